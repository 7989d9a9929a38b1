"""The embedded engine against transformers: ids, log-probabilities, stops, aborts, weight updates."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MistralConfig

from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.build import make_engine as build_engine
from quintet.types import FailureKind, FinishReason, GroupId, QuintetError, SamplingParams, VersionRun
from tests.rollout.small_models import (
    CONFIGS,
    CPU,
    EOS,
    PATHS,
    VOCABULARY,
    case,
    decode,
    finish,
    generate,
    make_engine,
    make_group,
    make_model,
    random_prompts,
    reference_greedy,
    reference_logits,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_ids_equal_transformers_and_logprobs_agree(name, path):
    model = make_model(name)
    groups = random_prompts(5, 60)
    for rollout, group in zip(generate(make_engine(model, **PATHS[path]), groups, GREEDY), groups, strict=True):
        assert rollout.response_ids == reference_greedy(model, group.prompt.token_ids, 20)
        expected = reference_logits(model, rollout).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(rollout.response_ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), chosen, atol=1e-4, rtol=0)
        assert len(set(rollout.response_ids)) > 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 7, 1.0), (1.0, 0, 0.8), (0.9, 20, 0.6)]
)
def test_logprobs_are_of_the_truncated_renormalised_distribution(temperature, top_k, top_p, path):
    model = make_model("qwen2")
    params = SamplingParams(n=4, temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=16)
    for rollout in generate(make_engine(model, **PATHS[path]), random_prompts(3, 30), params):
        logits = reference_logits(model, rollout) / temperature
        if top_k:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        if top_p < 1.0:
            order = logits.sort(-1, descending=True)
            mass = order.values.softmax(-1)
            dropped = torch.zeros_like(mass, dtype=torch.bool).scatter(
                1, order.indices, mass.cumsum(-1) - mass >= top_p
            )
            logits = logits.masked_fill(dropped, -torch.inf)
        expected = logits.log_softmax(-1).gather(1, torch.tensor(rollout.response_ids)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("path", PATHS)
def test_prompt_logits_equal_a_transformers_forward(path):
    model = make_model("qwen3")
    engine = make_engine(model, **PATHS[path])
    ids = random_prompts(1, 200, seed=3)[0].prompt.token_ids
    expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(engine.prompt_logits(ids), expected, atol=1e-4, rtol=1e-4)
    assert engine.stats().kv_used == 0.0


def test_keyed_randomness():  # ROL04
    given = case("ROL04")["input"]
    params = SamplingParams(n=given["n"], seed=given["seed"], temperature=given["temperature"], max_tokens=8)
    model = make_model()
    group = make_group("p", [5, 6, 7])
    first, again = (generate(make_engine(model), [group], params) for _ in range(2))
    assert len({tuple(r.response_ids) for r in first}) > 1
    assert [r.response_ids for r in first] == [r.response_ids for r in again]
    other = generate(make_engine(model), [group], SamplingParams(n=4, seed=8, max_tokens=8))
    assert [r.response_ids for r in other] != [r.response_ids for r in first]


def test_attempt_of_a_group_draws_anew():
    model = make_model()
    group = make_group("p", [5, 6, 7])
    retried = make_group("p", [5, 6, 7])
    retried.group_id = group.group_id.next_attempt()
    params = SamplingParams(n=2, max_tokens=8)
    first, second = (generate(make_engine(model), [g], params) for g in (group, retried))
    assert [r.response_ids for r in first] != [r.response_ids for r in second]


@pytest.mark.parametrize("path", PATHS)
def test_any_declared_eos_or_stop_id_ends_a_sample(path):  # ROL08, ROL17
    model = make_model()
    group = make_group("p", [5, 6, 7])
    plain = generate(make_engine(model, eos_ids=(), **PATHS[path]), [group], GREEDY)[0]
    assert plain.finish_reason is FinishReason.LENGTH
    assert len(plain.response_ids) == 20
    stop = next(i for i in plain.response_ids if i != plain.response_ids[0])
    cut = plain.response_ids[: plain.response_ids.index(stop) + 1]
    by_eos = generate(make_engine(model, eos_ids=(VOCABULARY - 1, stop), **PATHS[path]), [group], GREEDY)[0]
    params = SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=(stop,))
    by_stop_id = generate(make_engine(model, eos_ids=(), **PATHS[path]), [group], params)[0]
    for rollout in (by_eos, by_stop_id):
        assert rollout.response_ids == cut
        assert rollout.loss_mask == [1] * len(cut)
        assert rollout.finish_reason is FinishReason.STOP
        assert rollout.text == decode(cut[:-1])


def test_stop_string_keeps_its_token_and_cuts_the_text():
    model = make_model()
    group = make_group("p", [5, 6, 7])
    plain = generate(make_engine(model, eos_ids=()), [group], GREEDY)[0]
    stop = plain.text[7:9]  # starts in the middle of the fourth token and ends in the fifth
    at = plain.text.index(stop)
    needed = -(-(at + 2) // 2)
    params = SamplingParams(temperature=0.0, max_tokens=20, stop=("nowhere", stop))
    rollout = generate(make_engine(model, eos_ids=()), [group], params)[0]
    assert rollout.response_ids == plain.response_ids[:needed]
    assert rollout.text == plain.text[:at]
    assert rollout.finish_reason is FinishReason.STOP


def test_sampled_ids_survive_a_decoder_that_is_not_injective():  # ROL01
    model = make_model()
    merged = build_engine(
        model.config,
        model.state_dict(),
        eos_ids=(),
        decode=lambda ids: "undo",
        config=RolloutConfig(),
        device=CPU,
        dtype=torch.float32,
    )
    rollout = generate(merged, [make_group("p", [5, 6, 7])], SamplingParams(max_tokens=2))[0]
    expected = generate(make_engine(model, eos_ids=()), [make_group("p", [5, 6, 7])], SamplingParams(max_tokens=2))[0]
    assert (rollout.text, rollout.response_ids) == ("undo", expected.response_ids)


def test_prompts_that_cannot_be_served_fail_and_the_others_go_on():  # ROL06
    given = case("ROL06")["input"]
    model = make_model()
    model.config.max_position_embeddings = given["context"]
    engine = make_engine(model, eos_ids=())
    good = make_group("good", list(range(2, 12)))
    bad = [
        make_group("long", list(range(2, 2 + given["prompt_tokens"]))),
        make_group("empty", []),
        make_group("foreign", [VOCABULARY]),
    ]
    rollouts = generate(engine, [*bad, good], SamplingParams(n=2, max_tokens=50))
    for rollout in rollouts[:6]:
        assert rollout.finish_reason is FinishReason.FAILED
        assert rollout.failure.kind is FailureKind.ENGINE
        assert rollout.response_ids == []
    assert "20 tokens" in rollouts[0].failure.message
    assert "context of 16" in rollouts[0].failure.message
    for rollout in rollouts[6:]:
        assert rollout.finish_reason is FinishReason.LENGTH
        assert len(rollout.response_ids) == 6  # the context of 16 less the prompt


@pytest.mark.parametrize(
    ("numerics", "kv_pages", "longest"),
    [("reproducible", 3, 15), ("fast", 2, 33)],  # pages of 8; pages of 32, the prompt has one of its own
)
def test_a_response_that_no_cache_could_hold_is_refused(numerics, kv_pages, longest):
    engine = make_engine(make_model(), numerics=numerics, kv_pages=kv_pages)
    rollout = generate(engine, [make_group("p", [2] * 10)], SamplingParams(max_tokens=longest + 1))[0]
    assert f"rollout.kv_pages is {kv_pages}" in rollout.failure.message
    assert generate(engine, [make_group("p", [2] * 10)], SamplingParams(max_tokens=longest))[0].failure is None


@pytest.mark.parametrize("path", PATHS)
def test_abort_ends_running_and_waiting_samples_with_their_tokens(path):
    engine = make_engine(make_model(), eos_ids=(), max_running=3, **PATHS[path])
    for name in ("a", "b", "c"):
        engine.add_group(make_group(name, [4, 5, 6]), SamplingParams(n=2, max_tokens=30))
    for _ in range(4):
        assert engine.step() == []
    engine.abort([GroupId("a"), GroupId("c")])
    done = finish(engine)
    assert [(r.group_id.prompt_id, r.finish_reason.value) for r in done] == [
        ("a", "aborted"),
        ("a", "aborted"),
        ("b", "length"),
        ("b", "length"),
        ("c", "aborted"),
        ("c", "aborted"),
    ]
    assert 0 < len(done[0].response_ids) < 30
    assert len(done[0].logprobs) == len(done[0].response_ids) == done[0].weight_versions[0].length
    assert [len(r.response_ids) for r in done[2:]] == [30, 30, 0, 0]
    assert engine.stats().kv_used == 0.0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["llama-tied", "llama-untied", "qwen2"])
def test_greedy_after_each_update_equals_a_fresh_engine(name, path):  # ROL03, WSY03, WSY01
    models = [make_model(name, seed) for seed in (0, 1, 2)]
    engine = make_engine(models[0], **PATHS[path])
    groups = random_prompts(4, 40)
    seen = []
    for version, model in enumerate(models):
        if version:
            weights = dict(model.state_dict())
            if name == "llama-tied":
                del weights["lm_head.weight"]  # the embedding alone must carry the head
            engine.update_weights(weights, version)
        rollouts = generate(engine, groups, GREEDY)
        fresh = generate(make_engine(model, **PATHS[path], version=version), groups, GREEDY)
        assert [r.response_ids for r in rollouts] == [r.response_ids for r in fresh]
        assert [r.weight_versions for r in rollouts] == [r.weight_versions for r in fresh]
        torch.testing.assert_close([r.logprobs for r in rollouts], [r.logprobs for r in fresh], atol=1e-5, rtol=0)
        seen.append([r.response_ids for r in rollouts])
    assert seen[0] != seen[1] != seen[2]


def test_tokens_carry_the_version_they_were_sampled_with():  # WSY06
    given = case("WSY06")["input"]
    before, after = given["tokens_before_update"], given["tokens_after_update"]
    old, new = given["versions"]
    models = make_model(seed=0), make_model(seed=1)
    engine = make_engine(models[0], eos_ids=(), version=old, numerics="reproducible")
    group = make_group("p", list(range(10, 30)))
    engine.add_group(group, SamplingParams(n=2, temperature=0.0, max_tokens=before + after))
    for _ in range(before):
        engine.step()
    engine.update_weights(models[1].state_dict(), new)
    for rollout in finish(engine):
        assert rollout.weight_versions == [VersionRun(old, before), VersionRun(new, after)]
        forced = make_group("p", group.prompt.token_ids + rollout.response_ids[:before])
        fresh = generate(make_engine(models[1], eos_ids=(), numerics="reproducible"), [forced], GREEDY)[0]
        assert rollout.response_ids[before:] == fresh.response_ids[:after]
        assert rollout.logprobs[before:] == fresh.logprobs[:after]  # no KV of the old weights is left


def _broken(weights, kind):
    name = "model.layers.1.mlp.down_proj.weight"
    if kind == "missing":
        del weights[name]
    elif kind == "shape":
        weights[name] = weights[name][:-1]
    elif kind == "nan":
        weights[name] = weights[name].clone().fill_(math.nan)
    elif kind == "unknown":
        weights["base_model.lora_A"] = weights[name]
    else:
        weights["lm_head.weight"] = weights["lm_head.weight"] + 1.0
    return weights


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "'model.layers.1.mlp.down_proj.weight' is missing"),
        ("shape", "has shape (63, 96), the model's is (64, 96)"),
        ("nan", "not finite"),
        ("unknown", "unknown tensor 'base_model.lora_A'"),
        ("tied", "are tied in the model's config but differ"),
    ],
)
def test_a_refused_update_leaves_the_old_weights_whole(kind, message):
    engine = make_engine(make_model(seed=0), version=5)
    groups = random_prompts(2, 20)
    before = generate(engine, groups, GREEDY)
    with pytest.raises(QuintetError, match=message.replace("(", r"\(").replace(")", r"\)")):
        engine.update_weights(_broken(dict(make_model(seed=1).state_dict()), kind), 6)
    assert generate(engine, groups, GREEDY)[1].logprobs == before[1].logprobs
    assert engine.version == 5


@pytest.mark.parametrize("path", PATHS)
def test_non_finite_logits_fail_the_sample_and_poison_no_page(path):
    model = make_model()
    engine = make_engine(model, kv_pages=40, **PATHS[path])
    groups = random_prompts(3, 30)
    expected = generate(engine, groups, GREEDY)
    huge = {k: v * 1e38 if "norm" in k else v for k, v in model.state_dict().items()}
    engine.update_weights(huge, 1)
    failed = generate(engine, groups, SamplingParams(n=3, max_tokens=4))
    assert {r.failure.message for r in failed} == {"the model's logits are not finite"}
    engine.update_weights(model.state_dict(), 2)
    assert [r.response_ids for r in generate(engine, groups, GREEDY)] == [r.response_ids for r in expected]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (GPT2Config(n_layer=1, n_embd=32, n_head=2), "architecture 'gpt2'"),
        (MistralConfig(sliding_window=16, max_position_embeddings=64, num_hidden_layers=1), "sliding window of 16"),
        (LlamaConfig(hidden_act="gelu", num_hidden_layers=1), "hidden_act 'gelu'"),
        (
            LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            "rotary embedding 'dynamic'",
        ),
    ],
)
def test_what_the_engine_does_not_compute_is_refused_by_name(config, named):
    with pytest.raises(QuintetError, match=f"{named}(.|\n)*rollout.engine: transformers"):
        build_engine(config, {}, eos_ids=(), decode=decode, config=RolloutConfig(), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("path", PATHS)
def test_a_groups_prompt_is_computed_once(path):
    engine = make_engine(make_model(), eos_ids=(EOS,), **PATHS[path])
    generate(engine, [make_group("a", [3] * 50), make_group("b", [4] * 30)], SamplingParams(n=8, max_tokens=4))
    stats = engine.stats()
    assert stats.prompt_tokens == 8 * 80
    assert stats.computed_prompt_tokens == 80


@pytest.mark.parametrize("path", PATHS)
def test_samples_that_start_later_take_over_the_prompt_of_a_running_one(path):
    engine = make_engine(make_model(), eos_ids=(), max_running=3, **PATHS[path])
    engine.add_group(make_group("a", [3] * 50), SamplingParams(max_tokens=5))
    engine.step()
    engine.add_group(make_group("b", [4] * 50), SamplingParams(n=3, max_tokens=12))  # two of them at once
    finish(engine)
    assert engine.stats().computed_prompt_tokens == 50 + 50 + 1  # the third: the prompt's last token only
