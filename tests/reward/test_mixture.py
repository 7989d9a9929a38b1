"""One reward out of several values: weights, abstention, faults, gates, routing, normalisation, watched parts."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from quintet.reward.config import RewardConfig
from quintet.reward.mixture import Fault, Gate, Outcome, Term, combine_group, normalise
from quintet.reward.sample import Verdict
from quintet.reward.service import LocalRewardService
from quintet.types import Failure, FailureKind, FinishReason, Group, GroupId, Prompt, QuintetError, Rollout, Score


def combine(terms: Sequence[Term], *outcomes: Outcome) -> Score:
    """A group of one sample."""
    [score] = combine_group(terms, [[outcome] for outcome in outcomes])
    return score


def column(*values: float | None) -> list[Verdict]:
    return [Verdict(v) for v in values]


# ---- the sum -----------------------------------------------------------------------------------


def test_logged_reward_is_the_weighted_sum_and_parts_stay_unweighted() -> None:
    # CFG08
    result = combine([Term("a", 0.5), Term("b", 0.25)], Verdict(2.0), Verdict(1.0))
    assert result.reward == 1.25
    assert result.parts == {"a": 2.0, "b": 1.0}
    assert result.failure is None


def test_alpha_verifiable_beta_model_gamma_format_delta_length() -> None:
    terms = [Term("rule", 1.0), Term("model", 0.5, "sigmoid"), Term("format", 0.1), Term("length", 0.2)]
    result = combine(terms, Verdict(1.0), Verdict(0.0), Verdict(1.0), Verdict(-0.5))
    assert result.reward == pytest.approx(1.0 + 0.5 * 0.5 + 0.1 - 0.2 * 0.5)
    assert result.parts == {"rule": 1.0, "model": 0.0, "format": 1.0, "length": -0.5}


def test_an_abstaining_part_leaves_the_sum() -> None:
    result = combine([Term("a", 0.5), Term("b", 0.25)], Verdict(None), Verdict(1.0))
    assert result.reward == 0.25
    assert result.parts == {"a": None, "b": 1.0}


def test_all_abstaining_is_unscored_not_zero() -> None:
    result = combine([Term("a")], Verdict(None))
    assert result.reward is None
    assert result.failure is not None and result.failure.kind == FailureKind.UNSCORED


def test_one_failed_part_leaves_the_sample_without_reward() -> None:
    result = combine([Term("a"), Term("b")], Fault("a", FailureKind.GRADER, "raised"), Verdict(1.0))
    assert result.reward is None
    assert result.parts == {"b": 1.0}
    assert result.failure == Failure(FailureKind.GRADER, "reward function `a`: raised")


def test_a_fault_keeps_its_kind_and_whether_a_retry_may_help() -> None:
    result = combine([Term("a")], Fault("a", FailureKind.TRANSPORT, "503", retryable=True))
    assert result.failure == Failure(FailureKind.TRANSPORT, "reward function `a`: 503", retryable=True)


# ---- watched parts -----------------------------------------------------------------------------


def test_a_part_of_weight_0_is_in_the_parts_and_not_in_the_reward() -> None:
    terms = [Term("model"), Term("rule", 0.0)]
    assert combine(terms, Verdict(2.0), Verdict(1.0)) == Score(2.0, {"model": 2.0, "rule": 1.0})
    watched_alone = combine(terms, Verdict(None), Verdict(1.0))
    assert watched_alone.reward is None and watched_alone.failure is not None


def test_a_fault_of_a_watched_part_costs_nothing_and_is_noted() -> None:
    result = combine([Term("model"), Term("rule", 0.0)], Verdict(2.0), Fault("rule", FailureKind.TIMEOUT, "slow"))
    assert result == Score(2.0, {"model": 2.0}, None, {"rule": {"failure": "timeout: slow"}})


def test_a_fault_of_a_watched_part_that_a_gate_looks_at_costs_the_sample() -> None:
    terms = [Term("model", gate=Gate("rule")), Term("rule", 0.0)]
    result = combine(terms, Verdict(2.0), Fault("rule", FailureKind.TIMEOUT, "slow"))
    assert result.reward is None and result.failure == Failure(FailureKind.TIMEOUT, "reward function `rule`: slow")


# ---- gates -------------------------------------------------------------------------------------


def test_a_gated_part_counts_only_where_the_other_one_passed() -> None:
    terms = [Term("rule"), Term("model", 0.5, gate=Gate("rule", 1.0))]
    right, wrong = combine_group(terms, [column(1.0, 0.0), column(4.0, 9.0)])
    assert (right.reward, wrong.reward) == (3.0, 0.0)
    assert wrong.parts == {"rule": 0.0, "model": 9.0}  # kept as it was, for metrics


def test_a_gate_on_a_part_that_abstained_makes_the_gated_one_abstain() -> None:
    terms = [Term("rule", task_types=("math",)), Term("model", gate=Gate("rule"))]
    result = combine(terms, Verdict(None), Verdict(3.0))
    assert result.reward is None and result.failure is not None and result.failure.kind == FailureKind.UNSCORED


def test_group_statistics_are_taken_behind_the_gate() -> None:
    terms = [Term("rule"), Term("model", 0.5, "group_rank", gate=Gate("rule"))]
    scores = combine_group(terms, [column(1, 0, 1, 1), column(5.0, 99.0, 7.0, 6.0)])
    assert [s.reward for s in scores] == [1.0, 0.0, 1.5, 1.25]


# ---- normalisation -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "values", "expected"),
    [
        ("none", [3.0, None], [3.0, None]),
        ("range", [0.0, 1.0, 5.5, 10.0, 12.0, None], [0.0, 0.0, 0.5, 1.0, 1.0, None]),
        ("sigmoid", [0.0, math.log(3), -800.0, 800.0, None], [0.5, 0.75, 0.0, 1.0, None]),
        ("group_std", [1.0, 3.0, None, 1.0, 3.0], [-1.0, 1.0, None, -1.0, 1.0]),
        ("group_std", [2.0, 2.0, None], [0.0, 0.0, None]),
        ("group_std", [2.0], [0.0]),
        ("group_rank", [10.0, 30.0, 20.0, None], [0.0, 1.0, 0.5, None]),
        ("group_rank", [5.0, 5.0, 9.0], [0.25, 0.25, 1.0]),
        ("group_rank", [5.0, None], [0.5, None]),
    ],
)
def test_normalisation(how: Any, values: list[float | None], expected: list[float | None]) -> None:
    assert normalise(Term("x", normalize=how, range=(1.0, 10.0)), values) == pytest.approx(expected)


def test_parts_are_kept_as_they_were_given() -> None:
    [low, high] = combine_group([Term("judge", 2.0, "range", (0.0, 10.0))], [column(5.0, 20.0)])
    assert (low.reward, high.reward) == (1.0, 2.0)
    assert (low.parts, high.parts) == ({"judge": 5.0}, {"judge": 20.0})


# ---- in the service ----------------------------------------------------------------------------


def group(texts: Sequence[str], answer: str | None = "7", task_type: str = "math") -> Group:
    gid = GroupId("p")
    rollouts = [
        Rollout(gid, i, [1], list(range(len(t))), t, [], [], [], FinishReason.STOP) for i, t in enumerate(texts)
    ]
    return Group(gid, Prompt("p", [1], text="question", answer=answer, task_type=task_type), rollouts)


def service(*functions: dict[str, Any]) -> LocalRewardService:
    return LocalRewardService(RewardConfig.model_validate({"functions": list(functions), "workers": 0}))


def score(graded: LocalRewardService, *groups: Group) -> list[list[Score]]:
    try:
        return asyncio.run(graded.score(list(groups)))
    finally:
        graded.close()


def test_prompts_are_routed_by_their_task_type() -> None:
    graded = service(
        {"fn": "exact", "task_types": ["math"]},
        {"fn": "length", "args": {"max_tokens": 1}, "task_types": ["chat", "essay"]},
    )
    [[right], [chat]] = score(graded, group(["7"]), group(["77"], task_type="chat"))
    assert right == Score(1.0, {"exact": 1.0, "length": None})
    assert chat == Score(-1.0, {"exact": None, "length": -1.0})


def test_only_a_rule_that_takes_the_prompt_needs_its_reference() -> None:
    graded = service(
        {"fn": "number", "task_types": ["math"]},
        {"fn": "format", "task_types": ["chat"]},
        {"fn": "exact", "weight": 0},  # only watched
    )
    prompts = [
        Prompt("a", [1], answer="no number"),
        Prompt("b", [1], task_type="chat"),
        Prompt("c", [1], task_type="code"),
    ]
    assert graded.unusable_references(prompts) == [
        (0, "it is not one number: 'no number'"),
        (2, "no reward function takes prompts of task type `code`"),
    ]


def test_a_skipping_gate_spares_the_calls_and_the_term_is_0_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from quintet.reward import rules

    seen: list[str] = []

    def watching(sample: Any) -> Verdict:
        seen.append(sample.text)
        return Verdict(0.5)

    monkeypatch.setitem(rules.RULES, "length", watching)
    gate = {"part": "exact", "at_least": 1, "closed": "skip"}
    graded = service({"fn": "length", "gate": gate}, {"fn": "exact"})
    [scores] = score(graded, group(["7", "8", "7"]))
    assert seen == ["7", "7"]
    assert [s.reward for s in scores] == [1.5, 0.0, 1.5]
    assert [s.parts["length"] for s in scores] == [0.5, None, 0.5]


def test_a_watched_fault_is_said_once_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    graded = service({"fn": "length", "args": {"max_tokens": 9}}, {"fn": "exact", "weight": 0})
    with caplog.at_level(logging.WARNING):
        [scores] = score(graded, group(["7", "8"], answer=None))
    assert [s.reward for s in scores] == [0.0, 0.0]
    assert sum("`exact`, which is only watched, failed" in r.message for r in caplog.records) == 1


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([{"fn": "exact", "weight": 0}], "every weight is 0"),
        ([{"fn": "exact", "normalize": "range"}], "needs range"),
        ([{"fn": "exact", "range": [0, 1]}], "no other normalize uses it"),
        ([{"fn": "exact", "normalize": "range", "range": [1, 1]}], "must be below the second"),
        ([{"fn": "exact", "gate": {"part": "exact"}}], "names `exact`; other functions: none"),
        ([{"fn": "exact"}, {"fn": "format", "gate": {"part": "exct"}}], "names `exct`; other functions: exact"),
        (
            [
                {"fn": "exact"},
                {"fn": "format", "gate": {"part": "exact"}},
                {"fn": "length", "gate": {"part": "format"}},
            ],
            "which has a gate itself",
        ),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(functions: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RewardConfig.model_validate({"functions": functions})


def test_the_recipe_names_the_place_of_a_wrong_gate() -> None:
    from quintet.config import load_config

    functions = [{"fn": "exact"}, {"fn": "format", "gate": {"prt": "exact"}}]
    with pytest.raises(QuintetError, match=r"reward\.functions\.1\.gate\.prt"):
        load_config({"reward": {"functions": functions}})


def test_gdpo_which_mixes_the_parts_itself_is_told_what_is_only_watched() -> None:
    from quintet.config import load_config

    def gdpo(function: dict[str, Any], **weights: float) -> None:
        advantage = {"name": "gdpo", "weights": weights}
        load_config(
            {
                "algorithm": {"preset": "gdpo", "advantage": advantage},
                "reward": {"functions": [{"fn": "format"}, function]},
            }
        )

    gdpo({"fn": "exact"})
    gdpo({"fn": "exact", "weight": 0}, exact=0)
    with pytest.raises(QuintetError, match="`exact` is only watched"):
        gdpo({"fn": "exact", "weight": 0})
    with pytest.raises(QuintetError, match="`exact` has normalize, which has no effect"):
        gdpo({"fn": "exact", "normalize": "group_std"})
    with pytest.raises(QuintetError, match="`exact` has a gate, which has no effect"):
        gdpo({"fn": "exact", "gate": {"part": "format"}})
