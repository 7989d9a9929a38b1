"""Scores groups: every reward function on every sample, weighted, with faults kept apart from verdicts.

reward = sum over the parts that did not abstain of weight x value. That number is the trained and the logged one.
A sample of which one function failed has no reward and carries the failure; a sample on which all abstain has
the failure kind `unscored`. Neither is ever a 0.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]

from quintet.reward.background import AsyncGrader, BackgroundLoop
from quintet.reward.calling import GradingFunction, Signature
from quintet.reward.config import RewardConfig, RewardFunctionConfig
from quintet.reward.errors import CallTimeout, FunctionFailed, MissingColumn, RewardError, WorkerDied
from quintet.reward.loading import ASYNC_GRADERS, FunctionSource, check_rule_args, make_async_grader
from quintet.reward.model import MODEL, check_model_args
from quintet.reward.pool import ProcessSlot, SlotPool, ThreadSlot
from quintet.reward.rules import RULES, reference_fault
from quintet.reward.sample import Sample, Verdict, sample_of
from quintet.types import Failure, FailureKind, FinishReason, Group, Prompt, QuintetError, Rollout, Score

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """A reward function failed on a sample."""

    function: str
    kind: FailureKind
    reason: str

    @classmethod
    def of(cls, function: str, error: FunctionFailed) -> Fault:
        return cls(function, error.kind, error.message)

    @property
    def failure(self) -> Failure:
        return Failure(self.kind, f"reward function `{self.function}`: {self.reason}")


Outcome = Verdict | Fault


@dataclass
class _Part:
    """One weighted reward function and where it runs (`pool` None: right here)."""

    name: str
    weight: float = 1.0
    truncated: Literal["grade", "zero"] = "grade"
    source: FunctionSource | None = None  # loads in a worker
    function: GradingFunction | None = None  # lives in this process
    grader: AsyncGrader | None = None  # lives in this process, on the background loop
    pool: SlotPool | None = None
    index: int = 0  # among the functions of its pool
    signature: Signature = Signature.RULE


class LocalRewardService:
    """`RewardService` in this process, with user functions in a pool of worker processes.

    `functions`, when given, replace `config.functions`: callables in TRL's or verl's signature, weight 1 each. One
    that cannot be pickled runs in a thread of this process, whose limit is soft; a warning says so.
    `samples_per_step`: over how many consecutive samples `max_failure_frac` is taken; None: each call of `score`.

    `start` builds the pool and raises QuintetError for a function that does not load; the first `score` calls it
    if nobody did. `close` ends the workers.
    """

    def __init__(
        self,
        config: RewardConfig,
        *,
        functions: Sequence[Callable[..., Any]] | None = None,
        samples_per_step: int | None = None,
    ) -> None:
        self._config = config
        self._parts = (
            [_part_of_config(c, config.timeout_s) for c in config.functions]
            if functions is None
            else [_part_of_callable(fn, config.workers > 0) for fn in functions]
        )
        names = [part.name for part in self._parts]
        for name in names:
            if names.count(name) > 1:
                raise QuintetError(f"two reward functions are called `{name}`: give one a `name` (reward.functions)")
        self._samples_per_step = samples_per_step
        self._window_samples = 0
        self._window_faults: list[Fault] = []
        self._pools: list[SlotPool] = []
        self._background: BackgroundLoop | None = None
        self._started = False

    @property
    def names(self) -> list[str]:
        return [part.name for part in self._parts]

    def start(self) -> None:
        """Blocks until every worker has imported the functions. Raises QuintetError with the worker's own error."""
        if self._started:
            return
        self._started = True
        in_workers = [p for p in self._parts if p.source and p.source.pooled and self._config.workers > 0]
        if in_workers:
            self._start_processes(in_workers)
        for part in self._parts:
            if part.pool is None and part.source is not None:
                part.function = part.source.load()
        for part in self._parts:
            if part.source is not None and part.source.is_model and part.function is not None:
                self._place([part], SlotPool([ThreadSlot([part.function])]))
        here = [p for p in self._parts if p.pool is None and p.grader is None]
        in_thread = [p for p in here if p.source is None or p.source.pooled]
        if in_thread:
            self._place(in_thread, SlotPool([ThreadSlot([p.function for p in in_thread if p.function is not None])]))
        for part in self._parts:
            if part.function is not None:
                part.signature = part.function.signature
        self._start_graders([part.grader for part in self._parts if part.grader is not None])

    def close(self) -> None:
        if self._background is not None:
            for part in self._parts:
                if part.grader is not None:
                    self._background.run(part.grader.close())
            self._background.close()
            self._background = None
        for pool in self._pools:
            pool.close()
        self._pools.clear()

    def unusable_references(self, prompts: Sequence[Prompt]) -> list[tuple[int, str]]:
        """(row, reason) of the prompts whose reference answer a built-in rule could never grade, to be reported and
        left out when data is loaded. A reference that does not equal itself is among them."""
        rules = [part.source.spec for part in self._parts if part.source is not None and part.source.spec is not None]
        graders = [part.grader for part in self._parts if part.grader is not None]
        found: list[tuple[int, str | None]] = []
        for row, prompt in enumerate(prompts):
            found += [(row, reference_fault(rule, prompt.answer)) for rule in rules]
            found += [(row, grader.reference_fault(prompt)) for grader in graders]
        return [(row, fault) for row, fault in found if fault is not None]

    async def score(self, groups: list[Group]) -> list[list[Score]]:
        """One list per group, one score per rollout, in order.

        Raises RewardError when `on_failure` is `stop` and a function failed, when more than `max_failure_frac` of a
        step's samples failed, or when a function wants a column that the data does not have.
        """
        self.start()
        scored = await asyncio.gather(*(self._score_group(group) for group in groups))
        self._check_failures(sum(len(scores) for scores, _ in scored), [f for _, faults in scored for f in faults])
        return [scores for scores, _ in scored]

    def _start_graders(self, graders: list[AsyncGrader]) -> None:
        if not graders:
            return
        self._background = BackgroundLoop()
        try:
            for grader in graders:
                self._background.run(grader.start())
        except BaseException:
            self.close()
            raise

    def _start_processes(self, parts: list[_Part]) -> None:
        sources = [part.source for part in parts if part.source is not None]
        slots = [ProcessSlot(sources) for _ in range(self._config.workers)]
        self._place(parts, SlotPool(slots))
        try:
            found = [slot.wait_ready() for slot in slots]
        except QuintetError:
            self.close()
            raise
        for part, signature in zip(parts, found[0], strict=True):
            part.signature = signature

    def _place(self, parts: list[_Part], pool: SlotPool) -> None:
        self._pools.append(pool)
        for index, part in enumerate(parts):
            part.pool, part.index = pool, index

    async def _score_group(self, group: Group) -> tuple[list[Score], list[Fault]]:
        """Scores of the group's rollouts, and the first fault of each sample that a function failed on."""
        lost = [_rollout_failure(rollout) for rollout in group.rollouts]
        graded = [i for i, failure in enumerate(lost) if failure is None]
        samples = [sample_of(group, i) for i in graded]
        columns = await asyncio.gather(*(self._grade(part, samples) for part in self._parts))
        scores = [Score(None, failure=failure) for failure in lost]
        faults: list[Fault] = []
        for i, outcomes in zip(graded, zip(*columns, strict=True), strict=True):
            scores[i] = combine([(p.name, p.weight) for p in self._parts], outcomes)
            faults.extend([o for o in outcomes if isinstance(o, Fault)][:1])
        return scores, faults

    async def _grade(self, part: _Part, samples: list[Sample]) -> list[Outcome]:
        """One outcome per sample of a group."""
        outcomes: list[Outcome] = [Verdict(0.0, {"reason": "truncated"})] * len(samples)
        called = [i for i, s in enumerate(samples) if part.truncated == "grade" or not s.truncated]
        if not called:
            return outcomes
        if part.grader is not None and self._background is not None:
            results = await self._background.wait(_grade_all(part.name, part.grader, [samples[i] for i in called]))
        elif part.signature is Signature.TRL:
            results = await self._grade_together(part, [samples[i] for i in called])
        else:
            results = list(await asyncio.gather(*(self._grade_one(part, samples[i]) for i in called)))
        for i, result in zip(called, results, strict=True):
            outcomes[i] = result
        return outcomes

    async def _grade_together(self, part: _Part, samples: list[Sample]) -> list[Outcome]:
        """One call for the group; if it hangs or kills its worker, once more sample by sample to find the culprit."""
        try:
            return [_finite(part.name, verdict) for verdict in await self._call(part, samples)]
        except (CallTimeout, WorkerDied) as error:
            if len(samples) == 1:
                return [Fault.of(part.name, error)]
            return list(await asyncio.gather(*(self._grade_one(part, sample) for sample in samples)))
        except FunctionFailed as error:
            return [Fault.of(part.name, error)] * len(samples)

    async def _grade_one(self, part: _Part, sample: Sample) -> Outcome:
        try:
            return _finite(part.name, (await self._call(part, [sample]))[0])
        except FunctionFailed as error:
            return Fault.of(part.name, error)

    async def _call(self, part: _Part, samples: list[Sample]) -> list[Verdict]:
        try:
            if part.pool is not None:
                return await part.pool.call(part.index, samples, self._config.timeout_s * len(samples))
            assert part.function is not None  # start() has loaded what has no pool
            await asyncio.sleep(0)  # many quick rules in a row still let the loop breathe
            return part.function(samples)
        except MissingColumn as error:
            raise RewardError(part.name, error.message) from error

    def _check_failures(self, samples: int, faults: list[Fault]) -> None:
        if faults and self._config.on_failure == "stop":
            raise RewardError(faults[0].function, faults[0].reason)
        self._window_samples += samples
        self._window_faults.extend(faults)
        if self._window_samples < (self._samples_per_step or 1):
            return
        total, window = self._window_samples, self._window_faults
        self._window_samples, self._window_faults = 0, []
        if len(window) > self._config.max_failure_frac * total:
            raise RewardError(
                window[0].function,
                f"{len(window)} of {total} samples failed, more than reward.max_failure_frac "
                f"{self._config.max_failure_frac:g} allows; the first: {window[0].reason}",
            )


