import random

import pytest

from rl_post_training_mini import Rollout, RolloutWorker, TinyPolicy
from rl_post_training_mini.model import EOS
from rl_post_training_mini.paging import PagedKVCache, fragmentation
from rl_post_training_mini.rollout import Request


def request(group: int, index: int = 0, n_prompt: int = 10) -> Request:
    return Request(Rollout(group, index, (1,) * n_prompt, 0), random.Random(0))


def grow(kv: PagedKVCache, r: Request, n_tokens: int = 1) -> bool:
    for _ in range(n_tokens):
        if not kv.append(r):
            return False
        r.rollout.response.append(1)
    return True


@pytest.mark.parametrize(
    ("n_prompt", "n_response", "group", "block", "shared", "unshared"),
    [
        (10, 6, 8, 4, 18, 32),  # 2 full prompt blocks once + 8 × 2; 8 × 4
        (8, 5, 4, 4, 10, 16),  # the prompt ends with its block: 2 + 4 × 2; 4 × 4
        (3, 1, 4, 4, 4, 4),  # no full prompt block, nothing can stay shared
        (16, 1, 16, 16, 17, 32),  # 1 + 16 × 1; 16 × 2
    ],
)
def test_peak_blocks_equal_the_hand_computed_number(n_prompt, n_response, group, block, shared, unshared):
    policy = TinyPolicy.create(0)
    for row in policy.logits:
        row[EOS] -= 100.0
    for share, peak in ((True, shared), (False, unshared)):
        kv = PagedKVCache(64, block, share_prompts=share)
        RolloutWorker(policy, group_size=group, max_tokens=n_response, kv=kv).generate([(1,) * n_prompt])
        assert kv.peak_blocks == peak
        assert kv.used == 0


def test_copy_on_write_leaves_the_others_block_alone():
    kv, first, second = PagedKVCache(8, 4), request(0, 0), request(0, 1)
    assert kv.admit(first) and kv.admit(second)
    assert kv.tables[first] == kv.tables[second]
    assert kv.used == 3
    assert grow(kv, first)
    assert kv.tables[first][:2] == kv.tables[second][:2]
    assert kv.tables[first][2] != kv.tables[second][2]
    assert (kv.used, kv.copies) == (4, 1)
    assert grow(kv, second)  # alone with the old block by now: no copy
    assert (kv.used, kv.copies) == (4, 1)


def test_a_late_sample_shares_full_blocks_only_once_the_last_one_was_written():
    kv, first, late = PagedKVCache(8, 4), request(0, 0), request(0, 1)
    kv.admit(first)
    grow(kv, first)
    kv.admit(late)
    assert kv.tables[late][:2] == kv.tables[first][:2]
    assert kv.tables[late][2] != kv.tables[first][2]
    kv.check()


def test_no_block_no_change():
    kv, r = PagedKVCache(3, 4), request(0)
    assert kv.admit(r)
    assert grow(kv, r, 2)  # tokens 11 and 12 fill the third block
    before = list(kv.tables[r])
    assert not kv.append(r)
    assert kv.tables[r] == before
    assert not kv.admit(request(1))
    kv.check()


@pytest.mark.parametrize("seed", range(40))
def test_no_block_leaks_under_random_schedules(seed: int):
    """Random admissions, growth, preemptions and ends; the books balance after every single one."""
    rng = random.Random(seed)
    kv = PagedKVCache(rng.randint(6, 30), rng.randint(1, 5), share_prompts=rng.random() < 0.8)
    prompts = {group: rng.randint(1, 12) for group in range(4)}
    waiting = [request(g, i, prompts[g]) for g in range(4) for i in range(rng.randint(1, 5))]
    rng.shuffle(waiting)
    running: list[Request] = []
    for _ in range(250):
        action = rng.random()
        if waiting and action < 0.3:
            if kv.admit(waiting[-1]):
                running.append(waiting.pop())
        elif running and action < 0.85:
            grow(kv, rng.choice(running))
        elif running:
            r = running.pop(rng.randrange(len(running)))
            kv.release(r)
            if action < 0.95:
                waiting.insert(0, r)  # preempted: comes back with what it has generated
        kv.check()
        assert all(len(kv.tables[r]) == kv.blocks_for(r.n_tokens) for r in running)
    for r in running:
        kv.release(r)
    kv.check()
    assert kv.used == 0
    assert not kv.prompts


@pytest.mark.parametrize("seed", range(15))
def test_preemption_changes_no_token_and_leaks_no_block(seed: int):
    rng = random.Random(seed)
    policy, prompts = TinyPolicy.create(seed), [tuple(rng.choices(range(10), k=rng.randint(1, 9))) for _ in range(4)]
    options = {"seed": seed, "group_size": rng.randint(1, 6), "max_tokens": 12, "continuous": rng.random() < 0.8}
    block = rng.randint(1, 5)
    kv = PagedKVCache(-(-21 // block) + rng.randint(0, 4), block)
    worker = RolloutWorker(policy, kv=kv, **options)
    assert worker.generate(prompts) == RolloutWorker(policy, **options).generate(prompts)
    kv.check()
    assert kv.used == 0


def test_a_cache_too_small_for_one_request_is_an_error():
    with pytest.raises(RuntimeError, match="too small"):
        RolloutWorker(TinyPolicy.create(0), kv=PagedKVCache(2, 4)).generate([(1,) * 9])
    with pytest.raises(ValueError):
        PagedKVCache(0)


def test_fragmentation_by_hand():
    assert fragmentation([3, 5], [4, 8]) == pytest.approx(1 - 8 / 12)
