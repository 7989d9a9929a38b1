"""Small random models and the transformers numbers they are compared with."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.build import make_engine as build_engine
from quintet.rollout.engine.sync import SyncEngine
from quintet.types import Group, GroupId, Prompt, Rollout, SamplingParams

VOCABULARY = 120
EOS = 1
CPU = torch.device("cpu")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 320,
    "initializer_range": 0.3,  # peaked enough for ids to differ from prompt to prompt
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-untied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama-biased": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-3-heads-per-kv": lambda: LlamaConfig(
        **(SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96})
    ),
    "llama3-rope": lambda: LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 40,
        },
    ),
    "yarn-rope": lambda: LlamaConfig(
        **SIZES,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 80,
        },
    ),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
}


def case(case_id: str) -> dict:
    """A reported case from tests/data, by its id."""
    path = Path(__file__).parents[1] / "data" / "cases_rollout.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return next(row for row in rows if row["id"] == case_id)


def make_model(name: str = "llama-tied", seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:  # initialised to constants, which would hide a missing one
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def decode(ids: list[int]) -> str:
    """Two characters a token: 'aa', 'ab' ... so that text tells ids apart."""
    return "".join(chr(97 + i // 26) + chr(97 + i % 26) for i in ids)


# What each engine test runs on: numerics, and for fast numerics the path
PATHS = {
    "native": {"numerics": "fast", "kernels": "native"},
    "torch": {"numerics": "fast", "kernels": "torch"},
    "reproducible": {"numerics": "reproducible", "page_size": 8},
}


def make_engine(
    model: PreTrainedModel,
    *,
    eos_ids: tuple[int, ...] = (EOS,),
    version: int = 0,
    dtype: torch.dtype = torch.float32,
    **options,
) -> SyncEngine:
    if options.get("numerics") == "reproducible":
        options = {"page_size": 8} | options
    return build_engine(
        model.config,
        model.state_dict(),
        eos_ids=eos_ids,
        decode=decode,
        config=RolloutConfig(**({"max_running": 64} | options)),
        device=CPU,
        dtype=dtype,
        version=version,
    )


def make_group(name: str, token_ids: list[int]) -> Group:
    return Group(GroupId(name), Prompt(name, token_ids))


def random_prompts(count: int, longest: int, seed: int = 0) -> list[Group]:
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for index in range(count):
        size = int(torch.randint(1, longest + 1, (), generator=generator))
        groups.append(make_group(f"p{index}", torch.randint(2, VOCABULARY, (size,), generator=generator).tolist()))
    return groups


def finish(engine: SyncEngine, limit: int = 5000) -> list[Rollout]:
    """Step until nothing is left; rollouts by request, then sample index."""
    done = []
    for _ in range(limit):
        if not engine.has_work:
            return [rollout for _, rollout in sorted(done, key=lambda pair: (pair[0], pair[1].sample_index))]
        done += engine.step()
    raise AssertionError(f"not finished after {limit} steps")


def generate(engine: SyncEngine, groups: list[Group], params: SamplingParams) -> list[Rollout]:
    for group in groups:
        engine.add_group(group, params)
    return finish(engine)


def ids_and_bits(rollouts: list[Rollout]) -> list[tuple[list[int], list[float]]]:
    return [(r.response_ids, r.logprobs) for r in rollouts]


@torch.no_grad()
def reference_greedy(model: PreTrainedModel, prompt_ids: list[int], max_tokens: int) -> list[int]:
    """transformers' own greedy continuation, EOS included."""
    out = model.generate(
        torch.tensor([prompt_ids]),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
    )
    return out[0, len(prompt_ids) :].tolist()


@torch.no_grad()
def reference_logits(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """Logits [response, vocabulary] that each response token was sampled from, by one transformers forward."""
    ids = rollout.prompt_ids + rollout.response_ids
    logits = model(torch.tensor([ids])).logits[0].float()
    return logits[len(rollout.prompt_ids) - 1 : -1]
