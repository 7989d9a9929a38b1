"""The engine's own forward of Llama-style decoders: fused projections, paged attention, tied heads by storage."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quintet.rollout.engine.attention import StepPlan, paged_attention
from quintet.rollout.engine.kv_cache import KVCache
from quintet.rollout.engine.numerics import Kernels
from quintet.rollout.engine.spec import ModelSpec
from quintet.rollout.engine.weights import FusedWeights, LayerWeights

_ROPE_ROWS = 1024


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


class DecoderModel:
    """Weights in fused storage and the forward pass over them."""

    def __init__(self, spec: ModelSpec, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self._kernels = kernels
        self._rope = RopeTable(spec.inv_freq, spec.rope_scale, device, dtype)
        self._weights = FusedWeights(spec, device, dtype)

    @property
    def bytes(self) -> int:
        return self._weights.bytes

    @property
    def products(self) -> list[Tensor]:
        """One matrix of each kind that rows are multiplied with, for the check of row invariance."""
        layer = self._weights.layers[0]
        return [layer.qkv, layer.output, layer.gate_up, layer.down, self._weights.head]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """From a Hugging Face state dict; see `load_weights` for what is refused."""
        self._weights.load(weights)

    def forward(self, plan: StepPlan, cache: KVCache) -> Tensor:
        """Write the step's KV and return logits [plan.logit_count, vocabulary]."""
        spec, kernels = self.spec, self._kernels
        cos, sin = self._rope.rows(plan.positions_T, plan.last_position)
        x_TE = self._weights.embedding[plan.ids_T]
        for index, layer in enumerate(self._weights.layers):
            normed = rms_norm(x_TE, layer.input_norm, spec.norm_eps)
            x_TE = x_TE + self._attention(layer, normed, cos, sin, plan, cache.layer(index))
            normed = rms_norm(x_TE, layer.mlp_norm, spec.norm_eps)
            hidden = kernels.gated(kernels.linear(normed, layer.gate_up, layer.gate_up_bias))
            x_TE = x_TE + kernels.linear(hidden, layer.down, layer.down_bias)
        last = rms_norm(x_TE[plan.logit_rows], self._weights.norm, spec.norm_eps)
        return kernels.linear(last, self._weights.head, None)[: plan.logit_count]

    def _attention(
        self,
        layer: LayerWeights,
        x_TE: Tensor,
        cos: Tensor,
        sin: Tensor,
        plan: StepPlan,
        cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        spec = self.spec
        heads = spec.heads + 2 * spec.kv_heads
        fused = self._kernels.linear(x_TE, layer.qkv, layer.qkv_bias).view(-1, heads, spec.head_dim)
        qk, v = fused.split([heads - spec.kv_heads, spec.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([spec.heads, spec.kv_heads], dim=1)
            qk = torch.cat([rms_norm(q, layer.q_norm, spec.norm_eps), rms_norm(k, layer.k_norm, spec.norm_eps)], dim=1)
        q, k = rotate(qk, cos, sin).split([spec.heads, spec.kv_heads], dim=1)
        for stored, fresh in zip(cache, (k, v), strict=True):
            rows = fresh[: plan.tokens].reshape(-1, spec.head_dim)
            stored.view(-1, spec.head_dim).index_copy_(0, plan.write_rows, rows)
        mixed = paged_attention(q * spec.head_dim**-0.5, cache, plan, self._kernels, spec.kv_heads)
        return self._kernels.linear(mixed, layer.output, layer.output_bias)
