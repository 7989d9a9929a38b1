"""One forward pass as arrays: what the batch hands to a model, native or torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

PAGE = 32  # tokens of a KV page
DRAW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("uniform", np.float64),
    ]
)


@dataclass(frozen=True)
class Step:
    """M members (sequences), in groups that see the same shared pages; all integers int32.

    Member m has `member_count[m]` new tokens from `member_start[m]` on in `ids`, the first at position
    `member_position[m]`. They see all shared pages of their group, then the member's own pages, row `member_row[m]`
    of `own_table`, up to themselves; `own_before[m]` tokens were there before. `member_writes[m]` 0: its one token is
    the last one of the shared pages, whose KV is not written again.
    """

    ids: np.ndarray  # [T]
    member_start: np.ndarray  # [M]
    member_count: np.ndarray
    member_position: np.ndarray
    member_row: np.ndarray
    own_before: np.ndarray
    member_writes: np.ndarray
    own_table: np.ndarray  # [rows, pages]
    group_start: np.ndarray  # [G + 1], in members
    shared_start: np.ndarray  # [G + 1], in the two lists below
    shared_ids: np.ndarray
    shared_counts: np.ndarray  # tokens that each shared page holds
    logit_token: np.ndarray  # [L]
    sampler_logit: np.ndarray  # [S], ascending
    draws: np.ndarray  # [S] of DRAW

    @property
    def last_position(self) -> int:
        return int((self.member_position + self.member_count).max()) - 1

    def then(self, other: Step) -> Step:
        """One step of both, this one's members, logits and samplers first."""
        missing = other.own_table.shape[1] - self.own_table.shape[1]
        table = np.pad(self.own_table, ((0, 0), (0, missing))) if missing else self.own_table
        tokens = len(self.ids)

        def joined(name: str, offset: int = 0) -> np.ndarray:
            return np.concatenate([getattr(self, name), getattr(other, name) + np.int32(offset)])

        def bounds(name: str, offset: int) -> np.ndarray:
            return np.concatenate([getattr(self, name)[:-1], getattr(other, name) + np.int32(offset)])

        return Step(
            ids=joined("ids"),
            member_start=joined("member_start", tokens),
            member_count=joined("member_count"),
            member_position=joined("member_position"),
            member_row=joined("member_row", len(table)),
            own_before=joined("own_before"),
            member_writes=joined("member_writes"),
            own_table=np.concatenate([table, other.own_table]),
            group_start=bounds("group_start", len(self.member_start)),
            shared_start=bounds("shared_start", len(self.shared_ids)),
            shared_ids=joined("shared_ids"),
            shared_counts=joined("shared_counts"),
            logit_token=joined("logit_token", tokens),
            sampler_logit=joined("sampler_logit", len(self.logit_token)),
            draws=np.concatenate([self.draws, other.draws]),
        )


class StepModel(Protocol):
    """Weights, KV pages and the forward pass; one thread calls all methods."""

    path: str  # what computes, in words for the log
    dtype: torch.dtype  # of keys and values

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Whole or not at all, in place. Raises QuintetError as `check_weights` does."""
        ...

    def run(self, step: Step) -> tuple[np.ndarray, np.ndarray]:
        """Write KV; sampled ids int32 [S] and log-probabilities float32 [S], NaN where logits are not finite."""
        ...

    def logits(self, step: Step) -> Tensor:
        """Write KV; float32 logits [L, vocabulary]."""
        ...

    def clear_pages(self, pages: np.ndarray) -> None:
        """Zero pages that may hold NaN: hidden entries are multiplied by 0, and 0 x NaN would reach the next user."""
        ...

    def read_kv(self, pages: np.ndarray, counts: np.ndarray) -> Tensor:
        """Keys and values [2, layers, kv_heads, tokens, head_dim] of pages of which page i holds `counts[i]` tokens, in
        `dtype` on the CPU: the same whatever a model's pages look like inside."""
        ...

    def write_kv(self, pages: np.ndarray, counts: np.ndarray, kv: Tensor) -> None:
        """The reverse."""
        ...

    def bytes(self, pages: int) -> int:
        """Memory of the weights and of `pages` KV pages."""
        ...
