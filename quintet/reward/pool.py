"""Where calls with a limit run: a pool of slots, each a process that can be killed, or a thread that cannot.

A slot answers one call at a time. When a call exceeds its limit, the slot's process group is killed and a new
worker started at once, so that one hung call costs its own limit and nothing else. A thread slot abandons its
thread instead, which goes on burning its core: it exists for functions that no other process can load.

Calls that hang do not hold up those behind them: while a slot is stuck and others wait, spare processes take its
place. Stuck is a call that has slept through a tenth of its limit, or has computed through half of it: a grader that
is merely busy gets no more processes than there are workers, or it would be slowed down into its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from quintet.reward.calling import GradingFunction, Signature
from quintet.reward.errors import CallTimeout, WorkerDied
from quintet.reward.loading import FunctionSource
from quintet.reward.pool_worker import Call, Ready, Reply, answer
from quintet.reward.sample import Sample
from quintet.types import QuintetError

IMPORT_LIMIT_S = 120.0  # for a worker to start and to import the user's modules
MAX_SPARES = 64
SPARES_PER_STUCK = 2  # where one hangs others will: they start together, not one after the other
STUCK_ASLEEP, STUCK_BUSY = 0.1, 0.5  # shares of the limit
_BUSY = 0.2  # share of its time for which a process computes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Activity:
    """`runnable`: computing, or kept from it by a busy machine; otherwise it sleeps."""

    cpu_s: float
    runnable: bool


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


class ProcessSlot:
    """One worker process at a time; `start` returns before it is ready."""

    def __init__(self, sources: Sequence[FunctionSource]) -> None:
        self._sources = list(sources)
        self._closed = False
        self._lock = threading.Lock()  # close() comes from another thread than call()
        self.start()

    def start(self) -> None:
        """A bare interpreter with this one's import path, in a process group of its own (so Ctrl-C is ours alone)."""
        ours, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"from quintet.reward.pool_worker import main\nmain({theirs.fileno()}, {lifeline})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(theirs.fileno(), lifeline),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        os.close(lifeline)
        self._connection: Connection = ours
        self._ready = False
        with contextlib.suppress(BrokenPipeError):  # it died at once: `wait_ready` says so
            ours.send(self._sources)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def activity(self) -> Activity | None:
        """Read from /proc, so that it is not known outside Linux."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return Activity((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "R")

    def wait_ready(self) -> list[Signature]:
        """Signatures of the sources. Raises QuintetError with the worker's own error when one does not load."""
        try:
            if not self._connection.poll(IMPORT_LIMIT_S):
                raise QuintetError(f"a reward worker took more than {IMPORT_LIMIT_S:.0f} s to import {self._names()}")
            ready: Ready = self._connection.recv()
        except (EOFError, OSError) as error:
            raise QuintetError(
                f"a reward worker ended ({self._exit()}) while importing {self._names()}; its error is printed above"
            ) from error
        if ready.refused is not None:
            raise QuintetError(ready.refused)
        self._ready = True
        return ready.signatures

    def prepare(self) -> None:
        if not self._ready:
            self.wait_ready()

    def call(self, function: int, samples: list[Sample], limit_s: float) -> Reply:
        self.prepare()
        try:
            self._connection.send(Call(function, samples))
            if not self._connection.poll(limit_s):
                self._replace()
                raise CallTimeout(f"did not return within {limit_s:g} s; its worker was killed")
            reply: Reply = self._connection.recv()
        except (EOFError, OSError) as error:
            exit_status = self._exit()
            self._replace()
            raise WorkerDied(f"its worker ended in the middle of a call ({exit_status})") from error
        return reply

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._kill()

    def _replace(self) -> None:
        with self._lock:
            self._kill()
            if not self._closed:
                self.start()

    def _kill(self) -> None:
        """The whole process group: what the function started ends with it."""
        if self._lifeline < 0:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()
        os.close(self._lifeline)
        self._lifeline = -1

    def _exit(self) -> str:
        try:
            code = self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return "connection closed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def _names(self) -> str:
        return ", ".join(f"`{source.name}`" for source in self._sources)


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
        return elapsed > self.limit_s * (STUCK_BUSY if busy else STUCK_ASLEEP)


class SlotPool:
    """Gives each call the next free slot, without ever blocking the event loop.

    `spare` makes a further slot where stuck ones hold up the queue; None: there are none. Spares end when they are not
    needed any more.
    """

    def __init__(self, slots: Sequence[Slot], spare: Callable[[], Slot] | None = None) -> None:
        self.slots = list(slots)
        self._spare = spare
        self._spares: set[Slot] = set()
        self._starting = 0
        self._waiting = 0
        self._running: dict[Slot, _Running] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)
        threads = len(self.slots) + (0 if spare is None else MAX_SPARES)
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
                self._running[slot] = _Running(time.monotonic(), limit_s, slot.activity() if self._spare else None)
            return slot.call(function, samples, limit_s)
        finally:
            self._give_back(slot)

    def _take(self, limit_s: float) -> Slot:
        """The next free slot, or a spare one. Blocks."""
        patience_s = None if self._spare is None else limit_s * STUCK_ASLEEP / 2
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
            if self._spare is None or self._closed or spares >= min(SPARES_PER_STUCK * stuck, MAX_SPARES):
                return None
            self._starting += 1
        slot = self._spare()
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
