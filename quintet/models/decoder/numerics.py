"""Reproducible numerics: the few operations whose bits could depend on what else is in the batch.

The bits of a row are made a function of that row alone:

- matrix products run on a few fixed numbers of rows only, rows being padded to the smallest: a kernel for another
  number (1, 2, 3, on some processors 8, with two threads 64) may add up in another order;
- attention runs over fixed blocks of keys, partial results added strictly in block order, so that further blocks,
  which are masked, add exact zeros: decoding, prefill and prefill after a preemption agree bit for bit;
- SiLU is written out with `exp`, whose vector and tail code agree, which those of the fused SiLU do not.

Which numbers of rows agree to the bit is measured, for this machine, its threads and the model's own layers, when
weights are first loaded (`settle_row_counts`).

Engine and trainer both compute by these kernels, so that what was sampled and what is trained agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quintet.models.decoder.ops import BlockAttention, Gated, RowLinear
from quintet.types import QuintetError

ROW_COUNTS = (256, 128, 64, 32, 16, 8)  # rows of a matrix product, the largest first; each divides those before it
MIN_KEY_BLOCK = 64


class Kernels(Protocol):
    @property
    def row_tile(self) -> int:
        """Rows of every product come in multiples of this."""
        ...

    @property
    def key_block(self) -> int:
        """Attention sees keys in multiples of this."""
        ...

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor: ...

    def gated(self, gate_up_TI: Tensor) -> Tensor:
        """SiLU(gate) * up of a fused [T, 2 I] projection."""
        ...

    def attend(self, q_NRD: Tensor, k_NSD: Tensor, v_NSD: Tensor, bias: Tensor) -> Tensor:
        """Attention of R query rows over S keys for N = sequences x KV heads.

        `bias` [sequences or 1, 1, R or 1, S up to a whole number of blocks] is 0 where a key may be seen and -inf
        elsewhere; every row sees some key.
        """
        ...


class ReproducibleKernels:
    """`row_counts`: the numbers of rows that a matrix product may have; `settle_row_counts` narrows them."""

    def __init__(self, page_size: int) -> None:
        self.key_block = page_size * -(-MIN_KEY_BLOCK // page_size)
        self.row_counts: tuple[int, ...] = ROW_COUNTS

    @property
    def row_tile(self) -> int:
        return self.row_counts[-1]

    def linear(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        """The number of rows is a multiple of `row_tile`."""
        out: Tensor = RowLinear.apply(x_TK, weight_NK, bias_N, self._sizes(x_TK.shape[0]))
        return out

    def _sizes(self, rows: int) -> list[int]:
        """`rows` as a sum of `row_counts`, the largest first."""
        sizes: list[int] = []
        for count in self.row_counts:
            sizes += [count] * (rows // count)
            rows %= count
        if rows:
            raise ValueError(f"{rows} rows too many: pad to a multiple of {self.row_tile}")
        return sizes

    def gated(self, gate_up_TI: Tensor) -> Tensor:
        out: Tensor = Gated.apply(gate_up_TI)
        return out

    def attend(self, q_NRD: Tensor, k_NSD: Tensor, v_NSD: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = BlockAttention.apply(q_NRD, k_NSD, v_NSD, bias, self.key_block)
        return out


def reproducible_kernels(page_size: int, dtype: torch.dtype) -> ReproducibleKernels:
    """Raises QuintetError for anything but float32."""
    if dtype != torch.float32:
        raise QuintetError(
            f"rollout.numerics: reproducible needs float32 weights, not {str(dtype).removeprefix('torch.')}.\n"
            "Set model.dtype: float32, or rollout.numerics: fast."
        )
    return ReproducibleKernels(page_size)


@torch.no_grad()
def settle_row_counts(kernels: ReproducibleKernels, weights: Sequence[Tensor], head_dim: int) -> None:
    """Measure which numbers of rows give a row the same bits, in any place and beside any other rows, and let
    `kernels` use only these; the work of a few forward passes.

    Raises QuintetError naming the operation where none does.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {tuple(weight.shape): weight for weight in weights}
    counts = set(ROW_COUNTS)
    for shape, weight_NK in shapes.items():
        counts &= _agreeing_row_counts(kernels, weight_NK, counts, generator)
        if not counts:
            raise _cannot_keep(f"the matrix product of shape {shape}")
    kernels.row_counts = tuple(sorted(counts, reverse=True))
    broken = _broken_exp(kernels, weights[0], generator) or _broken_attention(kernels, weights, head_dim, generator)
    if broken:
        raise _cannot_keep(broken)


def _cannot_keep(operation: str) -> QuintetError:
    return QuintetError(
        f"rollout.numerics: reproducible cannot be kept here: {operation} gives a row other bits in another batch.\n"
        "Set rollout.numerics: fast (results then agree to rounding only)."
    )


def _agreeing_row_counts(
    kernels: ReproducibleKernels, weight_NK: Tensor, counts: set[int], generator: torch.Generator
) -> set[int]:
    """The largest set of numbers of rows that agree with each other; the one with the smaller numbers among equals."""
    x_TK = torch.randn(ROW_COUNTS[0], weight_NK.shape[1], generator=generator).to(weight_NK)
    agreeing: list[tuple[Tensor, set[int]]] = []
    for count in sorted(counts):
        kernels.row_counts = (count,)
        found_TN = kernels.linear(x_TK, weight_NK, None)
        moved_TN = kernels.linear(x_TK.roll(5, dims=0), weight_NK, None)
        if not torch.equal(moved_TN, found_TN.roll(5, dims=0)):
            continue  # a row's bits depend on its place
        for same_TN, members in agreeing:
            if torch.equal(same_TN, found_TN):
                members.add(count)
                break
        else:
            agreeing.append((found_TN, {count}))
    return max((members for _, members in agreeing), key=len, default=set())


def _broken_exp(kernels: Kernels, like: Tensor, generator: torch.Generator) -> str | None:
    x_TK = torch.randn(40, 2 * 72, generator=generator).to(like)
    return None if torch.equal(kernels.gated(x_TK[8:16].clone()), kernels.gated(x_TK)[8:16]) else "exp"


def _broken_attention(
    kernels: Kernels, weights: Sequence[Tensor], head_dim: int, generator: torch.Generator
) -> str | None:
    like = weights[0]
    keys, tile = 3 * kernels.key_block, kernels.row_tile
    q, k, v = (torch.randn(6, size, head_dim, generator=generator).to(like) for size in (8 * tile, keys, keys))
    seen = kernels.key_block - 5
    bias = torch.where(torch.arange(keys) < seen, 0.0, -torch.inf).view(1, 1, 1, keys).to(like)
    whole = kernels.attend(q, k, v, bias)
    for n, rows, blocks in ((1, tile, 1), (6, tile, 1), (2, 3 * tile, 2), (1, 8 * tile, 3)):
        size = blocks * kernels.key_block
        part = kernels.attend(
            q[:n, :rows].clone(), k[:n, :size].clone(), v[:n, :size].clone(), bias[..., :size].clone()
        )
        if not torch.equal(part, whole[:n, :rows]):
            return f"attention with {rows} query rows and {size} keys"
    return None
