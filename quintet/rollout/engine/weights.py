"""A Llama-style decoder's weights in fused storage: q, k, v are one matrix, gate and up another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.rollout.engine.loading import load_weights
from quintet.rollout.engine.spec import ModelSpec


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Tensor
    qkv: Tensor  # [(heads + 2 kv_heads) * head_dim, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor  # [hidden, heads * head_dim]
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor  # [2 * intermediate, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, intermediate]
    down_bias: Tensor | None


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
        targets = {
            "model.embed_tokens.weight": self.embedding,
            "model.norm.weight": self.norm,
            "lm_head.weight": self.head,
        }
        for index, layer in enumerate(self.layers):
            for name, tensor in self._layer_targets(layer).items():
                targets[f"model.layers.{index}.{name}"] = tensor
        return targets

    def _layer_targets(self, layer: LayerWeights) -> dict[str, Tensor]:
        spec = self._spec
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        fused = {
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): (layer.qkv, layer.qkv_bias, [q, kv, kv]),
            ("mlp.gate_proj", "mlp.up_proj"): (layer.gate_up, layer.gate_up_bias, [spec.intermediate_size] * 2),
            ("self_attn.o_proj",): (layer.output, layer.output_bias, [spec.hidden_size]),
            ("mlp.down_proj",): (layer.down, layer.down_bias, [spec.hidden_size]),
        }
        targets = {"input_layernorm.weight": layer.input_norm, "post_attention_layernorm.weight": layer.mlp_norm}
        if layer.q_norm is not None and layer.k_norm is not None:
            targets |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
        for names, (weight, bias, sizes) in fused.items():
            targets |= {f"{n}.weight": part for n, part in zip(names, weight.split(sizes), strict=True)}
            if bias is not None:
                targets |= {f"{n}.bias": part for n, part in zip(names, bias.split(sizes), strict=True)}
        return targets
