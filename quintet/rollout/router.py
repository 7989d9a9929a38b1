"""Which worker gets a request: a registry of workers with their health and weight version, and strategies to choose.

A worker is UP, DRAINING (finishes what it has, gets nothing new) or DOWN (failed or unhealthy; tried again after
`retry_after_s`). A draining worker never comes back by itself: add it again.
"""

from __future__ import annotations

import asyncio
import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from quintet.clock import Clock, RealClock
from quintet.types import Health, QuintetError


class WorkerState(StrEnum):
    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True)
class WorkerStatus:
    """One worker as the balancer sees it. `version` is its weight version, -1 when it is not known yet."""

    name: str
    state: WorkerState
    in_flight: int
    version: int
    served: int
    failed: int
    message: str = ""


@dataclass(frozen=True)
class RouteRequest:
    """What a strategy may look at. `session`: requests of one conversation share it. `min_version`: older workers are
    left out. `avoid`: workers that have just failed this request."""

    session: str
    prompt_ids: Sequence[int] = ()
    min_version: int = -1
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Lease:
    """One request's place on a worker, to be given back by `release`."""

    worker: str
    request: RouteRequest
    number: int


class NoWorker(QuintetError):
    """No worker can take a request, and none became able to in time."""


class RequestLoadBalancer(Protocol):
    """The seam between whoever has requests and the workers' registry."""

    async def acquire(self, request: RouteRequest) -> Lease:
        """A place on a worker that is up and new enough; waits for one. Raises NoWorker after `patience_s`."""
        ...

    def release(self, lease: Lease, *, error: str | None = None) -> None:
        """Give the place back; `error` says why the worker failed (it is DOWN for a while)."""
        ...

    def add(self, worker: str, health: Health | None = None) -> None:
        """A new worker, a drained one back again, or news of a known one: its health and weight version."""
        ...

    def remove(self, worker: str) -> None: ...

    async def drain(self, worker: str) -> None:
        """Send nothing new to a worker; returns when it has nothing left."""
        ...

    def status(self) -> list[WorkerStatus]: ...


class Strategy(Protocol):
    """Chooses among workers that may be chosen; never empty, in order of their names."""

    def choose(self, candidates: Sequence[WorkerStatus], request: RouteRequest) -> str: ...

    def forget(self, worker: str) -> None:
        """The worker is gone, and with it whatever it had cached."""
        ...


def least_in_flight(candidates: Sequence[WorkerStatus]) -> str:
    """Ties go to the worker that has served least, so that idle ones take turns."""
    return min(candidates, key=lambda w: (w.in_flight, w.served, w.name)).name


class Sticky:
    """A conversation stays where its tokens are cached; a new one goes to the worker with the least in flight."""

    def __init__(self) -> None:
        self._home: dict[str, str] = {}

    def choose(self, candidates: Sequence[WorkerStatus], request: RouteRequest) -> str:
        home = self._home.pop(request.session, None)
        if home is None or all(w.name != home for w in candidates):
            home = least_in_flight(candidates)
        self._home[request.session] = home  # newest last
        while len(self._home) > _MEMORY:
            del self._home[next(iter(self._home))]
        return home

    def forget(self, worker: str) -> None:
        self._home = {session: home for session, home in self._home.items() if home != worker}


class PrefixAware:
    """The worker that has seen the longest beginning of this prompt, counted in blocks of `block` tokens, unless it has
    `slack` requests more in flight than the least busy one."""

    def __init__(self, block: int = 16, slack: int = 16) -> None:
        self._block = block
        self._slack = slack
        self._seen: dict[str, dict[int, None]] = {}  # worker -> hashes of prompt beginnings, oldest first

    def choose(self, candidates: Sequence[WorkerStatus], request: RouteRequest) -> str:
        least = min(w.in_flight for w in candidates)
        free = [w for w in candidates if w.in_flight <= least + self._slack]
        hashes = self._hashes(request.prompt_ids)
        matched = {w.name: self._matched(w.name, hashes) for w in free}
        best = max(matched.values())
        name = least_in_flight([w for w in free if matched[w.name] == best])
        seen = self._seen.setdefault(name, {})
        for value in hashes:
            seen.pop(value, None)
            seen[value] = None
        while len(seen) > _MEMORY:
            del seen[next(iter(seen))]
        return name

    def forget(self, worker: str) -> None:
        self._seen.pop(worker, None)

    def _hashes(self, ids: Sequence[int]) -> list[int]:
        """One hash per whole block, each over everything up to the block's end."""
        out: list[int] = []
        value = 0
        for start in range(0, len(ids) - self._block + 1, self._block):
            value = hash((value, tuple(ids[start : start + self._block])))
            out.append(value)
        return out

    def _matched(self, worker: str, hashes: Sequence[int]) -> int:
        seen = self._seen.get(worker, {})
        return next((i for i, value in enumerate(hashes) if value not in seen), len(hashes))


