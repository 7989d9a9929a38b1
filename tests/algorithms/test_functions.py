"""Pure functions, against numbers computed by hand and by enumeration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from quintet.algorithms import correction, preference
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.filters import check_overlong_buffer, group_verdict, overlong_penalty, shape_samples
from quintet.algorithms.kl import adapted_coef, full_kl, kl_estimate
from quintet.algorithms.logprobs import entropy, kept_tokens, token_logprobs
from quintet.algorithms.policy_loss import LossInput, bernoulli_kl, bounded_log_ratio, highest_entropy
from quintet.algorithms.presets import Algorithm, resolve
from quintet.algorithms.value import explained_variance, value_loss
from quintet.types import Experience, Group, GroupId, Prompt, QuintetError, Score


def f64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def algorithm(**options: Any) -> Algorithm:
    return resolve(AlgorithmConfig(**options))


def group(*rewards: float | None) -> Group:
    return Group(GroupId("p"), Prompt("p", []), scores=[Score(r) for r in rewards])


def sample(reward: float | None, mask: list[int], truncated: bool = False) -> Experience:
    n = len(mask)
    return Experience(GroupId("p"), 0, [1], [2] * n, [-1.0] * n, mask, reward, 0, truncated=truncated)


def test_dynamic_sampling_drops_equal_groups_only() -> None:
    row = algorithm(filters=["dynamic_sampling"])
    assert group_verdict(row, group(1.0, 1.0)) == "equal_rewards"
    assert group_verdict(row, group(1.0, None, 1.0)) == "equal_rewards"
    assert group_verdict(row, group(1.0, 0.0)) is None
    assert group_verdict(row, group(None, None)) == "unscored"
    assert group_verdict(algorithm(), group(1.0, 1.0)) is None


def test_mean_range_keeps_what_lies_strictly_between() -> None:
    row = algorithm(filters=[{"name": "mean_range", "low": 0.2, "high": 0.8}])
    assert group_verdict(row, group(0.5, 0.5)) is None
    assert group_verdict(row, group(0.8, 0.8)) == "mean_out_of_range"
    assert group_verdict(row, group(0.2, 0.2)) == "mean_out_of_range"


def test_sample_filters_act_in_their_order() -> None:
    penalty = {"name": "overlong_penalty", "buffer": 4}
    row = algorithm(filters=["overlong_mask", penalty, {"name": "reward_clip", "low": 0.0, "high": 1.0}])
    long, short, unscored = shape_samples(
        row, [sample(1.0, [1] * 9, truncated=True), sample(2.0, [1, 0, 1]), sample(None, [1] * 9)], max_tokens=10
    )
    assert long.loss_mask == [0] * 9 and long.reward == pytest.approx(0.25)
    assert short.loss_mask == [1, 0, 1] and short.reward == 1.0
    assert unscored.reward is None and unscored.loss_mask == [1] * 9


def test_the_buffer_is_a_fifth_by_default_and_never_longer_than_the_limit() -> None:
    assert [overlong_penalty(n, 100, buffer=None) for n in (80, 90, 100)] == [0.0, -0.5, -1.0]
    row = algorithm(filters=[{"name": "overlong_penalty", "buffer": 200}])
    with pytest.raises(QuintetError, match=r"buffer 200 is longer than rollout\.max_tokens 100"):
        shape_samples(row, [], 100)
    check_overlong_buffer(row, 200)


def test_expected_gradients_of_the_estimators_are_the_divergences_on_policy() -> None:
    """In expectation over pi the gradient of k2 is that of KL(pi||ref), of k3 that of KL(ref||pi), of k1 zero."""
    logits, ref_logits = f64([0.3, -1.0, 0.8]).requires_grad_(), f64([1.0, 0.2, -0.5])

    def gradient(name: str) -> torch.Tensor:
        logp = logits.log_softmax(-1)
        estimate = kl_estimate(name, logp, ref_logits.log_softmax(-1))
        return torch.autograd.grad((logp.exp().detach() * estimate).sum(), logits)[0]

    reverse = torch.autograd.grad(full_kl(logits, ref_logits), logits)[0]
    forward = torch.autograd.grad(full_kl(logits, ref_logits, "forward"), logits)[0]
    assert torch.allclose(gradient("k2"), reverse) and torch.allclose(gradient("k3"), forward)
    assert gradient("k1").abs().max() < 1e-12 < reverse.abs().max()


@pytest.mark.parametrize(
    ("kl", "expected"), [(0.11, 0.5 * (1 + 0.1 * 64 / 1000)), (9.0, 0.5 * (1 + 0.2 * 64 / 1000)), (0.0, 0.4936)]
)
def test_the_adaptive_coefficient_moves_by_a_fifth_of_samples_over_horizon_at_most(kl: float, expected: float) -> None:
    assert adapted_coef(0.5, kl, target=0.1, horizon=1000, samples=64) == pytest.approx(expected)
    assert adapted_coef(0.5, 0.1, target=0.1, horizon=1000, samples=64) == 0.5


def test_the_bound_keeps_k3_finite() -> None:
    far = kl_estimate("k3", f64([-500.0]), f64([0.0]), bound=20.0)
    assert far.item() == pytest.approx(math.exp(20) - 21)
    assert kl_estimate("k3", f64([-500.0]), f64([0.0]), bound=20.0, clamp=10.0).item() == 10.0


def test_a_masked_log_ratio_is_zero_and_an_unmasked_one_bounded() -> None:
    new = f64([[-1.0, math.inf, math.nan, -500.0]]).requires_grad_()
    ratio = bounded_log_ratio(new, f64([[-1.5, 0.0, 0.0, 0.0]]), f64([[1.0, 0.0, 0.0, 1.0]]))
    assert ratio[0].tolist() == [0.5, 0.0, 0.0, -20.0]
    assert torch.autograd.grad(ratio.sum(), new)[0].tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_levels_of_the_importance_weight() -> None:
    log_ratio, mask = f64([[0.1, 0.3, 9.0]]).log1p(), f64([[1.0, 1.0, 0.0]])
    token = correction.importance_weights(log_ratio, mask)
    assert token[0, :2].tolist() == pytest.approx([1.1, 1.3])
    assert correction.importance_weights(log_ratio, mask, level="sequence")[0, 0].item() == pytest.approx(1.43)
    geometric = correction.importance_weights(log_ratio, mask, level="geometric")
    assert geometric[0].tolist() == pytest.approx([math.sqrt(1.43)] * 3)
    assert correction.importance_weights(log_ratio, mask, high=1.2)[0, :2].tolist() == pytest.approx([1.1, 1.2])
    masked = correction.importance_weights(log_ratio, mask, high=1.2, outside="mask")
    assert masked[0, :2].tolist() == pytest.approx([1.1, 0.0])


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ({"name": "tis", "high": 1.2}, [[1.1, 1.2], [0.9, 0.5]]),
        ({"name": "tis", "low": 0.8, "high": 1.2}, [[1.1, 1.2], [0.9, 0.8]]),
        ({"name": "mis", "high": 1.2}, [[1.1, 0.0], [0.9, 0.5]]),
        ({"name": "icepop", "low": 0.8, "high": 1.2}, [[1.1, 0.0], [0.9, 0.0]]),
        ({"name": "decoupled"}, [[1.1, 1.3], [0.9, 0.5]]),
        ({"name": "reject", "low": 0.8, "high": 1.2}, [[1.0, 0.0], [1.0, 0.0]]),
        ({"name": "reject", "low": 0.8, "high": 1.2, "weight": "token"}, [[1.1, 0.0], [0.9, 0.0]]),
        ({"name": "reject", "reduce": "sum", "low": 0.8, "high": 1.5}, [[1.0, 1.0], [0.0, 0.0]]),
        ({"name": "reject", "reduce": "max", "high": 1.0}, [[0.0, 0.0], [1.0, 1.0]]),
        ({"name": "reject", "metric": "k2", "reduce": "mean", "high": 0.05}, [[1.0, 1.0], [0.0, 0.0]]),
        ({"name": "opsm", "delta": 0.1}, [[1.0, 1.0], [0.0, 0.0]]),
        ({"name": "m2po"}, [[1.0, 1.0], [1.0, 1.0]]),
    ],
)
def test_each_correction_by_hand(cell: dict[str, Any], expected: list[list[float]]) -> None:
    """pi_old / mu is 1.1, 1.3 in a row with A > 0 and 0.9, 0.5 in one with A < 0; the policy has not moved."""
    mu, mask = torch.full((2, 2), -2.0, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)
    old = mu + f64([[1.1, 1.3], [0.9, 0.5]]).log()
    x = LossInput(old, old, mu, f64([[1.0, 1.0], [-1.0, -1.0]]), mask, bounded_log_ratio(old, old, mask))
    resolved = algorithm(correction=cell).correction
    assert resolved is not None
    weights = correction.correction_weights(resolved.name, dict(resolved.params), x)
    assert weights.tolist() == [pytest.approx(row) for row in expected]


def test_effective_sample_size_counts_equal_weights() -> None:
    assert correction.effective_sample_size(f64([2.0, 2.0, 2.0])).item() == pytest.approx(3.0)
    assert correction.effective_sample_size(f64([1.0, 0.0, 0.0])).item() == pytest.approx(1.0)


def test_the_highest_entropies_of_each_row_are_kept() -> None:
    kept = highest_entropy(f64([[1.0, 3.0, 2.0, 9.0], [5.0, 5.0, 1.0, 0.0]]), f64([[1, 1, 1, 0], [1, 1, 1, 1]]), 0.4)
    assert kept.tolist() == [[False, True, True, False], [True, True, False, False]]


def test_bernoulli_kl_is_zero_for_equal_policies() -> None:
    assert bernoulli_kl(f64([-1.0, -1e-9]), f64([-1.0, -1e-9])).tolist() == [0.0, 0.0]
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert bernoulli_kl(f64([math.log(0.5)]), f64([math.log(0.25)])).item() == pytest.approx(expected)


def test_simpo_and_dpo_by_hand() -> None:
    loss = preference.simpo(f64([-1.0]), f64([-1.5]), beta=2.0, gamma=0.5)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.5)))
    args = [f64([-1.0]), f64([-2.0]), f64([-1.2]), f64([-1.8])]
    assert preference.dpo(*args, beta=0.5).item() == pytest.approx(math.log(1 + math.exp(-0.2)))
    smooth = preference.dpo(*args, beta=0.5, label_smoothing=0.1).item()
    assert smooth == pytest.approx(0.9 * math.log(1 + math.exp(-0.2)) + 0.1 * math.log(1 + math.exp(0.2)))


def test_odds_ratio_of_equal_answers_is_log_two() -> None:
    assert preference.orpo_odds(f64([-1.0]), f64([-1.0]), beta=1.0).item() == pytest.approx(math.log(2))


def test_kto_baseline_is_never_negative_and_detached() -> None:
    policy = f64([-3.0]).requires_grad_()
    baseline = preference.kto_baseline(policy, f64([-1.0]))
    assert baseline.item() == 0.0 and not baseline.requires_grad


def test_value_clip_keeps_the_larger_error() -> None:
    loss, clipped = value_loss(f64([[2.0, 1.05]]), f64([[1.0, 1.0]]), f64([[2.0, 0.0]]), clip=0.2)
    assert loss[0].tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 1.05**2]) and clipped.tolist() == [[True, False]]
    huber, _ = value_loss(f64([[0.0]]), f64([[0.0]]), f64([[3.0]]), huber=1.0)
    assert huber.item() == pytest.approx(2.5)


def test_explained_variance_of_perfect_and_of_constant_values() -> None:
    returns, mask = f64([[1.0, 2.0, 3.0, 99.0]]), f64([[1.0, 1.0, 1.0, 0.0]])
    assert explained_variance(returns, returns, mask).item() == 1.0
    assert explained_variance(torch.zeros_like(returns), returns, mask).item() == 0.0


def test_the_kept_set_is_that_of_the_sampler() -> None:
    logits = f64([0.6, 0.3, 0.1]).log()
    assert kept_tokens(logits, top_p=0.8).tolist() == [True, True, False]
    assert kept_tokens(logits, top_p=0.6).tolist() == [True, False, False]
    assert kept_tokens(logits, top_k=1).tolist() == [True, False, False]
    assert kept_tokens(logits, min_p=0.4).tolist() == [True, True, False]
    assert kept_tokens(logits, temperature=1e-3, min_p=0.4).tolist() == [True, False, False]
    assert kept_tokens(logits, top_p=1e-9).tolist() == [True, False, False]


def test_logprobs_and_entropy_over_the_kept_set() -> None:
    logits, kept = f64([0.6, 0.3, 0.1]).log(), torch.tensor([True, True, False])
    inside = token_logprobs(logits, torch.tensor(0), kept_V=kept)
    assert inside.item() == pytest.approx(math.log(2 / 3))
    assert token_logprobs(logits, torch.tensor(2), kept_V=kept).item() == -math.inf
    expected = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert entropy(logits, kept_V=kept).item() == pytest.approx(expected)
