"""Which language model, on what device, in what precision. Torch-free: validated before anything heavy loads."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TinyConfig(BaseModel):
    """The built-in Llama-style model with a character tokenizer (`model.name: builtin:tiny`)."""

    model_config = ConfigDict(extra="forbid")

    hidden_size: int = Field(128, gt=0)
    intermediate_size: int = Field(384, gt=0)
    layers: int = Field(4, gt=0)
    heads: int = Field(4, gt=0)
    kv_heads: int = Field(2, gt=0)
    max_position: int = Field(256, gt=0, description="longest context in tokens")
    tie_embeddings: bool = True
    init_seed: int = Field(
        0, ge=0, description="its first weights; like any other model, it does not change with the run's seed"
    )
    alphabet: str = Field(
        "0123456789+-*=?. ", min_length=1, description="one token a character, special tokens come extra"
    )

    @model_validator(mode="after")
    def _check_shape(self) -> TinyConfig:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} must be an even multiple of heads {self.heads} (rotary halves)"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        twice = sorted({c for c in self.alphabet if self.alphabet.count(c) > 1})
        if twice:
            raise ValueError(f"alphabet names {' '.join(map(repr, twice))} more than once")
        return self


class LoraConfig(BaseModel):
    """Low-rank adapters by peft; the frozen base doubles as the reference policy."""

    model_config = ConfigDict(extra="forbid")

    r: int = Field(16, gt=0)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class ModelConfig(BaseModel):
    """`name`: `builtin:tiny`, `builtin:smollm2-135m`, a folder (also a PEFT adapter's), or a Hugging Face hub id."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field("builtin:tiny", description="builtin:tiny, builtin:smollm2-135m, a folder, or a hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    device: str = Field("auto", description="auto (cuda where there is one, else cpu), cpu, cuda, cuda:0 ...")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "float32",
        description="compute dtype; master weights are float32 always. auto: bfloat16 where the hardware has it",
    )
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, description="e.g. {enable_thinking: false}")
    use_chat_template: bool | None = Field(None, description="null: yes where the tokenizer has one")
    system_prompt: str | None = Field(None, description="put before messages that have no system message of their own")
    tiny: TinyConfig = Field(default_factory=TinyConfig)
    lora: LoraConfig | None = None
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _check_effect(self) -> ModelConfig:
        builtin = self.name.startswith("builtin:")
        if builtin and (self.revision is not None or self.trust_remote_code):
            raise ValueError(f"revision and trust_remote_code have no effect with {self.name}; remove them")
        if self.name != "builtin:tiny" and self.tiny != TinyConfig():
            raise ValueError(f"tiny has an effect only with name builtin:tiny, not with {self.name}; remove it")
        return self
