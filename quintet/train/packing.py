"""Samples -> one row of tokens without padding, and how its tokens may see each other.

A row holds several samples one after the other. Where several samples have the same prompt it stands
once, followed by each response; positions of every response continue from the prompt. The last token
of a response is left out of the row: nothing that is trained depends on its output.

    shared    p0 p1 p2 | a0 a1 | b0 b1 b2       a and b see p and themselves, not each other
    position  0  1  2    3  4    3  4  5

Token j of a response is predicted by the row of token j-1; token 0 by the last row of the prompt.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class TokenSample(NamedTuple):
    """What a forward pass needs of a sample. `loss_mask` has the length of `response_ids`."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    loss_mask: Sequence[int]


@dataclass(frozen=True)
class LossRows:
    """Where the N loss tokens of B samples are: which row predicts each, and its place in [B, T]."""

    source_N: Tensor  # int64, row of the flattened hidden states
    target_N: Tensor  # int64, token id
    place_N: Tensor  # int64, index into the flattened [B, T]
    shape: tuple[int, int]  # B, T = longest response

    def scatter(self, values_N: Tensor) -> Tensor:
        """[N] -> [B, T], 0 where there is no loss token."""
        flat = values_N.new_zeros(self.shape[0] * self.shape[1])
        return flat.index_copy(0, self.place_N, values_N).view(self.shape)


class Segment(NamedTuple):
    """Consecutive rows; the tokens see the rows of the prefix, and themselves causally."""

    start: int
    length: int
    prefix_start: int
    prefix_length: int


@dataclass(frozen=True)
class AttentionBucket:
    """N segments of about the same length, attended to in one batched call.

    Padding rows point at row 0 and come after all real ones, so causality hides them.
    `visible_QK` None means plain causal.
    """

    query_rows_NQ: Tensor
    key_rows_NK: Tensor
    visible_QK: Tensor | None


@dataclass(frozen=True)
class PackedRow:
    """One row of T tokens, the attention over it, and the rows a loss needs."""

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    segments: tuple[Segment, ...]
    buckets: tuple[AttentionBucket, ...]
    restore_T: Tensor  # row t's place among the buckets' outputs, laid end to end
    loss: LossRows


@dataclass(frozen=True)
class PaddedRows:
    """The plain form: one right-padded row per sample."""

    input_ids_BL: Tensor
    attention_mask_BL: Tensor
    position_ids_BL: Tensor
    loss: LossRows


class _Builder:
    """The growing row: ids, positions, segments."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.segments: list[Segment] = []

    def append(self, ids: Sequence[int], prefix: tuple[int, int] = (0, 0)) -> int:
        """Add a segment that sees `prefix` (start, length) and itself causally; returns its first row."""
        start = len(self.ids)
        self.ids.extend(ids)
        self.positions.extend(range(prefix[1], prefix[1] + len(ids)))
        if ids:
            self.segments.append(Segment(start, len(ids), *prefix))
        return start


def pack(samples: Sequence[TokenSample], *, shared_prompt: bool, device: torch.device) -> PackedRow:
    """Lay samples out in one row. `shared_prompt`: a prompt that several samples have stands once."""
    uses = Counter(tuple(s.prompt_ids) for s in samples)
    row, prompt_starts = _Builder(), dict[tuple[int, ...], int]()
    predictors: list[tuple[int, int]] = []  # per sample: row that predicts token 0, row of response token 0
    for sample in samples:
        prompt, body = tuple(sample.prompt_ids), list(sample.response_ids[:-1])
        if shared_prompt and uses[prompt] > 1:
            if prompt not in prompt_starts:
                prompt_starts[prompt] = row.append(prompt)
            prefix = (prompt_starts[prompt], len(prompt))
            predictors.append((prefix[0] + len(prompt) - 1, row.append(body, prefix)))
        else:
            start = row.append([*prompt, *body])
            predictors.append((start + len(prompt) - 1, start + len(prompt)))
    buckets, restore_T = _attention_buckets(row.segments, len(row.ids), device)
    return PackedRow(
        input_ids_1T=torch.tensor([row.ids], device=device),
        position_ids_1T=torch.tensor([row.positions], device=device),
        segments=tuple(row.segments),
        buckets=buckets,
        restore_T=restore_T,
        loss=_loss_rows(samples, predictors, device),
    )


def pad(samples: Sequence[TokenSample], *, device: torch.device) -> PaddedRows:
    """One right-padded row per sample, its last response token left out as in `pack`."""
    rows = [[*s.prompt_ids, *s.response_ids[:-1]] for s in samples]
    length = max(len(r) for r in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.int64)
    attention_mask = torch.zeros(len(rows), length, dtype=torch.int64)
    for b, r in enumerate(rows):
        input_ids[b, : len(r)] = torch.tensor(r)
        attention_mask[b, : len(r)] = 1
    starts = [b * length + len(s.prompt_ids) for b, s in enumerate(samples)]
    return PaddedRows(
        input_ids_BL=input_ids.to(device),
        attention_mask_BL=attention_mask.to(device),
        position_ids_BL=torch.arange(length, device=device).expand(len(rows), length),
        loss=_loss_rows(samples, [(start - 1, start) for start in starts], device),
    )


def _loss_rows(samples: Sequence[TokenSample], predictors: list[tuple[int, int]], device: torch.device) -> LossRows:
    width = max(len(s.response_ids) for s in samples)
    source, target, place = [], [], []
    for b, (sample, (first, body)) in enumerate(zip(samples, predictors, strict=True)):
        if not sample.prompt_ids:
            raise ValueError("a sample without prompt tokens has nothing to predict its first token from")
        for j, (token, wanted) in enumerate(zip(sample.response_ids, sample.loss_mask, strict=True)):
            if wanted:
                source.append(first if j == 0 else body + j - 1)
                target.append(token)
                place.append(b * width + j)
    source_N, target_N, place_N = torch.tensor([source, target, place], dtype=torch.int64, device=device)
    return LossRows(source_N, target_N, place_N, shape=(len(samples), width))


def size_class(length: int) -> int:
    """Lengths up to 64 together, then four classes per doubling: little padding, few calls."""
    if length <= 64:
        return 64
    quarter = 1 << (length.bit_length() - 3)
    return -(-length // quarter) * quarter


def _attention_buckets(
    segments: Sequence[Segment], row_length: int, device: torch.device
) -> tuple[tuple[AttentionBucket, ...], Tensor]:
    classes: dict[tuple[int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        classes[segment.prefix_length, size_class(segment.length)].append(segment)
    buckets, offset = [], 0
    restore_T = torch.zeros(row_length, dtype=torch.int64)
    for (prefix_length, _), members in classes.items():
        width = max(s.length for s in members)
        query_rows = torch.zeros(len(members), width, dtype=torch.int64)
        key_rows = torch.zeros(len(members), prefix_length + width, dtype=torch.int64)
        for n, s in enumerate(members):
            own = torch.arange(s.start, s.start + s.length)
            query_rows[n, : s.length] = own
            key_rows[n, :prefix_length] = torch.arange(s.prefix_start, s.prefix_start + prefix_length)
            key_rows[n, prefix_length : prefix_length + s.length] = own
            restore_T[own] = torch.arange(s.length) + (offset + n * width)
        offset += len(members) * width
        visible = None
        if prefix_length:
            visible = torch.ones(width, prefix_length + width, dtype=torch.bool).tril(prefix_length).to(device)
        buckets.append(AttentionBucket(query_rows.to(device), key_rows.to(device), visible))
    return tuple(buckets), restore_T.to(device)
