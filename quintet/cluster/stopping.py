"""Ctrl-C: the first one ends a run in order, the second one ends its process.

The second one does not wait for the update, the save or the generation in progress, which run in threads that cannot
be interrupted. Nothing durable is lost by it: the journal and the metrics are written before a call returns, and a
checkpoint that is cut off while it is written does not count.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from quintet.cluster.stages import EventHandler

INTERRUPTED = 130  # exit code, as shells give it to what Ctrl-C ended
_LEAVE_S = 0.5  # for the last words


class Stopped(KeyboardInterrupt):
    """The user asked the run to stop; everything finished is saved."""


class StopFlag:
    """Set by the first SIGINT or SIGTERM. The second one calls `on_abort` (half a second at most) and exits with 130.

    `on_set` is called by the signal handler: it may only hand work to the event loop.
    """

    def __init__(self, on_event: EventHandler, on_abort: Callable[[], None] = lambda: None) -> None:
        self._on_event = on_event
        self._on_abort = on_abort
        self.is_set = False
        self.on_set: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def handling_signals(self, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _interrupt(self, *_: object) -> None:
        if self.is_set:
            self._leave()
        self.is_set = True
        text = "stopping, with a checkpoint; press Ctrl-C again to stop at once (nothing finished is lost)"
        self._aside(lambda: self._on_event("message", {"level": "warning", "text": text}))
        self.on_set()

    def _leave(self) -> None:
        self._aside(self._on_abort).join(_LEAVE_S)
        os._exit(INTERRUPTED)

    @staticmethod
    def _aside(work: Callable[[], None]) -> threading.Thread:
        """In another thread: a signal handler may have interrupted a print, whose locks it must not wait for."""
        thread = threading.Thread(target=work, name="interrupt", daemon=True)
        thread.start()
        return thread
