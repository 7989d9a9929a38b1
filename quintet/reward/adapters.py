"""Rewards of other frameworks as they are: rubrics and reward functions of `verifiers`.

    fn: my_environment:rubric        # a verifiers.Rubric: functions with weights
    fn: my_environment:my_reward     # one of its functions, fn(completion, answer, **kwargs)

A rubric's own `score_rollout` turns an exception into a reward of 0. Here the functions are called one by one, and an
exception is a failure of the sample. Written for the rubrics of verifiers 0.1 (`funcs`, `weights`, `class_objects`),
whose package we need not import. Left out: verifiers' v1 tasks, whose rewards read a trace of their own harness, and
of `state` everything that only a verifiers environment has.

TRL's and verl's signatures are understood by `calling.py` itself, reasoning-gym's scoring is the rule `reasoning_gym`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from quintet.reward.sample import Verdict

_GROUP_PARAMETERS = frozenset(("prompts", "completions", "answers", "states", "tasks", "infos"))


@runtime_checkable
class RubricLike(Protocol):
    """What is used of a `verifiers.Rubric`."""

    funcs: Sequence[Callable[..., Any]]
    weights: Sequence[float]
    class_objects: Mapping[str, Any]


def adapted(function: Any) -> Any:
    """A rubric, or a verifiers reward function, as a function in TRL's signature; anything else as it is."""
    if isinstance(function, RubricLike):
        return RubricFunction(function.funcs, function.weights, function.class_objects)
    if inspect.isfunction(function) and "completion" in (names := inspect.signature(function).parameters):
        return function if _GROUP_PARAMETERS & names.keys() else RubricFunction([function], [1.0])
    return function


@dataclass
class RubricFunction:
    """The weighted sum of verifiers reward functions, for the samples of one group; each value goes into `info`."""

    funcs: Sequence[Callable[..., Any]]
    weights: Sequence[float]
    class_objects: Mapping[str, Any] = field(default_factory=dict)

    async def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[Verdict]:
        states = [_state(i, prompts, completions, columns) for i in range(len(completions))]
        found: list[dict[str, float]] = [{} for _ in states]
        totals: list[float | None] = [None] * len(states)
        for function, weight in zip(self.funcs, self.weights, strict=True):
            name = getattr(function, "__name__", type(function).__name__)
            for i, value in enumerate(await self._values(function, states)):
                if value is not None:
                    found[i][name] = float(value)
                    totals[i] = (totals[i] or 0.0) + weight * float(value)
        return [Verdict(total, dict(values)) for total, values in zip(totals, found, strict=True)]

    async def _values(self, function: Callable[..., Any], states: list[dict[str, Any]]) -> list[Any]:
        """One value per sample. Raises ValueError when a group function gives another number of them."""
        if not _GROUP_PARAMETERS & inspect.signature(function).parameters.keys():
            return [await self._call(function, state | {"state": state}) for state in states]
        together = {f"{name}s": [state[name] for state in states] for name in states[0]} | {"states": states}
        values = list(await self._call(function, together))
        if len(values) != len(states):
            raise ValueError(f"{function} returned {len(values)} values for {len(states)} completions")
        return values

    async def _call(self, function: Callable[..., Any], available: dict[str, Any]) -> Any:
        available = available | dict(self.class_objects)
        parameters = inspect.signature(function).parameters
        takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
        result = function(**(available if takes_any else {k: v for k, v in available.items() if k in parameters}))
        return await result if inspect.isawaitable(result) else result


def _state(i: int, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """What verifiers calls prompt, completion, answer, task and info; `info` is the column of that name, else all."""
    row = {name: values[i] for name, values in columns.items()}
    info = row["info"] if isinstance(row.get("info"), dict) else row
    answer = row.get("answer")
    return {
        "prompt": prompts[i],
        "completion": completions[i],
        "answer": "" if answer is None else answer,
        "task": row.get("task", row.get("task_type", "")),
        "info": info,
    }
