"""Groups to experiences and metrics: the greedy answer as a baseline, parts and their agreement, graders' spending."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import resolve
from quintet.controller.controller import _failure_of
from quintet.controller.experience import sample_metrics, step_batch
from quintet.types import Failure, FailureKind, FinishReason, Group, GroupId, Prompt, Rollout, Score, VersionRun
from tests.controller.simulation import Simulation

BROKEN = Failure(FailureKind.ENGINE, "boom", retryable=True)


def group(rewards: list[float | None], failures: list[Failure | None] | None = None, length: int = 2) -> Group:
    """Samples, and last the greedy answer."""
    group_id, faults = GroupId("p"), failures or [None] * len(rewards)
    rollouts = []
    for i, fault in enumerate(faults):
        ones = [1] * length
        rollout = Rollout(
            group_id, i, [1], [2] * length, "x", [-1.0] * length, ones, [VersionRun(0, length)], FinishReason.STOP
        )
        rollout.failure, rollout.greedy = fault, i == len(rewards) - 1
        rollouts.append(rollout)
    return Group(group_id, Prompt("p", [1]), rollouts, [Score(r) for r in rewards])


def test_samples_know_the_greedy_answers_reward_shaped_as_theirs() -> None:
    row = resolve(AlgorithmConfig(preset="remax", filters=[{"name": "reward_clip", "low": 0.0, "high": 1.0}]))
    batch = step_batch(row, [group([3.0, 0.5, 2.0])], step=1, version=0, max_tokens=4)
    assert [(e.sample_index, e.reward, e.baseline) for e in batch.experiences] == [(0, 1.0, 1.0), (1, 0.5, 1.0)]


def test_samples_without_a_scored_greedy_answer_are_unscored() -> None:
    row = resolve(AlgorithmConfig(preset="remax"))
    batch = step_batch(row, [group([1.0, 0.0, None])], step=1, version=0, max_tokens=4)
    assert [e.reward for e in batch.experiences] == [None, None]


def test_a_group_whose_greedy_answer_failed_is_tried_again() -> None:
    assert _failure_of(group([1.0, 0.0, 1.0], [None, None, BROKEN])) == BROKEN
    assert _failure_of(group([1.0, 0.0, 1.0], [BROKEN, None, None])) is None
    assert _failure_of(group([1.0, 0.0, 1.0], [BROKEN, BROKEN, None])) == BROKEN


def test_the_loop_asks_for_one_greedy_answer_a_group() -> None:
    run = Simulation(steps=2, groups_per_step=3, preset="remax")
    metrics = run.run()
    asked = [name for name, _ in run.rollout.asked]
    assert len(asked) == 2 * 6 and all(asked.count(name) == 2 for name in asked)
    assert all("reward/greedy_mean" in m.values for m in metrics)


def metrics(*scores: Score) -> dict[str, float]:
    gid = GroupId("p")
    rollouts = [Rollout(gid, i, [1], [2], "x", [0.0], [1], [], FinishReason.STOP) for i in range(len(scores))]
    return sample_metrics([Group(gid, Prompt("p", [1]), rollouts, list(scores))], 0)


def test_parts_are_averaged_over_the_samples_that_have_them() -> None:
    found = metrics(Score(1.0, {"a": 2.0, "b": None}), Score(0.0, {"a": 0.0, "b": 4.0}), Score(None, {"b": 2.0}))
    assert found["reward/a/mean"] == 1.0 and found["reward/b/mean"] == 3.0 and found["reward/mean"] == 0.5


def test_agreement_is_the_correlation_of_two_parts_within_the_step() -> None:
    rows = [(0.0, 1.0), (1.0, 0.5), (2.0, 0.0)]
    scores = [Score(a, {"model": a, "exact": b}) for a, b in rows]
    assert metrics(*scores)["reward/agreement/exact~model"] == pytest.approx(-1.0)
    lost = Score(None, {"model": 50.0}, Failure(FailureKind.TIMEOUT, "slow"))
    assert metrics(*scores, lost)["reward/agreement/exact~model"] == pytest.approx(-1.0)
    same = [Score(1.0, {"model": 1.0, "exact": b}) for _, b in rows]
    assert not [name for name in metrics(*same) if "agreement" in name]


def test_what_graders_spent_is_summed_over_the_samples() -> None:
    def spent(info: Any) -> Score:
        return Score(1.0, {"judge": 1.0}, info={"judge": info})

    found = metrics(spent({"usage": {"cost": 0.5, "requests": 2}}), spent({"usage": {"cost": 0.25, "requests": 1}}))
    assert found["reward/judge/cost"] == 0.75 and found["reward/judge/requests"] == 3.0
    assert not [name for name in metrics(spent({"usage": 3}), spent("text")) if name.endswith("cost")]
