"""Environments written by others: OpenEnv's results, async methods, reasoning-gym's own scores."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from quintet.data.config import DataConfig
from quintet.data.dataset import build_prompts, load_rows
from quintet.rollout.adapters import GymEnvironment, ReasoningGymEnvironment
from quintet.rollout.config import EnvironmentConfig
from quintet.rollout.environment import Action, EnvironmentFailure, Outcome
from quintet.rollout.environments import EnvironmentFactory
from quintet.types import FinishReason, Prompt


@dataclass
class Seen:
    text: str


@dataclass
class Result:
    observation: Any
    reward: float | None = None
    done: bool = False


class Echo:
    """OpenEnv's API, async; its observations are objects with a field `text`."""

    def __init__(self) -> None:
        self.closed = False

    async def reset(self) -> Result:
        return Result(Seen("say x"))

    async def step(self, action: str) -> Result:
        return Result(Seen(f"heard {action}"), reward=0.5, done=action == "x")

    async def close(self) -> None:
        self.closed = True


def act(environment, text: str, reason: FinishReason = FinishReason.STOP):
    return asyncio.run(environment.step(Action(text, reason)))


def test_openenvs_results_are_read_by_attribute() -> None:
    made: list[Echo] = []

    def make() -> Echo:
        made.append(Echo())
        return made[-1]

    environment = GymEnvironment(make, field="text")
    first = asyncio.run(environment.reset(Prompt("p", []), 0))
    assert first == [{"role": "user", "content": "say x"}]
    step = act(environment, "y")
    assert (step.observation, step.reward, step.done) == ([{"role": "user", "content": "heard y"}], 0.5, False)
    assert act(environment, "x").done
    asyncio.run(environment.close())
    assert made[0].closed
    assert asyncio.run(environment.finish(Outcome.MAX_TURNS)) == 0.0


def test_a_recipe_names_a_gymnasium_environment_by_its_path() -> None:
    config = EnvironmentConfig(kind=f"gym:{__name__}:Echo", args={"field": "text", "limit_reward": -1.0})
    environment = EnvironmentFactory(config)()
    assert isinstance(environment, GymEnvironment)
    assert asyncio.run(environment.finish(Outcome.CONTEXT)) == -1.0


def test_reasoning_gym_gives_its_own_score_and_as_many_tries_as_it_was_told() -> None:
    pytest.importorskip("reasoning_gym")
    config = DataConfig(source="reasoning_gym:chain_sum", args={"size": 4}, eval_size=0)
    (prompt, *_), _ = build_prompts(load_rows(config, 0)[0], config, lambda messages, text: [1])
    assert prompt.answer is not None

    def fresh(**args: Any) -> ReasoningGymEnvironment:
        environment = EnvironmentFactory(EnvironmentConfig(kind="reasoning_gym", args=args))()
        assert isinstance(environment, ReasoningGymEnvironment)
        assert asyncio.run(environment.reset(prompt, 0)) is None
        return environment

    right = f"I think <answer>{prompt.answer}</answer>"
    assert act(fresh(), right).reward == 1.0
    wrong = act(fresh(), "<answer>no</answer>")
    assert wrong.done and wrong.reward is not None and wrong.reward < 1.0
    twice = fresh(attempts=2)
    again = act(twice, "<answer>no</answer>")
    assert (again.done, again.observation) == (False, [{"role": "user", "content": "That is not right. Try again."}])
    assert act(twice, right).reward == 1.0
    assert act(fresh(), right, FinishReason.LENGTH).outcome == Outcome.CONTEXT
    with pytest.raises(EnvironmentFailure, match=r"not of data\.source reasoning_gym"):
        asyncio.run(fresh().reset(Prompt("other", []), 0))
