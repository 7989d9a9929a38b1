"""The training loop, top to bottom: prompt -> rollout -> score -> experience -> gradient -> version.

One program for synchronous and asynchronous training. A producer keeps groups in flight while

    admitted < (version + 1 + max_staleness) * groups_per_step                        (arXiv 2505.24298, eq. 3)

and `step()` takes the oldest ones. With `max_staleness` 0 the producer has no room until the next version
is out, which *is* on-policy training; with more, generation overlaps the training of earlier groups.
Nothing below asks which of the two it is.

The controller owns counters, never tensors. It knows the four other modules by `protocols.py` only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from quintet.algorithms.advantage import compute_advantages
from quintet.algorithms.filters import group_verdict, refill_bound
from quintet.algorithms.presets import Algorithm
from quintet.clock import Clock, RealClock
from quintet.controller.experience import sample_metrics, step_batch
from quintet.controller.scoring import score_group
from quintet.controller.state import ControllerState
from quintet.protocols import ExperienceBuffer, RewardService, RolloutWorker, TrainWorker
from quintet.types import (
    ExperienceBatch,
    Failure,
    FailureKind,
    FinishReason,
    Group,
    GroupId,
    GroupState,
    Prompt,
    QuintetError,
    Rollout,
    SamplingParams,
    Score,
    Span,
    StepAbandoned,
    StepAssignment,
    StepMetrics,
    WeightRef,
)

logger = logging.getLogger(__name__)


T = TypeVar("T")


class Draw(Protocol):
    """One prompt drawn from the data; `occurrence` tells equal prompts of an epoch apart."""

    @property
    def epoch(self) -> int: ...

    @property
    def occurrence(self) -> int: ...

    @property
    def prompt(self) -> Prompt: ...


class PromptSource(Protocol):
    """The run's prompts as a function of their number: any place in the stream can be returned to."""

    def draw(self, index: int) -> Draw | None:
        """The `index`-th draw of the run, always the same; None from the end of the data on."""
        ...


@dataclass(frozen=True)
class ControllerSettings:
    total_steps: int
    groups_per_step: int
    sampling: SamplingParams
    group_timeout_s: float | None = None  # a group that takes longer is aborted and tried again
    max_attempts: int = 3  # tries of one group whose failures are retryable


class RunFailed(QuintetError):
    """The run cannot go on; what was finished is in the journal and the run can be resumed."""


class EndOfData(Exception):
    """The data ended and what is left does not fill a step."""


