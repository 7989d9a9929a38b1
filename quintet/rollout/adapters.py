"""Environments written by others behind quintet's protocol: Gymnasium and OpenEnv text environments, reasoning-gym."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from quintet.data.reasoning import score_answer
from quintet.rollout.environment import Action, EnvironmentFailure, Observation, Outcome, Step, TextEnvironment
from quintet.types import FinishReason, Prompt


class GymEnvironment(TextEnvironment):
    """A text environment with Gymnasium's API, `reset(seed=, options=) -> (observation, info)` and `step(action) ->
    (observation, reward, terminated, truncated, info)`, or OpenEnv's, whose results have `observation`, `reward` and
    `done`. Methods may be async; others run in a thread.

    `options` are the prompt's metadata. `field`: the attribute of an observation that is its text; None: `str` of it.
    The reward is the sum over the steps.
    """

    def __init__(self, make: Callable[[], Any], *, field: str | None = None, limit_reward: float | None = 0.0) -> None:
        super().__init__(limit_reward)
        self._environment = make()
        self._field = field

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        takes = inspect.signature(self._environment.reset).parameters
        offered: dict[str, Any] = {"seed": seed, "options": prompt.metadata}
        result = await self._call(self._environment.reset, **{k: v for k, v in offered.items() if k in takes})
        return self._user(result[0] if isinstance(result, tuple) else result.observation)

    async def step(self, action: Action) -> Step:
        result = await self._call(self._environment.step, action.text)
        if isinstance(result, tuple):
            seen, reward, terminated, truncated, _ = result
            done = bool(terminated or truncated)
        else:
            seen, reward, done = result.observation, result.reward, bool(result.done)
        return Step(self._user(seen), done=done, reward=None if reward is None else float(reward))

    async def close(self) -> None:
        await self._call(self._environment.close)

    def _user(self, seen: Any) -> Observation:
        return [{"role": "user", "content": str(seen if self._field is None else vars(seen)[self._field])}]

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        return await asyncio.to_thread(method, *args, **kwargs)


class ReasoningGymEnvironment(TextEnvironment):
    """Questions of `data.source: reasoning_gym:NAME`, scored by the task itself; `attempts` tries, told when wrong."""

    def __init__(self, *, attempts: int = 1, feedback: str = "That is not right. Try again.") -> None:
        super().__init__(0.0)
        self._left = attempts
        self._feedback = feedback
        self._metadata: dict[str, Any] = {}

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        if "reasoning_gym" not in prompt.metadata:
            raise EnvironmentFailure(f"prompt {prompt.id} is not of data.source reasoning_gym:NAME", retryable=False)
        self._metadata = prompt.metadata
        return None

    async def step(self, action: Action) -> Step:
        if action.finish_reason is FinishReason.LENGTH:
            return Step(done=True, outcome=Outcome.CONTEXT)
        self._left -= 1
        answer = action.text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        score = await asyncio.to_thread(score_answer, self._metadata, answer)
        if score >= 1.0 or self._left == 0:
            return Step(done=True, reward=score)
        return Step([{"role": "user", "content": self._feedback}])
