"""The asyncio face of a synchronous engine: its own thread, futures per call, commands between steps."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from enum import StrEnum
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PretrainedConfig

from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.build import make_engine
from quintet.rollout.engine.fast import FastEngine
from quintet.rollout.engine.handoff import Prefilled, PrefillFailed
from quintet.rollout.engine.sequence import Decode, Finished, OnToken, check_params
from quintet.rollout.engine.sync import EngineStats, SyncEngine
from quintet.rollout.metered import MeteredWorker
from quintet.types import Group, GroupId, Health, QuintetError, Rollout, SamplingParams, Span, WeightRef
from quintet.weights import open_weights

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SPAN_S = 0.5  # a phase is told at least this often
_SPAN_GAP_S = 0.005  # steps further apart are two spans


class PauseMode(StrEnum):
    """What becomes of the samples in flight when an engine is paused."""

    ABORT = "abort"  # they end as aborted, with the tokens so far
    WAIT = "wait"  # they are finished first
    KEEP = "keep"  # they stand still and go on after `resume`


class _Call:
    """One call: a place for each rollout, and the future of what `make` makes of all of them."""

    def __init__(
        self,
        groups: int,
        samples: int,
        first_sample: int,
        make: Callable[[list[Rollout]], object] = list,
    ) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()
        self._make = make
        self.rows: dict[int, int] = {}  # request -> place of its group
        self._places: list[list[Rollout | None]] = [[None] * samples for _ in range(groups)]
        self._missing = groups * samples
        self._first_sample = first_sample

    def put(self, request: int, rollout: Rollout) -> None:
        self._places[self.rows[request]][rollout.sample_index - self._first_sample] = rollout
        self._missing -= 1
        if self._missing == 0:
            self.future.set_result(self._make([r for row in self._places for r in row if r is not None]))


class EngineWorker(MeteredWorker):
    """`RolloutWorker` over any `SyncEngine`. All engine calls happen in one thread, between or in steps.

    Concurrent `generate` calls share the engine's batch. An exception in the engine ends what was in flight with
    `Rollout.failure` (kind engine); the worker stays up and is unhealthy until a step succeeds.

    `on_span` is told of the engine's phases from its thread: neighbouring steps of one phase are one span of lane
    `rollout`, up to half a second long and never across a sample's end.
    """

    def __init__(self, engine: SyncEngine) -> None:
        self._engine = engine
        self.on_span: Callable[[Span], None] = lambda span: None
        self._phase: Span | None = None  # begun and not yet told
        self._threads = torch.get_num_threads()
        self._wake = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._calls: dict[int, _Call] = {}
        self._paused: PauseMode | None = None
        self._held: dict[_Call, Callable[[], None]] = {}  # calls that came in while paused, and what admits them
        self._drained: list[Future[None]] = []  # of `pause(WAIT)` calls: nothing is in flight any more
        self._closing = False
        self._error = ""
        self._last_stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="rollout-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompts: list[Group],
        sampling_params: SamplingParams,
        weight_version: int,
        *,
        on_token: OnToken | None = None,
    ) -> list[Rollout]:
        """See `RolloutWorker.generate`. `on_token` is told of each token as it is sampled, from the engine's thread.

        Raises QuintetError on wrong sampling parameters, on a `weight_version` newer than the engine's, and after
        `close`. A cancelled call takes its samples out of the batch."""
        check_params(sampling_params)
        if not prompts:
            return []
        call = _Call(len(prompts), sampling_params.n, sampling_params.first_sample)

        def add(group: Group) -> int:
            return self._engine.add_group(group, sampling_params, on_token)

        found: list[Rollout] = await self._answer(call, prompts, weight_version, add)
        return found

    async def prefill(self, group: Group, params: SamplingParams, weight_version: int) -> Prefilled:
        """The prompt's KV and each sample's first token, for another engine's `decode`. Raises as `generate` does."""
        check_params(params)
        engine, requests = self._fast_engine(), list[int]()

        def add(group: Group) -> int:
            requests.append(engine.add_prefill(group, params))
            return requests[-1]

        call = _Call(1, params.n, params.first_sample, lambda rollouts: engine.take_prefilled(requests[0], rollouts))
        found: Prefilled = await self._answer(call, [group], weight_version, add)
        return found

    async def decode(
        self, group: Group, params: SamplingParams, found: Prefilled, *, on_token: OnToken | None = None
    ) -> list[Rollout]:
        """Go on from another engine's `prefill` of the same request, whose tokens `on_token` is told of as well.

        Raises PrefillFailed when the KV is not of this engine's weight version."""
        check_params(params)
        engine = self._fast_engine()
        call = _Call(1, params.n, params.first_sample)
        rollouts: list[Rollout] = await self._answer(
            call, [group], -1, lambda group: engine.add_prefilled(group, params, found, on_token)
        )
        return rollouts

    async def pause(self, mode: PauseMode) -> None:
        """Take no step until `resume`; calls that come in meanwhile wait. Weights may be updated while paused.

        Returns when nothing runs any more, which with `wait` takes as long as the samples in flight do.
        """
        drained: Future[None] = Future()
        drained.set_running_or_notify_cancel()
        await asyncio.wrap_future(self._submit(lambda: self._pause(mode, drained)))
        await asyncio.wrap_future(drained)

    async def resume(self) -> None:
        """Go on after `pause`; without one, nothing happens."""
        await asyncio.wrap_future(self._submit(self._resume))

    async def update_weights(self, weight_path: WeightRef, version: int) -> None:
        """Whole or not at all, between two steps. Raises QuintetError when the weights do not fit the model."""
        if weight_path.version != version:
            raise QuintetError(
                f"Weight update to version {version}: {weight_path.location} holds version {weight_path.version}."
            )
        weights = await asyncio.to_thread(open_weights, weight_path)
        await asyncio.wrap_future(self._submit(lambda: self._update(weights, version)))

    async def health_check(self) -> Health:
        stats = self._engine.stats()
        error = "closed" if self._closing else self._error
        message = error or (f"paused ({self._paused.value})" if self._paused else "")
        return Health(
            ok=not error,
            version=self._engine.version,
            running=stats.running,
            waiting=stats.waiting,
            kv_used=stats.kv_used,
            memory_bytes=stats.memory_bytes,
            message=message,
        )

    async def abort(self, group_ids: list[GroupId]) -> None:
        wanted = frozenset(group_ids)
        await asyncio.wrap_future(self._submit(lambda: self._engine.abort(wanted)))

    async def close(self) -> None:
        """End the thread after the step in progress; samples in flight fail. May be called twice."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def metrics(self) -> dict[str, float]:
        """Since the last call: tokens per second of engine time, preemptions, share of prompt tokens not recomputed
        because a group's samples share them; and what runs and waits now."""
        last, now = self._last_stats, self._engine.stats()
        self._last_stats = now
        return _metrics(last, now)

    def _fast_engine(self) -> FastEngine:
        if not isinstance(self._engine, FastEngine):
            raise QuintetError(
                "Prefill and decoding can be separated with rollout.engine: embedded and rollout.numerics: fast only."
            )
        return self._engine

    async def _answer(self, call: _Call, groups: list[Group], weight_version: int, add: Callable[[Group], int]) -> Any:
        """What becomes of a call whose groups `add` gives to the engine."""
        self._submit(lambda: self._admit(call, groups, weight_version, add))
        try:
            return await asyncio.wrap_future(call.future)
        except asyncio.CancelledError:
            if not self._closing:
                self._submit(lambda: self._forget(call))
            raise

    def _submit(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` in the engine's thread before its next step."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise QuintetError("The rollout worker is closed.")
            self._commands.append(run)
            self._wake.notify()
        return future

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP and MKL keep the number per thread
        try:
            while self._next_commands():
                if self._may_step:
                    self._deliver(self._step())
                self._tell_drained()
        finally:
            self._shut()

    @property
    def _may_step(self) -> bool:
        return self._engine.has_work and self._paused is not PauseMode.KEEP

    def _next_commands(self) -> bool:
        """Wait for something to do and carry out what was submitted; False when closing."""
        with self._wake:
            while not (self._commands or self._closing or self._may_step):
                self._wake.wait()
            if self._closing:
                return False
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return True

    def _step(self) -> list[Finished]:
        began = time.monotonic()
        try:
            finished = self._engine.step()
        except Exception as error:
            _log.exception("rollout engine step failed")
            self._error = f"{type(error).__name__}: {error}"
            return self._engine.fail_all(f"the engine stopped: {self._error}")
        self._error = ""
        self._note_phase(began, time.monotonic(), last=bool(finished))
        return finished

    def _note_phase(self, began: float, ended: float, *, last: bool) -> None:
        open_ = self._phase
        if open_ is not None and (open_.name != self._engine.phase or began - open_.end > _SPAN_GAP_S):
            self.on_span(open_)
            open_ = None
        start, steps = (began, 1) if open_ is None else (open_.start, open_.args["steps"] + 1)
        self._phase = Span("rollout", self._engine.phase, start, ended, {"steps": steps})
        if last or ended - start >= _SPAN_S:
            self.on_span(self._phase)
            self._phase = None

    def _shut(self) -> None:
        with self._wake:
            self._closing = True
            commands, self._commands = self._commands, deque()
        for command in commands:  # nobody may wait for ever; what they queue is failed below
            command()
        self._resume()
        try:
            self._deliver(self._engine.fail_all("the rollout worker was closed"))
        finally:
            for call in self._calls.values():
                if not call.future.done():
                    call.future.set_exception(RuntimeError("the rollout engine's thread ended"))

    def _deliver(self, finished: list[Finished]) -> None:
        for request, rollout in finished:
            call = self._calls[request]
            call.put(request, rollout)
        for request in {request for request, _ in finished}:
            if self._calls[request].future.done():
                del self._calls[request]

    def _admit(self, call: _Call, groups: list[Group], weight_version: int, add: Callable[[Group], int]) -> None:
        if self._paused is not None:
            self._held[call] = lambda: self._admit(call, groups, weight_version, add)
            return
        if self._engine.version < weight_version:
            call.future.set_exception(
                QuintetError(
                    f"generate() asks for weight version {weight_version}, the engine has {self._engine.version}.\n"
                    "Call update_weights() with that version first."
                )
            )
            return
        for place, group in enumerate(groups):
            try:
                request = add(group)
            except PrefillFailed as error:
                call.future.set_exception(error)
                return
            call.rows[request] = place
            self._calls[request] = call

    def _forget(self, call: _Call) -> None:
        if self._held.pop(call, None) is None:
            self._engine.abort_requests(call.rows.keys())

    def _pause(self, mode: PauseMode, drained: Future[None]) -> None:
        self._paused = mode
        self._drained.append(drained)
        if mode is PauseMode.ABORT:
            self._engine.abort_requests(self._calls.keys())

    def _tell_drained(self) -> None:
        """Who paused may go on: nothing is in flight, or it stands still, or the pause is over."""
        if self._paused is PauseMode.KEEP or not self._engine.has_work or self._paused is None:
            drained, self._drained = self._drained, []
            for future in drained:
                future.set_result(None)

    def _resume(self) -> None:
        self._paused = None
        self._tell_drained()
        held, self._held = self._held, {}
        for admit in held.values():
            admit()

    def _update(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._engine.update_weights(weights, version)
        self._error = ""


class EmbeddedRolloutWorker(EngineWorker):
    """The embedded engine behind the protocol; arguments as for `make_engine`."""

    def __init__(
        self,
        hf_config: PretrainedConfig,
        weights: Mapping[str, Tensor],
        *,
        eos_ids: Collection[int],
        decode: Decode,
        config: RolloutConfig,
        device: torch.device,
        dtype: torch.dtype,
        version: int = 0,
    ) -> None:
        super().__init__(
            make_engine(
                hf_config,
                weights,
                eos_ids=eos_ids,
                decode=decode,
                config=config,
                device=device,
                dtype=dtype,
                version=version,
            )
        )


def _metrics(last: EngineStats, now: EngineStats) -> dict[str, float]:
    busy_s = now.busy_s - last.busy_s
    tokens = now.sampled_tokens - last.sampled_tokens
    prompt = now.prompt_tokens - last.prompt_tokens
    computed = now.computed_prompt_tokens - last.computed_prompt_tokens
    return {
        "engine/tokens_per_s": tokens / busy_s if busy_s > 0 else 0.0,
        "engine/sampled_tokens": float(tokens),
        "engine/preemptions": float(now.preemptions - last.preemptions),
        "engine/prefix_shared_frac": 1.0 - computed / prompt if prompt else 0.0,
        "engine/weights_load_s": now.update_s - last.update_s,
        "engine/running": float(now.running),
        "engine/waiting": float(now.waiting),
        "engine/kv_used": now.kv_used,
    }
