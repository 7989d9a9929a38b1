"""Where calls with a limit run: a pool of slots, each a process that can be killed, or a thread that cannot.

A slot answers one call at a time. When a call exceeds its limit, the slot's process group is killed and a new
worker started at once, so that one hung call costs its own limit and nothing else. A thread slot abandons its
thread instead, which goes on burning its core: it exists for functions that no other process can load.

Calls that hang do not hold up those behind them: while a slot is stuck and others wait, spare processes take its
place. Stuck is a call that has slept for a quarter of a second (or a tenth of its limit, if that is less), or has
computed through half of its limit: a grader that is merely busy gets no more processes than there are workers, or it
would be slowed down into its limit.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from quintet.reward.calling import GradingFunction
from quintet.reward.errors import CallTimeout
from quintet.reward.pool_worker import Call, Reply, answer
from quintet.reward.sample import Sample
from quintet.reward.worker_process import Activity, Template, WorkerProcess

MAX_SPARES = 64
SPARES_PER_STUCK = 4  # where one hangs others will: they start together, not one after the other
STUCK_ASLEEP_S, STUCK_ASLEEP, STUCK_BUSY = 0.25, 0.1, 0.5  # the latter two are shares of the limit
_BUSY = 0.2  # share of its time for which a process computes

log = logging.getLogger(__name__)


class Slot(Protocol):
    def prepare(self) -> None:
        """Blocks until a call would begin at once. Raises QuintetError when the functions do not load."""
        ...

    def call(self, function: int, samples: list[Sample], limit_s: float) -> Reply:
        """Blocks at most about `limit_s`. Raises CallTimeout, WorkerDied."""
        ...

    def activity(self) -> Activity | None:
        """None where it is not known."""
        ...

    def close(self) -> None: ...


class ThreadSlot:
    """One daemon thread at a time, for functions that live in this process. The limit is soft."""

    def __init__(self, functions: Sequence[GradingFunction]) -> None:
        self._functions = list(functions)
        self._start()

    def _start(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Call, queue.SimpleQueue[Reply]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(self._calls,), name="reward", daemon=True).start()

    def _serve(self, calls: queue.SimpleQueue[tuple[Call, queue.SimpleQueue[Reply]] | None]) -> None:
        while (item := calls.get()) is not None:
            call, replies = item
            replies.put(answer(self._functions[call.function], call.samples))

    def prepare(self) -> None:
        pass  # a thread is there when it is made

    def call(self, function: int, samples: list[Sample], limit_s: float) -> Reply:
        replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._calls.put((Call(function, samples), replies))
        try:
            return replies.get(timeout=limit_s)
        except queue.Empty:
            self._calls.put(None)  # if the abandoned thread ever comes back, it ends
            self._start()
            log.warning(
                "reward function `%s` hangs in a thread, which cannot be killed and goes on running",
                self._functions[function].name,
            )
            raise CallTimeout(f"did not return within {limit_s:g} s; its thread was abandoned") from None

    def activity(self) -> Activity | None:
        return None

    def close(self) -> None:
        self._calls.put(None)


@dataclass(frozen=True)
class _Running:
    """A call in a slot."""

    since: float
    limit_s: float
    before: Activity | None  # of the slot, when the call began

    def stuck(self, slot: Slot) -> bool:
        elapsed = time.monotonic() - self.since
        now = slot.activity()
        busy = now is None or self.before is None or now.runnable or now.cpu_s - self.before.cpu_s > _BUSY * elapsed
        return elapsed > (self.limit_s * STUCK_BUSY if busy else _asleep_s(self.limit_s))


class SlotPool:
    """Gives each call the next free slot, without ever blocking the event loop.

    Further workers of the `template` take over where stuck slots hold up the queue (without one nothing does), and end
    when they are not needed any more. It is closed with the pool.
    """

    def __init__(self, slots: Sequence[Slot], template: Template | None = None) -> None:
        self.slots = list(slots)
        self._template = template
        self._spares: set[Slot] = set()
        self._starting = 0
        self._waiting = 0
        self._running: dict[Slot, _Running] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)
        threads = len(self.slots) + (0 if template is None else MAX_SPARES)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="reward-pool")

    async def call(self, function: int, samples: list[Sample], limit_s: float) -> Reply:
        """`limit_s` counts from the call's own start, not from its time in the queue. Raises FunctionFailed
        (CallTimeout and WorkerDied among them)."""
        loop = asyncio.get_running_loop()
        reply = await loop.run_in_executor(self._executor, self._call, function, samples, limit_s)
        if reply.failed is not None:
            raise reply.failed
        return reply

    def _call(self, function: int, samples: list[Sample], limit_s: float) -> Reply:
        slot = self._take(limit_s)
        try:
            slot.prepare()  # its start is not the call's time: it would look stuck
            with self._lock:
                self._running[slot] = _Running(time.monotonic(), limit_s, slot.activity() if self._template else None)
            return slot.call(function, samples, limit_s)
        finally:
            self._give_back(slot)

    def _take(self, limit_s: float) -> Slot:
        """The next free slot, or a spare one. Blocks."""
        patience_s = None if self._template is None else _asleep_s(limit_s) / 4
        with self._lock:
            self._waiting += 1
        try:
            while True:
                try:
                    return self._free.get(timeout=patience_s)
                except queue.Empty:
                    if (slot := self._new_spare()) is not None:
                        return slot
        finally:
            with self._lock:
                self._waiting -= 1

    def _new_spare(self) -> Slot | None:
        """At most `SPARES_PER_STUCK` for each slot that is stuck, spares that are stuck included."""
        with self._lock:
            running = list(self._running.items())
            spares = len(self._spares) + self._starting
            stuck = sum(call.stuck(slot) for slot, call in running)
            if self._template is None or self._closed or spares >= min(SPARES_PER_STUCK * stuck, MAX_SPARES):
                return None
            self._starting += 1
        slot = WorkerProcess(self._template)
        with self._lock:
            self._starting -= 1
            self._spares.add(slot)
            if self._closed:
                slot.close()
        return slot

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            self._running.pop(slot, None)
            surplus = slot in self._spares and (self._waiting == 0 or self._closed)
            if surplus:
                self._spares.discard(slot)
        if surplus:
            slot.close()
        else:
            self._free.put(slot)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._closed = True
            slots = [*self.slots, *self._spares]
        for slot in slots:
            slot.close()
        if self._template is not None:
            self._template.close()


def _asleep_s(limit_s: float) -> float:
    return min(STUCK_ASLEEP_S, STUCK_ASLEEP * limit_s)
