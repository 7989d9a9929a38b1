"""Pages and scheduling: nothing leaks, nothing is overwritten, the oldest always ends."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.rollout.engine.kv_cache import KVCache
from quintet.types import GroupId, SamplingParams
from tests.rollout.small_models import CPU, finish, generate, ids_and_bits, make_engine, make_group, make_model

MODEL = make_model()


def make_cache(capacity: int = 10, page_size: int = 4) -> KVCache:
    return KVCache(
        layers=1, kv_heads=1, head_dim=2, page_size=page_size, capacity=capacity, device=CPU, dtype=torch.float32
    )


def test_the_last_partial_page_is_copied_when_one_of_its_owners_writes():
    cache = make_cache()
    first: list[int] = []
    cache.make_writable(first, 0, 6)
    keys = cache.layer(0)[0]
    keys[first[1], :4] = 7.0  # tokens 4 and 5
    second = cache.pool.share(first)
    assert cache.missing(second, 6, 7) == 1
    cache.make_writable(second, 6, 7)
    assert second[0] == first[0]
    assert second[1] != first[1]
    assert cache.layer(0)[0][second[1], :4].tolist() == [7.0] * 4
    assert cache.missing(first, 6, 7) == 0  # the other owner is alone with the original now
    cache.pool.release(first)
    cache.pool.release(second)
    assert cache.pool.used == 0


def test_the_cache_grows_with_the_pages_in_use_and_keeps_what_it_holds():
    cache = make_cache(capacity=1000)
    small = cache.bytes
    pages: list[int] = []
    cache.make_writable(pages, 0, 4)
    cache.layer(0)[0][pages[0]] = 3.0
    cache.make_writable(pages, 4, 4000)
    assert len(set(pages)) == 1000
    assert cache.bytes == 1001 * 4 * 2 * 2 * 4 > small
    assert cache.layer(0)[0][pages[0]].tolist() == [3.0] * 8
    assert cache.pool.free == 0


def test_page_zero_is_never_handed_out():
    cache = make_cache(capacity=5)
    pages: list[int] = []
    cache.make_writable(pages, 0, 20)
    assert sorted(pages) == [1, 2, 3, 4, 5]


commands = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 5), st.integers(1, 12)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 8)),
        st.tuples(st.just("update")),
        st.tuples(st.just("fail")),
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(commands, st.integers(7, 20), st.integers(1, 6), st.sampled_from([1, 30, 500]))
def test_no_page_leaks_and_every_sample_comes_back_once(script, kv_pages, max_running, prefill_tokens):
    engine = make_engine(
        MODEL,
        eos_ids=(),
        numerics="reproducible",
        kv_pages=kv_pages,
        max_running=max_running,
        prefill_tokens=prefill_tokens,
    )
    expected, done, added = set(), [], 0
    for command in script:
        if command[0] == "add":
            _, tokens, n, max_tokens = command
            request = engine.add_group(
                make_group(f"g{added}", [5] * tokens), SamplingParams(n=n, max_tokens=max_tokens)
            )
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
    assert engine.stats().kv_used == 0.0
    assert engine._cache.pool._references == {}


def test_few_pages_and_few_slots_change_no_greedy_result():
    groups = [make_group(f"g{i}", list(range(3 + i, 30 + 2 * i))) for i in range(6)]
    params = SamplingParams(n=3, max_tokens=20, seed=1)
    roomy = generate(make_engine(MODEL, eos_ids=(), numerics="reproducible"), groups, params)
    tight = make_engine(
        MODEL, eos_ids=(), numerics="reproducible", kv_pages=12, max_running=7, prefill_tokens=40, page_size=8
    )
    assert ids_and_bits(generate(tight, groups, params)) == ids_and_bits(roomy)
    assert tight.stats().preemptions > 0


def test_the_youngest_is_preempted_and_the_oldest_ends_first():
    engine = make_engine(MODEL, eos_ids=(), numerics="reproducible", kv_pages=6)
    for name in ("old", "young"):
        engine.add_group(make_group(name, [5] * 16), SamplingParams(max_tokens=24))
    ended = []
    while engine.has_work:
        ended += [r.group_id.prompt_id for _, r in engine.step()]
    assert ended == ["old", "young"]
    assert engine.stats().preemptions == 1


def test_prefill_is_bounded_by_the_token_budget_but_one_prompt_always_fits():
    engine = make_engine(MODEL, eos_ids=(), numerics="reproducible", prefill_tokens=25)
    for index, tokens in enumerate((10, 10, 10, 60)):
        engine.add_group(make_group(f"g{index}", [5] * tokens), SamplingParams(max_tokens=50))
    running = []
    for _ in range(3):
        engine.step()
        running.append(engine.stats().running)
    assert running == [2, 3, 4]
    finish(engine)
