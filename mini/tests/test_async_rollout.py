import math

import pytest

from rl_post_training_mini import Experience, FakeClock, RealClock, TinyPolicy, TrainConfig
from rl_post_training_mini.async_rollout import recompute_old, train_async, truncated_importance
from rl_post_training_mini.stage import new_run


def test_same_seed_same_history_with_threads(make_run):
    runs = [make_run(max_staleness=2, prepare=truncated_importance) for _ in range(3)]
    for run in runs:
        train_async(run, 6, queue_size=2)
    assert all(run.history == runs[0].history for run in runs)
    assert all(run.worker.clock.timeline == runs[0].worker.clock.timeline for run in runs)
    assert all(run.trainer.get_weights() == runs[0].trainer.get_weights() for run in runs)


def test_staleness_bound_of_zero_is_the_synchronous_loop(make_run):
    threaded, stepped = make_run(), make_run()
    train_async(threaded, 4)
    for _ in range(4):
        stepped.step()
    assert threaded.history == stepped.history
    assert threaded.trainer.get_weights() == stepped.trainer.get_weights()
    assert threaded.worker.clock.now() == stepped.worker.clock.now()


@pytest.mark.parametrize("bound", [1, 2, 4])
def test_staleness_reaches_its_bound_and_never_passes_it(bound: int):
    config = TrainConfig(epochs=4, mini_batches=3)  # a slow trainer
    run = new_run(FakeClock(), 0, config, group_size=2, prompts_per_step=3, max_staleness=bound)
    train_async(run, 10, queue_size=bound)
    assert max(m["staleness"] for m in run.history) == bound


def test_generation_overlaps_training_and_saves_time(make_run):
    overlapped, stepped = make_run(max_staleness=2, group_size=8), make_run(group_size=8)
    train_async(overlapped, 6, queue_size=2)
    for _ in range(6):
        stepped.step()
    timeline = overlapped.worker.clock.timeline
    trains = [s for s in timeline if s.lane == "train"]
    assert any(r.start_s < t.end_s and t.start_s < r.end_s for r in timeline if r.lane == "rollout" for t in trains)
    assert overlapped.worker.clock.now() < 0.8 * stepped.worker.clock.now()


def test_importance_weights_by_hand():
    policy = TinyPolicy.create(0)
    now = policy.token_logprobs((3,), [4, 5, 6])
    sampled = [now[0], now[1] + math.log(2.0), now[2] - 30.0]
    e = Experience((3,), [4, 5, 6], sampled, 1.0, 1.0, 0)
    truncated_importance(policy, [e], cap=3.0)
    assert e.importance == pytest.approx([1.0, 0.5, 3.0])
    assert e.proximal_logprobs == now
    assert [t.old_logprob for t in e.own_tokens()] == now
    plain = Experience((3,), [4, 5, 6], sampled, 1.0, 1.0, 0)
    recompute_old(policy, [plain])
    assert plain.importance is None
    assert [t.weight for t in plain.own_tokens()] == [1.0] * 3


def test_error_in_the_producer_reaches_the_consumer(make_run):
    run = make_run()
    run.prompts = [(99,)]
    with pytest.raises(ValueError, match="outside the vocabulary"):
        train_async(run, 2)


def test_it_runs_on_the_wall_clock_too(make_run, monkeypatch):
    monkeypatch.setattr("rl_post_training_mini.rollout.STEP_S", 0.0001)
    run = make_run(group_size=2, prompts_per_step=2, max_staleness=1)
    run.worker.clock = RealClock()
    train_async(run, 2)
    assert run.version == 2


def test_bad_queue_size_is_refused(make_run):
    with pytest.raises(ValueError, match="queue_size"):
        train_async(make_run(), 1, queue_size=0)
