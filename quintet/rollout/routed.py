"""Several rollout workers as one: a load balancer chooses, and what a worker leaves unfinished goes on elsewhere.

A retried sample keeps its tokens so far: they become part of the prompt, and the draws go on at their position, so that
with the same weights the whole is what an undisturbed worker would have given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping

import msgspec

from quintet.clock import Clock, RealClock
from quintet.rollout.engine.handoff import PrefillFailed
from quintet.rollout.engine.sequence import OnToken
from quintet.rollout.router import Lease, NoWorker, RequestLoadBalancer, RouteRequest, WorkerState, WorkerStatus
from quintet.rollout.streaming import OutdatedWeights, TokenWorker
from quintet.types import (
    Failure,
    FailureKind,
    FinishReason,
    Group,
    GroupId,
    Health,
    Prompt,
    QuintetError,
    Rollout,
    SamplingParams,
    WeightRef,
    expand_versions,
    run_length,
)
from quintet.weights.file import FileStore
from quintet.weights.memory import MemoryStore

_log = logging.getLogger(__name__)
_ELSEWHERE = (FailureKind.TRANSPORT, FailureKind.ENGINE)


class RoutedRolloutWorker:
    """`RolloutWorker` over named workers.

    `initial`: weights that every worker gets before the first request, published in `store`, which keeps them. A
    worker that was away is given the newest weights before it is sent anything; its health is asked for every `poll_s`.
    Each sample is tried `attempts` times.
    """

    def __init__(
        self,
        workers: Mapping[str, TokenWorker],
        balancer: RequestLoadBalancer,
        *,
        decode: Callable[[list[int]], str],
        eos_ids: Collection[int],
        initial: WeightRef | None = None,
        store: MemoryStore | FileStore | None = None,
        attempts: int = 4,
        poll_s: float = 2.0,
        clock: Clock | None = None,
    ) -> None:
        self._workers = dict(workers)
        self._balancer = balancer
        self._decode = decode
        self._eos_ids = frozenset(eos_ids)
        self._newest = initial
        self._store = store  # memory is gone with the last who knows of it
        self._attempts = attempts
        self._poll_s = poll_s
        self._clock = clock or RealClock()
        self._monitor: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._loading = {name: asyncio.Lock() for name in self._workers}

    async def generate(
        self,
        prompts: list[Group],
        sampling_params: SamplingParams,
        weight_version: int,
        *,
        on_token: OnToken | None = None,
    ) -> list[Rollout]:
        await self._start()
        made = await asyncio.gather(*(self._group(g, sampling_params, weight_version, on_token) for g in prompts))
        return [rollout for rollouts in made for rollout in rollouts]

    async def update_weights(self, weight_path: WeightRef, version: int) -> None:
        """On every worker. Those that fail are left out until they have the new weights; raises when all fail."""
        self._newest = weight_path
        errors = await asyncio.gather(*(self._update(name) for name in self._workers))
        if all(errors):
            raise QuintetError(f"no rollout worker took weight version {version}: {errors[0]}")

    async def health_check(self) -> Health:
        """Healthy while one worker is; `version` is the oldest among those that are up."""
        found = await asyncio.gather(*(worker.health_check() for worker in self._workers.values()))
        up = [health for health in found if health]
        return Health(
            self._can_serve([name for name, health in zip(self._workers, found, strict=True) if health]),
            version=min((h.version for h in up), default=-1),
            running=sum(h.running for h in up),
            waiting=sum(h.waiting for h in up),
            kv_used=max((h.kv_used for h in up), default=0.0),
            memory_bytes=sum(h.memory_bytes for h in up),
            message="; ".join(h.message for h in found if h.message),
        )

    async def abort(self, group_ids: list[GroupId]) -> None:
        names = [w.name for w in self._status() if w.state is not WorkerState.DOWN]
        await asyncio.gather(*(self._workers[name].abort(group_ids) for name in names), return_exceptions=True)

    async def close(self) -> None:
        if self._monitor is not None:
            self._monitor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._monitor
        for worker in self._workers.values():
            await worker.close()  # type: ignore[attr-defined]

    # -- workers ---------------------------------------------------------------------------------

    async def _start(self) -> None:
        async with self._starting:
            if self._monitor is not None:
                return
            for name in self._workers:
                self._balancer_of(name).add(name)
            if self._newest is not None:
                await self.update_weights(self._newest, self._newest.version)
            await self._poll()
            self._monitor = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(self._poll_s)
            await self._poll()

    async def _poll(self) -> None:
        await asyncio.gather(*(self._poll_one(name) for name in self._workers))

    async def _update(self, name: str) -> str | None:
        async with self._loading[name]:
            return await self._load(name)

    async def _poll_one(self, name: str) -> None:
        async with self._loading[name]:  # what is being loaded is not loaded a second time
            health = await self._workers[name].health_check()
            if health and self._newest is not None and health.version != self._newest.version:
                await self._load(name)
            else:
                self._balancer_of(name).add(name, health)

    def _balancer_of(self, name: str) -> RequestLoadBalancer:
        """Where a worker is registered."""
        return self._balancer

    def _status(self) -> list[WorkerStatus]:
        return self._balancer.status()

    def _can_serve(self, up: Collection[str]) -> bool:
        """Whether the workers that are up are enough."""
        return bool(up)

    async def _load(self, name: str) -> str | None:
        """Give a worker the newest weights; the reason when that fails."""
        assert self._newest is not None
        ref, worker = self._newest, self._workers[name]
        try:
            await worker.update_weights(ref, ref.version)
        except Exception as error:
            _log.warning("rollout worker %s did not take weight version %d: %s", name, ref.version, error)
            self._balancer_of(name).add(name, Health(False, message=str(error)))
            return str(error) or type(error).__name__
        self._balancer_of(name).add(name, await worker.health_check())
        return None

    # -- requests --------------------------------------------------------------------------------

    async def _group(
        self, group: Group, params: SamplingParams, version: int, on_token: OnToken | None
    ) -> list[Rollout]:
        """All samples on one worker, where they share their prompt; those it leaves unfinished one by one elsewhere."""
        rollouts, worker = await self._send(group, params, version, on_token, frozenset())
        again = [i for i, r in enumerate(rollouts) if _is_unfinished(r)]
        made = await asyncio.gather(
            *(self._finish(group, params, version, on_token, rollouts[i], worker) for i in again)
        )
        for place, rollout in zip(again, made, strict=True):
            rollouts[place] = rollout
        return rollouts

    async def _finish(
        self,
        group: Group,
        params: SamplingParams,
        version: int,
        on_token: OnToken | None,
        rollout: Rollout,
        worker: str,
    ) -> Rollout:
        failed = {worker}
        for _ in range(self._attempts - 1):
            if (whole := self._as_whole(rollout, params)) is not None:
                return whole
            rest_of = Group(group.group_id, _prompt_so_far(group.prompt, rollout))
            rest = msgspec.structs.replace(
                params,
                n=1,
                first_sample=rollout.sample_index,
                first_position=params.first_position + len(rollout.response_ids),
                max_tokens=params.max_tokens - len(rollout.response_ids),
            )
            (more,), worker = await self._send(rest_of, rest, version, on_token, frozenset(failed))
            rollout = self._joined(group, rollout, more, params)
            if not _is_unfinished(rollout):
                return rollout
            failed.add(worker)
        return rollout

    async def _send(
        self, group: Group, params: SamplingParams, version: int, on_token: OnToken | None, avoid: frozenset[str]
    ) -> tuple[list[Rollout], str]:
        """One try on one worker, and which it was ("": none could be had)."""
        session = f"{group.group_id}#{params.first_sample if params.n == 1 else ''}"
        try:
            lease = await self._balancer.acquire(RouteRequest(session, group.prompt.token_ids, version, avoid))
        except NoWorker as none:
            return _failed(group, params, str(none)), ""
        error: str | None = None
        try:
            rollouts = await self._ask(lease, group, params, version, on_token)
            error = next((r.failure.message for r in rollouts if r.failure and _is_unfinished(r)), None)
        except OutdatedWeights as outdated:  # it was started again: the next poll gives it the newest
            error = str(outdated)
            rollouts = _failed(group, params, error)
        except PrefillFailed as failed:  # not this worker's doing
            rollouts = _failed(group, params, str(failed))
        finally:
            self._balancer.release(lease, error=error)
        return rollouts, lease.worker

    async def _ask(
        self, lease: Lease, group: Group, params: SamplingParams, version: int, on_token: OnToken | None
    ) -> list[Rollout]:
        return await self._workers[lease.worker].generate([group], params, version, on_token=on_token)

    def _as_whole(self, rollout: Rollout, params: SamplingParams) -> Rollout | None:
        """The rollout as a finished one, when its tokens so far are all there will be."""
        ids = rollout.response_ids
        text, stopped = self._text(ids, params)
        if stopped:
            reason = FinishReason.STOP
        elif len(ids) >= params.max_tokens:
            reason = FinishReason.LENGTH
        else:
            return None
        return msgspec.structs.replace(rollout, text=text, finish_reason=reason, failure=None)

    def _joined(self, group: Group, first: Rollout, more: Rollout, params: SamplingParams) -> Rollout:
        """Both parts as one rollout of the group's own prompt, cut where a stop string was completed across them."""
        ids = [*first.response_ids, *more.response_ids]
        keep = self._stop_across(ids, len(first.response_ids), params)
        versions = [*expand_versions(first.weight_versions), *expand_versions(more.weight_versions)]
        ids = ids[:keep]
        text, stopped = self._text(ids, params)
        cut = keep < len(first.response_ids) + len(more.response_ids)
        return Rollout(
            group.group_id,
            first.sample_index,
            group.prompt.token_ids,
            ids,
            "" if more.failure else text,
            [*first.logprobs, *more.logprobs][:keep],
            [1] * keep,
            run_length(versions[:keep]),
            FinishReason.STOP if cut and stopped else more.finish_reason,
            timing=more.timing,
            failure=None if cut and stopped else more.failure,
        )

    def _stop_across(self, ids: list[int], seam: int, params: SamplingParams) -> int:
        """How many tokens there are up to the first stop string that began before the seam."""
        if not params.stop:
            return len(ids)
        reach = seam + max(map(len, params.stop))
        for end in range(seam + 1, min(reach, len(ids)) + 1):
            if any(stop in self._decode(ids[:end]) for stop in params.stop):
                return end
        return len(ids)

    def _text(self, ids: list[int], params: SamplingParams) -> tuple[str, bool]:
        """The text that is shown, and whether an end id or a stop string ends it."""
        ended = bool(ids) and ids[-1] in self._eos_ids | set(params.stop_token_ids)
        text = self._decode(ids[:-1] if ended else ids)
        places = [at for stop in params.stop if (at := text.find(stop)) >= 0]
        return text[: min(places, default=None)], ended or bool(places)


def _is_unfinished(rollout: Rollout) -> bool:
    failure = rollout.failure
    return failure is not None and failure.retryable and failure.kind in _ELSEWHERE


def _prompt_so_far(prompt: Prompt, rollout: Rollout) -> Prompt:
    return Prompt(prompt.id, [*prompt.token_ids, *rollout.response_ids])


def _failed(group: Group, params: SamplingParams, message: str) -> list[Rollout]:
    failure = Failure(FailureKind.TRANSPORT, message, retryable=True)
    prompt, reason = group.prompt.token_ids, FinishReason.FAILED
    return [
        Rollout(group.group_id, params.first_sample + i, prompt, [], "", [], [], [], reason, failure=failure)
        for i in range(params.n)
    ]
