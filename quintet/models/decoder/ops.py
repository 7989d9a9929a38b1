"""Three operations whose forward has the bits that `numerics` promises, with ordinary gradients.

Only the forward of the trainer must equal the sampler's; its backward is free to add up in the quickest order. None
keeps more for the backward pass than its inputs and what attention's softmax needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

_BACKWARD_BLOCKS = 8  # key blocks that attention's backward takes at once


class RowLinear(Function):
    """x [T, K] @ weight [N, K].T + bias [N] | None, computed for `sizes` rows at a time (their sum is T)."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, sizes: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x_TK, weight_NK)
        out_TN = x_TK.new_empty(x_TK.shape[0], weight_NK.shape[0])
        for part, out in zip(x_TK.split(sizes), out_TN.split(sizes), strict=True):
            if bias_N is None:
                torch.mm(part, weight_NK.t(), out=out)
            else:
                torch.addmm(bias_N, part, weight_NK.t(), out=out)
        return out_TN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TN,) = grads
        x_TK, weight_NK = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        return (
            grad_TN @ weight_NK if wants_x else None,
            grad_TN.t() @ x_TK if wants_weight else None,
            grad_TN.sum(0) if wants_bias else None,
            None,
        )


class Gated(Function):
    """SiLU(gate) * up of [T, 2 I]; SiLU is written out with `exp`."""

    @staticmethod
    def forward(ctx: Any, gate_up_TI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TI)
        gate, up = gate_up_TI.chunk(2, dim=-1)
        gate = gate.contiguous()
        return gate / (gate.neg().exp_() + 1.0) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad_TI,) = grads
        gate, up = ctx.saved_tensors[0].chunk(2, dim=-1)
        share = gate.sigmoid()
        silu = gate * share
        slope = share + silu * (1.0 - share)
        return torch.cat([grad_TI * up * slope, grad_TI * silu], dim=-1)


class BlockAttention(Function):
    """Attention of R query rows over S keys for N = sequences x KV heads, partial results added in the order of the
    key blocks. `bias` [sequences or 1, 1, R or 1, S or more] is 0 where a key may be seen and -inf elsewhere; its width
    is a number of whole blocks."""

    @staticmethod
    def forward(ctx: Any, q_NRD: Tensor, k_NSD: Tensor, v_NSD: Tensor, bias: Tensor, key_block: int) -> Tensor:
        n, rows, width = q_NRD.shape
        pad = bias.shape[-1] - k_NSD.shape[1]
        keys, values = (F.pad(x, (0, 0, 0, pad)) if pad else x for x in (k_NSD, v_NSD))
        parts = _blocks(keys.shape[1], key_block)
        scores = [_masked_scores(q_NRD, keys[:, part], bias[..., part]) for part in parts]
        peak_NR1 = q_NRD.new_full((n, rows, 1), -torch.inf)
        for block in scores:
            peak_NR1 = torch.maximum(peak_NR1, block.amax(-1, keepdim=True))
        out_NRD = q_NRD.new_zeros(n, rows, width)
        total_NR1 = q_NRD.new_zeros(n, rows, 1)
        for part, block in zip(parts, scores, strict=True):
            weights = _exp(block.sub_(peak_NR1))
            total_NR1 += weights.sum(-1, keepdim=True)
            out_NRD.baddbmm_(weights, values[:, part])
        out_NRD = out_NRD / total_NR1
        ctx.save_for_backward(q_NRD, k_NSD, v_NSD, bias, out_NRD, peak_NR1, total_NR1)
        ctx.key_block = key_block
        return out_NRD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NRD,) = grads
        q_NRD, k_NSD, v_NSD, bias, out_NRD, peak_NR1, total_NR1 = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q_NRD), torch.empty_like(k_NSD), torch.empty_like(v_NSD)
        mean_NR1 = (grad_NRD * out_NRD).sum(-1, keepdim=True)
        for part in _blocks(k_NSD.shape[1], _BACKWARD_BLOCKS * ctx.key_block):
            keys = k_NSD[:, part]
            weights = _exp(_masked_scores(q_NRD, keys, bias[..., part]).sub_(peak_NR1)).div_(total_NR1)
            dv[:, part] = weights.transpose(1, 2) @ grad_NRD
            slope = (grad_NRD @ v_NSD[:, part].transpose(1, 2)).sub_(mean_NR1).mul_(weights)
            dq.baddbmm_(slope, keys)
            dk[:, part] = slope.transpose(1, 2) @ q_NRD
        return dq, dk, dv, None, None


def _blocks(keys: int, block: int) -> list[slice]:
    return [slice(at, min(at + block, keys)) for at in range(0, keys, block)]


def _exp(x: Tensor) -> Tensor:
    """In place, and exactly 0 below e^-80: what is hidden is -inf, on which `exp` takes fifteen times as long."""
    return torch.threshold_(x.clamp_min_(-80.0).exp_(), 1e-34, 0.0)


def _masked_scores(q_NRD: Tensor, k_NBD: Tensor, bias: Tensor) -> Tensor:
    scores_NRB = torch.bmm(q_NRD, k_NBD.transpose(1, 2))
    scores_NRB.view(bias.shape[0], -1, *scores_NRB.shape[1:]).add_(bias)
    return scores_NRB
