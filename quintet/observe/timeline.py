"""Where a step's wall time went, from the same spans that the trace shows.

The controller's step is cut into parts that do not overlap and add up to `time/step_s`:

    waiting for groups   time/prefill_s  the engine computed prompts
                         time/decode_s   the engine sampled tokens
                         time/reward_s   the engine rested and samples were being scored
                         time/idle_s     neither
    time/prepare_s       reference and proximal log-probabilities
    time/forward_s, time/backward_s, time/optimizer_s   of the update, as the train worker measures them
    time/sync_s          publishing the new version and loading it into the engine
    time/other_s         the rest: advantages, packing, journal

With staleness above 0 generation goes on during the update. That work costs the step nothing and is in none
of its parts; the trace shows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from quintet.types import Span

PARTS = ("prefill", "decode", "reward", "idle", "prepare", "forward", "backward", "optimizer", "sync", "other")
_MEASURED_BY_TRAINER = ("forward", "backward", "optimizer")
_SYNC = ("publish", "load")
Interval = tuple[float, float]


class Timeline:
    """Receives spans from any thread, passes them on to `trace`, and keeps those that the step in progress needs."""

    def __init__(self, trace: Callable[[Span], None], *, now: Callable[[], float] = time.monotonic) -> None:
        self._trace = trace
        self._now = now
        self._lock = threading.Lock()
        self._recent: list[Span] = []
        self._engine_reports = False

    def __call__(self, span: Span) -> None:
        self._trace(span)
        with self._lock:
            self._recent.append(span)
            self._engine_reports = self._engine_reports or span.lane == "rollout"

    @contextmanager
    def measure(self, lane: str, name: str) -> Iterator[None]:
        """The block as a span, also when it raises."""
        start = self._now()
        try:
            yield
        finally:
            self(Span(lane, name, start, self._now()))

    def step_parts(self, values: Mapping[str, float]) -> dict[str, float]:
        """`time/<part>_s` of the step whose span came last; `values` are that step's metrics.

        Spans that ended before its end are forgotten. Raises ValueError when no step has been reported.
        """
        with self._lock:
            step = next((s for s in reversed(self._recent) if s.lane == "step"), None)
            if step is None:
                raise ValueError("no step has ended yet")
            spans = self._recent
            self._recent = [s for s in spans if s.end > step.end]
            engine_reports = self._engine_reports
        inside = [s for s in spans if s.end > step.start and s.start < step.end]
        parts = _wait_parts(inside, engine_reports) | {
            "prepare": _seconds(s for s in inside if s.lane == "train" and s.name == "prepare"),
            "sync": _seconds(s for s in inside if s.lane == "controller" and s.name in _SYNC),
        }
        parts |= {name: values.get(f"time/{name}_s", 0.0) for name in _MEASURED_BY_TRAINER}
        parts["other"] = max(0.0, step.end - step.start - sum(parts.values()))
        return {f"time/{name}_s": parts[name] for name in PARTS}


def _wait_parts(spans: Sequence[Span], engine_reports: bool) -> dict[str, float]:
    """The time in which the controller waited for groups. An engine that does not report its phases (one of the
    user's own) counts as decoding while a group is with it."""
    waits = [(s.start, s.end) for s in spans if s.lane == "controller" and s.name == "wait"]
    engine_lane = "rollout" if engine_reports else "group"

    def during(lane: str, name: str | None = None) -> list[Interval]:
        found = [(s.start, s.end) for s in spans if s.lane == lane and name in (None, s.name)]
        return _clip(_union(found), waits)

    prefill = during("rollout", "prefill")
    engine = during(engine_lane)
    busy = _union([*engine, *during("reward")])
    return {
        "prefill": _length(prefill),
        "decode": _length(engine) - _length(prefill),
        "reward": _length(busy) - _length(engine),
        "idle": _length(waits) - _length(busy),
    }


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same points, ascending."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _clip(intervals: Iterable[Interval], windows: Sequence[Interval]) -> list[Interval]:
    cut = ((max(a, c), min(b, d)) for a, b in intervals for c, d in windows)
    return [(a, b) for a, b in cut if b > a]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _seconds(spans: Iterable[Span]) -> float:
    return sum(s.end - s.start for s in spans)
