"""Reproducible numerics: the few operations whose bits could depend on what else is in the batch.

The bits of a row are made a function of that row alone:

- rows come in multiples of 8 and matrix products run on at most 256 rows, because a kernel for 1, 2 or 3 rows (or an
  edge of one) may add up in another order than the one for 8;
- attention runs over fixed blocks of keys, partial results added strictly in block order, so that further blocks,
  which are masked, add exact zeros: decoding, prefill and prefill after a preemption agree bit for bit;
- SiLU is written out with `exp`, whose vector and tail code agree, which those of the fused SiLU do not.

That a machine's kernels keep the bits of a row is measured when weights are first loaded (`check_row_invariance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from quintet.types import QuintetError

ROW_TILE = 8
MAX_ROWS = 256
MIN_KEY_BLOCK = 64


class Kernels(Protocol):
    row_tile: int  # rows of every product come in multiples of this
    key_block: int  # attention sees keys in multiples of this

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor: ...

    def gated(self, gate_up_TI: Tensor) -> Tensor:
        """SiLU(gate) * up of a fused [T, 2 I] projection."""
        ...

    def attend(self, q_NRD: Tensor, k_NSD: Tensor, v_NSD: Tensor, bias: Tensor) -> Tensor:
        """Attention of R query rows over S keys for N = sequences x KV heads.

        `bias` [sequences, 1, R or 1, S] is 0 where a key may be seen and -inf elsewhere; every row sees some key.
        """
        ...


class ReproducibleKernels:
    row_tile = ROW_TILE

    def __init__(self, page_size: int) -> None:
        self.key_block = page_size * -(-MIN_KEY_BLOCK // page_size)

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        if x_TK.shape[0] <= MAX_ROWS:
            return F.linear(x_TK, weight_NK, bias_N)
        return torch.cat([F.linear(part, weight_NK, bias_N) for part in x_TK.split(MAX_ROWS)])

    def gated(self, gate_up_TI: Tensor) -> Tensor:
        gate, up = gate_up_TI.chunk(2, dim=-1)
        gate = gate.contiguous()
        return gate / (gate.neg().exp_() + 1.0) * up

    def attend(self, q_NRD: Tensor, k_NSD: Tensor, v_NSD: Tensor, bias: Tensor) -> Tensor:
        n, rows, width = q_NRD.shape
        parts = [slice(at, at + self.key_block) for at in range(0, k_NSD.shape[1], self.key_block)]
        scores = [torch.bmm(q_NRD, k_NSD[:, part].transpose(1, 2)) for part in parts]
        peak_NR1 = q_NRD.new_full((n, rows, 1), -torch.inf)
        for part, block in zip(parts, scores, strict=True):
            block.view(bias.shape[0], -1, rows, self.key_block).add_(bias[..., part])
            peak_NR1 = torch.maximum(peak_NR1, block.amax(-1, keepdim=True))
        out_NRD = q_NRD.new_zeros(n, rows, width)
        total_NR1 = q_NRD.new_zeros(n, rows, 1)
        for part, block in zip(parts, scores, strict=True):
            weights = block.sub_(peak_NR1).exp_()
            total_NR1 += weights.sum(-1, keepdim=True)
            out_NRD.baddbmm_(weights, v_NSD[:, part])
        return out_NRD / total_NR1


def reproducible_kernels(page_size: int, dtype: torch.dtype) -> ReproducibleKernels:
    """Raises QuintetError for anything but float32."""
    if dtype != torch.float32:
        raise QuintetError(
            f"rollout.numerics: reproducible needs float32 weights, not {str(dtype).removeprefix('torch.')}.\n"
            "Set model.dtype: float32, or rollout.numerics: fast."
        )
    return ReproducibleKernels(page_size)


@torch.no_grad()
def check_row_invariance(kernels: Kernels, weights: Sequence[Tensor], head_dim: int) -> None:
    """Measure on this machine that a row's bits do not depend on the rows beside it; about a forward pass of work.

    Raises QuintetError naming the operation that breaks it.
    """
    generator = torch.Generator().manual_seed(0)
    broken = _broken_linear(kernels, weights, generator) or _broken_attention(kernels, weights, head_dim, generator)
    if broken:
        raise QuintetError(
            f"rollout.numerics: reproducible cannot be kept here: {broken} gives a row other bits in another batch.\n"
            "Set rollout.numerics: fast (results then agree to rounding only)."
        )


def _broken_linear(kernels: Kernels, weights: Sequence[Tensor], generator: torch.Generator) -> str | None:
    seen: set[tuple[int, ...]] = set()
    for weight_NK in weights:
        if tuple(weight_NK.shape) in seen:
            continue
        seen.add(tuple(weight_NK.shape))
        rows = MAX_ROWS if weight_NK.numel() < 2**24 else 64  # large layers: fewer rows, the same kernels
        x_TK = torch.randn(rows, weight_NK.shape[1], generator=generator).to(weight_NK)
        whole_TN = kernels.linear(x_TK, weight_NK, None)
        for start, count in ((0, 8), (8, 8), (0, 16), (16, 24), (8, 40), (0, 56)):
            part_TN = kernels.linear(x_TK[start : start + count].clone(), weight_NK, None)
            if not torch.equal(part_TN, whole_TN[start : start + count]):
                return f"the matrix product of shape {tuple(weight_NK.shape)} with {count} rows"
    x_TK = torch.randn(40, 2 * 72, generator=generator).to(weights[0])
    if not torch.equal(kernels.gated(x_TK[8:16].clone()), kernels.gated(x_TK)[8:16]):
        return "exp"
    return None


def _broken_attention(
    kernels: Kernels, weights: Sequence[Tensor], head_dim: int, generator: torch.Generator
) -> str | None:
    like = weights[0]
    keys = 3 * kernels.key_block
    q, k, v = (torch.randn(6, size, head_dim, generator=generator).to(like) for size in (64, keys, keys))
    seen = kernels.key_block - 5
    bias = torch.where(torch.arange(keys) < seen, 0.0, -torch.inf).view(1, 1, 1, keys).to(like)
    whole = kernels.attend(q, k, v, bias)
    for n, rows, blocks in ((1, 8, 1), (6, 8, 1), (2, 24, 2), (1, 64, 3)):
        size = blocks * kernels.key_block
        part = kernels.attend(
            q[:n, :rows].clone(), k[:n, :size].clone(), v[:n, :size].clone(), bias[..., :size].clone()
        )
        if not torch.equal(part, whole[:n, :rows]):
            return f"attention with {rows} query rows and {size} keys"
    return None
