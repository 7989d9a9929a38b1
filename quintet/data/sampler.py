"""The order in which prompts are drawn: a pure function of seed and number, so that any place can be returned to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from quintet.types import Prompt, QuintetError


class Draw(NamedTuple):
    """`occurrence` tells apart the draws of one prompt id within an epoch (0 where each stands once in the data)."""

    epoch: int
    occurrence: int
    prompt: Prompt


class PromptSampler:
    """Prompts epoch after epoch, each once per epoch, in an order keyed by (seed, epoch).

    A step may wrap into the next epoch. With `epochs` the stream ends after so many passes.
    Raises QuintetError when there is no prompt.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        if not prompts:
            raise QuintetError("data: there is no prompt to draw from.")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._epoch = -1
        self._order: list[Draw] = []

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    def draw(self, index: int) -> Draw | None:
        """The `index`-th draw of the run, always the same; None from the end of the last epoch on."""
        epoch, offset = divmod(index, len(self._prompts))
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._shuffled(epoch)
        return self._order[offset]

    def _shuffled(self, epoch: int) -> list[Draw]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"prompts/{self._seed}/{epoch}").shuffle(order)
        seen: Counter[str] = Counter()
        draws: list[Draw] = []
        for prompt in (self._prompts[i] for i in order):
            draws.append(Draw(epoch, seen[prompt.id], prompt))
            seen[prompt.id] += 1
        return draws
