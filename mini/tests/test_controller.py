import pytest

from rl_post_training_mini import StaleRolloutError


def test_step_increments_version(make_run):
    run = make_run()
    for version in (1, 2, 3):
        metrics = run.step()
        assert metrics["version"] == run.version == run.worker.version == version
        assert run.worker.policy.logits == run.trainer.policy.logits
    assert [m["version"] for m in run.history] == [1, 2, 3]


def test_stale_rollout_rejected(make_run):
    run = make_run()
    late = run.worker.generate(run.sample_prompts(0), weight_version=0)
    run.step()
    weights = run.trainer.get_weights()
    with pytest.raises(StaleRolloutError, match=r"version \[0\] came while version 1 is current"):
        run.learn(late)
    assert run.version == 1
    assert run.trainer.get_weights() == weights
    run.strict = False
    assert run.check_versions(late) == []
    assert run.stale == len(late) == 16


def test_only_the_fresh_part_of_a_mixed_batch_is_trained(make_run):
    run, other = make_run(strict=False), make_run(strict=False)
    late = run.worker.generate([(1,)])
    other.worker.generate([(1,)])
    for r in (run, other):
        r.step()
    fresh = run.worker.generate([(2,), (3,)])
    run.learn([*late, *fresh])
    other.learn(other.worker.generate([(2,), (3,)]))
    assert run.trainer.get_weights() == other.trainer.get_weights()


def test_rollouts_from_the_future_are_refused(make_run):
    run = make_run(max_staleness=3)
    rollouts = run.worker.generate([(1,)])
    for r in rollouts:
        r.weight_version = 1
    with pytest.raises(StaleRolloutError):
        run.learn(rollouts)


def test_same_seed_same_history(make_run):
    runs = [make_run(seed) for seed in (0, 0, 1)]
    for run in runs:
        for _ in range(3):
            run.step()
    assert runs[0].history == runs[1].history != runs[2].history
    assert runs[0].worker.clock.timeline == runs[1].worker.clock.timeline
    assert runs[0].trainer.get_weights() == runs[1].trainer.get_weights()


def test_evaluation_is_repeatable_and_changes_nothing(make_run):
    run, undisturbed = make_run(), make_run()
    assert run.evaluate() == run.evaluate()
    assert run.evaluate()["kl"] == 0.0
    assert run.step() == undisturbed.step()
    assert run.worker.clock.now() == undisturbed.worker.clock.now()


def test_timeline_of_a_step_is_rollout_then_reward_then_train(make_run):
    run = make_run()
    run.step()
    timeline = run.worker.clock.timeline
    assert [span.lane for span in timeline] == ["rollout", "reward", "train"]
    assert all(a.end_s == b.start_s for a, b in zip(timeline, timeline[1:], strict=False))
