"""What counts as right in an evaluation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from quintet.controller.evaluate import evaluate
from quintet.types import FinishReason, Group, GroupId, Prompt, Rollout, SamplingParams, Score, WeightRef


class Rollouts:
    async def generate(
        self, prompts: list[Group], sampling_params: SamplingParams, weight_version: int
    ) -> list[Rollout]:
        return [
            Rollout(group.group_id, i, [1], [2, 3], "x", [0.0, 0.0], [1, 1], [], FinishReason.STOP)
            for group in prompts
            for i in range(sampling_params.n)
        ]

    async def update_weights(self, weight_path: WeightRef, version: int) -> None: ...

    async def health_check(self) -> None: ...

    async def abort(self, group_ids: Sequence[GroupId]) -> None: ...


class Scores:
    """The given scores, prompt by prompt."""

    def __init__(self, *scores: list[Score]) -> None:
        self._left = list(scores)

    async def score(self, groups: list[Group]) -> list[list[Score]]:
        return [self._left.pop(0) for _ in groups]


def values(*scores: list[Score], rules: Sequence[str] = ()) -> dict[str, float]:
    prompts = [Prompt(str(i), [1]) for i in range(len(scores))]
    params = SamplingParams(n=len(scores[0]))
    found, _ = asyncio.run(
        evaluate(Rollouts(), Scores(*scores), prompts, params, 0, rules=rules)  # type: ignore[arg-type]
    )
    return found


def test_without_a_rule_a_reward_of_1_is_right() -> None:
    found = values([Score(1.0, {"a": 1.0})], [Score(0.9, {"a": 0.9})])
    assert found["accuracy"] == 0.5 and found["reward"] == pytest.approx(0.95) and "a/mean" not in found


def test_the_verifiable_parts_say_what_is_right_whatever_the_weights() -> None:
    fooled = Score(5.0, {"model": 5.0, "exact": 0.0})
    right = Score(0.3, {"model": -1.0, "exact": 1.0})
    assert values([fooled], [right], [right], [fooled], rules=["exact"])["accuracy"] == 0.5
    found = values([fooled, right], rules=["exact"])
    assert (found["accuracy"], found["pass_at_2"]) == (0.5, 1.0)
    assert (found["model/mean"], found["exact/mean"]) == (2.0, 0.5)


def test_a_rule_that_abstained_says_nothing_and_all_that_speak_must_agree() -> None:
    rules = ["math", "code"]
    routed = Score(0.2, {"math": None, "code": 1.0})
    split = Score(2.0, {"math": 1.0, "code": 0.5})
    neither = Score(1.0, {"math": None, "code": None, "judge": 1.0})
    assert values([routed], [split], [neither], rules=rules)["accuracy"] == pytest.approx(2 / 3)
