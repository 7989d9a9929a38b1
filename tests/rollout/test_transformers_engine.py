"""The plain transformers engine: an architecture the embedded one does not know, the same semantics."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

from quintet.rollout.config import RolloutConfig
from quintet.rollout.transformers_engine import TransformersEngine, TransformersRolloutWorker
from quintet.types import FinishReason, GroupId, QuintetError, SamplingParams, VersionRun
from quintet.weights.memory import MemoryStore
from tests.rollout.small_models import (
    EOS,
    VOCABULARY,
    decode,
    finish,
    generate,
    make_group,
    make_model,
    random_prompts,
    reference_greedy,
    reference_logits,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def gpt2(seed=0):
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2,
        n_embd=64,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=320,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=EOS,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def make(model, *, eos_ids=(EOS,), version=0, **options):
    config = RolloutConfig(engine="transformers", **options)
    return TransformersEngine(model, eos_ids=eos_ids, decode=decode, config=config, version=version)


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_greedy_ids_and_logprobs_of_ragged_prompts_equal_transformers(name):
    model = gpt2() if name == "gpt2" else make_model(name)
    groups = random_prompts(7, 60)
    for rollout, group in zip(generate(make(model, max_running=4), groups, GREEDY), groups, strict=True):
        assert rollout.response_ids == reference_greedy(model, group.prompt.token_ids, 20)
        expected = reference_logits(model, rollout).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(rollout.response_ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), chosen, atol=1e-4, rtol=0)


def test_sampling_is_keyed_and_independent_of_the_number_of_rows():
    model = gpt2()
    groups = random_prompts(5, 20)
    params = SamplingParams(n=3, max_tokens=12, seed=5)
    wide, narrow = (generate(make(model, max_running=rows), groups, params) for rows in (64, 2))
    assert [r.response_ids for r in wide] == [r.response_ids for r in narrow]
    assert len({tuple(r.response_ids) for r in wide[:3]}) > 1


def test_an_update_in_flight_splits_the_versions_and_later_tokens_are_of_the_new_model():
    engine = make(gpt2(0), eos_ids=(), version=3)
    new = gpt2(1)
    engine.add_group(make_group("p", [4, 5, 6]), SamplingParams(n=2, temperature=0.0, max_tokens=16))
    for _ in range(10):
        engine.step()
    weights = dict(new.state_dict())
    del weights["lm_head.weight"]  # tied
    engine.update_weights(weights, 4)
    for rollout in finish(engine):
        assert rollout.weight_versions == [VersionRun(3, 10), VersionRun(4, 6)]
        assert rollout.response_ids[10:] == reference_greedy(new, [4, 5, 6, *rollout.response_ids[:10]], 6)


def test_abort_failure_and_stops():
    engine = make(gpt2(), eos_ids=(), max_running=4)
    engine.add_group(make_group("long", [2] * 320), GREEDY)
    engine.add_group(make_group("a", [4, 5]), SamplingParams(n=3, max_tokens=30))
    engine.add_group(make_group("b", [4, 5]), GREEDY)
    for _ in range(3):
        engine.step()
    engine.abort([GroupId("a")])
    done = {r.group_id.prompt_id: r for r in finish(engine)}
    assert done["a"].finish_reason is FinishReason.ABORTED
    assert len(done["a"].response_ids) == 3
    assert len(done["b"].response_ids) == 20
    text = done["b"].text
    cut = generate(
        make(gpt2(), eos_ids=()), [make_group("b", [4, 5])], SamplingParams(temperature=0.0, stop=(text[8:10],))
    )
    assert cut[0].text == text[: text.index(text[8:10])]


def test_the_worker_serves_and_updates():
    store = MemoryStore()
    group = make_group("p", [4, 5, 6])

    async def main():
        config = RolloutConfig(engine="transformers")
        worker = TransformersRolloutWorker(gpt2(0), eos_ids=(EOS,), decode=decode, config=config)
        first = await worker.generate([group], GREEDY, 0)
        await worker.update_weights(store.publish(gpt2(1).state_dict(), 1), 1)
        second = await worker.generate([group], GREEDY, 1)
        await worker.close()
        return first[0].response_ids, second[0].response_ids

    expected = tuple(reference_greedy(gpt2(seed), group.prompt.token_ids, 20) for seed in (0, 1))
    assert asyncio.run(asyncio.wait_for(main(), 60)) == expected


def test_reproducible_numerics_are_refused():
    with pytest.raises(QuintetError, match="embedded only"):
        make(gpt2(), numerics="reproducible")
