"""The coefficient of an adaptive KL penalty: where it stands, and how a step moves it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quintet.algorithms.kl import adapted_coef
from quintet.algorithms.presets import Algorithm


@dataclass
class KlCoefficient:
    """`value` holds for the next batch; a checkpoint keeps it. `metric` is the KL that it follows."""

    value: float
    target: float
    horizon: int
    metric: str

    @classmethod
    def of(cls, algorithm: Algorithm) -> KlCoefficient | None:
        """None where the row has no KL, or a fixed coefficient."""
        if algorithm.kl is None or algorithm.kl.params["target"] is None:
            return None
        params = algorithm.kl.params
        metric = "kl/ref" if params["placement"] == "loss" else "kl/in_reward"
        return cls(params["coef"], params["target"], params["horizon"], metric)

    def adapt(self, metrics: Mapping[str, float], samples: int) -> None:
        """After a batch of `samples`; one that measured no KL (nothing was trainable) moves nothing."""
        if self.metric in metrics:
            self.value = adapted_coef(
                self.value, metrics[self.metric], target=self.target, horizon=self.horizon, samples=samples
            )
