"""Reproducible numerics: what the trainer computes is what the engine sampled with, to the last bit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from quintet.models.config import LoraConfig, ModelConfig
from quintet.models.loader import load_model, load_tokenizer
from quintet.models.lora import apply_lora, merged_state_dict
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.build import make_engine as build_engine
from quintet.train.exact import trainer_kernels
from quintet.train.forward import PolicyForward
from quintet.train.packing import TokenSample
from quintet.types import Experience, ExperienceBatch, Group, QuintetError, Rollout, SamplingParams
from tests.rollout.small_models import CPU, decode, finish, make_group, make_model
from tests.train.helpers import gradients, largest_relative_gap, make_worker, plain_logprobs, random_samples, tiny_model

# Prompt length, samples, tokens: shared prompts, lengths around the blocks of 16 and 64 keys, one token only
REQUESTS = [(3, 3, 5), (17, 2, 50), (63, 2, 4), (64, 2, 1), (150, 1, 12), (9, 4, 13)]
PAGE = 8
TEMPERATURE = 0.7


def sampled(model: nn.Module, requests: list[tuple[int, int, int]], vocab: int, **options: Any) -> list[Rollout]:
    """Rollouts of one engine, by group and sample; the cache is too small for all at once."""
    rng = random.Random(3)
    engine = build_engine(
        model.config,  # type: ignore[arg-type]  # peft hands it on
        merged_state_dict(model),
        eos_ids=(),
        decode=decode,
        config=RolloutConfig(**({"numerics": "reproducible", "page_size": PAGE} | options)),
        device=CPU,
        dtype=torch.float32,
    )
    for index, (length, samples, tokens) in enumerate(requests):
        group: Group = make_group(f"p{index}", [rng.randrange(2, vocab) for _ in range(length)])
        engine.add_group(group, SamplingParams(n=samples, max_tokens=tokens, seed=5, temperature=TEMPERATURE))
    rollouts = finish(engine)
    assert (engine.stats().preemptions > 0) == ("kv_pages" in options)
    return rollouts


def samples_of(rollouts: list[Rollout]) -> list[TokenSample]:
    return [TokenSample(r.prompt_ids, r.response_ids, [1] * len(r.response_ids)) for r in rollouts]


@torch.no_grad()
def gap(forward: PolicyForward, rollouts: list[Rollout], at_once: int) -> float:
    """Largest |trainer - engine| with so many samples in a micro-batch."""
    found = 0.0
    for start in range(0, len(rollouts), at_once):
        some = rollouts[start : start + at_once]
        for row, rollout in zip(forward(samples_of(some)).logprobs_BT, some, strict=True):
            wanted = torch.tensor(rollout.logprobs)
            found = max(found, float((row[: len(wanted)] - wanted).abs().max()))
    return found


def adapted(base: PreTrainedModel) -> nn.Module:
    model = apply_lora(base, LoraConfig(r=3), seed=1)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize("name", ["llama-3-heads-per-kv", "qwen3", "lora"])
def test_trainer_and_engine_agree_bit_for_bit(name: str) -> None:
    model = adapted(make_model("qwen2")) if name == "lora" else make_model(name)
    rollouts = sampled(model, REQUESTS, 120, kv_pages=24, max_running=6, prefill_tokens=40)
    kernels = trainer_kernels(model, PAGE)
    together = PolicyForward(model, temperature=TEMPERATURE, kernels=kernels, head_chunk_tokens=50)
    assert [gap(together, rollouts, n) for n in (len(rollouts), 5, 1)] == [0.0] * 3
    apart = PolicyForward(model, temperature=TEMPERATURE, kernels=kernels, shared_prompt=False)
    assert gap(apart, rollouts, 4) == 0.0
    ordinary = PolicyForward(model, temperature=TEMPERATURE)
    assert 0.0 < gap(ordinary, rollouts, 4) < 1e-4, "it is the kernels that make it 0"


def test_long_prompts_and_many_samples_are_cut_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    rollouts = sampled(model, [(150, 3, 40), (20, 5, 20)], 120)
    kernels = trainer_kernels(model, PAGE)
    loss = [PolicyForward(model, kernels=kernels)(samples_of(rollouts)).logprobs_BT.sum()]
    loss[0].backward()
    whole = gradients(model)
    monkeypatch.setattr("quintet.train.exact._MAX_QUERIES", 48)
    monkeypatch.setattr("quintet.train.exact._MAX_SCORES", 4000)
    forward = PolicyForward(model, temperature=TEMPERATURE, kernels=kernels)
    assert gap(forward, rollouts, len(rollouts)) == 0.0
    PolicyForward(model, kernels=kernels)(samples_of(rollouts)).logprobs_BT.sum().backward()
    assert largest_relative_gap(gradients(model), whole) <= 1e-5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"activation_checkpointing": True}),
        ("qwen2", {"shared_prompt": False}),
        ("qwen3", {}),
        ("lora", {}),
    ],
)
def test_its_gradient_is_that_of_the_plain_forward(name: str, options: dict[str, Any]) -> None:
    model = adapted(tiny_model("qwen2", initializer_range=0.1)) if name == "lora" else tiny_model(name)
    samples = random_samples(1, [(5, [3, 7, 1, 4]), (9, [2, 80]), (3, [6]), (5, [5, 5])])
    reference = [plain_logprobs(model, s, TEMPERATURE) for s in samples]  # type: ignore[arg-type]  # peft hands it on
    torch.cat([r * torch.arange(1, len(r) + 1) for r in reference]).sum().backward()
    expected = gradients(model)
    forward = PolicyForward(
        model, temperature=TEMPERATURE, head_chunk_tokens=7, kernels=trainer_kernels(model, 16), **options
    )
    out = forward(samples).logprobs_BT
    (out * torch.arange(1, out.shape[1] + 1)).sum().backward()
    assert max(float((out[b, : len(r)] - r).detach().abs().max()) for b, r in enumerate(reference)) <= 1e-5
    assert largest_relative_gap(gradients(model), expected) <= 1e-5


def test_entropy_has_the_gradient_of_the_plain_forward_too() -> None:
    model, samples = tiny_model(), random_samples(1, [(5, [3, 7, 4])])
    found = []
    for options in ({}, {"kernels": trainer_kernels(model, 16)}):
        forward = PolicyForward(model, **options)  # type: ignore[arg-type]
        forward(samples).entropy_BT.sum().backward()
        forward.release()
        found.append(gradients(model))
    assert largest_relative_gap(found[1], found[0]) <= 1e-5


def test_activations_recomputed_change_no_bit_and_save_less() -> None:
    model, kept = tiny_model(), {}
    kernels, samples = trainer_kernels(model, 16), random_samples(2, [(20, [30, 30, 30, 30])])

    def run(recompute: bool) -> dict[str, torch.Tensor]:
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            loss = PolicyForward(model, kernels=kernels, activation_checkpointing=recompute)(samples).logprobs_BT.sum()
        kept[recompute] = sum(sizes)
        loss.backward()
        return gradients(model)

    plain, recomputed = run(False), run(True)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert kept[True] < kept[False] / 2


def test_a_model_that_computes_something_else_is_refused() -> None:
    model = tiny_model()
    kernels = trainer_kernels(model, 16)
    model.model.layers[0].mlp.act_fn = nn.GELU()
    with pytest.raises(QuintetError, match="computes another model than LlamaForCausalLM"):
        PolicyForward(model, kernels=kernels)


@pytest.mark.heavy
def test_smollm2_is_updated_on_exactly_what_it_sampled() -> None:
    config = ModelConfig(name="builtin:smollm2-135m", device="cpu")
    model = load_model(config).eval()
    texts = ["What is 3 + 4?", "Tell me of the sea, in one short line, please.", "Count to ten."]
    encode = load_tokenizer(config).encode
    engine = build_engine(
        model.config,
        model.state_dict(),
        eos_ids=(),
        decode=decode,
        config=RolloutConfig(numerics="reproducible", max_running=5),
        device=CPU,
        dtype=torch.float32,
    )
    for index, (text, tokens) in enumerate(zip(texts, (4, 30, 12), strict=True)):
        engine.add_group(make_group(f"p{index}", encode(text)), SamplingParams(n=2, max_tokens=tokens, seed=1))
    rollouts = [rollout for _ in range(9) for _, rollout in engine.step()]
    assert engine.has_work
    engine.update_weights(model.state_dict(), 0)  # preempts everything; the weights are the same
    rollouts += finish(engine)
    batch = ExperienceBatch(step=1, version=0, experiences=[experience(r) for r in rollouts])
    worker = make_worker(
        model, old="trainer", mini_batches=3, micro_batch_tokens=30, temperature=1.0, lr=1e-4,
        kernels=trainer_kernels(model, 16),
    )  # fmt: skip

    async def step() -> dict[str, float]:
        return (await worker.update(await worker.prepare(batch))).values

    values = asyncio.run(step())
    assert values["mismatch/max_abs_logprob"] == 0.0
    ordinary = PolicyForward(load_model(config).eval())
    assert 0.0 < gap(ordinary, rollouts, 6) < 1e-3


def experience(rollout: Rollout) -> Experience:
    tokens = len(rollout.response_ids)
    return Experience(
        group_id=rollout.group_id,
        sample_index=rollout.sample_index,
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        logprobs=rollout.logprobs,
        loss_mask=[1] * tokens,
        reward=float(rollout.sample_index),
        weight_version=0,
        weight_versions=rollout.weight_versions,
        advantages=[rollout.sample_index - 0.5] * tokens,
    )
