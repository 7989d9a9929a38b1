"""Causal attention over a packed row, forward and backward, without copying a shared prompt to its responses.

Every segment (a prompt, a response, a whole sample) attends to itself, segments of similar length in one call. The
responses of a prompt then attend to it together, as one long query: attention over two sets of keys is the mean of
both, weighted by their sums of exponentials. Given the joint output and the joint log-sum, the backward pass of
either set is exact by itself.

H query heads, J key/value heads, D their size, T tokens; `qkv` [T, (H + 2 J) D] holds queries, keys, values.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quintet.train.packing import Segment, size_class

_attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_NO_WEIGHT = 1e4  # a log-sum so large that every exp(score - log-sum) is 0


class Heads(NamedTuple):
    queries: int
    keys: int
    size: int
    scale: float


class _Bucket(NamedTuple):
    """N segments in rows of W; `padding_NW` is True where there is no token, None where there is one everywhere."""

    rows_M: Tensor  # N * W indices of tokens
    width: int
    padding_NW: Tensor | None


class _Family(NamedTuple):
    """The tokens of a prompt, and those of its responses."""

    prompt: slice
    rows_R: Tensor


@dataclass(frozen=True)
class FusedPlan:
    """Who attends to whom in one packed row of T tokens."""

    buckets: tuple[_Bucket, ...]
    restore_T: Tensor  # token t's place among the buckets' rows, laid end to end
    families: tuple[_Family, ...]


def plan(segments: tuple[Segment, ...], n_tokens: int) -> FusedPlan:
    classes: dict[int, list[Segment]] = defaultdict(list)
    families: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
    for s in segments:
        classes[size_class(s.length)].append(s)
        if s.prefix_length:
            families[s.prefix_start, s.prefix_length].append(torch.arange(s.start, s.start + s.length))
    buckets, offset, restore_T = [], 0, torch.zeros(n_tokens, dtype=torch.int64)
    for members in classes.values():
        width = max(s.length for s in members)
        starts_N, lengths_N = torch.tensor([(s.start, s.length) for s in members]).t()[..., None]
        place_W = torch.arange(width)
        padding_NW = place_W >= lengths_N
        rows_NW = (starts_N + place_W).masked_fill(padding_NW, 0)
        restore_T[rows_NW[~padding_NW]] = (offset + torch.arange(rows_NW.numel()).view_as(rows_NW))[~padding_NW]
        buckets.append(_Bucket(rows_NW.flatten(), width, padding_NW if padding_NW.any() else None))
        offset += rows_NW.numel()
    joined = (_Family(slice(start, start + n), torch.cat(rows)) for (start, n), rows in families.items())
    return FusedPlan(tuple(buckets), restore_T, tuple(joined))


def attention(qkv_TC: Tensor, heads: Heads, plan: FusedPlan, out_TC: Tensor, lse_TH: Tensor) -> None:
    """Fills the output [T, H D] and the log-sums of scaled scores [T, H], float32."""
    outs, sums = [], []
    for bucket in plan.buckets:
        q, k, v = _own(qkv_TC, bucket, heads)
        o_NHWD, lse_NHW = _attend(q, k, v, 0.0, True, attn_mask=None, scale=heads.scale)
        outs.append(o_NHWD.transpose(1, 2).flatten(2).flatten(0, 1))
        sums.append(lse_NHW.transpose(1, 2).flatten(0, 1))
    torch.index_select(torch.cat(outs), 0, plan.restore_T, out=out_TC)
    torch.index_select(torch.cat(sums), 0, plan.restore_T, out=lse_TH)
    for family in plan.families:
        q, k, v = _to_prompt(qkv_TC, family, heads)
        o_JQD, lse_JQ = _attend(q, k, v, 0.0, False, attn_mask=None, scale=heads.scale)
        other_RHD, other_lse_RH = _from_prompt(o_JQD, heads), _from_prompt(lse_JQ[..., None], heads)[..., 0]
        own_RHD, own_lse_RH = out_TC[family.rows_R].view_as(other_RHD), lse_TH[family.rows_R]
        joint_RH = torch.logaddexp(own_lse_RH, other_lse_RH)
        own_share, other_share = (own_lse_RH - joint_RH).exp_(), (other_lse_RH - joint_RH).exp_()
        mean_RHD = own_RHD * own_share[..., None] + other_RHD * other_share[..., None]
        out_TC[family.rows_R] = mean_RHD.flatten(1).to(out_TC.dtype)
        lse_TH[family.rows_R] = joint_RH


def attention_backward(
    grad_TC: Tensor, qkv_TC: Tensor, heads: Heads, plan: FusedPlan, out_TC: Tensor, lse_TH: Tensor, grad_qkv_TC: Tensor
) -> None:
    """Fills d(loss)/d(qkv) from d(loss)/d(output)."""
    parts = []
    for bucket in plan.buckets:
        q, k, v = _own(qkv_TC, bucket, heads)
        shape = (-1, bucket.width, heads.queries)
        grad, out = (x[bucket.rows_M].view(*shape, heads.size) for x in (grad_TC, out_TC))
        lse = lse_TH[bucket.rows_M].view(shape)
        if bucket.padding_NW is not None:
            grad.masked_fill_(bucket.padding_NW[..., None, None], 0.0)
            lse.masked_fill_(bucket.padding_NW[..., None], _NO_WEIGHT)
        # in float32: each of the many small bfloat16 products inside sets up a kernel anew (3 to 5 times slower)
        inputs = [x.float() for x in (grad.transpose(1, 2), q, k, v, out.transpose(1, 2))]
        dq, dk, dv = _attend_backward(*inputs, lse.transpose(1, 2), 0.0, True, attn_mask=None, scale=heads.scale)
        dk, dv = (x.unflatten(1, (heads.keys, -1)).sum(2) for x in (dk, dv))
        grads = torch.cat([dq, dk, dv], dim=1).transpose(1, 2)
        parts.append(grads.to(grad_qkv_TC.dtype).flatten(2).flatten(0, 1))
    torch.index_select(torch.cat(parts), 0, plan.restore_T, out=grad_qkv_TC)
    n_query, n_key = heads.queries * heads.size, heads.keys * heads.size
    for family in plan.families:
        q, k, v = _to_prompt(qkv_TC, family, heads)
        grad, out = (_as_query(x[family.rows_R], heads) for x in (grad_TC, out_TC))
        lse = _as_query(lse_TH[family.rows_R], heads)[..., 0]
        dq, dk, dv = _attend_backward(grad, q, k, v, out, lse, 0.0, False, attn_mask=None, scale=heads.scale)
        grad_qkv_TC[:, :n_query].index_add_(0, family.rows_R, _from_prompt(dq, heads).flatten(1))
        for first, x in ((n_query, dk), (n_query + n_key, dv)):
            grad_qkv_TC[family.prompt, first : first + n_key] += x[0].transpose(0, 1).flatten(1)


def _own(qkv_TC: Tensor, bucket: _Bucket, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [N, H, W, D] of a bucket's segments."""
    x_NWHD = qkv_TC[bucket.rows_M].view(-1, bucket.width, heads.queries + 2 * heads.keys, heads.size)
    q, k, v = x_NWHD.transpose(1, 2).split([heads.queries, heads.keys, heads.keys], dim=1)
    repeats = heads.queries // heads.keys
    return q, k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def _to_prompt(qkv_TC: Tensor, family: _Family, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """The responses' queries as one sequence [1, J, (H / J) R, D], the prompt's keys and values [1, J, P, D]."""
    n_query = heads.queries * heads.size
    q = _as_query(qkv_TC[family.rows_R, :n_query], heads)
    k, v = qkv_TC[family.prompt, n_query:].view(-1, 2, heads.keys, heads.size).permute(1, 2, 0, 3)[:, None]
    return q, k, v


def _as_query(x_RC: Tensor, heads: Heads) -> Tensor:
    """[R, H X] -> [1, J, (H / J) R, X]: the query heads of a key head one after the other."""
    x_RJGX = x_RC.view(len(x_RC), heads.keys, heads.queries // heads.keys, -1)
    return x_RJGX.permute(1, 2, 0, 3).flatten(1, 2)[None]


def _from_prompt(x_1JQX: Tensor, heads: Heads) -> Tensor:
    """The inverse of `_as_query`: [R, H, X]."""
    repeats = heads.queries // heads.keys
    return x_1JQX[0].unflatten(1, (repeats, -1)).permute(2, 0, 1, 3).flatten(1, 2)
