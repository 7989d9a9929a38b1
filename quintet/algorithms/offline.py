"""Presets that train on given answers: preference optimisation, reward models, supervised fine-tuning. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from quintet.algorithms.cells import OBJECTIVES, Trait
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import Cell, OfflineRow, find_row, override_cell
from quintet.types import QuintetError

_ONLINE_OPTIONS = ("advantage", "policy_loss", "aggregation", "kl", "correction", "filters", "entropy_coef")


@dataclass(frozen=True)
class OfflineAlgorithm:
    """A resolved offline row: the objective with every parameter filled in."""

    preset: str
    objective: Cell

    def _has(self, trait: Trait) -> bool:
        return trait in OBJECTIVES[self.objective.name].traits

    @property
    def needs_ref(self) -> bool:
        """A frozen reference policy is compared with."""
        return self._has(Trait.NEEDS_REF)

    @property
    def needs_pairs(self) -> bool:
        """Every row of the data has a chosen and a rejected answer."""
        return self._has(Trait.NEEDS_PAIRS)

    @property
    def trains_reward(self) -> bool:
        """The result is a reward model."""
        return self._has(Trait.TRAINS_REWARD)


def is_offline(config: AlgorithmConfig) -> bool:
    """Whether the preset trains on given answers. Raises `QuintetError` for an unknown preset."""
    return isinstance(find_row(config.preset), OfflineRow)


def resolve_offline(config: AlgorithmConfig) -> OfflineAlgorithm:
    """The preset's objective with the recipe's override over it.

    Raises `QuintetError` as `presets.resolve`, and for options of online presets, which would do nothing.
    """
    row = find_row(config.preset)
    if not isinstance(row, OfflineRow):
        raise QuintetError(f"algorithm.preset {config.preset} samples its answers, it is no offline preset")
    plain = AlgorithmConfig()
    for name in (*_ONLINE_OPTIONS, "max_staleness"):
        if getattr(config, name) != getattr(plain, name):
            raise QuintetError(f"algorithm.{name} has no effect: preset {config.preset} samples nothing. Remove it")
    objective = override_cell("objective", row.objective, config.objective)
    if objective is None:
        raise QuintetError(f"algorithm.objective: none is not possible here\nUse one of: {', '.join(OBJECTIVES)}")
    return OfflineAlgorithm(config.preset, objective)