class Controller:
    def __init__(
        self,
        settings: ControllerSettings,
        algorithm: Algorithm,
        *,
        rollout: RolloutWorker,
        reward: RewardService,
        train: TrainWorker,
        buffer: ExperienceBuffer,
        prompts: PromptSource,
        clock: Clock | None = None,
        state: ControllerState | None = None,
        on_span: Callable[[Span], None] = lambda span: None,
        on_publish: Callable[[WeightRef, int], None] = lambda ref, step: None,
        on_batch: Callable[[int, list[Group]], None] = lambda step, groups: None,
        before_training: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.settings = settings
        self.algorithm = algorithm
        self.rollout = rollout
        self.reward = reward
        self.train = train
        self.buffer = buffer
        self.prompts = prompts
        self.clock = clock or RealClock()
        self.state = state or ControllerState()
        self._on_span = on_span
        self._on_publish = on_publish
        self._on_batch = on_batch
        self._before_training = before_training
        self._retries: deque[Group] = deque()  # next attempts of dropped groups, admitted before new prompts
        self._redo: deque[StepAssignment] = deque()
        self._pending: list[Group] = []  # groups in flight when the process ended, taken up after the redo
        self._produce_from = self.state.version  # the version that the last step to redo leads to
        self._ready: dict[GroupId, Group] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._failed: asyncio.Future[None] | None = None
        self._ended = asyncio.Event()
        self._stopped = asyncio.Event()
        self._out_of_data = False
        self._dropped_since_step: Counter[str] = Counter()

    # -- the loop --------------------------------------------------------------------------------

    async def run(self, after_step: Callable[[StepMetrics], Awaitable[None]]) -> None:
        """Train until `total_steps`, the end of the data, or `stop()`. `after_step` logs, evaluates, saves."""
        async with self._producing():
            while self.state.step < self.settings.total_steps and not self._stopped.is_set():
                try:
                    metrics = await self.step()
                except StepAbandoned:
                    return
                except EndOfData:
                    logger.warning("the data ended after step %d: the rest does not fill a step", self.state.step)
                    for group in list(self._ready.values()):
                        await self._drop(group, "incomplete_step")
                    return
                await after_step(metrics)

    async def step(self) -> StepMetrics:
        """Take -> prepare -> advantage -> train -> publish version + 1.

        Raises EndOfData, and StepAbandoned where `stop()` found it before the first optimizer step.
        """
        step, started = self.state.step + 1, self.clock.now()
        groups, dropped = await self._next_groups()
        self._on_span(Span("controller", "wait", started, self.clock.now()))
        self._on_batch(step, groups)
        if self._before_training is not None:
            await self._before_training()
        values = sample_metrics(groups, self.state.version)
        batch = await self._timed("train", "prepare", self.train.prepare(self._experiences(step, groups)))
        batch = self.compute_advantage(batch)
        trained = await self._timed("train", "update", self.train.update(batch))
        await self.sync_weights()
        await self.buffer.commit(step, self.state.version)
        self.state.step = step
        values |= batch.metrics | trained.values | {"actor/optimizer_steps": float(trained.optimizer_steps)}
        values |= {f"dropped/{reason}": float(n) for reason, n in dropped.items()}
        whole = Span("step", f"step {step}", started, self.clock.now())
        self._on_span(whole)
        values["time/step_s"] = whole.end - whole.start
        return StepMetrics(step=step, version=self.state.version, values=values)

    def sample_prompts(self) -> list[Prompt]:
        """The new prompts that the admission formula has room for now, in the order of the data."""
        prompts: list[Prompt] = []
        room = self._room()
        while len(prompts) < room and not self._out_of_data:
            draw = self.prompts.draw(self.state.drawn)
            if draw is None:
                self._out_of_data = True
            else:
                prompts.append(draw.prompt)
                self.state.drawn += 1
        return prompts

    def compute_advantage(self, batch: ExperienceBatch) -> ExperienceBatch:
        return compute_advantages(self.algorithm, batch)

    async def sync_weights(self) -> None:
        """Publish version + 1 and load it into the rollout worker: one controller step is one version."""
        version = self.state.version + 1
        ref = await self._timed("controller", "publish", self.train.publish(version))
        await self._timed("controller", "load", self.rollout.update_weights(ref, version))
        self.state.version = version
        self._on_publish(ref, self.state.step + 1)
        self._wake.set()

    def stop(self) -> None:
        """End now if groups are being waited for, else after the step in progress (or earlier, if the train worker
        gives it up). To be called in the event loop."""
        self._stopped.set()

    async def resume(self) -> None:
        """Take up what the journal holds: steps to redo first, then the groups that were in flight."""
        found = await self.buffer.resume()
        self._redo.extend(found.redo)
        self._pending = found.pending
        self._produce_from = self.state.version + len(found.redo)
        self._dropped_since_step.update(found.dropped)
        self.state.drawn = found.drawn

    # -- batches ---------------------------------------------------------------------------------

    async def _next_groups(self) -> tuple[list[Group], dict[str, int]]:
        """The next step's groups: one to redo, or the oldest ready ones; and how many were dropped, by reason, while
        it was gathered. Raises what a worker raised, EndOfData, and StepAbandoned on `stop()`."""
        if self._redo:
            redone = self._redo.popleft()
            return redone.groups, redone.dropped
        self._wake.set()
        self._note_end()
        assert self._failed is not None, "step() needs a running producer"
        take = asyncio.ensure_future(self.buffer.take(self.settings.groups_per_step, self.state.version))
        end, stop = (asyncio.ensure_future(event.wait()) for event in (self._ended, self._stopped))
        first: set[asyncio.Future[Any]] = {take, end, stop, self._failed}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        stop.cancel()
        if not take.done():
            take.cancel()
            if self._failed.done():
                self._failed.result()
            raise StepAbandoned if self._stopped.is_set() else EndOfData
        groups = take.result()
        for group in groups:
            del self._ready[group.group_id]
        dropped = dict(self._dropped_since_step)
        self._dropped_since_step.clear()
        return groups, dropped

    def _experiences(self, step: int, groups: list[Group]) -> ExperienceBatch:
        return step_batch(
            self.algorithm, groups, step=step, version=self.state.version, max_tokens=self.settings.sampling.max_tokens
        )

    # -- the producer ----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _producing(self) -> AsyncIterator[None]:
        self._failed = asyncio.get_running_loop().create_future()
        producer = asyncio.ensure_future(self._produce())
        producer.add_done_callback(self._note_failure)
        try:
            yield
        finally:
            running = [producer, *self._tasks]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            if self._failed.done():
                self._failed.exception()  # seen: it was raised by step(), or the run was over

    async def _produce(self) -> None:
        while self.state.version < self._produce_from:  # in-flight groups belong to a version that is being rebuilt
            await self._woken()
        for group in self._pending:
            self._launch(group)
        self._pending = []
        while True:
            groups = self._admissible()
            await self.buffer.admit(groups)
            for group in groups:
                self._launch(group)
            self._note_end()
            await self._woken()

    def _room(self) -> int:
        """Groups that may be admitted now: the admission formula, capped by what the run still needs."""
        ahead = self.state.version + 1 + self.algorithm.max_staleness
        bound = min(ahead, self.settings.total_steps) * self.settings.groups_per_step
        return bound - self.buffer.stats().admitted - len(self._retries)

    def _admissible(self) -> list[Group]:
        """Next attempts first, then new prompts."""
        first = self.state.drawn
        fresh = [self._group(index, prompt) for index, prompt in enumerate(self.sample_prompts(), start=first)]
        groups = [*self._retries, *fresh]
        self._retries.clear()
        return groups

    def _group(self, index: int, prompt: Prompt) -> Group:
        draw = self.prompts.draw(index)
        assert draw is not None and draw.prompt is prompt
        return Group(GroupId(prompt.id, draw.epoch, draw.occurrence), prompt)

    def _launch(self, group: Group) -> None:
        task = asyncio.ensure_future(self._work(group))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._note_failure)
        task.add_done_callback(lambda _task: self._note_end())

    async def _work(self, group: Group) -> None:
        """One group from wherever it stands to READY, or to DROPPED."""
        if group.state is GroupState.ADMITTED:
            group.rollouts = await self._generate(group)
            failure = _failure_of(group)
            if failure is not None:
                await self._drop_failed(group, failure)
                return
            await self.buffer.advance(group, GroupState.GENERATED)
        if group.state is GroupState.GENERATED:
            group.scores = await self._score(group)
            await self.buffer.advance(group, GroupState.SCORED)
        if group.state is GroupState.SCORED:
            reason = group_verdict(self.algorithm, group)
            if reason is not None:
                await self._drop(group, reason)
                self._check_refill(reason)
                return
        self._ready[group.group_id] = group
        if group.state is GroupState.SCORED:
            await self.buffer.advance(group, GroupState.READY)

    async def _generate(self, group: Group) -> list[Rollout]:
        started = self.clock.now()
        try:
            rollouts = await asyncio.wait_for(self._ask(group), self.settings.group_timeout_s)
        except TimeoutError:
            await self.rollout.abort([group.group_id])
            message = f"group {group.group_id} took longer than {self.settings.group_timeout_s} s"
            failure = Failure(FailureKind.TIMEOUT, message, retryable=True)
            rollouts = [_failed_rollout(group, i, failure) for i in range(self.settings.sampling.n)]
        span = Span("group", str(group.group_id), started, self.clock.now())
        self._on_span(span)
        for rollout in rollouts:
            rollout.timing |= {"start_s": span.start, "end_s": span.end}
        return rollouts

    async def _ask(self, group: Group) -> list[Rollout]:
        """The group's samples and, where the advantage needs it, the greedy answer after them."""
        sampling, version = self.settings.sampling, self.state.version
        kinds = [sampling, sampling.greedy()] if self.algorithm.needs_greedy else [sampling]
        samples, *greedy = await asyncio.gather(*(self.rollout.generate([group], kind, version) for kind in kinds))
        for (answer,) in greedy:
            answer.greedy, answer.sample_index = True, sampling.n
            samples.append(answer)
        return samples

    async def _score(self, group: Group) -> list[Score]:
        started = self.clock.now()
        scores = await score_group(self.reward, group)
        self._on_span(Span("reward", str(group.group_id), started, self.clock.now()))
        return scores

    async def _drop_failed(self, group: Group, failure: Failure) -> None:
        logger.warning("group %s failed: %s: %s", group.group_id, failure.kind.value, failure.message)
        attempts = group.group_id.attempt + 1
        if failure.retryable and attempts >= self.settings.max_attempts:
            raise RunFailed(f"group {group.group_id} failed {attempts} times: {failure.kind.value}: {failure.message}")
        if failure.retryable:
            self.retry(group)
        await self._drop(group, f"failed:{failure.kind.value}")
        if self._dropped_since_step[f"failed:{failure.kind.value}"] > 3 * self.settings.groups_per_step:
            raise RunFailed(f"no step can be filled: group after group fails: {failure.kind.value}: {failure.message}")

    def _check_refill(self, reason: str) -> None:
        """Raises RunFailed when a filter drops group after group: the step might never fill."""
        bound, filtered = refill_bound(self.algorithm), self._dropped_since_step[reason]
        if bound is not None and filtered > bound * self.settings.groups_per_step:
            raise RunFailed(
                f"step {self.state.step + 1} cannot be filled: the filters dropped {filtered} groups ({reason}), more "
                f"than max_refill {bound} x {self.settings.groups_per_step}.\nThe task is too hard or too easy for the "
                "model: change the data, take algorithm.filters away, or raise max_refill"
            )

    async def _drop(self, group: Group, reason: str) -> None:
        self._dropped_since_step[reason] += 1
        self._ready.pop(group.group_id, None)
        await self.buffer.drop(group, reason)
        self._wake.set()

    def retry(self, group: Group, reason: str | None = None) -> None:
        """The next attempt of a dropped group is admitted before any new prompt. `reason`: of a drop that the buffer
        decided, to be counted."""
        if reason is not None:
            self._dropped_since_step[reason] += 1
        self._ready.pop(group.group_id, None)
        self._retries.append(Group(group_id=group.group_id.next_attempt(), prompt=group.prompt))
        self._wake.set()

    async def _woken(self) -> None:
        await self._wake.wait()
        self._wake.clear()

    def _note_end(self) -> None:
        """The data ended, nothing is on its way, and what is ready does not fill a step."""
        idle = self._out_of_data and not self._tasks and not self._retries and not self._pending
        if idle and len(self._ready) < self.settings.groups_per_step:
            self._ended.set()

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def _timed(self, lane: str, name: str, work: Awaitable[T]) -> T:
        started = self.clock.now()
        result = await work
        self._on_span(Span(lane, name, started, self.clock.now()))
        return result


def _failure_of(group: Group) -> Failure | None:
    """Why nothing of the group can be trained on: all samples failed, or the greedy answer that they need did."""
    samples = [r.failure for r in group.samples]
    greedy = next((r.failure for r in group.rollouts if r.greedy), None)
    return samples[0] if all(samples) else greedy


def _failed_rollout(group: Group, index: int, failure: Failure) -> Rollout:
    return Rollout(
        group.group_id, index, group.prompt.token_ids, [], "", [], [], [], FinishReason.FAILED, failure=failure
    )
