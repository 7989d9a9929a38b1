"""Fused storage of a Llama-style decoder's weights, filled by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quintet.models.decoder.spec import ModelSpec
from quintet.models.decoder.weights import EMBEDDING, HEAD, LAYER_PARTS, NORM, LayerWeights, layer_name
from quintet.rollout.engine.loading import load_weights


class FusedWeights:
    """Tied heads share storage."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec, self._device, self._dtype = spec, device, dtype
        self.embedding = self._empty(spec.vocab_size, spec.hidden_size)
        self.head = self.embedding if spec.tied else self._empty(spec.vocab_size, spec.hidden_size)
        self.norm = self._empty(spec.hidden_size)
        self.layers = [self._new_layer() for _ in range(spec.layers)]
        self._targets = self._named_targets()

    @property
    def bytes(self) -> int:
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in self._targets.values()}.values())

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """From a Hugging Face state dict; see `load_weights` for what is refused."""
        load_weights(self._targets, weights)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, device=self._device, dtype=self._dtype)

    def _new_layer(self) -> LayerWeights:
        spec = self._spec
        qkv = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        return LayerWeights(
            input_norm=self._empty(spec.hidden_size),
            qkv=self._empty(qkv, spec.hidden_size),
            qkv_bias=self._empty(qkv) if spec.qkv_bias else None,
            q_norm=self._empty(spec.head_dim) if spec.qk_norm else None,
            k_norm=self._empty(spec.head_dim) if spec.qk_norm else None,
            output=self._empty(spec.hidden_size, spec.heads * spec.head_dim),
            output_bias=self._empty(spec.hidden_size) if spec.output_bias else None,
            mlp_norm=self._empty(spec.hidden_size),
            gate_up=self._empty(2 * spec.intermediate_size, spec.hidden_size),
            gate_up_bias=self._empty(2 * spec.intermediate_size) if spec.mlp_bias else None,
            down=self._empty(spec.hidden_size, spec.intermediate_size),
            down_bias=self._empty(spec.hidden_size) if spec.mlp_bias else None,
        )

    def _named_targets(self) -> dict[str, Tensor]:
        """Hugging Face name -> the part of the fused storage it is copied into."""
        spec = self._spec
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        sizes = {1: None, 2: [spec.intermediate_size] * 2, 3: [q, kv, kv]}
        targets = {EMBEDDING: self.embedding, NORM: self.norm, HEAD: self.head}
        for index, layer in enumerate(self.layers):
            for field, names in LAYER_PARTS.items():
                fused: Tensor | None = getattr(layer, field)
                if fused is None:
                    continue
                split = sizes[len(names)]
                parts = (fused,) if split is None else fused.split(split)
                targets |= {layer_name(index, name): part for name, part in zip(names, parts, strict=True)}
        return targets
