"""Calls one reward function, whatever its signature, and checks what it returns.

Three signatures are understood; which one a function has is decided once, by its parameter names:
- rule (ours):  `rule(sample, *, option=...) -> float | Verdict | None`
- TRL:          `fn(completions, prompts=..., completion_ids=..., **columns) -> list[float | None]`, sync or async,
                called once per group; completions are strings, or message lists for conversational prompts
- verl:         `fn(solution_str, ground_truth, data_source=..., extra_info=...) -> float | {"score": ...}`,
                called once per sample
Rubrics of `verifiers` are adapted to the second, see `adapters.py`.

Runs inside a pool worker: imports nothing heavy. Left out: TRL's `trainer_state`, `log_extra` and
`log_metric`, which belong to its trainer; a function that *requires* one of them is told so.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from quintet.reward.adapters import adapted
from quintet.reward.errors import FunctionFailed, MissingColumn
from quintet.reward.sample import Info, Sample, Verdict
from quintet.types import QuintetError

TRACEBACK_LINES = 6

SIGNATURES = (
    "accepted are TRL's `fn(prompts, completions, completion_ids, **columns)` and "
    "verl's `fn(data_source, solution_str, ground_truth, extra_info)`"
)


class Signature(StrEnum):
    RULE = "rule"
    TRL = "trl"
    VERL = "verl"


@dataclass(frozen=True)
class Parameters:
    """The names a function can be called with."""

    names: tuple[str, ...]
    required: tuple[str, ...]
    takes_any: bool  # has **kwargs

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Parameters:
        """Raises QuintetError for what has no readable signature or positional-only parameters."""
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:
            raise QuintetError(f"reward function `{name}` has no readable signature ({error}); {SIGNATURES}") from error
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        if any(p.kind == p.POSITIONAL_ONLY for p in parameters):
            raise QuintetError(f"reward function `{name}` has positional-only parameters; {SIGNATURES}")
        return cls(
            names=tuple(p.name for p in named),
            required=tuple(p.name for p in named if p.default is p.empty),
            takes_any=any(p.kind == p.VAR_KEYWORD for p in parameters),
        )


def detect_signature(parameters: Parameters, name: str) -> Signature:
    """By names alone. Raises QuintetError when neither TRL's nor verl's names are there."""
    names = set(parameters.names)
    if {"solution_str", "ground_truth"} <= names:
        return Signature.VERL
    if "completions" in names:
        return Signature.TRL
    shown = ", ".join(parameters.names) or "no named parameters"
    raise QuintetError(f"reward function `{name}({shown})` has an unsupported signature\n{SIGNATURES}")


@dataclass
class GradingFunction:
    """A loaded function, ready to be called on the samples of one group."""

    name: str
    function: Callable[..., Any]
    args: Mapping[str, Any] = field(default_factory=dict)
    rule: bool = False

    def __post_init__(self) -> None:
        self._runner: asyncio.Runner | None = None
        if self.rule:
            self.signature = Signature.RULE
            return
        self.function = adapted(self.function)
        self._parameters = Parameters.of(self.function, self.name)
        self.signature = detect_signature(self._parameters, self.name)
        unknown = [key for key in self.args if key not in self._parameters.names]
        if unknown and not self._parameters.takes_any:
            raise QuintetError(
                f"reward function `{self.name}` has no parameter `{unknown[0]}` (given in reward.functions args); "
                f"it has: {', '.join(self._parameters.names)}"
            )

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample. Raises FunctionFailed for a raise or an unusable return, MissingColumn."""
        match self.signature:
            case Signature.RULE:
                return [self._call_rule(sample) for sample in samples]
            case Signature.VERL:
                return [self._call_verl(sample) for sample in samples]
            case Signature.TRL:
                return self._call_trl(samples)

    def _call_rule(self, sample: Sample) -> Verdict:
        result = self._run(sample, **self.args)
        return result if isinstance(result, Verdict) else Verdict(self._value(result))

    def _call_verl(self, sample: Sample) -> Verdict:
        extra = sample.metadata.get("extra_info")
        result = self._run(
            **self._select(
                {
                    "data_source": sample.metadata.get("data_source", sample.task_type),
                    "solution_str": sample.text,
                    "ground_truth": reference_answer(sample),
                    "extra_info": extra if isinstance(extra, dict) else dict(sample.metadata),
                }
            )
        )
        if not isinstance(result, dict):
            return Verdict(self._value(result))
        if "score" not in result:
            raise FunctionFailed(f"returned a dict without 'score' (keys: {', '.join(map(str, result))})")
        return Verdict(self._value(result["score"]), _plain({k: v for k, v in result.items() if k != "score"}))

    def _call_trl(self, samples: Sequence[Sample]) -> list[Verdict]:
        result = self._run(**self._select(trl_arguments(samples)))
        if isinstance(result, (str, bytes, Mapping)):
            raise FunctionFailed(f"returned {type(result).__name__}, expected a list of {len(samples)}")
        try:
            values = list(result)
        except TypeError:
            raise FunctionFailed(
                f"returned {type(result).__name__} ({result!r:.60}), expected a list of {len(samples)}"
            ) from None
        if len(values) != len(samples):
            raise FunctionFailed(
                f"returned {len(values)} values for {len(samples)} completions ({len(values)} vs {len(samples)})"
            )
        return [value if isinstance(value, Verdict) else Verdict(self._value(value)) for value in values]

    def _select(self, available: dict[str, Any]) -> dict[str, Any]:
        """Those arguments that the function takes; the recipe's args win over columns."""
        arguments = available | dict(self.args)
        missing = [name for name in self._parameters.required if name not in arguments]
        if missing:
            raise MissingColumn(
                f"its parameter `{missing[0]}` is no column of the data; there are: {', '.join(available)}"
            )
        if self._parameters.takes_any:
            return arguments
        return {name: arguments[name] for name in self._parameters.names if name in arguments}

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Call, await if needed. Anything the user's code raises, SystemExit included, becomes FunctionFailed."""
        try:
            result = self.function(*args, **kwargs)
            return self._await(result) if inspect.isawaitable(result) else result
        except FunctionFailed:
            raise
        except (Exception, SystemExit) as error:
            lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
            raise FunctionFailed("raised\n" + "\n".join(lines[-TRACEBACK_LINES:])) from error

    def _await(self, awaitable: Any) -> Any:
        """On one loop for the worker's life, so that clients a function keeps between calls stay usable."""
        if self._runner is None:
            self._runner = asyncio.Runner()

        async def wait() -> Any:
            return await awaitable

        main: Coroutine[Any, Any, Any] = wait()
        return self._runner.run(main)

    def _value(self, value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, (str, bytes)):
            raise FunctionFailed(f"returned the string {value!r:.40} as a reward, expected a number or None")
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise FunctionFailed(
                f"returned {type(value).__name__} ({value!r:.60}) as a reward, expected a number or None"
            ) from None
        return number


