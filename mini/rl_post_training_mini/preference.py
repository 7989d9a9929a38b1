"""A reward model learnt from preferences: of two responses, which one did the annotator like better?

Stands for: reward-model training (InstructGPT, arXiv:2203.02155). Grown-up version: the Bradley–Terry loss in
quintet/algorithms/*, served by quintet/reward/.

Bradley–Terry: P(a ≻ b) = σ(s(a) − s(b)). Here s(response) is the mean of one weight per transition prev → tok, so
the gradient of −log σ(s(a) − s(b)) is −(1 − σ(s(a) − s(b))) · (φ(a) − φ(b)) with φ the transition frequencies.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

from .model import VOCAB_SIZE, Table
from .reward import Rule, counting_rule
from .rollout import RolloutWorker


class Pair(NamedTuple):
    prompt: tuple[int, ...]
    chosen: Sequence[int]
    rejected: Sequence[int]


def make_pairs(
    worker: RolloutWorker, prompts: Sequence[tuple[int, ...]], n: int, seed: int, rule: Rule = counting_rule
) -> list[Pair]:
    """Two samples per prompt from the worker's policy; the annotator prefers what the rule scores higher."""
    rng, pairs = random.Random(f"pairs/{seed}"), list[Pair]()
    for _ in range(20 * n):
        if len(pairs) == n:
            return pairs
        samples = worker.generate([rng.choice(prompts)])[:2]
        ranked = sorted(samples, key=lambda r: rule(r.prompt, r.response), reverse=True)
        if rule(ranked[0].prompt, ranked[0].response) > rule(ranked[-1].prompt, ranked[-1].response):
            pairs.append(Pair(ranked[0].prompt, ranked[0].response, ranked[-1].response))
    raise ValueError(f"only {len(pairs)} of {n} pairs had a preference: the policy's samples hardly differ")


class BradleyTerry:
    """Implements `score` like `TinyReward`, so that a `RewardService` takes it as its model."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        self.weights: Table = [[0.0] * vocab_size for _ in range(vocab_size)]

    def score(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        """σ(s): between 0 and 1, and 0.5 before any training."""
        return _sigmoid(self.raw_score(prompt, response))

    def raw_score(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        steps = zip((prompt[-1], *response), response, strict=False)
        return sum(self.weights[prev][tok] for prev, tok in steps) / max(1, len(response))

    def loss_and_gradient(self, pairs: Sequence[Pair]) -> tuple[float, Table]:
        """Mean of −log σ(s(chosen) − s(rejected)), and its exact gradient by weight."""
        loss, gradient = 0.0, [[0.0] * len(row) for row in self.weights]
        for prompt, chosen, rejected in pairs:
            margin = self.raw_score(prompt, chosen) - self.raw_score(prompt, rejected)
            loss += math.log1p(math.exp(-margin)) / len(pairs)
            slope = -(1.0 - _sigmoid(margin)) / len(pairs)
            for response, sign in ((chosen, 1.0), (rejected, -1.0)):
                for prev, tok in zip((prompt[-1], *response), response, strict=False):
                    gradient[prev][tok] += sign * slope / len(response)
        return loss, gradient

    def fit(self, pairs: Sequence[Pair], steps: int = 30, learning_rate: float = 20.0) -> list[float]:
        """Gradient descent; returns the loss before each step."""
        losses = []
        for _ in range(steps):
            loss, gradient = self.loss_and_gradient(pairs)
            losses.append(loss)
            for row, slope in zip(self.weights, gradient, strict=True):
                for j, g in enumerate(slope):
                    row[j] -= learning_rate * g
        return losses

    def accuracy(self, pairs: Sequence[Pair]) -> float:
        """Share of pairs ranked right; a tie is half right."""
        margins = [self.raw_score(p.prompt, p.chosen) - self.raw_score(p.prompt, p.rejected) for p in pairs]
        return sum(1.0 if m > 0.0 else 0.5 if m == 0.0 else 0.0 for m in margins) / len(pairs)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))
