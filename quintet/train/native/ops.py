"""`fused_ops.Ops` by the C++ kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.train.fused_attention import Heads
from quintet.train.fused_ops import Branch
from quintet.train.native.library import CHeads, Library
from quintet.train.packing import PackedRow, Segment
from quintet.train.workspace import Workspace

_PIECE_SEGMENTS = 4  # of a shared prompt that one thread takes at a time: its keys are packed anew for each piece


@dataclass(frozen=True)
class _Plan:
    """int32 tables, as the structures of segments.h: Span, Piece and Sum; `slots` rows of sums."""

    spans: Tensor
    pieces: Tensor
    prompts: Tensor
    slots: int


class NativeOps:
    """Tensors must be contiguous, those of the compute dtype all of one dtype that `library` computes."""

    def __init__(self, library: Library, workspace: Workspace) -> None:
        self._library, self._workspace = library, workspace

    def norm(
        self, x_TE: Tensor, weight_E: Tensor, eps: float, out_TE: Tensor, inverse_T: Tensor, branch: Branch = None
    ) -> None:
        low_TE, total_TE = branch or (None, None)
        self._rows("norm", out_TE.dtype, x_TE, x_TE, low_TE, total_TE, weight_E, eps, out_TE, inverse_T)

    def norm_again(self, x_TE: Tensor, weight_E: Tensor, inverse_T: Tensor, out_TE: Tensor) -> None:
        self._rows("norm_again", out_TE.dtype, x_TE, x_TE, weight_E, inverse_T, out_TE)

    def norm_backward(
        self,
        grad_out_TE: Tensor,
        x_TE: Tensor,
        weight_E: Tensor,
        inverse_T: Tensor,
        grad_TE: Tensor,
        *,
        low_TE: Tensor | None = None,
        of_weight: bool,
    ) -> Tensor | None:
        parts = self._workspace.scratch("parts", (self._library.parts, len(weight_E)), torch.float32)
        wanted = parts if of_weight else None
        inputs = (grad_out_TE, x_TE, inverse_T, weight_E)
        self._rows("norm_backward", grad_out_TE.dtype, x_TE, *inputs, grad_TE, low_TE, wanted)
        return parts.sum(0) if of_weight else None

    def add(self, x_TE: Tensor, low_TE: Tensor, out_TE: Tensor) -> None:
        self._library.call("add", low_TE.dtype, x_TE.numel(), x_TE, low_TE, out_TE)

    def swiglu(self, gate_up_TF: Tensor, out_TF: Tensor) -> None:
        self._rows("swiglu", out_TF.dtype, out_TF, gate_up_TF, out_TF)

    def swiglu_backward(self, grad_TF: Tensor, gate_up_TF: Tensor, out_TF: Tensor) -> None:
        self._rows("swiglu_backward", grad_TF.dtype, grad_TF, grad_TF, gate_up_TF, out_TF)

    def rotate(self, x_TC: Tensor, heads: int, cos_TD: Tensor, sin_TD: Tensor, *, back: bool = False) -> None:
        sign = -1.0 if back else 1.0
        self._rows("rotate", x_TC.dtype, x_TC, heads, cos_TD.shape[1], x_TC, cos_TD, sin_TD, sign)

    def plan(self, row: PackedRow) -> _Plan:
        """A prompt and its samples become pieces of a few segments each; what a prompt's keys and values get from its
        pieces, and from the prompt itself, goes to rows of sums of their own."""
        families: dict[tuple[int, int], list[Segment]] = defaultdict(list)
        for segment in row.segments:
            families[segment.prefix_start, segment.prefix_length].append(segment)
        spans, pieces, sums, slots = list[tuple[int, int]](), list[tuple[int, ...]](), list[tuple[int, ...]](), 0
        for (start, length), members in families.items():
            if not length:
                continue
            first_slot = slots
            for i in range(0, len(members), _PIECE_SEGMENTS):
                part = members[i : i + _PIECE_SEGMENTS]
                pieces.append((start, length, len(spans), len(part), slots, -1))
                spans += [(s.start, s.length) for s in part]
                slots += length
            pieces.append((0, 0, len(spans), 1, -1, slots))
            spans.append((start, length))
            slots += length
            sums.append((start, length, first_slot, (slots - first_slot) // length))
        for s in families.get((0, 0), []):
            if (s.start, s.length) not in families:
                pieces.append((0, 0, len(spans), 1, -1, -1))
                spans.append((s.start, s.length))
        return _Plan(_table(spans), _table(pieces), _table(sums), slots)

    def attention(self, qkv_TC: Tensor, heads: Heads, plan: _Plan, out_TC: Tensor, lse_TH: Tensor) -> None:
        inputs = (self._library.unit, CHeads(*heads), qkv_TC, plan.spans, plan.pieces, len(plan.pieces))
        self._library.call("attention", qkv_TC.dtype, *inputs, out_TC, lse_TH)

    def attention_backward(
        self,
        grad_TC: Tensor,
        qkv_TC: Tensor,
        heads: Heads,
        plan: _Plan,
        out_TC: Tensor,
        lse_TH: Tensor,
        to_TC: Tensor,
    ) -> None:
        sums = self._workspace.scratch("sums", (plan.slots, 2 * heads.keys * heads.size), torch.float32)
        tables = (plan.spans, plan.pieces, len(plan.pieces), plan.prompts, len(plan.prompts))
        inputs = (self._library.unit, CHeads(*heads), qkv_TC, *tables, out_TC, lse_TH, grad_TC)
        self._library.call("attention_backward", qkv_TC.dtype, *inputs, to_TC, sums)

    def _rows(self, name: str, dtype: torch.dtype, like_TX: Tensor, *arguments: object) -> None:
        """A kernel whose first arguments are rows and columns of `like_TX`."""
        self._library.call(name, dtype, *like_TX.shape, *arguments)


def _table(rows: Sequence[tuple[int, ...]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)
