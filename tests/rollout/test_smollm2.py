"""SmolLM2-135M in the embedded engine: transformers' ids, its log-probabilities, the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from quintet.models.config import ModelConfig
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.build import make_engine as build_engine
from quintet.rollout.engine.native.library import load_library
from quintet.types import SamplingParams
from tests.rollout.small_models import CPU, generate, ids_and_bits, make_group, reference_logits

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def smollm2():
    from quintet.models.loader import load_model, load_tokenizer

    config = ModelConfig(name="builtin:smollm2-135m", device="cpu")
    return load_model(config).eval(), load_tokenizer(config)


def make_engine(model, tokenizer, **options):
    return build_engine(
        model.config,
        model.state_dict(),
        eos_ids=tokenizer.eos_ids,
        decode=tokenizer.decode,
        config=RolloutConfig(**({"numerics": "reproducible"} | options)),
        device=CPU,
        dtype=torch.float32,
    )


def question(tokenizer, a, b):
    text = f"What is {a} + {b}? Answer with only the number."
    return make_group(f"{a}+{b}", tokenizer.encode_chat([{"role": "user", "content": text}]))


@torch.no_grad()
def test_greedy_ids_and_logprobs_equal_transformers(smollm2):
    model, tokenizer = smollm2
    groups = [question(tokenizer, a, b) for a, b in ((3, 4), (17, 20), (9, 1))]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    for rollout, group in zip(generate(make_engine(model, tokenizer), groups, params), groups, strict=True):
        ids = torch.tensor([group.prompt.token_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=list(tokenizer.eos_ids),
            pad_token_id=tokenizer.pad_id,
        )
        assert rollout.response_ids == out[0, ids.shape[1] :].tolist()
        expected = reference_logits(model, rollout).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(rollout.response_ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), chosen, atol=1e-4, rtol=0)


def test_alone_among_64_and_after_preemption_give_the_same_bits(smollm2):
    model, tokenizer = smollm2
    watched = question(tokenizer, 12, 15)
    params = SamplingParams(n=2, max_tokens=24, seed=1)
    alone = ids_and_bits(generate(make_engine(model, tokenizer), [watched], params))
    crowd = [question(tokenizer, a, b) for a in range(1, 6) for b in range(1, 7)][:31]
    among = generate(make_engine(model, tokenizer), [*crowd[:20], watched, *crowd[20:]], params)
    assert ids_and_bits(among[40:42]) == alone
    tight = make_engine(model, tokenizer, kv_pages=14)
    squeezed = generate(tight, [*crowd[:3], watched], params)
    assert tight.stats().preemptions > 0
    assert ids_and_bits(squeezed[6:]) == alone


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_bf16_logprobs_are_close_to_float32(smollm2, kernels):
    if not load_library().bf16:
        pytest.skip("no bfloat16 products here")
    model, tokenizer = smollm2
    groups = [question(tokenizer, a, b) for a, b in ((3, 4), (17, 20), (9, 1), (12, 15))]
    engine = build_engine(
        model.config,
        model.state_dict(),
        eos_ids=(),
        decode=tokenizer.decode,
        config=RolloutConfig(kernels=kernels),
        device=CPU,
        dtype=torch.bfloat16,
    )
    off = []
    for rollout in generate(engine, groups, SamplingParams(n=4, max_tokens=48)):
        expected = reference_logits(model, rollout).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(rollout.response_ids)[:, None]).squeeze(1)
        off.append((torch.tensor(rollout.logprobs) - chosen).abs())
    assert torch.cat(off).mean() <= 0.015


def test_float32_kernels_continue_a_long_context_as_transformers_does(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer.encode_chat([{"role": "user", "content": "Tell me a story about the sea. " * 150}])
    assert len(ids) > 1000
    engine = make_engine(model, tokenizer, numerics="fast", kernels="native")
    rollout = generate(engine, [make_group("long", ids)], SamplingParams(temperature=0.0, max_tokens=24))[0]
    expected = reference_logits(model, rollout)
    assert rollout.response_ids == expected.argmax(-1).tolist()
