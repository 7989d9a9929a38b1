"""Tokenizer, config and weights of the model that a recipe names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from quintet.models.config import ModelConfig
from quintet.models.device import resolve_device
from quintet.models.lora import require_peft
from quintet.models.quiet import quiet_transformers
from quintet.models.source import TINY, Source, resolve_source
from quintet.models.tiny import tiny_hf_config, tiny_model, tiny_tokenizer
from quintet.models.tokenizer import Tokenizer
from quintet.types import QuintetError


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """The tokenizer with all end ids of the model: tokenizer, chat template, config and generation config.

    Raises QuintetError when the model cannot be found or has no usable tokenizer.
    """
    if config.name == TINY:
        return Tokenizer(tiny_tokenizer(config.tiny), name=TINY, reject_unknown=True)
    source = resolve_source(config)
    stop_ids = _end_ids(read_config(source, config)) + _end_ids(_read_generation_config(source))
    with quiet_transformers(), named(config, "tokenizer"):
        hf = _read_tokenizer(source, config)
    return Tokenizer(hf, stop_ids, name=config.name, uses_chat_template=config.use_chat_template is not False)


def load_plain_tokenizer(config: ModelConfig) -> Any:
    """The transformers tokenizer as it is, for a model that writes no answers and so needs no end token."""
    with quiet_transformers(), named(config, "tokenizer"):
        return _read_tokenizer(resolve_source(config), config)


def load_hf_config(config: ModelConfig) -> PretrainedConfig:
    """The transformers config: architecture, sizes, context length. Raises as `load_model` does, but quickly."""
    if config.name == TINY:
        return tiny_hf_config(config.tiny)
    hf_config = read_config(resolve_source(config), config)
    _refuse_quantised(hf_config, config)
    return hf_config


def load_model(config: ModelConfig, *, seed: int = 0) -> PreTrainedModel:
    """The causal language model with float32 weights on the configured device, in evaluation mode.

    `seed` initialises `builtin:tiny`; a PEFT adapter folder is loaded merged into its base. LoRA of the
    config is *not* applied here (see `lora.apply_lora`). Raises QuintetError when the model cannot be
    found, is no causal language model, is quantised, or cannot run with the configured attention.
    """
    device = resolve_device(config.device)
    attention = None if config.attention == "auto" else config.attention
    if config.name == TINY:
        with named(config, "model"):
            return _place(tiny_model(config.tiny, seed, attention), device)
    source = resolve_source(config)
    _refuse_quantised(read_config(source, config), config)
    with quiet_transformers(), named(config, "model"):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=config.trust_remote_code,
            **source.hub_kwargs,
        )
        if source.adapter is not None:
            model = _merge_adapter(model, source.adapter)
    return _place(model, device)


def _place(model: nn.Module, device: torch.device) -> PreTrainedModel:
    return cast(PreTrainedModel, model.to(device).eval())


def _merge_adapter(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    require_peft()
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload(safe_merge=True)


def read_config(source: Source, config: ModelConfig) -> PretrainedConfig:
    with quiet_transformers(), named(config, "config"):
        return AutoConfig.from_pretrained(source.path, trust_remote_code=config.trust_remote_code, **source.hub_kwargs)


def _read_generation_config(source: Source) -> GenerationConfig | None:
    with quiet_transformers():
        try:
            return GenerationConfig.from_pretrained(source.path, **source.hub_kwargs)
        except OSError:  # a model may come without one
            return None


def _read_tokenizer(source: Source, config: ModelConfig) -> Any:
    adapter_has_one = source.adapter is not None and (source.adapter / "tokenizer_config.json").is_file()
    path = str(source.adapter) if adapter_has_one else source.path
    return AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code, **source.hub_kwargs)


def _end_ids(config: PretrainedConfig | GenerationConfig | None) -> tuple[int, ...]:
    ids = None if config is None else config.eos_token_id
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)


def _refuse_quantised(hf_config: PretrainedConfig, config: ModelConfig) -> None:
    marks = hf_config.to_dict().get("quantization_config")
    if not marks:
        return
    method = marks.get("quant_method", "unknown method") if isinstance(marks, dict) else marks.quant_method
    why = (
        "merging a LoRA adapter into quantised weights would round the update away"
        if config.lora
        else "quantised weights cannot be trained"
    )
    raise QuintetError(
        f"model.name: {config.name!r} is quantised ({method}), and {why}.\n"
        "Name the full-precision model that it was made from."
    )


@contextmanager
def named(config: ModelConfig, what: str) -> Iterator[None]:
    """transformers' ways to say that a model cannot be had, as one error that names the model."""
    try:
        yield
    except (OSError, ValueError, ImportError, KeyError) as error:
        first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise QuintetError(
            f"model.name: the {what} of {config.name!r} cannot be loaded: {first_line.strip()[:300]}\n"
            "Give a folder or a hub id that this machine can reach; model.attention and trust_remote_code matter too."
        ) from error