def combine(parts: Sequence[tuple[str, float]], outcomes: Sequence[Outcome]) -> Score:
    """The weighted sum over the parts (name, weight) that did not abstain; a fault leaves the sample unrewarded."""
    values: dict[str, float | None] = {}
    info: dict[str, Any] = {}
    fault: Fault | None = None
    total: float | None = None
    for (name, weight), outcome in zip(parts, outcomes, strict=True):
        if isinstance(outcome, Fault):
            fault = fault or outcome
            continue
        values[name] = outcome.value
        if outcome.info:
            info[name] = outcome.info
        if outcome.value is not None:
            total = (total or 0.0) + weight * outcome.value
    if fault is not None:
        return Score(None, values, fault.failure, info)
    if total is None:
        return Score(None, values, Failure(FailureKind.UNSCORED, "every reward function abstained"), info)
    return Score(total, values, None, info)


async def _grade_all(name: str, grader: AsyncGrader, samples: list[Sample]) -> list[Outcome]:
    async def grade(sample: Sample) -> Outcome:
        try:
            return _finite(name, await grader.grade(sample))
        except FunctionFailed as error:
            return Fault.of(name, error)

    return list(await asyncio.gather(*(grade(sample) for sample in samples)))


def _finite(name: str, verdict: Verdict) -> Outcome:
    """NaN and infinities are never trained on."""
    if verdict.value is None or math.isfinite(verdict.value):
        return verdict
    return Fault(name, FailureKind.GRADER, f"returned {verdict.value}, expected a finite number or None")


