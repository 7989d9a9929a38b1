"""The plan of one forward pass: which tokens are computed, where their KV goes, which keys each of them sees.

A plan is made once per step from a list of segments (a decoding sequence is a segment of one token) and is used by
every layer. Segments of similar size form a chunk: one gather of their pages and one batched attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.models.decoder.numerics import Kernels
from quintet.models.decoder.spec import ModelSpec

_MAX_SCORES = 2**24  # attention scores held at once by one chunk
_MAX_GATHER = 2**26  # numbers of gathered keys held at once by one chunk


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence: `ids` at positions from `start` on; `pages` is its page table."""

    ids: list[int]
    start: int
    pages: list[int]


@dataclass(frozen=True)
class Chunk:
    """Queries of S segments, C tokens each (short ones repeat their last), over a common number of key pages."""

    segments: int
    q_rows: Tensor  # [S * C] rows of the step's tokens
    kept: Tensor | None  # [n] entries of q_rows that are real; None: all
    out_rows: Tensor  # [n] where the result goes
    kv_rows: Tensor  # [S * kv_heads * pages] rows of the cache
    bias: Tensor  # [S, 1, R or 1, keys], 0 or -inf


@dataclass(frozen=True)
class StepPlan:
    """`ids_T` and `positions_T` are padded to the kernels' row tile; only the first `tokens` are real."""

    tokens: int
    ids_T: Tensor
    positions_T: Tensor
    last_position: int
    write_rows: Tensor  # [tokens * kv_heads] rows of the cache seen as [pages * kv_heads * page_size, head_dim]
    chunks: list[Chunk]
    logit_rows: Tensor  # padded to the row tile
    logit_count: int