def reference_answer(sample: Sample) -> Any:
    """`answer`, else verl's own place for it (`reward_model: {ground_truth: ...}`), else the column `ground_truth`."""
    if sample.answer is not None:
        return sample.answer
    nested = sample.metadata.get("reward_model")
    if isinstance(nested, dict) and "ground_truth" in nested:
        return nested["ground_truth"]
    return sample.metadata.get("ground_truth")


def trl_arguments(samples: Sequence[Sample]) -> dict[str, Any]:
    """Keyword arguments of a TRL reward function: lists of one entry per sample.

    Columns are the prompt's metadata, `answer`, `task_type` and `test_cases`; the reference answer also goes by
    the names `solution` and `ground_truth` where the data has no such column of its own.
    """
    columns: dict[str, list[Any]] = {
        name: [s.metadata.get(name) for s in samples] for name in sorted({k for s in samples for k in s.metadata})
    }
    answers = [reference_answer(s) for s in samples]
    if any(answer is not None for answer in answers):
        columns |= {name: answers for name in ("answer", "solution", "ground_truth") if name not in columns}
    columns.setdefault("task_type", [s.task_type for s in samples])
    if any(s.test_cases is not None for s in samples):
        columns.setdefault("test_cases", [s.test_cases for s in samples])
    return columns | {
        "prompts": [s.prompt_text if s.messages is None else s.messages for s in samples],
        "completions": [s.text if s.messages is None else [{"role": "assistant", "content": s.text}] for s in samples],
        "completion_ids": [s.response_ids for s in samples],
    }


def _plain(values: Mapping[Any, Any]) -> Info:
    """Only what can be journaled: strings, numbers, booleans."""
    return {str(k): v for k, v in values.items() if isinstance(v, (str, int, float, bool))}
