"""Rollout workers that measure themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod


class MeteredWorker(ABC):
    """Its numbers go into the metrics of each step, as `engine/*`."""

    @abstractmethod
    def metrics(self) -> dict[str, float]:
        """Since the last call."""
