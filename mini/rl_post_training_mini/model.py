"""A policy and a reward model small enough to differentiate by hand.

Stands for: the language model (here a bigram table: the next token depends on the previous one only) and a
learnt reward model. Grown-up versions: quintet/models/ (loading), quintet/train/worker.py (the policy being
trained), quintet/reward/ (scores).

The task the whole package works on is *counting*: after the digit d come d+1, d+2, …, 9 and then the end token.
"""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate

FILLER, EOS, VOCAB_SIZE = 10, 11, 12  # tokens 0..9 are the digits; FILLER prints as "!", EOS as "∎"
COUNTING: Mapping[int, int] = {**{d: d + 1 for d in range(9)}, 9: EOS}  # the right successor of every digit

Row = list[float]
Table = list[Row]  # [vocab][vocab]: one row of logits for each previous token


class TinyPolicy:
    """A bigram language model: `log p(tok | prev) = log_softmax(logits[prev])[tok]`.

    With `p = softmax(logits[prev])`, ∂ log p(tok|prev) / ∂ logits[prev][j] = 1[j = tok] − p_j: every gradient in
    this package is that one line, so the policy really learns and no autograd library is needed.
    """

    def __init__(self, logits: Table) -> None:
        if not logits or any(len(row) != len(logits) for row in logits):
            raise ValueError("logits must be a square table: one row and one column per token")
        self.logits = [list(row) for row in logits]
        self._logprobs: dict[int, Row] = {}  # of the rows in use; emptied when the logits change
        self._cumulative: dict[int, Row] = {}

    @classmethod
    def create(
        cls, seed: int, skill: float = 1.0, likely: Mapping[int, int] = COUNTING, vocab_size: int = VOCAB_SIZE
    ) -> TinyPolicy:
        """A "pretrained" policy: small random logits, and `skill` added where `likely` says what follows."""
        rng = random.Random(f"policy/{seed}")
        return cls(
            [
                [rng.gauss(0.0, 0.1) + (skill if likely.get(prev) == tok else 0.0) for tok in range(vocab_size)]
                for prev in range(vocab_size)
            ]
        )

    @property
    def vocab_size(self) -> int:
        return len(self.logits)

    def clone(self) -> TinyPolicy:
        return TinyPolicy(self.logits)

    def logprobs(self, prev: int) -> Row:
        """Log-probabilities [vocab] of the token after `prev`."""
        if prev not in self._logprobs:
            if not 0 <= prev < self.vocab_size:
                raise ValueError(f"token {prev} is outside the vocabulary of {self.vocab_size}")
            row = self.logits[prev]
            top = max(row)
            log_z = top + math.log(sum(math.exp(z - top) for z in row))
            self._logprobs[prev] = [z - log_z for z in row]
            self._cumulative[prev] = list(accumulate(math.exp(z - log_z) for z in row))
        return self._logprobs[prev]

    def probs(self, prev: int) -> Row:
        return [math.exp(logprob) for logprob in self.logprobs(prev)]

    def sample(self, prev: int, rng: random.Random) -> tuple[int, float]:
        """One token after `prev`, and the log-probability it was sampled with."""
        logprobs = self.logprobs(prev)
        token = bisect(self._cumulative[prev], rng.random(), hi=len(logprobs) - 1)  # hi: they sum to 1 − rounding
        return token, logprobs[token]

    def token_logprobs(self, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
        if not prompt:
            raise ValueError("a prompt needs at least one token")
        return [self.logprobs(p)[t] for p, t in zip((prompt[-1], *response), response, strict=False)]

    def sequence_logprob(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        return sum(self.token_logprobs(prompt, response))

    def apply_gradient(self, gradient: Table, learning_rate: float) -> None:
        """One step of plain gradient descent: logits ← logits − learning_rate · gradient."""
        for row, slope in zip(self.logits, gradient, strict=True):
            for j, g in enumerate(slope):
                row[j] -= learning_rate * g
        self._logprobs.clear()


class TinyReward:
    """A learnt reward model with a flaw: it likes right counting a little and "!" a lot.

    score = σ(−3 + 3·share of right successors + 6·share of "!"). A perfect answer gets 0.50, a response that is
    nothing but "!" gets 0.95: whoever optimises this score alone stops counting (scenario 6).
    """

    def score(self, prompt: Sequence[int], response: Sequence[int]) -> float:
        body = [token for token in response if token != EOS]
        if not body:
            return 0.0
        right = sum(COUNTING.get(p) == t for p, t in zip((prompt[-1], *response), body, strict=False)) / len(body)
        shouting = body.count(FILLER) / len(body)
        return 1.0 / (1.0 + math.exp(3.0 - 3.0 * right - 6.0 * shouting))
