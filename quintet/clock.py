"""Time as a dependency: the same controller code runs on the wall clock or in virtual time.

Under `VirtualClock` an asyncio program runs on an event loop whose `time()` jumps to the next timer as
soon as nothing is runnable, so that a schedule of hours is simulated in milliseconds and is the same
every time. Left out on purpose: threads and sockets do not exist in virtual time.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary origin, never decreasing."""
        ...

    async def sleep(self, seconds: float) -> None: ...

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a program to its end on an event loop that obeys this clock."""
        ...


class RealClock:
    """The wall clock (monotonic)."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(main)


class VirtualTimeDeadlock(RuntimeError):
    """Nothing is runnable and no timer is pending: the simulated program waits for ever."""


class _JumpSelector(selectors.SelectSelector):
    """Instead of waiting for `timeout` seconds, moves the virtual clock on by them."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualTimeDeadlock("every task waits and no timer is pending")
        self._clock.advance(max(timeout, 0.0))
        return []


class VirtualClock:
    """Virtual seconds, starting at 0. `run` gives a program an event loop in this clock's time."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        loop = asyncio.SelectorEventLoop(_JumpSelector(self))
        loop.time = self.now  # type: ignore[method-assign]
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main)
