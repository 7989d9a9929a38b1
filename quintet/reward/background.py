"""Graders that wait rather than compute (a sandbox, a remote model, a judge): many samples in flight at once.

They run on one event loop in a thread of its own, so that what they open (connections, processes) outlives a call and
can be opened and closed by code that does not run in a loop, and so that no grader holds up the training loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from quintet.reward.sample import Sample, Verdict
from quintet.types import Prompt

T = TypeVar("T")


class AsyncGrader(Protocol):
    """One reward function. It keeps its own limits: the service does not cut a call off."""

    def reference_fault(self, prompt: Prompt) -> str | None:
        """Why no sample of this prompt could ever be graded; None when it could. Asked when data is loaded."""
        ...

    async def start(self) -> None:
        """Raises QuintetError for what is missing."""
        ...

    async def grade(self, sample: Sample) -> Verdict:
        """Raises FunctionFailed for a fault that is not the candidate's."""
        ...

    async def close(self) -> None: ...


class BackgroundLoop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Blocks the calling thread until it is done."""
        return self.submit(work).result()

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits in the caller's loop. Cancelling the wait cancels the work."""
        return await asyncio.wrap_future(self.submit(work))

    def close(self) -> None:
        """Cancels what still runs."""
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
