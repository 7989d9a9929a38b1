"""What the embedded engine must know of an architecture, read from a Hugging Face config."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from quintet.types import QuintetError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and switches of a Llama-style decoder. `inv_freq` [head_dim / 2] float32."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    inv_freq: Tensor
    rope_scale: float

    @property
    def query_group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


def read_spec(config: PretrainedConfig) -> ModelSpec:
    """Raises QuintetError for an architecture, or a feature of one, that the engine does not compute."""
    family = config.model_type
    if family not in FAMILIES:
        _refuse(f"architecture {family!r}", f"it knows {', '.join(FAMILIES)}")
    if config.hidden_act != "silu":
        _refuse(f"{family} with hidden_act {config.hidden_act!r}", "it computes silu")
    if _window_in_use(config):
        _refuse(f"{family} with a sliding window of {config.sliding_window} tokens", "it computes full attention")
    heads = config.num_attention_heads
    bias = family == "qwen2" or (family != "mistral" and config.attention_bias)
    inv_freq, rope_scale = _rope(config)
    return ModelSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        norm_eps=config.rms_norm_eps,
        max_position=config.max_position_embeddings,
        qkv_bias=bias,
        output_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and config.mlp_bias,
        qk_norm=family == "qwen3",
        tied=config.tie_word_embeddings,
        inv_freq=inv_freq,
        rope_scale=rope_scale,
    )


def _refuse(what: str, why: str) -> None:
    raise QuintetError(f"rollout.engine: embedded does not serve {what} ({why}).\nSet rollout.engine: transformers.")


def _head_dim(config: PretrainedConfig) -> int:
    # Qwen2's config has no such field: its heads always divide the hidden size
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _window_in_use(config: PretrainedConfig) -> bool:
    """Whether any token could fall out of a sliding window within the model's own context."""
    if config.model_type == "llama" or config.sliding_window is None:
        return False
    if config.model_type != "mistral" and "sliding_attention" not in config.layer_types:
        return False
    return config.sliding_window < config.max_position_embeddings


def _rope(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Inverse frequencies and the factor on cos and sin."""
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind not in _ROPE_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse(f"{config.model_type} with rotary embedding {kind!r}", f"it computes whole {', '.join(_ROPE_TYPES)}")
    if kind != "default":
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return inv_freq, float(scale)
    width = _head_dim(config)
    return 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model's Hugging Face state dict."""
    hidden, q, kv = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rows = {"q": q, "k": kv, "v": kv}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (spec.vocab_size, hidden),
    }
    for index in range(spec.layers):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.{n}.weight": (hidden,) for n in ("input_layernorm", "post_attention_layernorm")}
        for name, size in rows.items():
            shapes |= _linear(f"{layer}.self_attn.{name}_proj", size, hidden, spec.qkv_bias)
        if spec.qk_norm:
            shapes |= {f"{layer}.self_attn.{n}_norm.weight": (spec.head_dim,) for n in "qk"}
        shapes |= _linear(f"{layer}.self_attn.o_proj", hidden, q, spec.output_bias)
        for name in ("gate", "up"):
            shapes |= _linear(f"{layer}.mlp.{name}_proj", spec.intermediate_size, hidden, spec.mlp_bias)
        shapes |= _linear(f"{layer}.mlp.down_proj", hidden, spec.intermediate_size, spec.mlp_bias)
    return shapes


def tied_names(spec: ModelSpec) -> list[tuple[str, ...]]:
    """Names of which one stands for all."""
    return [("model.embed_tokens.weight", "lm_head.weight")] if spec.tied else []


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})
