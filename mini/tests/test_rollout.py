import heapq

import pytest

from rl_post_training_mini import FakeClock, RolloutWorker, StaleRolloutError, TinyPolicy
from rl_post_training_mini.model import COUNTING, EOS
from rl_post_training_mini.rollout import STEP_S


def perfect_counter() -> TinyPolicy:
    return TinyPolicy.create(0, skill=60.0)


def test_logprobs_match_policy():
    policy = TinyPolicy.create(0)
    rollouts = RolloutWorker(policy, group_size=4).generate([(1, 2), (8,)])
    assert [(r.group_id, r.sample_index, r.prompt) for r in rollouts[3:5]] == [(0, 3, (1, 2)), (1, 0, (8,))]
    for r in rollouts:
        assert r.logprobs == policy.token_logprobs(r.prompt, r.response)
        assert sum(r.logprobs) == pytest.approx(policy.sequence_logprob(r.prompt, r.response))
        assert (r.finish_reason == "stop") == (r.response[-1] == EOS)


def test_continuous_batching():
    """Lengths 5, 1, 1, 1 on two slots: static takes 5 + 1 steps, continuous 5; the tokens are the same."""
    results = {}
    for continuous in (False, True):
        clock = FakeClock()
        worker = RolloutWorker(perfect_counter(), clock, group_size=1, slots=2, continuous=continuous)
        rollouts = worker.generate([(5,), (9,), (9,), (9,)])
        assert [len(r.response) for r in rollouts] == [5, 1, 1, 1]
        results[continuous] = rollouts, clock.now()
    assert results[False][1] == pytest.approx(6 * STEP_S)
    assert results[True][1] == pytest.approx(5 * STEP_S)
    assert results[False][0] == results[True][0]


@pytest.mark.parametrize("slots", [1, 3, 7, 64])
def test_makespan_is_that_of_list_scheduling_and_tokens_do_not_depend_on_slots(slots: int):
    clock = FakeClock()
    worker = RolloutWorker(TinyPolicy.create(1), clock, slots=slots)
    rollouts = worker.generate([(d,) for d in range(9)])
    free_at = [0] * slots
    for length in (len(r.response) for r in rollouts):
        heapq.heappush(free_at, heapq.heappop(free_at) + length)
    assert clock.now() == pytest.approx(max(free_at) * STEP_S)
    assert rollouts == RolloutWorker(TinyPolicy.create(1), slots=64).generate([(d,) for d in range(9)])


def test_worker_keeps_its_weights_until_they_are_pushed():
    policy = TinyPolicy.create(0)
    worker = RolloutWorker(policy, group_size=1)
    policy.apply_gradient([[1.0] * 6 + [-1.0] * 6] * 12, learning_rate=9.0)
    assert worker.policy.logits == TinyPolicy.create(0).logits
    worker.update_weights(policy.logits, version=5)
    assert worker.policy.logits == policy.logits
    assert worker.generate([(1,)])[0].weight_version == 5
    assert worker.health_check() == {"ok": True, "version": 5, "slots": 64}


def test_weights_pushed_during_generation_count_from_the_next_call():
    clock = FakeClock()
    worker = RolloutWorker(perfect_counter(), clock, group_size=1)
    results = []
    task = clock.spawn("rollout", lambda: results.extend(worker.generate([(0,)])))
    clock.sleep(3.5 * STEP_S)
    worker.update_weights(TinyPolicy.create(0, skill=0.0).logits, version=1)
    clock.join(task)
    assert results[0].response == [1, 2, 3, 4, 5, 6, 7, 8, 9, EOS]
    assert results[0].weight_version == 0


def test_a_version_the_worker_does_not_hold_is_refused():
    with pytest.raises(StaleRolloutError, match="holds version 0, version 2"):
        RolloutWorker(TinyPolicy.create(0)).generate([(1,)], weight_version=2)


def test_bad_input_is_refused():
    worker = RolloutWorker(TinyPolicy.create(0))
    for prompt in ((), (12,), (-1,)):
        with pytest.raises(ValueError, match="empty or holds a token outside"):
            worker.generate([prompt])
    with pytest.raises(ValueError, match="at least 1"):
        RolloutWorker(TinyPolicy.create(0), slots=0)
    assert worker.generate([]) == []


def test_a_response_ends_at_max_tokens():
    rollout = RolloutWorker(perfect_counter(), group_size=1, max_tokens=3).generate([(1,)])[0]
    assert (rollout.response, rollout.finish_reason) == ([2, 3, 4], "length")
    assert COUNTING[4] == 5
