"""The reproducible engine's forward: decoder layers over paged attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quintet.models.decoder.forward import RopeTable, decoder_layer, rms_norm
from quintet.models.decoder.numerics import Kernels
from quintet.models.decoder.spec import ModelSpec
from quintet.rollout.engine.attention import StepPlan, paged_attention
from quintet.rollout.engine.kv_cache import KVCache
from quintet.rollout.engine.weights import FusedWeights


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
        return [*self._weights.layers[0].products, self._weights.head]

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """From a Hugging Face state dict; see `load_weights` for what is refused."""
        self._weights.load(weights)

    def forward(self, plan: StepPlan, cache: KVCache) -> Tensor:
        """Write the step's KV and return logits [plan.logit_count, vocabulary]."""
        spec, kernels = self.spec, self._kernels
        rope = self._rope.rows(plan.positions_T, plan.last_position)
        x_TE = self._weights.embedding[plan.ids_T]
        for index, layer in enumerate(self._weights.layers):
            kv = cache.layer(index)

            def attend(q: Tensor, k: Tensor, v: Tensor, kv: tuple[Tensor, Tensor] = kv) -> Tensor:
                for stored, fresh in zip(kv, (k, v), strict=True):
                    rows = fresh[: plan.tokens].reshape(-1, spec.head_dim)
                    stored.view(-1, spec.head_dim).index_copy_(0, plan.write_rows, rows)
                return paged_attention(q, kv, plan, kernels, spec.kv_heads)

            x_TE = decoder_layer(spec, kernels, layer, x_TE, rope, attend)
        last = rms_norm(x_TE[plan.logit_rows], self._weights.norm, spec.norm_eps)
        return kernels.linear(last, self._weights.head, None)[: plan.logit_count]
