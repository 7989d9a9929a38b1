"""Learning: a batch of experience in, new weights out.

Stands for: Megatron-LM or FSDP training. Grown-up version: quintet/train/worker.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .algorithms import categorical_kl, categorical_kl_gradient, ppo_clip_gradient, ppo_clip_loss
from .buffer import Experience
from .clock import Clock, FakeClock
from .model import Table, TinyPolicy

UPDATE_S = 0.02  # one mini-batch


class LossReport(NamedTuple):
    loss: float
    gradient: Table  # ∂ loss / ∂ logits
    clip_frac: float
    kl: float


def loss_and_gradient(
    policy: TinyPolicy, reference: TinyPolicy, batch: Sequence[Experience], clip_eps: float = 0.2, beta: float = 0.0
) -> LossReport:
    """Mean over tokens of `weight · ppo_clip_loss + beta · KL(π‖π_ref)`, and its exact gradient.

    The KL is the exact one of each visited state, so that it really pulls the policy back (see algorithms.py).
    """
    size = policy.vocab_size
    rows = [policy.logprobs(prev) for prev in range(size)]
    slopes = [[0.0] * size for _ in range(size)]  # Σ ∂ loss / ∂ log p(tok|prev), by prev and tok
    visits = [0] * size
    loss, clipped = 0.0, 0
    for experience in batch:
        for prev, token, old, weight in experience.own_tokens():
            new = rows[prev][token]
            slope = ppo_clip_gradient(new, old, experience.advantage, clip_eps)
            # not clipped the loss is −ratio·A, and that is its own derivative
            loss += weight * (slope or ppo_clip_loss(new, old, experience.advantage, clip_eps))
            clipped += slope == 0.0 and experience.advantage != 0.0
            slopes[prev][token] += weight * slope
            visits[prev] += 1
    n_tokens, kl_sum = max(1, sum(visits)), 0.0
    gradient = [[0.0] * size for _ in range(size)]
    for prev in (p for p in range(size) if visits[p]):
        logprobs_ref = reference.logprobs(prev)
        kl_sum += visits[prev] * categorical_kl(rows[prev], logprobs_ref)
        pull = categorical_kl_gradient(rows[prev], logprobs_ref)
        total = sum(slopes[prev])
        for j, p in enumerate(policy.probs(prev)):
            # Σ_tok slope[tok] · (1[j = tok] − p_j)
            gradient[prev][j] = (slopes[prev][j] - total * p + beta * visits[prev] * pull[j]) / n_tokens
    kl = kl_sum / n_tokens
    return LossReport(loss / n_tokens + beta * kl, gradient, clipped / n_tokens, kl)


@dataclass(frozen=True)
class TrainConfig:
    learning_rate: float = 4.0  # large: the mean over tokens leaves each of the few logits a small slope
    epochs: int = 2  # with one epoch of one mini-batch the ratio is 1 and nothing can be clipped
    mini_batches: int = 2
    clip_eps: float = 0.2
    beta: float = 0.0  # weight of the KL to the reference
    seed: int = 0

    def __post_init__(self) -> None:
        if self.learning_rate < 0.0 or self.beta < 0.0:
            raise ValueError("learning_rate and beta must not be negative")
        if min(self.epochs, self.mini_batches) < 1 or not 0.0 < self.clip_eps < 1.0:
            raise ValueError("epochs and mini_batches must be at least 1, clip_eps between 0 and 1")


class TrainWorker:
    def __init__(self, policy: TinyPolicy, config: TrainConfig | None = None, clock: Clock | None = None) -> None:
        self.policy, self.reference = policy.clone(), policy.clone()
        self.config, self.clock = config or TrainConfig(), clock or FakeClock()
        self.updates = 0

    def update(self, batch: Sequence[Experience]) -> dict[str, float]:
        """Epochs × mini-batches of PPO; the optimizer steps once per mini-batch. Returns means over them."""
        if not batch:
            raise ValueError("nothing to train on: the batch is empty")
        reports = []
        with self.clock.span("train", f"update {self.updates}"):
            for mini_batch in self._mini_batches(batch):
                report = loss_and_gradient(
                    self.policy, self.reference, mini_batch, self.config.clip_eps, self.config.beta
                )
                self.policy.apply_gradient(report.gradient, self.config.learning_rate)
                self.clock.sleep(UPDATE_S)
                reports.append(report)
        self.updates += 1
        n = len(reports)
        return {
            "loss": sum(r.loss for r in reports) / n,
            "clip_frac": sum(r.clip_frac for r in reports) / n,
            "kl": sum(r.kl for r in reports) / n,
        }

    def get_weights(self) -> Table:
        return self.policy.clone().logits

    def save_checkpoint(self, path: str | Path) -> None:
        """Weights, reference and update count: all that decides what the next update does."""
        state = {"weights": self.policy.logits, "reference": self.reference.logits, "updates": self.updates}
        Path(path).write_text(json.dumps(state), encoding="utf-8")

    def load_checkpoint(self, path: str | Path) -> None:
        state = json.loads(Path(path).read_text(encoding="utf-8"))
        self.policy, self.reference = TinyPolicy(state["weights"]), TinyPolicy(state["reference"])
        self.updates = state["updates"]

    def _mini_batches(self, batch: Sequence[Experience]) -> list[list[Experience]]:
        rng = random.Random(f"shuffle/{self.config.seed}/{self.updates}")
        n = min(self.config.mini_batches, len(batch))
        result = []
        for _ in range(self.config.epochs):
            shuffled = rng.sample(batch, len(batch))
            result += [shuffled[i::n] for i in range(n)]
        return result
