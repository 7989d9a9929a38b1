"""Time as a parameter: the same program runs on the wall clock, or in virtual time where nothing waits.

Stands for: the wall clock and the distributed trace of a cluster. Grown-up version: quintet/clock.py.

Under `FakeClock` a `sleep` costs nothing and exactly one thread runs at a time: the one that wakes earliest, ties
broken by who went to sleep first. So a schedule of several threads is reproduced exactly, run after run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple


class Span(NamedTuple):
    """A stretch of work in one lane (rollout, reward or train) of the timeline."""

    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass
class Task:
    """One thread: it sleeps until `wake_s`, or waits until `ready()`; `baton` lets it run."""

    name: str
    wake_s: float = 0.0
    ready: Callable[[], bool] = lambda: True
    order: int = 0
    done: bool = False
    error: BaseException | None = None
    baton: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # not swallowed: Clock.join raises it in the thread that waits
            self.error = error
        self.done = True


class Clock:
    """What every module sees: now, sleep, wait_until, spawn, and the timeline they leave behind."""

    def __init__(self) -> None:
        self.timeline: list[Span] = []

    def now(self) -> float:
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def wait_until(self, ready: Callable[[], bool]) -> None:
        raise NotImplementedError

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        raise NotImplementedError

    def join(self, task: Task) -> None:
        """Waits for the thread to end and raises what it raised."""
        self.wait_until(lambda: task.done)
        if task.error is not None:
            raise task.error

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        start_s = self.now()
        yield
        self.timeline.append(Span(lane, name, start_s, self.now()))


class RealClock(Clock):
    """The wall clock and ordinary threads."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            time.sleep(0.001)

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        task = Task(name)
        threading.Thread(target=task.run, args=(body,), name=name, daemon=True).start()
        return task


class FakeClock(Clock):
    """Virtual time. The thread that uses the clock first is its main task; others come from `spawn`."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s, self._order = 0.0, 0
        self._main = self._current = Task("main")
        self._tasks = [self._main]

    def now(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        if seconds < 0.0:
            raise ValueError(f"cannot sleep {seconds} s")
        self._pause(self._now_s + seconds, lambda: True)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        self._pause(self._now_s, ready)

    def spawn(self, name: str, body: Callable[[], None]) -> Task:
        task = Task(name, wake_s=self._now_s, order=self._next_order())

        def thread() -> None:
            task.baton.acquire()
            task.run(body)
            self._tasks.remove(task)
            self._pick().baton.release()

        self._tasks.append(task)
        threading.Thread(target=thread, name=name, daemon=True).start()
        return task

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    def _pause(self, wake_s: float, ready: Callable[[], bool]) -> None:
        me = self._current
        me.wake_s, me.ready, me.order = wake_s, ready, self._next_order()
        following = self._pick()
        if following is not me:
            following.baton.release()
            me.baton.acquire()
        if not me.ready():
            raise RuntimeError("deadlock: every thread waits for something that no thread can bring about")

    def _pick(self) -> Task:
        """Makes the task that can run earliest the current one and moves the time there; main on a deadlock."""
        able = [task for task in self._tasks if task.ready()]
        self._current = min(able, key=lambda t: (max(t.wake_s, self._now_s), t.order), default=self._main)
        if able:
            self._now_s = max(self._current.wake_s, self._now_s)
        return self._current
