"""Fast numerics, C++ kernels and plain torch: distribution, long contexts, refill, preemption, the prefix cache."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.rollout.engine import products, torch_model
from quintet.rollout.engine.slots import State
from quintet.types import FinishReason, GroupId, SamplingParams
from tests.rollout.small_models import (
    EOS,
    PATHS,
    VOCABULARY,
    finish,
    generate,
    make_engine,
    make_group,
    make_model,
    random_prompts,
    reference_greedy,
    reference_logits,
)

FAST = {name: PATHS[name] for name in ("native", "torch")}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
MODEL = make_model()


@pytest.mark.parametrize("path", FAST)
def test_sampled_tokens_fit_the_models_distribution(path):
    count = 4000
    engine = make_engine(MODEL, eos_ids=(), max_running=512, **FAST[path])
    rollouts = generate(
        engine, [make_group("p", [5, 9, 40, 7])], SamplingParams(n=count, max_tokens=2, temperature=2.0)
    )
    first = [r.response_ids[0] for r in rollouts]
    assert chi_square(first, [5, 9, 40, 7]) < 4.5
    common = max(set(first), key=first.count)
    second = [r.response_ids[1] for r in rollouts if r.response_ids[0] == common]
    assert len(second) > 200
    assert chi_square(second, [5, 9, 40, 7, common]) < 4.5


@torch.no_grad()
def chi_square(tokens, context):
    """Standard deviations above its mean, of tokens against the exact distribution at temperature 2."""
    mass = (MODEL(torch.tensor([context])).logits[0, -1].double() / 2.0).softmax(-1).numpy() * len(tokens)
    observed = np.bincount(tokens, minlength=VOCABULARY)
    likely = mass >= 5
    rest = max(mass[~likely].sum(), 1e-9)
    chi = ((observed - mass)[likely] ** 2 / mass[likely]).sum() + (observed[~likely].sum() - rest) ** 2 / rest
    freedom = likely.sum()
    return (chi - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize("path", FAST)
def test_greedy_ids_equal_transformers_beyond_a_thousand_tokens(path):
    model = make_model("llama-3-heads-per-kv")
    model.config.max_position_embeddings = 2048
    ids = torch.randint(2, VOCABULARY, (1100,), generator=torch.Generator().manual_seed(4)).tolist()
    engine = make_engine(model, prefill_tokens=300, **FAST[path])  # the prompt comes in four chunks
    rollouts = generate(engine, [make_group("long", ids), make_group("short", ids[:3])], GREEDY)
    assert [r.response_ids for r in rollouts] == [reference_greedy(model, p, 24) for p in (ids, ids[:3])]


@pytest.mark.parametrize("path", FAST)
def test_freed_places_are_refilled_in_the_next_step_and_change_no_result(path):
    groups, lengths = random_prompts(9, 50), [5, 24, 9, 17, 3, 20, 12, 7, 15]
    expected = [reference_greedy(MODEL, g.prompt.token_ids, n) for g, n in zip(groups, lengths, strict=True)]
    engine = make_engine(MODEL, max_running=3, **FAST[path])
    for group, length in zip(groups, lengths, strict=True):
        engine.add_group(group, SamplingParams(temperature=0.0, max_tokens=length))
    done = []
    while True:
        ended = engine.step()
        done += [rollout for _, rollout in ended]
        if not engine.stats().waiting:
            break
        assert engine.stats().running == 3 - len(ended)
    found = {str(r.group_id): r.response_ids for r in done + finish(engine)}
    assert found == {str(group.group_id): ids for group, ids in zip(groups, expected, strict=True)}


@pytest.mark.parametrize("path", FAST)
def test_preempted_samples_go_on_where_they_were(path):
    groups = random_prompts(6, 100, seed=2)
    params = SamplingParams(n=3, max_tokens=80, seed=1)
    roomy = generate(make_engine(MODEL, eos_ids=(), **FAST[path]), groups, params)
    tight = make_engine(MODEL, eos_ids=(), kv_pages=24, prefill_tokens=40, **FAST[path])
    assert [r.response_ids for r in generate(tight, groups, params)] == [r.response_ids for r in roomy]
    assert tight.stats().preemptions > 0


@pytest.mark.parametrize("path", FAST)
def test_a_prompt_longer_than_the_budget_does_not_stall_the_others(path):
    engine = make_engine(MODEL, eos_ids=(), prefill_tokens=16, **FAST[path])
    engine.add_group(make_group("first", [5, 6, 7]), SamplingParams(n=2, max_tokens=40))
    engine.step()
    engine.add_group(make_group("long", [9] * 100), SamplingParams(max_tokens=1))
    steps = 0
    while not any(r.group_id == GroupId("long") for _, r in engine.step()):
        steps += 1
    assert steps == 6  # 100 tokens at 16 a step
    assert engine.stats().sampled_tokens == 2 * 8 + 1  # the first two went on in each of them


@pytest.mark.parametrize("path", FAST)
def test_the_next_turn_computes_only_what_is_new(path):
    prompt = list(range(2, 52))
    first = generate(make_engine(MODEL, eos_ids=(), **FAST[path]), [make_group("a", prompt)], GREEDY)[0]
    turn = [*prompt, *first.response_ids, 17, 18, 19]
    expected = generate(make_engine(MODEL, eos_ids=(), **FAST[path]), [make_group("b", turn)], GREEDY)[0]
    engine = make_engine(MODEL, eos_ids=(), **FAST[path])
    generate(engine, [make_group("a", prompt)], GREEDY)
    again = generate(engine, [make_group("b", turn)], GREEDY)[0]
    assert again.response_ids == expected.response_ids
    torch.testing.assert_close(again.logprobs, expected.logprobs, atol=1e-5, rtol=0)
    assert engine.stats().computed_prompt_tokens == 50 + 4  # the last sampled token and the three new ones


@pytest.mark.parametrize("path", FAST)
def test_the_prefix_cache_is_dropped_with_the_weights(path):
    groups = [make_group("a", list(range(2, 90)))]
    engine = make_engine(MODEL, **FAST[path])
    before = generate(engine, groups, GREEDY)[0]
    assert generate(engine, groups, GREEDY)[0].response_ids == before.response_ids
    assert engine.stats().computed_prompt_tokens == 88 + 1
    other = make_model(seed=1)
    engine.update_weights(other.state_dict(), 1)
    assert generate(engine, groups, GREEDY)[0].response_ids == reference_greedy(other, groups[0].prompt.token_ids, 24)
    assert engine.stats().computed_prompt_tokens == 88 + 1 + 88


def test_the_prefix_cache_keeps_the_pages_used_last():
    engine = make_engine(MODEL, eos_ids=(), prefix_cache_pages=4, **FAST["native"])
    one = SamplingParams(max_tokens=1)
    groups = {name: make_group(name, [place] * 64) for place, name in enumerate("abc", 2)}
    for name in "abab":
        generate(engine, [groups[name]], one)
    assert engine.stats().computed_prompt_tokens == 64 + 64 + 1 + 1
    generate(engine, [groups["c"]], one)  # takes the place of a
    for name, computed in (("b", 1), ("c", 1), ("a", 64)):
        known = engine.stats().computed_prompt_tokens
        generate(engine, [groups[name]], one)
        assert engine.stats().computed_prompt_tokens - known == computed


@pytest.mark.parametrize("path", FAST)
def test_weights_that_change_in_the_middle_take_over_the_tokens_so_far(path):
    other = make_model(seed=1)
    group = make_group("p", list(range(10, 60)))
    engine = make_engine(MODEL, eos_ids=(), version=3, **FAST[path])
    engine.add_group(group, SamplingParams(n=2, temperature=0.0, max_tokens=60))
    for _ in range(40):
        engine.step()
    engine.update_weights(other.state_dict(), 4)
    for rollout in finish(engine):
        assert [(run.version, run.length) for run in rollout.weight_versions] == [(3, 40), (4, 20)]
        so_far = group.prompt.token_ids + rollout.response_ids[:40]
        fresh = make_engine(other, eos_ids=(), **FAST[path])
        alone = generate(fresh, [make_group("q", so_far)], SamplingParams(temperature=0.0, max_tokens=20))[0]
        assert rollout.response_ids[40:] == alone.response_ids
        torch.testing.assert_close(rollout.logprobs[40:], alone.logprobs, atol=1e-5, rtol=0)


def test_a_decoding_step_costs_no_python_per_sample():
    calls = {}
    for samples in (2, 60):
        engine = make_engine(MODEL, eos_ids=(), **FAST["native"])
        engine.add_group(make_group("p", [5, 6, 7]), SamplingParams(n=samples, max_tokens=30))
        for _ in range(3):
            engine.step()
        count = 0

        def note(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(note)
        engine.step()
        sys.setprofile(None)
        assert engine.stats().running == samples
        calls[samples] = count
    assert calls[2] == calls[60]


commands = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 70), st.integers(1, 5), st.integers(1, 50)),
        st.tuples(st.just("step"), st.integers(1, 30)),
        st.tuples(st.just("abort"), st.integers(0, 8)),
        st.tuples(st.just("update")),
        st.tuples(st.just("fail")),
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(commands, st.integers(5, 12), st.integers(1, 6), st.sampled_from([1, 30, 500]), st.sampled_from([0, 3, 1000]))
def test_no_page_leaks_and_every_sample_comes_back_once(script, kv_pages, max_running, prefill_tokens, keep):
    engine = make_engine(
        MODEL,
        kv_pages=kv_pages,
        max_running=max_running,
        prefill_tokens=prefill_tokens,
        prefix_cache_pages=keep,
        **FAST["native"],
    )
    expected, done, added = set(), [], 0
    for command in script:
        if command[0] == "add":
            _, tokens, n, max_tokens = command
            group = make_group(f"g{added}", [5] * tokens)
            request = engine.add_group(group, SamplingParams(n=n, max_tokens=max_tokens))
            expected |= {(request, index) for index in range(n)}
            added += 1
        elif command[0] == "step":
            for _ in range(command[1]):
                done += engine.step()
        elif command[0] == "abort":
            engine.abort([GroupId(f"g{command[1]}")])
        elif command[0] == "update":
            engine.update_weights(MODEL.state_dict(), 1)
        else:
            done += engine.fail_all("asked to")
    while engine.has_work:
        done += engine.step()
    assert sorted((request, r.sample_index) for request, r in done) == sorted(expected)
    for _, rollout in done:
        assert len(rollout.logprobs) == len(rollout.response_ids) == sum(v.length for v in rollout.weight_versions)
        assert (EOS in rollout.response_ids) <= (rollout.finish_reason is FinishReason.STOP)
    cache = engine._cache
    assert cache.in_use == 0
    assert cache.idle <= keep
    cache.clear()
    assert sorted(cache._free) == list(range(1, kv_pages + 1))
    assert not (engine._slots.state != State.FREE).any()


def test_a_beginning_that_comes_back_for_ever_leaves_nothing_behind():
    engine = make_engine(MODEL, eos_ids=(), prefix_cache_pages=1000, **FAST["native"])
    group = make_group("same", [5] * 40)
    for _ in range(300):
        generate(engine, [group], SamplingParams(max_tokens=1))
    cache = engine._cache
    assert cache.idle == 2  # the prompt's pages; a token that is never fed back needs none
    assert len(cache._leaves) <= 2 * cache.idle + 64


def test_plain_torch_takes_all_pages_of_few_tokens_at_once_and_changes_no_result(monkeypatch):
    engine = make_engine(MODEL, eos_ids=(), **FAST["torch"])
    model, off = engine.model, []
    run = model.run

    def both(step):
        """The step as it is taken, and again with pages apart."""
        at_once, found = model._all_pages(step), model.logits(step)
        with monkeypatch.context() as patch:
            patch.setattr(torch_model, "_FEW_KEYS", 0)
            apart = model.logits(step)
        assert (at_once is None) == (len(step.ids) > len(step.member_start))
        if at_once is not None:
            off.append((found - apart).abs().max() / apart.abs().max())
        return run(step)

    model.run = both
    long = make_group("long", [1 + i % 90 for i in range(700)])  # beside it others have blocks without any key
    for group in [long, *random_prompts(5, 60, seed=5)]:
        engine.add_group(group, SamplingParams(n=3, max_tokens=70))
    finish(engine)
    assert len(off) > 60
    assert max(off) < 1e-5


def test_plain_torch_reads_own_pages_where_they_lie_or_gathers_them(monkeypatch):
    monkeypatch.setattr(torch_model, "_FEW_KEYS", 0)  # else these few are taken at once
    groups = random_prompts(6, 60, seed=3)
    expected = [reference_greedy(MODEL, group.prompt.token_ids, 70) for group in groups]
    engine = make_engine(MODEL, **FAST["torch"])
    places = []
    own_pages = engine.model._own_pages

    def note(step):
        found = own_pages(step)
        places.append(type(found.places) if found else None)
        return found

    engine.model._own_pages = note
    for group in groups[:3]:
        engine.add_group(group, SamplingParams(temperature=0.0, max_tokens=70))
    while engine.stats().sampled_tokens < 60:
        engine.step()
    between = engine._cache.take(40)  # pages of somebody else
    for group in groups[3:]:
        engine.add_group(group, SamplingParams(temperature=0.0, max_tokens=70))
    assert [r.response_ids for r in finish(engine)] == expected
    assert {slice, torch.Tensor} <= set(places)
    engine._cache.give(between)


def test_plain_torch_takes_lists_of_like_sizes_together(monkeypatch):
    monkeypatch.setattr(torch_model, "_FEW_SCORES", 0)  # else this little goes in one piece
    monkeypatch.setattr(torch_model, "_FEW_KEYS", 0)
    groups = random_prompts(8, 90, seed=4)
    expected = [reference_greedy(MODEL, group.prompt.token_ids, 24) for group in groups]
    engine = make_engine(MODEL, **FAST["torch"])
    most = 0
    shared = engine.model._shared

    def note(step):
        nonlocal most
        found = list(shared(step))
        most = max(most, len(found))
        return found

    engine.model._shared = note
    for index, group in enumerate(groups):
        engine.add_group(group, SamplingParams(temperature=0.0, max_tokens=24, n=1 + index))
    assert [r.response_ids for r in finish(engine)] == [ids for i, ids in enumerate(expected) for _ in range(1 + i)]
    assert most > 2


@pytest.mark.parametrize("few_keys", [0, torch_model._FEW_KEYS])
@pytest.mark.parametrize("float32_is_faster", [False, True])
def test_plain_torch_in_bf16_is_near_float32_by_either_product(monkeypatch, float32_is_faster, few_keys):
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bf16 here")
    monkeypatch.setattr(products, "_float32_is_faster", lambda: float32_is_faster)
    monkeypatch.setattr(torch_model, "_FEW_KEYS", few_keys)
    engine = make_engine(MODEL, dtype=torch.bfloat16, eos_ids=(), **FAST["torch"])
    assert engine.model._weights.compute is (torch.float32 if float32_is_faster else torch.bfloat16)
    off = []
    for rollout in generate(engine, random_prompts(5, 60), SamplingParams(n=3, max_tokens=70)):
        expected = reference_logits(MODEL, rollout).log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(rollout.response_ids)[:, None]).squeeze(1)
        off.append((torch.tensor(rollout.logprobs) - chosen).abs())
    assert 0 < torch.cat(off).mean() < 0.15  # nats; another token would be off by several
