"""A step's experiences -> mini-batches (one optimizer step each) -> micro-batches (one forward each).

Mini-batches keep groups whole and the given order. Micro-batches only bound memory: the loss divides by
the counts of the mini-batch, so that how it is cut changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quintet.algorithms.aggregate import Counts
from quintet.train.forward import Layout
from quintet.train.packing import TokenSample
from quintet.types import Experience, GroupId


def trainable(experiences: Iterable[Experience]) -> list[Experience]:
    """Scored samples with at least one loss token. The others leave loss and counts."""
    return [e for e in experiences if e.reward is not None and any(e.loss_mask)]


def token_sample(experience: Experience) -> TokenSample:
    return TokenSample(experience.prompt_ids, experience.response_ids, experience.loss_mask)


def mini_batches(experiences: Sequence[Experience], n: int) -> list[list[Experience]]:
    """At most `n` contiguous runs of whole groups, as equal in groups as can be; none is empty."""
    groups: dict[GroupId, list[Experience]] = {}
    for e in experiences:
        groups.setdefault(e.group_id, []).append(e)
    members = list(groups.values())
    n = min(n, len(members))
    bounds = [len(members) * i // n for i in range(n + 1)] if n else []
    return [[e for g in members[a:b] for e in g] for a, b in pairwise(bounds)]


def counts(experiences: Sequence[Experience]) -> Counts:
    """The denominators of one optimizer step: loss tokens, sequences, longest response in tokens."""
    return Counts(
        tokens=float(sum(sum(e.loss_mask) for e in experiences)),
        sequences=float(len(experiences)),
        max_length=max((len(e.response_ids) for e in experiences), default=0),
    )


def micro_batches(samples: Sequence[TokenSample], max_tokens: int, layout: Layout) -> list[range]:
    """Cut samples, in order, into runs whose forward takes at most `max_tokens` tokens; a longer sample goes alone.

    A shared prompt counts once per run; padded rows count with their padding.
    """
    return unit_batches([[sample] for sample in samples], max_tokens, layout)


def unit_batches(units: Sequence[Sequence[TokenSample]], max_tokens: int, layout: Layout) -> list[range]:
    """As `micro_batches`, over units of samples that must stay together (a pair of answers)."""
    runs: list[range] = []
    start, load = 0, _Load(layout)
    for i, unit in enumerate(units):
        load.add(unit)
        if i > start and load.tokens > max_tokens:
            runs.append(range(start, i))
            start, load = i, _Load(layout)
            load.add(unit)
    if units:
        runs.append(range(start, len(units)))
    return runs


class _Load:
    """Tokens that a forward over the samples added so far takes."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._rows = self._longest = self._packed = 0
        self._prompts: set[tuple[int, ...]] = set()

    @property
    def tokens(self) -> int:
        return self._rows * self._longest if self._layout is Layout.PADDED else self._packed

    def add(self, samples: Iterable[TokenSample]) -> None:
        for sample in samples:
            prompt, body = tuple(sample.prompt_ids), len(sample.response_ids) - 1
            is_shared = self._layout is Layout.SHARED and prompt in self._prompts
            self._prompts.add(prompt)
            self._rows += 1
            self._longest = max(self._longest, len(prompt) + body)
            self._packed += body if is_shared else len(prompt) + body


def right_padded(rows: Sequence[Sequence[float] | None], width: int, what: str) -> Tensor:
    """Ragged float rows -> [B, width] float32; raises ValueError for a row that is missing."""
    out = torch.zeros(len(rows), width)
    for b, row in enumerate(rows):
        if row is None:
            raise ValueError(f"an experience has no {what}: prepare and compute_advantage come before update")
        out[b, : len(row)] = torch.tensor(row, dtype=torch.float32)
    return out
