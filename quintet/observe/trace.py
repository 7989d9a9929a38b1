"""`trace.json`: the run's spans in Chrome's trace format, for https://ui.perfetto.dev or chrome://tracing.

Lanes: `step` (one bar per controller step), `controller` (wait, publish, load, evaluate, checkpoint), `rollout`
(the engine's prefill and decode), `train` (prepare, update; forward, backward, optimizer inside), and one row per
concurrent `group` and `reward`, whose spans overlap. Times are microseconds since the file was begun, by the
wall clock, so that a run resumed after a reboot goes on behind its first sitting. The closing bracket is
optional in that format: a killed run leaves a readable file.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from io import SEEK_END
from pathlib import Path
from typing import Any

from quintet.types import Span

LANES = ("step", "controller", "rollout", "train")  # in this order from the top; their bars nest or stand apart
_TAIL_BYTES = 65536


class ChromeTrace:
    """Appends spans to a file; any thread may call it. Lines are flushed once per step and on `close`.

    `now` is the clock of the spans in seconds, `wall` the time of day; the second one places this sitting behind
    earlier ones.
    """

    def __init__(
        self, path: Path, *, now: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        begun_s, last_us = _recover(path)
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._serial = 0
        here_s = wall()
        if begun_s is None:
            begun_s = here_s
            self._file.write("[\n")
            self._write({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "quintet", "begun": begun_s}})
            for place, lane in enumerate(LANES, start=1):
                self._name_lane(place, lane)
        # A time of day that was set back must not lay this sitting over the last one.
        self._start_us = max((here_s - begun_s) * 1e6, float(last_us))
        self._origin_s = now()
        self._sitting = round(self._start_us)
        if last_us:
            self._write({"ph": "i", "s": "g", "pid": 1, "tid": 1, "name": "resumed", "ts": self._sitting})
        self._file.flush()

    def __call__(self, span: Span) -> None:
        begin = round(self._start_us + (span.start - self._origin_s) * 1e6)
        end = round(self._start_us + (span.end - self._origin_s) * 1e6)
        with self._lock:
            if span.lane in LANES:
                place = LANES.index(span.lane) + 1
                bar = {"ph": "X", "pid": 1, "tid": place, "name": span.name, "ts": begin, "dur": end - begin}
                self._write(bar | ({"args": span.args} if span.args else {}))
            else:
                self._write_pair(span, begin, end)
            if span.lane == "step":
                self._file.flush()

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _write_pair(self, span: Span, begin: int, end: int) -> None:
        """Overlapping spans are asynchronous events; an id per span keeps the rows apart."""
        self._serial += 1
        name = f"{self._sitting}-{self._serial}"  # unique in the file, over all sittings
        both = {"pid": 1, "tid": 1, "cat": span.lane, "id": name, "name": span.lane}
        self._write({"ph": "b", "ts": begin, **both, "args": {"id": span.name, **span.args}})
        self._write({"ph": "e", "ts": end, **both})

    def _name_lane(self, place: int, lane: str) -> None:
        where = {"ph": "M", "pid": 1, "tid": place}
        self._write({**where, "name": "thread_name", "args": {"name": lane}})
        self._write({**where, "name": "thread_sort_index", "args": {"sort_index": place}})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")


def _recover(path: Path) -> tuple[float | None, int]:
    """When an existing file was begun (seconds of the epoch) and its last microsecond; a torn last line is cut off.

    (None, 0): there is no usable file, a new one is to be written at this path.
    """
    if not path.exists():
        return None, 0
    with path.open("r+b") as file:
        size = file.seek(0, SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        tail = file.read()
        whole = tail.rfind(b"\n") + 1
        file.truncate(size - len(tail) + whole)
        file.seek(0)
        file.readline()
        first = file.readline().decode().rstrip().rstrip(",")
        if not first:
            file.truncate(0)
            return None, 0
    begun_s = float(json.loads(first)["args"]["begun"])
    lines = tail[:whole].decode(errors="replace").splitlines()[1 if size > _TAIL_BYTES else 0 :]
    events = [json.loads(line.rstrip(",")) for line in lines if line.startswith("{")]
    return begun_s, max((e["ts"] + e.get("dur", 0) for e in events if "ts" in e), default=0)
