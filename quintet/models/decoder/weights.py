"""A Llama-style decoder's weights as they are multiplied: q, k, v are one matrix, gate and up another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# Field of `LayerWeights` -> what it is made of, in order, within a layer of the Hugging Face state dict
LAYER_PARTS: Mapping[str, tuple[str, ...]] = {
    "input_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "gate_up_bias": ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
    "down": ("mlp.down_proj.weight",),
    "down_bias": ("mlp.down_proj.bias",),
}


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

    @property
    def products(self) -> list[Tensor]:
        """The matrices that rows are multiplied with."""
        return [self.qkv, self.output, self.gate_up, self.down]


def layer_name(index: int, part: str) -> str:
    return f"model.layers.{index}.{part}"


def joined_layer(weights: Mapping[str, Tensor], index: int) -> LayerWeights:
    """Layer `index` of a Hugging Face state dict; what is joined is copied, differentiably."""
    fields: dict[str, Tensor | None] = {}
    for field, parts in LAYER_PARTS.items():
        names = [layer_name(index, part) for part in parts]
        if names[0] not in weights:
            fields[field] = None
        else:
            fields[field] = weights[names[0]] if len(names) == 1 else torch.cat([weights[name] for name in names])
    return LayerWeights(**fields)  # type: ignore[arg-type]  # None only where the class has it
