"""Experience, and the buffer between those who make it and the one who trains on it.

Stands for: the experience buffer (in the main package also a redo log on disk). Grown-up version:
quintet/buffer/buffer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple


class Token(NamedTuple):
    """One of the policy's own tokens: what came before it, the log-probability to compare with, its weight."""

    prev: int
    token: int
    old_logprob: float
    weight: float


@dataclass
class Experience:
    prompt_ids: tuple[int, ...]
    response_ids: list[int]
    logprobs: list[float]  # of the policy that sampled
    reward: float
    advantage: float
    weight_version: int
    metadata: dict[str, Any] = field(default_factory=dict)
    loss_mask: list[int] = field(default_factory=list)  # empty: every token is the policy's own
    group_id: int = 0
    proximal_logprobs: list[float] | None = None  # of the policy the update starts from, where it is not the sampler
    importance: list[float] | None = None  # weight of each token; none: 1

    def own_tokens(self) -> Iterator[Token]:
        """The tokens that carry loss; those a tool put there are only what comes before the next one."""
        old = self.proximal_logprobs or self.logprobs
        weights = self.importance or [1.0] * len(self.response_ids)
        mask = self.loss_mask or [1] * len(self.response_ids)
        previous = (self.prompt_ids[-1], *self.response_ids[:-1])
        for prev, token, logprob, weight, own in zip(previous, self.response_ids, old, weights, mask, strict=True):
            if own:
                yield Token(prev, token, logprob, weight)


class ExperienceBuffer:
    """First in, first out. Nothing older than `max_staleness` versions is handed out (0: strictly on-policy).

    `replay=True` hands out random samples that stay in the buffer until they are too old.
    """

    def __init__(self, max_staleness: int = 0, replay: bool = False) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0, got {max_staleness}")
        self.max_staleness, self.replay = max_staleness, replay
        self.dropped = 0
        self._items: list[Experience] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, batch: list[Experience]) -> None:
        self._items.extend(batch)

    def take(self, n: int, current_version: int, rng: Random | None = None) -> list[Experience]:
        """At most `n` experiences that are fresh enough; the stale ones are dropped and counted."""
        fresh = [e for e in self._items if current_version - e.weight_version <= self.max_staleness]
        self.dropped += len(self._items) - len(fresh)
        self._items = fresh
        if self.replay:
            if rng is None:
                raise ValueError("replay draws at random: it needs an rng")
            return rng.sample(fresh, min(n, len(fresh)))
        self._items = fresh[n:]
        return fresh[:n]
