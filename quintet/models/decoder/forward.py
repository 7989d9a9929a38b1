"""One layer of a Llama-style decoder. Where keys come from (pages, a packed row) is the caller's part."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quintet.models.decoder.numerics import Kernels
from quintet.models.decoder.spec import ModelSpec
from quintet.models.decoder.weights import LayerWeights

_ROPE_ROWS = 1024

# Queries (scaled) [T, heads, head_dim], keys and values [T, kv_heads, head_dim] -> [T, heads * head_dim]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class RopeTable:
    """cos and sin per position, made in pieces of fixed size, so that a row's bits never depend on when it was made."""

    def __init__(self, inv_freq: Tensor, scale: float, device: torch.device, dtype: torch.dtype) -> None:
        self._inv_freq = inv_freq.float().cpu()
        self._scale = scale
        self._cos = torch.empty(0, len(inv_freq), device=device, dtype=dtype)
        self._sin = self._cos

    def rows(self, positions_T: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """[T, 1, head_dim / 2] each; `last` is the largest position asked for."""
        cos, sin = self.table(last)
        return cos[positions_T, None], sin[positions_T, None]

    def table(self, last: int) -> tuple[Tensor, Tensor]:
        """[positions, head_dim / 2] each, contiguous, at least up to position `last`."""
        while self._cos.shape[0] <= last:
            start = self._cos.shape[0]
            angles = torch.arange(start, start + _ROPE_ROWS, dtype=torch.float32)[:, None] * self._inv_freq
            self._cos = torch.cat([self._cos, (angles.cos() * self._scale).to(self._cos)])
            self._sin = torch.cat([self._sin, (angles.sin() * self._scale).to(self._sin)])
        return self._cos, self._sin


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, halves convention (arXiv 2104.09864 as in Llama's published code)."""
    left, right = x_THD.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised in float32 over the last axis (arXiv 1910.07467)."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def decoder_layer(
    spec: ModelSpec,
    kernels: Kernels,
    layer: LayerWeights,
    x_TE: Tensor,
    rope: tuple[Tensor, Tensor],
    attend: Attention,
) -> Tensor:
    """[T, E] -> [T, E]; T is a multiple of `kernels.row_tile`. `rope`: cos and sin as of `RopeTable.rows`."""
    q, k, v = _queries_keys_values(spec, kernels, layer, rms_norm(x_TE, layer.input_norm, spec.norm_eps), rope)
    mixed_TX = attend(q * spec.head_dim**-0.5, k, v)
    x_TE = x_TE + kernels.linear(mixed_TX, layer.output, layer.output_bias)
    normed = rms_norm(x_TE, layer.mlp_norm, spec.norm_eps)
    hidden = kernels.gated(kernels.linear(normed, layer.gate_up, layer.gate_up_bias))
    return x_TE + kernels.linear(hidden, layer.down, layer.down_bias)


def _queries_keys_values(
    spec: ModelSpec, kernels: Kernels, layer: LayerWeights, x_TE: Tensor, rope: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """[T, heads, head_dim], and [T, kv_heads, head_dim] twice; queries and keys normed and rotated."""
    heads = spec.heads + 2 * spec.kv_heads
    fused = kernels.linear(x_TE, layer.qkv, layer.qkv_bias).view(-1, heads, spec.head_dim)
    qk, v = fused.split([heads - spec.kv_heads, spec.kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = qk.split([spec.heads, spec.kv_heads], dim=1)
        qk = torch.cat([rms_norm(q, layer.q_norm, spec.norm_eps), rms_norm(k, layer.k_norm, spec.norm_eps)], dim=1)
    q, k = rotate(qk, *rope).split([spec.heads, spec.kv_heads], dim=1)
    return q, k, v
