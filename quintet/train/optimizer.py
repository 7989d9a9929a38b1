"""AdamW with a schedule by optimizer step, gradient clipping, and a guard against non-finite gradients."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quintet.train.config import TrainConfig

log = logging.getLogger(__name__)

_FUSED_DEVICES = ("cpu", "cuda")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: the norm before clipping, the rate used, and whether it was applied."""

    grad_norm: float
    lr: float
    applied: bool


def lr_at(step: int, config: TrainConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0).

    Warm-up step s has lr (s + 1) / warmup_steps, so that no step is spent at 0. Decay runs from lr at
    the first step after it towards lr * min_lr_ratio, reached after `total_steps` and kept from there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    left = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)


class Optimizer:
    """AdamW over the trainable parameters of a model. `total_steps` counts optimizer steps."""

    def __init__(self, model: nn.Module, config: TrainConfig, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.steps = 0
        values = list(self._parameters.values())
        decayed, plain = [p for p in values if p.ndim >= 2], [p for p in values if p.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=all(p.device.type in _FUSED_DEVICES for p in values) or None,
        )

    def step(self) -> StepResult:
        """Clip, update, clear the gradients. A non-finite gradient leaves weights and moments as they are."""
        lr = lr_at(self.steps, self._config, self._total_steps)
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        applied = bool(norm.isfinite())
        if applied:
            if self._config.max_grad_norm > 0.0:
                torch.nn.utils.clip_grads_with_norm_(self._parameters.values(), self._config.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            # the fused kernel does not count as a change of the tensor; copies of weights are renewed by that count
            torch.autograd.graph.increment_version(self._parameters.values())
            self.steps += 1
        else:
            log.warning("optimizer step %d skipped: gradient norm is %s", self.steps, float(norm))
        self.zero_grad()
        return StepResult(float(norm), lr, applied)

    def zero_grad(self) -> None:
        """Forget what was accumulated."""
        self._adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and counts as `<parameter>.<moment>`; parameters never updated have none."""
        return {
            f"{name}.{key}": self._adamw.state[p][key]
            for name, p in self._parameters.items()
            for key in _MOMENTS
            if p in self._adamw.state
        }

    def load_state(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        """Inverse of `state_tensors`; `steps` optimizer steps have been taken."""
        unknown = sorted(tensors.keys() - set(self._keys()))
        if unknown:
            raise ValueError(f"optimizer state of unknown parameter {unknown[0]}")
        loaded: dict[Tensor, dict[str, Tensor]] = {
            p: {key: tensors[f"{name}.{key}"].to(p.device, copy=True) for key in _MOMENTS}
            for name, p in self._parameters.items()
            if f"{name}.step" in tensors
        }
        self._adamw.state.clear()
        self._adamw.state.update(loaded)
        self.steps = steps

    def _keys(self) -> Iterable[str]:
        return (f"{name}.{key}" for name in self._parameters for key in _MOMENTS)
