"""Sums that become a step's metrics, whatever the micro-batches were."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from quintet.types import Span


class MetricSums:
    """Adds up (numerator, denominator) pairs by metric name; a maximum (`.../max_x`, `..._max`) keeps the largest.

    `on_span` is told of every timed block, lane `train`."""

    def __init__(self, on_span: Callable[[Span], None] = lambda span: None) -> None:
        self._on_span = on_span
        self._sums: dict[str, tuple[float, float]] = {}
        self._seconds: dict[str, float] = defaultdict(float)

    def add(self, stats: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """One micro-batch's sums. A pair whose denominator is 0 says nothing."""
        for name, pair in stats.items():
            self.add_value(name, float(pair[0]), float(pair[1]))

    def add_value(self, name: str, numerator: float, denominator: float = 1.0) -> None:
        if denominator == 0.0:
            return
        if name not in self._sums:
            self._sums[name] = (numerator, denominator)
            return
        num, den = self._sums[name]
        self._sums[name] = (max(num, numerator), den) if _keeps_largest(name) else (num + numerator, den + denominator)

    @contextmanager
    def timed(self, name: str, device: torch.device) -> Iterator[None]:
        """Adds wall seconds to `time/<name>_s`, the device's queued work included."""
        start = time.monotonic()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        end = time.monotonic()
        self._seconds[f"time/{name}_s"] += end - start
        self._on_span(Span("train", name, start, end))

    def values(self) -> dict[str, float]:
        means = {name: num if _keeps_largest(name) else num / den for name, (num, den) in self._sums.items()}
        return means | dict(self._seconds)


def _keeps_largest(name: str) -> bool:
    return name.endswith("_max") or "/max_" in name
