"""Rubrics of verifiers as reward functions. (TRL and verl: test_service.py; reasoning-gym: test_rules.py.)"""

from __future__ import annotations

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from quintet.reward.adapters import RubricFunction, adapted
from quintet.reward.config import RewardConfig
from quintet.reward.service import LocalRewardService
from quintet.types import FailureKind, FinishReason, Group, GroupId, Prompt, Rollout, Score

RUBRIC = textwrap.dedent(
    """
    class Parser:
        def parse_answer(self, completion):
            return completion[-1]["content"].removeprefix("answer: ")

    class Rubric:  # as verifiers 0.1 lays it out
        def __init__(self, funcs, weights, **class_objects):
            self.funcs, self.weights, self.class_objects = funcs, weights, class_objects

    def right(parser, completion, answer, **kwargs):
        return float(parser.parse_answer(completion) == answer)

    async def short(completion, state, info):
        return 1.0 if len(state["completion"][-1]["content"]) <= info["limit"] else 0.0

    def longest(completions, **kwargs):
        lengths = [len(c[-1]["content"]) for c in completions]
        return [float(n == max(lengths)) for n in lengths]

    def broken(completion, **kwargs):
        raise RuntimeError("no such luck")

    rubric = Rubric([right, short, longest], [1.0, 0.5, 0.25], parser=Parser())
    failing = Rubric([right, broken], [1.0, 1.0], parser=Parser())
    """
)


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "environment.py"
    path.write_text(RUBRIC)
    return str(path)


def score(fn: str, texts: list[str], prompt: Prompt) -> list[Score]:
    gid = GroupId("p")
    rollouts = [Rollout(gid, i, [1], [2], text, [0.0], [1], [], FinishReason.STOP) for i, text in enumerate(texts)]
    config = {"functions": [{"fn": fn, "name": "r"}], "workers": 1, "max_failure_frac": 1.0}
    service = LocalRewardService(RewardConfig.model_validate(config))
    try:
        [scores] = asyncio.run(service.score([Group(gid, prompt, rollouts)]))
        return scores
    finally:
        service.close()


def question(**metadata: Any) -> Prompt:
    return Prompt("p", [1], [{"role": "user", "content": "q"}], answer="7", metadata={"info": {"limit": 9}} | metadata)


def test_a_rubric_is_the_weighted_sum_of_its_functions(module: str) -> None:
    scores = score(f"{module}:rubric", ["answer: 7", "answer: 12345"], question())
    assert [s.reward for s in scores] == [1.5, 0.25]
    assert scores[0].info == {"r": {"right": 1.0, "short": 1.0, "longest": 0.0}}


def test_one_function_of_a_rubric_stands_alone(module: str) -> None:
    assert [s.reward for s in score(f"{module}:short", ["answer: 7", "answer: 12345"], question())] == [1.0, 0.0]


def test_an_exception_in_a_rubric_is_a_failure_and_never_a_zero(module: str) -> None:
    [failed] = score(f"{module}:failing", ["answer: 7"], question())
    assert failed.reward is None
    assert failed.failure is not None and failed.failure.kind is FailureKind.GRADER
    assert "RuntimeError: no such luck" in failed.failure.message


def test_a_function_that_abstains_leaves_the_sum() -> None:
    def sometimes(completion: str) -> float | None:
        return None if completion == "?" else 2.0

    rubric = RubricFunction([sometimes, lambda completion: None], [0.5, 1.0])
    verdicts = asyncio.run(rubric(prompts=["q", "q"], completions=["?", "a"]))
    assert [v.value for v in verdicts] == [None, 1.0]


def test_other_functions_are_left_as_they_are() -> None:
    def trl(completions: list[str], **_: Any) -> list[float]:
        return [0.0]

    assert adapted(trl) is trl
    assert adapted(len) is len