@dataclass(frozen=True)
class Planner:
    """Makes plans for one model on one device."""

    spec: ModelSpec
    kernels: Kernels
    page_size: int
    device: torch.device
    dtype: torch.dtype

    def plan(self, segments: list[Segment], *, every_logit: bool = False) -> StepPlan:
        """Logits are computed for the last token of each segment, or for every token."""
        counts_S = np.array([len(s.ids) for s in segments])
        starts_S = np.array([s.start for s in segments])
        offsets_S = np.cumsum(counts_S) - counts_S
        tokens = int(counts_S.sum())
        owner_t = np.repeat(np.arange(len(segments)), counts_S)
        positions_t = starts_S[owner_t] + np.arange(tokens) - offsets_S[owner_t]
        table_SP = np.zeros((len(segments), max(len(s.pages) for s in segments)), dtype=np.int64)
        for row, segment in enumerate(segments):
            table_SP[row, : len(segment.pages)] = segment.pages
        pages_t = table_SP[owner_t, positions_t // self.page_size]
        write = (pages_t[:, None] * self.spec.kv_heads + np.arange(self.spec.kv_heads)) * self.page_size
        ids_t = np.fromiter((i for s in segments for i in s.ids), dtype=np.int64, count=tokens)
        logits = np.arange(tokens) if every_logit else offsets_S + counts_S - 1
        return StepPlan(
            tokens=tokens,
            ids_T=self._padded(ids_t),
            positions_T=self._padded(positions_t),
            last_position=int(positions_t.max()),
            write_rows=self._tensor((write + (positions_t % self.page_size)[:, None]).ravel()),
            chunks=list(self._chunks(counts_S, starts_S, offsets_S, table_SP)),
            logit_rows=self._padded(logits),
            logit_count=len(logits),
        )

    @property
    def _key_width(self) -> int:
        return self.spec.kv_heads * self.spec.head_dim

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _padded(self, array: np.ndarray) -> Tensor:
        return self._tensor(np.pad(array, (0, -len(array) % self.kernels.row_tile)))

    def _chunks(
        self, counts_S: np.ndarray, starts_S: np.ndarray, offsets_S: np.ndarray, table_SP: np.ndarray
    ) -> Iterator[Chunk]:
        for bucket in self._buckets(counts_S, starts_S + counts_S):
            starts, counts, offsets = starts_S[bucket], counts_S[bucket], offsets_S[bucket]
            longest = int(counts.max())
            keys = int((starts + counts).max())
            step = max(1, _MAX_SCORES // (len(bucket) * self.spec.heads * keys))
            for at in range(0, longest, step):
                live = counts > at
                span = min(step, longest - at)
                yield self._chunk(
                    starts[live] + at, np.minimum(counts[live] - at, span), offsets[live] + at, table_SP[bucket[live]]
                )

    def _buckets(self, counts_S: np.ndarray, ends_S: np.ndarray) -> Iterator[np.ndarray]:
        """Segments of similar length together, so that a long one does not pad all others to its size."""
        bucket: list[int] = []
        shortest = longest = 0
        for index in np.lexsort((ends_S, counts_S)).tolist():
            end = int(ends_S[index])
            low, high = (min(shortest, end), max(longest, end)) if bucket else (end, end)
            ragged = high > 2 * low + 128 or counts_S[index] > 2 * counts_S[bucket[0] if bucket else index]
            if bucket and (ragged or (len(bucket) + 1) * high * self._key_width > _MAX_GATHER):
                yield np.array(bucket)
                bucket, low, high = [], end, end
            bucket.append(index)
            shortest, longest = low, high
        yield np.array(bucket)

    def _chunk(self, starts: np.ndarray, counts: np.ndarray, offsets: np.ndarray, table: np.ndarray) -> Chunk:
        segments, width = len(starts), int(counts.max())
        pages = -(-int((starts + counts).max()) // self.page_size)
        per_block = self.kernels.key_block // self.page_size
        pages = -(-pages // per_block) * per_block
        table = np.pad(table, ((0, 0), (0, max(0, pages - table.shape[1]))))[:, :pages]
        heads = np.arange(self.spec.kv_heads)
        kv_rows = table[:, None, :] * self.spec.kv_heads + heads[None, :, None]
        place_SC = np.minimum(np.arange(width)[None, :], counts[:, None] - 1)
        real_SC = np.arange(width)[None, :] < counts[:, None]
        q_rows = (offsets[:, None] + place_SC).ravel()
        kept = np.flatnonzero(real_SC.ravel())
        return Chunk(
            segments=segments,
            q_rows=self._tensor(q_rows),
            kept=None if len(kept) == len(q_rows) else self._tensor(kept),
            out_rows=self._tensor(q_rows[kept]),
            kv_rows=self._tensor(kv_rows.ravel()),
            bias=self._bias(starts[:, None] + place_SC + 1, pages * self.page_size),
        )

    def _bias(self, visible_SC: np.ndarray, keys: int) -> Tensor:
        segments, width = visible_SC.shape
        visible = self._tensor(visible_SC)
        if width > 1:  # one row per (token, query head of the KV head), padded as the query rows are
            visible = visible.repeat_interleave(self.spec.query_group, dim=1)
            pad = -visible.shape[1] % self.kernels.row_tile
            visible = torch.cat([visible, visible[:, -1:].expand(segments, pad)], dim=1)
        hidden = torch.arange(keys, device=self.device) >= visible[..., None]
        bias = torch.zeros(hidden.shape, device=self.device, dtype=self.dtype).masked_fill_(hidden, -torch.inf)
        return bias[:, None]


def paged_attention(
    q_THD: Tensor, cache: tuple[Tensor, Tensor], plan: StepPlan, kernels: Kernels, kv_heads: int
) -> Tensor:
    """Attention of the step's tokens over their pages. Queries come scaled; returns [T, heads * head_dim]."""
    rows, heads, width = q_THD.shape
    group = heads // kv_heads
    result = q_THD.new_zeros(rows, heads * width)
    for chunk in plan.chunks:
        n = chunk.segments
        q = q_THD.index_select(0, chunk.q_rows).view(n, -1, kv_heads, group, width)
        tokens = q.shape[1]
        q = q.transpose(1, 2).reshape(n * kv_heads, tokens * group, width)
        if pad := -(tokens * group) % kernels.row_tile:
            q = F.pad(q, (0, 0, 0, pad))
        keys, values = (part.index_select(0, chunk.kv_rows).view(n * kv_heads, -1, width) for part in cache)
        out = kernels.attend(q, keys, values, chunk.bias)[:, : tokens * group]
        out = out.reshape(n, kv_heads, tokens, group, width).transpose(1, 2).reshape(n * tokens, heads * width)
        result.index_copy_(0, chunk.out_rows, out if chunk.kept is None else out.index_select(0, chunk.kept))
    return result
