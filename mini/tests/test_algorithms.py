import math
import random

import pytest

from rl_post_training_mini import Experience, TinyPolicy, compute_grpo_advantage, ppo_clip_loss
from rl_post_training_mini.algorithms import (
    categorical_kl,
    categorical_kl_gradient,
    kl_k1,
    kl_k2,
    kl_k3,
    ppo_clip_gradient,
)
from rl_post_training_mini.trainer import loss_and_gradient


def test_grpo_advantage_zero_mean():
    rng = random.Random(0)
    rewards = [rng.random() for _ in range(32)]
    groups = [i // 8 for i in range(32)]
    advantages = compute_grpo_advantage(rewards, groups)
    for group in range(4):
        assert sum(advantages[8 * group : 8 * group + 8]) == pytest.approx(0.0, abs=1e-9)


def test_grpo_advantage_group_normalized():
    # group a: mean 2, population std 1; group b, interleaved: mean 0.5, std 0.5
    advantages = compute_grpo_advantage([1.0, 0.0, 3.0, 1.0], ["a", "b", "a", "b"])
    assert advantages == pytest.approx([-1.0, -1.0, 1.0, 1.0], abs=1e-6)
    assert compute_grpo_advantage([1.0, 3.0], [0, 0], scale_by_std=False) == [-1.0, 1.0]


def test_grpo_advantage_of_equal_rewards_or_one_sample_is_exactly_zero():
    assert compute_grpo_advantage([0.1] * 7 + [5.0], [0] * 7 + [1]) == [0.0] * 8
    assert compute_grpo_advantage([], []) == []


def test_grpo_advantage_refuses_lengths_that_differ():
    with pytest.raises(ValueError, match="3 rewards for 2 group ids"):
        compute_grpo_advantage([1.0, 2.0, 3.0], [0, 0])


def test_ppo_clip_symmetric():
    def loss(ratio: float, advantage: float) -> float:
        return ppo_clip_loss(math.log(ratio), 0.0, advantage)

    # a good token gains nothing beyond 1 + ε, a bad one nothing beyond 1 − ε: the same distance to either side
    assert loss(1.5, 1.0) == loss(9.0, 1.0) == pytest.approx(-1.2)
    assert loss(0.5, -1.0) == loss(0.1, -1.0) == pytest.approx(0.8)
    assert loss(1.5, 1.0) - loss(1.0, 1.0) == pytest.approx(loss(0.5, -1.0) - loss(1.0, -1.0))
    # the harmful side is not clipped
    assert loss(0.5, 1.0) == pytest.approx(-0.5)
    assert loss(1.5, -1.0) == pytest.approx(1.5)


def test_ppo_clip_gradient_is_zero_only_where_clipped():
    assert ppo_clip_gradient(math.log(1.5), 0.0, 2.0) == 0.0
    assert ppo_clip_gradient(math.log(0.5), 0.0, -2.0) == 0.0
    assert ppo_clip_gradient(math.log(0.5), 0.0, 2.0) == pytest.approx(-1.0)
    assert ppo_clip_gradient(math.log(1.5), 0.0, -2.0) == pytest.approx(3.0)


def test_ppo_clip_loss_of_a_broken_token_is_finite():
    assert math.isfinite(ppo_clip_loss(0.0, -5000.0, -1.0))
    with pytest.raises(ValueError, match="clip_eps"):
        ppo_clip_loss(0.0, 0.0, 1.0, clip_eps=1.5)


def test_kl_penalty():
    """What each estimator is worth as a figure, and what its gradient does as a loss: exact expectations over π."""
    policy, reference = TinyPolicy.create(1), TinyPolicy.create(2, skill=2.0)
    logp, logq = policy.logprobs(3), reference.logprobs(3)
    probs = policy.probs(3)
    kl = categorical_kl(logp, logq)
    assert kl > 0.05
    assert categorical_kl(logp, logp) == 0.0
    assert sum(p * kl_k1(a, b) for p, a, b in zip(probs, logp, logq, strict=True)) == pytest.approx(kl)
    assert sum(p * kl_k3(a, b) for p, a, b in zip(probs, logp, logq, strict=True)) == pytest.approx(kl)
    assert all(kl_k3(a, b) >= 0.0 for a, b in zip(logp, logq, strict=True))

    def expected_gradient(slopes: list[float]) -> list[float]:
        """E over tok ~ π of slope(tok) · ∂ log π(tok) / ∂ logits."""
        total = sum(p * s for p, s in zip(probs, slopes, strict=True))
        return [p * (s - total) for p, s in zip(probs, slopes, strict=True)]

    pull = categorical_kl_gradient(logp, logq)
    reverse_pull = [p - math.exp(q) for p, q in zip(probs, logq, strict=True)]  # ∂ KL(π_ref‖π) / ∂ logits
    d_k2 = [a - b for a, b in zip(logp, logq, strict=True)]
    d_k3 = [1.0 - math.exp(b - a) for a, b in zip(logp, logq, strict=True)]
    assert expected_gradient([1.0] * len(logp)) == pytest.approx([0.0] * len(logp), abs=1e-12)  # k1 pulls nothing
    assert expected_gradient(d_k2) == pytest.approx(pull)
    assert expected_gradient(d_k3) == pytest.approx(reverse_pull)
    h = 1e-6
    assert (kl_k2(logp[0] + h, logq[0]) - kl_k2(logp[0] - h, logq[0])) / (2 * h) == pytest.approx(d_k2[0], rel=1e-6)
    assert (kl_k3(logp[0] + h, logq[0]) - kl_k3(logp[0] - h, logq[0])) / (2 * h) == pytest.approx(d_k3[0], rel=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_gradient_agrees_with_central_differences(beta: float, weighted: bool):
    rng = random.Random(7)
    policy, reference, sampler = TinyPolicy.create(0), TinyPolicy.create(1, skill=2.0), TinyPolicy.create(2, skill=0.0)
    batch = []
    for i in range(12):
        response = [rng.randrange(12) for _ in range(5)]
        logprobs = [old + rng.gauss(0.0, 0.3) for old in sampler.token_logprobs((3,), response)]
        e = Experience((3,), response, logprobs, 0.0, rng.choice((-1.0, 1.0)) * (0.5 + i), 0)
        e.loss_mask = [1, 1, 0, 1, 1]
        e.importance = [rng.random() for _ in response] if weighted else None
        batch.append(e)
    report = loss_and_gradient(policy, reference, batch, clip_eps=0.2, beta=beta)
    assert 0.1 < report.clip_frac < 0.9  # both branches of the clip are in the batch
    h, largest = 1e-5, max(abs(g) for row in report.gradient for g in row)
    for prev in range(12):
        for j in range(12):
            losses = []
            for step in (h, -h):
                moved = policy.clone()
                moved.logits[prev][j] += step
                losses.append(loss_and_gradient(moved, reference, batch, clip_eps=0.2, beta=beta).loss)
            slope = (losses[0] - losses[1]) / (2 * h)
            assert slope == pytest.approx(report.gradient[prev][j], rel=1e-6, abs=1e-8 * largest)


def test_beta_counts_in_units_of_the_advantage(make_run):
    """Why scenario 4 leaves out the division by the std: with it, β = 0.1 holds far less."""
    kl = {}
    for scale_by_std, learning_rate in ((True, 8.0), (False, 60.0)):
        run = make_run(learning_rate=learning_rate, alpha=1.0, scale_by_std=scale_by_std, group_size=8)
        object.__setattr__(run.trainer.config, "beta", 0.1)
        for _ in range(12):
            run.step()
        kl[scale_by_std] = run.evaluate()["kl"]
    assert kl[True] > 2.0 * kl[False]
