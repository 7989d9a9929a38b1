"""Tiny random models and samples for the train tests."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import resolve
from quintet.models.config import ModelConfig
from quintet.models.loader import load_tokenizer
from quintet.train.config import TrainConfig
from quintet.train.packing import TokenSample
from quintet.train.worker import LocalTrainWorker
from quintet.types import Experience, GroupId, VersionRun
from quintet.weights.memory import MemoryStore

VOCAB = 61
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}


def tiny_model(model_type: str = "llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random float32 model whose attention and head are far from uniform (weights of standard deviation 0.3)."""
    kernel = overrides.pop("attn_implementation", "sdpa")
    config = AutoConfig.for_model(model_type, **({**_SIZES, "initializer_range": 0.3} | overrides))
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation=kernel).float().eval()


def random_samples(seed: int, groups: list[tuple[int, list[int]]], vocab: int = VOCAB) -> list[TokenSample]:
    """`groups`: (prompt length, response lengths). About one response token in six is masked, never all."""
    rng = random.Random(seed)
    out = []
    for prompt_length, lengths in groups:
        prompt = [rng.randrange(1, vocab) for _ in range(prompt_length)]
        for length in lengths:
            mask = [int(rng.random() > 1 / 6) for _ in range(length)]
            mask[rng.randrange(length)] = 1
            out.append(TokenSample(prompt, [rng.randrange(1, vocab) for _ in range(length)], mask))
    return out


def plain_logprobs(model: PreTrainedModel, sample: TokenSample, temperature: float) -> torch.Tensor:
    """[response length] from one unpadded forward of the model itself, full logits: the reference."""
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0] / temperature
    logp = logits.log_softmax(-1)[len(sample.prompt_ids) - 1 : -1]
    return logp.gather(1, torch.tensor(list(sample.response_ids))[:, None])[:, 0] * torch.tensor(sample.loss_mask)


def exact_logprobs(model: PreTrainedModel, sample: TokenSample, temperature: float) -> torch.Tensor:
    """As `plain_logprobs`, in float64; `model` is left as it is."""
    return plain_logprobs(copy.deepcopy(model).double(), sample, temperature)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of all trained parameters; clears them."""
    out = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out


def largest_relative_gap(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Over tensors: max |found - expected| / max |expected|."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - g).abs().max() / g.abs().max().clamp_min(1e-30)) for n, g in expected.items())


def experiences(seed: int, groups: list[tuple[int, list[int]]], version: int = 3) -> list[Experience]:
    """Scored samples with random advantages, sampler, proximal and reference log-probabilities."""
    rng, out = random.Random(seed + 1000), []
    samples = iter(random_samples(seed, groups))
    for g, (_, lengths) in enumerate(groups):
        for index in range(len(lengths)):
            s = next(samples)
            n = len(s.response_ids)
            sampler, proximal, ref = ([f32(rng.uniform(-3.0, -1.0)) for _ in range(n)] for _ in range(3))
            out.append(
                Experience(
                    group_id=GroupId(f"p{g}"),
                    sample_index=index,
                    prompt_ids=list(s.prompt_ids),
                    response_ids=list(s.response_ids),
                    logprobs=sampler,
                    loss_mask=list(s.loss_mask),
                    reward=rng.random(),
                    weight_version=version,
                    weight_versions=[VersionRun(version, n)],
                    advantages=[f32(rng.gauss(0.0, 1.0))] * n,
                    proximal_logprobs=proximal,
                    ref_logprobs=ref,
                )
            )
    return out


def f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def make_worker(model: torch.nn.Module, algorithm: dict[str, Any] | None = None, **options: Any) -> LocalTrainWorker:
    """A worker on `model`; `options` beside the constructor's own are those of `TrainConfig`."""
    own = {
        k: options.pop(k)
        for k in ("temperature", "total_steps", "store", "ref_model", "dtype", "stopping", "kernels")
        if k in options
    }
    return LocalTrainWorker(
        model,
        tokenizer=load_tokenizer(ModelConfig()),
        config=TrainConfig(**options),
        algorithm=resolve(AlgorithmConfig(**(algorithm or {}))),
        **({"temperature": 0.7, "total_steps": 10, "store": MemoryStore(), "dtype": torch.float32} | own),
    )
