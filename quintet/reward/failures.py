"""When failures stop a run, and what grading a step took."""

from __future__ import annotations

from statistics import fmean

from quintet.reward.config import RewardConfig
from quintet.reward.errors import RewardError


class FailureWindow:
    """`on_failure` and `max_failure_frac`, the latter over windows of `samples_per_step` samples (None: each note)."""

    def __init__(self, config: RewardConfig, samples_per_step: int | None) -> None:
        self._config = config
        self._samples_per_step = samples_per_step or 1
        self._samples = 0
        self._faults: list[tuple[str, str]] = []

    def note(self, samples: int, faults: list[tuple[str, str]]) -> None:
        """`faults`: function and reason of the samples that failed. Raises RewardError when the run must stop."""
        if faults and self._config.on_failure == "stop":
            raise RewardError(*faults[0])
        self._samples += samples
        self._faults += faults
        if self._samples < self._samples_per_step:
            return
        total, window = self._samples, self._faults
        self._samples, self._faults = 0, []
        if len(window) > self._config.max_failure_frac * total:
            function, first = window[0]
            raise RewardError(
                function,
                f"{len(window)} of {total} samples failed, more than reward.max_failure_frac "
                f"{self._config.max_failure_frac:g} allows; the first: {first}",
            )


class Timings:
    """Seconds that the samples of a step took to grade, each on its own."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def note(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def take(self) -> dict[str, float]:
        """Metrics since the last call: mean and longest, and the share of all the time that the longest took."""
        seconds, self._seconds = self._seconds, []
        total = sum(seconds)
        if total == 0.0:
            return {}
        return {
            "reward/grade_s_mean": fmean(seconds),
            "reward/grade_s_max": max(seconds),
            "reward/slowest_share": max(seconds) / total,
        }
