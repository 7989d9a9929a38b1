"""Scores groups: every reward function on every sample, weighted, with faults kept apart from verdicts.

`mixture.py` makes one reward of the parts; that number is the trained and the logged one. A sample of which one
weighted function failed has no reward and carries the failure; a sample on which all abstain has the failure kind
`unscored`. Neither is ever a 0.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle  # type: ignore[import-untyped]

from quintet.reward.background import AsyncGrader, BackgroundLoop
from quintet.reward.calling import GradingFunction, Signature
from quintet.reward.config import RewardConfig, RewardFunctionConfig
from quintet.reward.errors import CallTimeout, FunctionFailed, MissingColumn, RewardError, WorkerDied
from quintet.reward.failures import FailureWindow, Timings
from quintet.reward.loading import ASYNC_GRADERS, FunctionSource, check_rule_args, make_async_grader
from quintet.reward.mixture import Fault, Outcome, Term, combine_group, first_fault, required
from quintet.reward.model import MODEL, check_model_args
from quintet.reward.pool import SlotPool, ThreadSlot
from quintet.reward.rules import BATCHED, RULES, reference_fault
from quintet.reward.sample import Sample, Verdict, rollout_failure, sample_of
from quintet.reward.worker_process import Template, WorkerProcess
from quintet.types import FailureKind, Group, Prompt, QuintetError, Score

log = logging.getLogger(__name__)


@dataclass
class _Part:
    """One reward function, its term in the mixture, and where it runs (`pool` None: right here)."""

    term: Term
    truncated: Literal["grade", "zero"] = "grade"
    source: FunctionSource | None = None  # loads in a worker
    function: GradingFunction | None = None  # lives in this process
    grader: AsyncGrader | None = None  # lives in this process, on the background loop
    pool: SlotPool | None = None
    index: int = 0  # among the functions of its pool
    signature: Signature = Signature.RULE

    @property
    def name(self) -> str:
        return self.term.name

    @property
    def batched(self) -> bool:
        """A built-in whose calls are short and bounded: the samples of a group go to a worker together."""
        return self.pool is not None and self.source is not None and self.source.spec in BATCHED

    def reference_fault(self, prompt: Prompt) -> str | None:
        if self.grader is not None:
            return self.grader.reference_fault(prompt)
        rule = None if self.source is None else self.source.spec
        return None if rule is None else reference_fault(rule, prompt.answer)


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
        self._terms = [part.term for part in self._parts]
        self._watch_faults: set[str] = set()
        self._window = FailureWindow(config, samples_per_step)
        self._timings = Timings()
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
        """(row, reason) of the prompts of which no sample could get a reward, to be reported and left out when data is
        loaded: those that every function leaves to others, and those whose reference answer a built-in rule could
        never grade. A reference that does not equal itself is among them."""
        faults = ((row, self._prompt_fault(prompt)) for row, prompt in enumerate(prompts))
        return [(row, fault) for row, fault in faults if fault is not None]

    def _prompt_fault(self, prompt: Prompt) -> str | None:
        needed = required(self._terms)
        parts = [p for p in self._parts if p.name in needed and p.term.takes(prompt.task_type)]
        if not parts:
            return f"no reward function takes prompts of task type `{prompt.task_type}`"
        return next((fault for part in parts if (fault := part.reference_fault(prompt)) is not None), None)

    async def score(self, groups: list[Group]) -> list[list[Score]]:
        """One list per group, one score per rollout, in order.

        Raises RewardError when `on_failure` is `stop` and a function failed, when more than `max_failure_frac` of a
        step's samples failed, or when a function wants a column that the data does not have.
        """
        self.start()
        scored = await asyncio.gather(*(self._score_group(group) for group in groups))
        faults = [(fault.function, fault.reason) for _, found in scored for fault in found]
        self._window.note(sum(len(scores) for scores, _ in scored), faults)
        return [scores for scores, _ in scored]

    def take_metrics(self) -> dict[str, float]:
        """How long grading took since the last call, see `Timings.take`."""
        return self._timings.take()

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
        template = Template(sources)
        slots = [WorkerProcess(template) for _ in range(self._config.workers)]
        self._place(parts, SlotPool(slots, template))
        try:
            found = [slot.signatures() for slot in slots]
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
        lost = [rollout_failure(rollout) for rollout in group.rollouts]
        graded = [i for i, failure in enumerate(lost) if failure is None]
        columns = await self._columns([sample_of(group, i) for i in graded], group.prompt.task_type)
        scores = [Score(None, failure=failure) for failure in lost]
        for i, score in zip(graded, combine_group(self._terms, columns), strict=True):
            scores[i] = score
        rows = list(zip(*columns, strict=True))
        for row in rows:
            self._warn_watched(row)
        return scores, [fault for row in rows if (fault := first_fault(self._terms, row)) is not None]

    async def _columns(self, samples: list[Sample], task_type: str) -> list[list[Outcome]]:
        """Per part, one outcome per sample. Parts that are called only behind an open gate come second."""
        columns: dict[str, list[Outcome]] = {p.name: [Verdict(None)] * len(samples) for p in self._parts}
        called = [p for p in self._parts if p.term.takes(task_type)]
        for wave in ([p for p in called if not _skips(p)], [p for p in called if _skips(p)]):
            found = await asyncio.gather(*(self._grade_open(part, samples, columns) for part in wave))
            columns |= {part.name: column for part, column in zip(wave, found, strict=True)}
        return [columns[part.name] for part in self._parts]

    async def _grade_open(self, part: _Part, samples: list[Sample], columns: dict[str, list[Outcome]]) -> list[Outcome]:
        """The part on the samples behind an open gate; on the others it abstains without a call."""
        gate = part.term.gate
        if gate is None or not gate.skip:
            return await self._grade(part, samples)
        states = [isinstance(o, Verdict) and gate.is_open(o.value) is True for o in columns[gate.part]]
        behind = [i for i, is_open in enumerate(states) if is_open]
        outcomes: list[Outcome] = [Verdict(None)] * len(samples)
        for i, outcome in zip(behind, await self._grade(part, [samples[i] for i in behind]), strict=True):
            outcomes[i] = outcome
        return outcomes

    def _warn_watched(self, outcomes: Sequence[Outcome]) -> None:
        """A fault of a part that is only watched costs nothing, and is said once."""
        needed = required(self._terms)
        for fault in outcomes:
            if isinstance(fault, Fault) and fault.function not in needed | self._watch_faults:
                self._watch_faults.add(fault.function)
                log.warning("reward function `%s`, which is only watched, failed: %s", fault.function, fault.reason)

    async def _grade(self, part: _Part, samples: list[Sample]) -> list[Outcome]:
        """One outcome per sample of a group."""
        outcomes: list[Outcome] = [Verdict(0.0, {"reason": "truncated"})] * len(samples)
        called = [i for i, s in enumerate(samples) if part.truncated == "grade" or not s.truncated]
        if not called:
            return outcomes
        together = [samples[i] for i in called]
        if part.grader is not None and self._background is not None:
            results = await self._background.wait(self._grade_all(part.name, part.grader, together))
        elif part.signature is Signature.TRL:
            results = await self._grade_together(part, together, self._config.timeout_s * len(together))
        elif part.batched:
            results = await self._grade_together(part, together, self._config.timeout_s)
        else:
            results = list(await asyncio.gather(*(self._grade_one(part, sample) for sample in together)))
        for i, result in zip(called, results, strict=True):
            outcomes[i] = result
        return outcomes

    async def _grade_all(self, name: str, grader: AsyncGrader, samples: list[Sample]) -> list[Outcome]:
        async def call(sample: Sample) -> Verdict:
            start = time.perf_counter()
            try:
                return await grader.grade(sample)
            finally:
                self._timings.note(time.perf_counter() - start)

        return list(await asyncio.gather(*(_outcome(name, functools.partial(call, sample)) for sample in samples)))

    async def _grade_together(self, part: _Part, samples: list[Sample], limit_s: float) -> list[Outcome]:
        """One call for the group; if it hangs or kills its worker, once more sample by sample to find the culprit."""
        try:
            return [_finite(part.name, verdict) for verdict in await self._call(part, samples, limit_s)]
        except FunctionFailed as error:
            if len(samples) > 1 and (part.batched or isinstance(error, (CallTimeout, WorkerDied))):
                return list(await asyncio.gather(*(self._grade_one(part, sample) for sample in samples)))
            return [Fault.of(part.name, error)] * len(samples)

    async def _grade_one(self, part: _Part, sample: Sample) -> Outcome:
        async def call() -> Verdict:
            return (await self._call(part, [sample], self._config.timeout_s))[0]

        return await _outcome(part.name, call)

    async def _call(self, part: _Part, samples: list[Sample], limit_s: float) -> list[Verdict]:
        seconds = limit_s
        try:
            if part.pool is not None:
                reply = await part.pool.call(part.index, samples, limit_s)
                seconds = reply.seconds
                return reply.verdicts
            assert part.function is not None  # start() has loaded what has no pool
            await asyncio.sleep(0)  # many quick rules in a row still let the loop breathe
            start = time.perf_counter()
            verdicts = part.function(samples)
            seconds = time.perf_counter() - start
            return verdicts
        except MissingColumn as error:
            raise RewardError(part.name, error.message) from error
        finally:
            for _ in samples:
                self._timings.note(seconds / len(samples))


def _skips(part: _Part) -> bool:
    return part.term.gate is not None and part.term.gate.skip


async def _outcome(name: str, call: Callable[[], Awaitable[Verdict]]) -> Outcome:
    """What a call gives for one sample; it is made once more after a fault that may pass."""
    try:
        try:
            return _finite(name, await call())
        except FunctionFailed as error:
            if not error.retryable:
                raise
            return _finite(name, await call())
    except FunctionFailed as error:
        return Fault.of(name, error)


def _finite(name: str, verdict: Verdict) -> Outcome:
    """NaN and infinities are never trained on."""
    if verdict.value is None or math.isfinite(verdict.value):
        return verdict
    return Fault(name, FailureKind.GRADER, f"returned {verdict.value}, expected a finite number or None")


def _part_of_config(config: RewardFunctionConfig, timeout_s: float) -> _Part:
    if config.fn in RULES:
        check_rule_args(config.fn, config.args)
    if config.fn == MODEL:
        check_model_args(config.args)
    name, term = config.part_name, Term.of(config)
    if config.fn in ASYNC_GRADERS:
        grader = make_async_grader(name, config.fn, config.args, timeout_s)
        return _Part(term, config.truncated, grader=grader)
    return _Part(term, config.truncated, source=FunctionSource(name, config.fn, args=config.args))


def _part_of_callable(function: Callable[..., Any], in_worker: bool) -> _Part:
    """By value where it must be (`__main__`, notebooks, lambdas), by reference where it can be imported."""
    inner = function.func if isinstance(function, functools.partial) else function
    name = str(getattr(inner, "__name__", type(inner).__name__))
    local = GradingFunction(name, function)  # refuses an unsupported signature now
    if not in_worker:
        return _Part(Term(name), function=local)
    try:
        return _Part(Term(name), source=FunctionSource(name, pickled=cloudpickle.dumps(function)))
    except Exception as error:  # pickling runs the objects' own code, which may raise anything
        log.warning(
            "reward function `%s` cannot be sent to a worker process (%s: %s): it runs in a thread of this process, "
            "where the limit of %s is soft: a call that hangs is given up but goes on running",
            *(name, type(error).__name__, error, "reward.timeout_s"),
        )
        return _Part(Term(name), function=local)
