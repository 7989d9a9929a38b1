import math

import pytest

from rl_post_training_mini import Experience, TinyPolicy, TrainConfig, TrainWorker
from rl_post_training_mini.trainer import UPDATE_S, loss_and_gradient


def batch(policy: TinyPolicy, advantage: float = 1.0) -> list[Experience]:
    return [Experience((d,), [d + 1, 0], policy.token_logprobs((d,), [d + 1, 0]), 1.0, advantage, 0) for d in range(4)]


def test_first_gradient_by_hand():
    """One token 3 → 4, ratio 1, advantage 2: ∂ loss / ∂ logits[3][j] = −2 · (1[j = 4] − p_j)."""
    policy = TinyPolicy.create(0)
    e = Experience((3,), [4], policy.token_logprobs((3,), [4]), 1.0, 2.0, 0)
    report = loss_and_gradient(policy, policy, [e])
    p = policy.probs(3)
    assert report.loss == pytest.approx(-2.0)
    assert report.gradient[3] == pytest.approx([-2.0 * ((j == 4) - p[j]) for j in range(12)])
    assert report.gradient[5] == [0.0] * 12


def test_update_makes_what_was_good_more_likely_and_steps_once_per_mini_batch():
    policy = TinyPolicy.create(0)
    trainer = TrainWorker(policy, TrainConfig(learning_rate=1.0, epochs=3, mini_batches=2))
    metrics = trainer.update(batch(policy))
    assert trainer.policy.sequence_logprob((1,), [2, 0]) > policy.sequence_logprob((1,), [2, 0])
    assert trainer.reference.logits == policy.logits
    assert trainer.clock.now() == pytest.approx(6 * UPDATE_S)
    assert metrics["kl"] > 0.0


def test_one_update_of_the_sampling_policy_clips_nothing():
    policy = TinyPolicy.create(0)
    trainer = TrainWorker(policy, TrainConfig(learning_rate=50.0, epochs=1, mini_batches=1))
    assert trainer.update(batch(policy))["clip_frac"] == 0.0


def test_everything_masked_is_exactly_zero():
    policy = TinyPolicy.create(0)
    items = batch(policy)
    for e in items:
        e.loss_mask, e.logprobs = [0, 0], [-500.0, math.nan]
    report = loss_and_gradient(policy, TinyPolicy.create(1), items, beta=1.0)
    assert (report.loss, report.clip_frac, report.kl) == (0.0, 0.0, 0.0)
    assert report.gradient == [[0.0] * 12 for _ in range(12)]


def test_checkpoint_continues_where_it_was_saved(tmp_path):
    policy = TinyPolicy.create(0)
    first = TrainWorker(policy, TrainConfig(beta=0.1))
    first.update(batch(policy))
    first.save_checkpoint(tmp_path / "checkpoint.json")
    second = TrainWorker(TinyPolicy.create(9), TrainConfig(beta=0.1))
    second.load_checkpoint(tmp_path / "checkpoint.json")
    assert second.get_weights() == first.get_weights()
    assert first.update(batch(policy, -1.0)) == second.update(batch(policy, -1.0))
    assert second.get_weights() == first.get_weights()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="empty"):
        TrainWorker(TinyPolicy.create(0)).update([])
    for bad in ({"learning_rate": -1.0}, {"epochs": 0}, {"clip_eps": 0.0}, {"beta": -0.1}):
        with pytest.raises(ValueError):
            TrainConfig(**bad)