class PowerOfTwo:
    """Two workers drawn at random, the one with less in flight (Mitzenmacher 2001)."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[WorkerStatus], request: RouteRequest) -> str:
        return least_in_flight(self._random.sample(candidates, min(2, len(candidates))))

    def forget(self, worker: str) -> None:
        return


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[WorkerStatus], request: RouteRequest) -> str:
        self._last = next((w.name for w in candidates if w.name > self._last), candidates[0].name)
        return self._last

    def forget(self, worker: str) -> None:
        return


_MEMORY = 100_000  # sessions or prompt blocks that a strategy remembers, at most
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "sticky": Sticky,
    "prefix": PrefixAware,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}


def make_strategy(name: str) -> Strategy:
    """A strategy by its name, or a class of the user's own as `module:Class`. Raises QuintetError."""
    if name in STRATEGIES:
        return STRATEGIES[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        raise QuintetError(f"rollout.router: {name!r} is not one of {', '.join(STRATEGIES)}, nor a module:Class.")
    try:
        found = vars(importlib.import_module(module)).get(attribute)
    except ImportError as error:
        raise QuintetError(f"rollout.router: {module!r} cannot be imported: {error}.") from error
    missing = [method for method in ("choose", "forget") if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        raise QuintetError(f"rollout.router: {name!r} is no class with choose() and forget().")
    made: Strategy = found()
    return made


@dataclass
class _Worker:
    name: str
    state: WorkerState = WorkerState.UP
    version: int = -1
    served: int = 0
    failed: int = 0
    message: str = ""
    down_until: float = 0.0
    leases: dict[int, Lease] = field(default_factory=dict)

    @property
    def status(self) -> WorkerStatus:
        return WorkerStatus(
            self.name, self.state, len(self.leases), self.version, self.served, self.failed, self.message
        )


class LoadBalancer:
    """`RequestLoadBalancer` in this process. One event loop uses it.

    `max_in_flight`: requests a worker has at most (None: no limit); others wait in order of arrival.
    """

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        clock: Clock | None = None,
        retry_after_s: float = 5.0,
        patience_s: float = 60.0,
        max_in_flight: int | None = None,
    ) -> None:
        self._strategy = strategy or Sticky()
        self._clock = clock or RealClock()
        self._retry_after_s = retry_after_s
        self._patience_s = patience_s
        self._max_in_flight = max_in_flight
        self._workers: dict[str, _Worker] = {}
        self._leases = 0
        self._changed = asyncio.Condition()
        self._notifying: set[asyncio.Task[None]] = set()

    async def acquire(self, request: RouteRequest) -> Lease:
        deadline = self._clock.now() + self._patience_s
        while True:
            lease = self._try(request)
            if lease is not None:
                return lease
            if self._clock.now() >= deadline:
                raise NoWorker(self._explain(request))
            await self._change(deadline)

    def release(self, lease: Lease, *, error: str | None = None) -> None:
        worker = self._workers.get(lease.worker)
        if worker is None or worker.leases.pop(lease.number, None) is None:
            return  # it was removed, or removed and added again, meanwhile
        if error is None:
            worker.served += 1
        else:
            worker.failed += 1
            self._down(worker, error)
        self._notify()

    def add(self, worker: str, health: Health | None = None) -> None:
        known = self._workers.setdefault(worker, _Worker(worker))
        if health is None:
            known.state, known.message = WorkerState.UP, ""
        else:
            known.version = health.version
            if not health:
                self._down(known, health.message)
        self._notify()

    def remove(self, worker: str) -> None:
        self._workers.pop(worker, None)
        self._strategy.forget(worker)
        self._notify()

    async def drain(self, worker: str) -> None:
        found = self._workers.get(worker)
        if found is None:
            return
        found.state = WorkerState.DRAINING
        self._strategy.forget(worker)
        while found.leases and self._workers.get(worker) is found:
            async with self._changed:
                await self._changed.wait()

    def status(self) -> list[WorkerStatus]:
        return [self._workers[name].status for name in sorted(self._workers)]

    def _try(self, request: RouteRequest) -> Lease | None:
        self._wake_rested()
        able = [w for w in self.status() if self._may_take(w, request)]
        preferred = [w for w in able if w.name not in request.avoid]
        if not able:
            return None
        self._leases += 1
        name = self._strategy.choose(preferred or able, request)
        lease = Lease(name, request, self._leases)
        self._workers[name].leases[lease.number] = lease
        return lease

    def _may_take(self, worker: WorkerStatus, request: RouteRequest) -> bool:
        has_room = self._max_in_flight is None or worker.in_flight < self._max_in_flight
        return worker.state is WorkerState.UP and worker.version >= request.min_version and has_room

    def _down(self, worker: _Worker, message: str) -> None:
        if worker.state is not WorkerState.DRAINING:
            worker.state = WorkerState.DOWN
        worker.message = message
        worker.down_until = self._clock.now() + self._retry_after_s
        self._strategy.forget(worker.name)

    def _wake_rested(self) -> None:
        for worker in self._workers.values():
            if worker.state is WorkerState.DOWN and worker.down_until <= self._clock.now():
                worker.state, worker.message = WorkerState.UP, ""

    async def _change(self, deadline: float) -> None:
        """Until something changed, a worker may be tried again, or the deadline."""
        ends = [w.down_until for w in self._workers.values() if w.state is WorkerState.DOWN]
        until = min([*ends, deadline])

        async def changed() -> None:
            async with self._changed:
                await self._changed.wait()

        waiting = asyncio.ensure_future(changed())
        timer = asyncio.ensure_future(self._clock.sleep(max(until - self._clock.now(), 0.0)))
        try:
            await asyncio.wait([waiting, timer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            timer.cancel()

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = asyncio.ensure_future(notify())
        self._notifying.add(task)
        task.add_done_callback(self._notifying.discard)

    def _explain(self, request: RouteRequest) -> str:
        seen = ", ".join(f"{w.name} {w.state} (version {w.version}) {w.message}".strip() for w in self.status())
        wanted = f" with weight version {request.min_version} or newer" if request.min_version >= 0 else ""
        return f"no rollout worker{wanted} took a request within {self._patience_s:g} s: {seen or 'there is none'}"