def _rollout_failure(rollout: Rollout) -> Failure | None:
    """Why a rollout is not graded at all: the engine or the environment gave no whole response."""
    if rollout.failure is not None:
        return rollout.failure
    if rollout.finish_reason in (FinishReason.ABORTED, FinishReason.FAILED):
        return Failure(FailureKind.UNSCORED, f"the rollout was {rollout.finish_reason}", retryable=True)
    return None


def _part_of_config(config: RewardFunctionConfig, timeout_s: float) -> _Part:
    if config.fn in RULES:
        check_rule_args(config.fn, config.args)
    if config.fn == MODEL:
        check_model_args(config.args)
    name = config.name or config.fn.rpartition(":")[2]
    if config.fn in ASYNC_GRADERS:
        grader = make_async_grader(name, config.fn, config.args, timeout_s)
        return _Part(name, config.weight, config.truncated, grader=grader)
    return _Part(name, config.weight, config.truncated, source=FunctionSource(name, config.fn, args=config.args))


def _part_of_callable(function: Callable[..., Any], in_worker: bool) -> _Part:
    """By value where it must be (`__main__`, notebooks, lambdas), by reference where it can be imported."""
    inner = function.func if isinstance(function, functools.partial) else function
    name = str(getattr(inner, "__name__", type(inner).__name__))
    local = GradingFunction(name, function)  # refuses an unsupported signature now
    if not in_worker:
        return _Part(name, function=local)
    try:
        return _Part(name, source=FunctionSource(name, pickled=cloudpickle.dumps(function)))
    except Exception as error:  # pickling runs the objects' own code, which may raise anything
        log.warning(
            "reward function `%s` cannot be sent to a worker process (%s: %s): it runs in a thread of this process, "
            "where the limit of %s is soft: a call that hangs is given up but goes on running",
            *(name, type(error).__name__, error, "reward.timeout_s"),
        )
        return _Part(name, function=local)
