"""Attention over a packed row, as an attention function of transformers.

transformers looks the function up by the name in a model's config and hands on keyword arguments given
to the decoder, which is how the row's layout arrives here. No mask over the whole row exists: segments
of similar length are gathered and attended to together (see `packing.AttentionBucket`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from quintet.train.packing import PackedRow

ATTENTION_NAME = "quintet_packed"
Kernel = Literal["sdpa", "eager"]

# Keyword arguments by which a layer asks for an attention that is not plain softmax(QK)V.
_FOREIGN_ARGUMENTS = ("softcap", "s_aux", "position_bias", "sliding_window")


@dataclass(frozen=True)
class AttentionPlan:
    """The layout of one row and the kernel to compute it with."""

    row: PackedRow
    kernel: Kernel


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`query` [1, H, T, D], `key`/`value` [1, KV, T, D] -> [1, T, H, D]. Dropout of attention weights is left out.

    Raises RuntimeError when called without a plan (a padded call would be silently wrong) or by a layer
    whose attention has other parts than a causal softmax.
    """
    if attention_plan is None:
        raise RuntimeError("this model is set up for the trainer's packed forward; use PolicyForward, or release() it")
    foreign = [name for name in _FOREIGN_ARGUMENTS if kwargs.get(name) is not None]
    if foreign:
        raise RuntimeError(f"packed attention does not know {', '.join(foreign)}")
    q_THD, k_TJD, v_TJD = (states[0].transpose(0, 1) for states in (query, key, value))
    row, attend = attention_plan.row, _eager if attention_plan.kernel == "eager" else _sdpa
    outputs = []
    for bucket in row.buckets:
        q_NHQD = q_THD[bucket.query_rows_NQ].transpose(1, 2)
        k_NHKD, v_NHKD = (_per_query_head(x, bucket.key_rows_NK, q_THD.shape[1]) for x in (k_TJD, v_TJD))
        outputs.append(attend(q_NHQD, k_NHKD, v_NHKD, bucket.visible_QK, scaling).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[row.restore_T][None], None


def _per_query_head(states_TJD: Tensor, rows_NK: Tensor, query_heads: int) -> Tensor:
    """Gather rows and repeat each of J key/value heads for its query heads: [N, H, K, D]."""
    return states_TJD[rows_NK].transpose(1, 2).repeat_interleave(query_heads // states_TJD.shape[1], dim=1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible_QK: Tensor | None, scaling: float | None) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=visible_QK, is_causal=visible_QK is None, scale=scaling)


def _eager(q: Tensor, k: Tensor, v: Tensor, visible_QK: Tensor | None, scaling: float | None) -> Tensor:
    if visible_QK is None:
        visible_QK = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = scores.float().masked_fill(~visible_QK, float("-inf")).softmax(dim=-1)
    return weights.to(v.dtype) @ v


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why this architecture cannot be packed, from its class and config; None when it can."""
    config = model.config.get_text_config()
    kernel = model.config._attn_implementation
    other_layers = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if not type(model)._supports_attention_backend:
        return "the architecture does not take attention functions"
    if kernel not in ("sdpa", "eager", ATTENTION_NAME):
        return f"attention kernel {kernel!r} was asked for"
    if other_layers:
        return f"it has layers of type {', '.join(other_layers)}"
    if getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        return "its attention has a sliding window"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention scores are soft-capped"
    return None


def install(model: PreTrainedModel) -> Kernel:
    """Route a model's attention through `packed_attention`; returns the kernel it had, for `uninstall`."""
    had = model.config._attn_implementation
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    model.set_attn_implementation(ATTENTION_NAME)
    return "eager" if had == "eager" else "sdpa"


def uninstall(model: PreTrainedModel, kernel: Kernel) -> None:
    """Give a model its own attention back."""
    model.set_attn_implementation(kernel)
