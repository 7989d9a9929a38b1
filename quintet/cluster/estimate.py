"""How much memory and disk a run will take, before its weights load. Formulas in docs/observability.md.

Weights and optimizer state are exact; activations and the KV cache are estimates of the right size.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from quintet.algorithms.offline import OfflineAlgorithm
from quintet.algorithms.presets import Algorithm
from quintet.config import RunConfig
from quintet.models.config import LoraConfig
from quintet.rollout.engine.step import PAGE

_FLOAT32 = 4
_ADAMW = 8  # two float32 moments
_JOURNAL_PER_TOKEN, _JOURNAL_PER_SAMPLE = 9, 400  # bytes, see buffer/journal.py


def parameter_counts(hf_config: PretrainedConfig, config: RunConfig) -> tuple[int, int]:
    """(all, trained) parameters, counted on a model without storage; tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=config.model.trust_remote_code)
    every = sum(p.numel() for p in model.parameters())
    return every, every if config.model.lora is None else _lora_parameters(model, config.model.lora)


def _lora_parameters(model: nn.Module, lora: LoraConfig) -> int:
    head = model.get_output_embeddings()  # type: ignore[operator]
    wanted = None if lora.target_modules == "all-linear" else set(lora.target_modules)
    linears = (
        (n.rpartition(".")[2], m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head
    )
    return sum(lora.r * (m.in_features + m.out_features) for name, m in linears if wanted is None or name in wanted)


def memory_estimate(
    config: RunConfig,
    algorithm: Algorithm,
    hf_config: PretrainedConfig,
    counts: tuple[int, int],
    *,
    dtype: torch.dtype,
    prompt_tokens: tuple[float, int],
) -> dict[str, int]:
    """Bytes by what they are for. `counts`: (all, trained) parameters; `prompt_tokens`: (mean, longest)."""
    every, trained = counts
    has_copy = algorithm.needs_ref and config.model.lora is None
    return {
        "master weights": _FLOAT32 * every,
        "gradients": _FLOAT32 * trained,
        "AdamW moments": _ADAMW * trained,
        "reference": _FLOAT32 * every if has_copy else 0,
        "critic": (2 * _FLOAT32 + _ADAMW) * every if algorithm.needs_values else 0,  # weights, gradients, moments
        "published version": 2 * _FLOAT32 * every,  # the new one is copied while the old one is still there
        "engine weights": dtype.itemsize * every,
        "KV cache": _kv_bytes(config, algorithm, hf_config, dtype, prompt_tokens[1]),
        "activations": _activation_bytes(config, hf_config, dtype, prompt_tokens[0]),
    }


def fixed_bytes(estimate: Mapping[str, int]) -> int:
    """What does not depend on batch sizes: a machine with less cannot run this at all."""
    return sum(size for name, size in estimate.items() if name not in ("KV cache", "activations"))


def _kv_bytes(
    config: RunConfig, algorithm: Algorithm, hf_config: PretrainedConfig, dtype: torch.dtype, longest_prompt: int
) -> int:
    """Keys and values of all samples that run together at full length, each group's prompt once."""
    text = hf_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rollout = config.rollout
    per_step = rollout.groups_per_step * algorithm.rollouts_per_group(rollout.group_size)
    running = min(rollout.max_running, per_step * (1 + algorithm.max_staleness))
    tokens = running * rollout.max_tokens + -(-running // rollout.group_size) * longest_prompt
    if rollout.kv_pages is not None:
        page = rollout.page_size if rollout.numerics == "reproducible" else PAGE
        tokens = min(tokens, rollout.kv_pages * page)
    return 2 * text.num_hidden_layers * heads * head_dim * dtype.itemsize * tokens


def offline_memory_estimate(
    config: RunConfig,
    algorithm: OfflineAlgorithm,
    hf_config: PretrainedConfig,
    counts: tuple[int, int],
    *,
    dtype: torch.dtype,
    row_tokens: float,
) -> dict[str, int]:
    """As `memory_estimate`, of an offline preset; `row_tokens`: mean of prompt and answers together."""
    every, trained = counts
    has_copy = algorithm.needs_ref and config.model.lora is None
    tokens = min(config.train.micro_batch_tokens, int(config.offline.batch_size * row_tokens))
    return {
        "master weights": _FLOAT32 * every,
        "gradients": _FLOAT32 * trained,
        "AdamW moments": _ADAMW * trained,
        "reference": _FLOAT32 * every if has_copy else 0,
        "activations": _forward_bytes(config, hf_config, dtype, tokens),
    }


def offline_disk_estimate(config: RunConfig, algorithm: OfflineAlgorithm, counts: tuple[int, int]) -> dict[str, int]:
    """As `disk_estimate`, of an offline preset."""
    every, trained = counts
    has_copy = algorithm.needs_ref and config.model.lora is None
    checkpoint = (_FLOAT32 + _ADAMW) * trained + (_FLOAT32 * every if has_copy else 0)
    return {"checkpoints": checkpoint * _checkpoints_kept(config), "final and starting model": _models(config, every)}


def _checkpoints_kept(config: RunConfig) -> int:
    return config.checkpoint.keep_last + int(config.checkpoint.keep_best) + 1  # one more while it is being written


def _models(config: RunConfig, parameters: int) -> int:
    return _FLOAT32 * parameters * (2 if config.warm_start.steps else 1)


def _activation_bytes(config: RunConfig, hf_config: PretrainedConfig, dtype: torch.dtype, mean_prompt: float) -> int:
    rollout, train = config.rollout, config.train
    samples = rollout.groups_per_step * rollout.group_size
    prompts = rollout.groups_per_step if train.shared_prompt else samples
    step_tokens = int(samples * rollout.max_tokens + prompts * mean_prompt)
    tokens = min(train.micro_batch_tokens, step_tokens // train.mini_batches)
    return _forward_bytes(config, hf_config, dtype, tokens)


def _forward_bytes(config: RunConfig, hf_config: PretrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """About 14 hidden and 5 intermediate widths per token and layer are kept for the backward pass of a Llama-style
    block; with checkpointing one hidden width, plus one block in full. The head's chunk of logits comes on top."""
    text, train = hf_config.get_text_config(), config.train
    block = 14 * text.hidden_size + 5 * getattr(text, "intermediate_size", 4 * text.hidden_size)
    layers = text.num_hidden_layers
    per_token = layers * text.hidden_size + block if train.activation_checkpointing else layers * block
    logits = 2 * _FLOAT32 * min(tokens, train.head_chunk_tokens) * text.vocab_size
    return dtype.itemsize * tokens * per_token + logits


def disk_estimate(config: RunConfig, algorithm: Algorithm, counts: tuple[int, int]) -> dict[str, int]:
    """Bytes in the run folder at its fullest, by what they are for."""
    every, trained = counts
    checkpoint = (_FLOAT32 + _ADAMW) * trained
    if algorithm.needs_ref and config.model.lora is None:
        checkpoint += _FLOAT32 * every
    if algorithm.needs_values:
        checkpoint += (_FLOAT32 + _ADAMW) * every
    rollouts = algorithm.rollouts_per_group(config.rollout.group_size)
    samples = config.steps * config.rollout.groups_per_step * rollouts
    return {
        "checkpoints": checkpoint * _checkpoints_kept(config),
        "final and starting model": _models(config, every),
        "journal": samples * (_JOURNAL_PER_TOKEN * config.rollout.max_tokens + _JOURNAL_PER_SAMPLE),
    }


def available_memory(device: torch.device) -> int | None:
    """Bytes that can still be had on the device, limits of a container included; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return None
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    known = [int(fields["MemAvailable"].split()[0]) * 1024]
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        known.append(int(text) - int(used.read_text()))
    return min(known)


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
