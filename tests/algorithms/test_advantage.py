"""From experiences to advantages: grouping, exclusion, KL in the reward, metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.algorithms import estimators
from quintet.algorithms.advantage import compute_advantages
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import Algorithm, resolve
from quintet.types import Experience, ExperienceBatch, GroupId, QuintetError


def algorithm(**options: Any) -> Algorithm:
    return resolve(AlgorithmConfig(**options))


def experience(group: int, index: int, reward: float | None, mask: list[int] | None = None, **more: Any) -> Experience:
    mask = [1, 1] if mask is None else mask
    n = len(mask)
    return Experience(
        group_id=GroupId("same prompt", occurrence=group),
        sample_index=index,
        prompt_ids=[1],
        response_ids=[5] * n,
        logprobs=more.pop("logprobs", [-1.0] * n),
        loss_mask=mask,
        reward=reward,
        weight_version=0,
        **more,
    )


def batch(*groups: list[float | None]) -> ExperienceBatch:
    return ExperienceBatch(
        0, 0, [experience(g, i, r) for g, rewards in enumerate(groups) for i, r in enumerate(rewards)]
    )


def values(result: ExperienceBatch) -> list[float]:
    return [e.advantage for e in result.experiences]


def test_grpo_divides_by_the_population_deviation_of_the_group() -> None:
    result = compute_advantages(algorithm(), batch([1.0, 0.0, 0.0, 0.0]))
    assert values(result) == pytest.approx([1.7320508, -0.5773503, -0.5773503, -0.5773503], abs=1e-6)
    assert result.experiences[0].advantages == pytest.approx([1.7320508, 1.7320508], abs=1e-6)


def test_the_input_batch_is_not_touched() -> None:
    given = batch([1.0, None])
    compute_advantages(algorithm(), given)
    assert given.experiences[0].advantages is None and given.experiences[1].loss_mask == [1, 1] and not given.metrics


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_at_k"])
def test_equal_rewards_give_exactly_zero_whatever_their_rounding(preset: str) -> None:
    result = compute_advantages(algorithm(preset=preset), batch([0.1] * 7, [0.7] * 12, [1.0, 0.0]))
    assert values(result)[:19] == [0.0] * 19 and values(result)[19] > 0
    assert result.metrics["reward/zero_std_frac"] == pytest.approx(2 / 3)
    assert result.metrics["advantage/zero_frac"] == pytest.approx((20 if preset == "pass_at_k" else 19) / 21)


def test_an_unscored_sample_is_in_no_statistic_and_leaves_the_loss() -> None:
    result = compute_advantages(algorithm(advantage={"std": "sample"}), batch([1.0, 0.0, None]))
    assert values(result) == pytest.approx([0.7071068, -0.7071068, 0.0], abs=1e-6)
    assert [e.loss_mask for e in result.experiences] == [[1, 1], [1, 1], [0, 0]]
    assert result.experiences[2].advantages == [0.0, 0.0]


def test_a_batch_without_any_score_gets_zeros() -> None:
    result = compute_advantages(algorithm(), batch([None, None]))
    assert values(result) == [0.0, 0.0] and result.metrics["reward/zero_std_frac"] == 1.0


def test_masked_tokens_get_zero_and_do_not_shift_the_reward() -> None:
    tool = experience(0, 0, 1.0, mask=[1, 0, 1, 0])
    result = compute_advantages(
        algorithm(preset="reinforce_pp", kl="none"), ExperienceBatch(0, 0, [tool, experience(1, 0, 0.0)])
    )
    first, second = result.experiences
    assert first.advantages[1] == first.advantages[3] == 0.0
    assert first.advantages[0] == first.advantages[2] == pytest.approx(0.8660254, abs=1e-6)
    assert second.advantages == pytest.approx([-0.8660254] * 2, abs=1e-6)


def test_a_sample_without_loss_tokens_still_counts_in_the_baseline() -> None:
    masked = experience(0, 1, 0.0, mask=[0, 0])
    result = compute_advantages(algorithm(), ExperienceBatch(0, 0, [experience(0, 0, 1.0), masked]))
    assert values(result) == pytest.approx([1.0, -1.0], abs=1e-6)
    assert result.experiences[1].advantages == [0.0, 0.0]


def test_kl_in_the_reward_uses_the_proximal_policy_and_counts_once() -> None:
    row = algorithm(advantage="returns", kl={"name": "k1", "coef": 0.1})
    sample = experience(0, 0, 1.0, logprobs=[-9.0, -9.0], ref_logprobs=[-1.2, -1.3], proximal_logprobs=[-1.0, -1.0])
    result = compute_advantages(row, ExperienceBatch(0, 0, [sample]))
    assert result.experiences[0].advantages == pytest.approx([0.95, 0.97])
    assert result.metrics["kl/in_reward"] == pytest.approx(0.25)


def test_kl_in_the_reward_of_a_sequence_estimator_is_summed() -> None:
    row = algorithm(preset="rloo", kl={"name": "k1", "coef": 0.1})
    samples = [experience(0, i, 1.0, ref_logprobs=ref) for i, ref in enumerate([[-1.0, -1.0], [-2.0, -2.0]])]
    assert values(compute_advantages(row, ExperienceBatch(0, 0, samples))) == pytest.approx([0.2, -0.2])


def test_kl_in_the_reward_without_reference_is_a_bug_of_ours() -> None:
    with pytest.raises(ValueError, match="ref_logprobs"):
        compute_advantages(algorithm(preset="reinforce_pp"), batch([1.0, 0.0]))


def test_gdpo_normalises_each_reward_by_itself_and_skips_abstentions() -> None:
    parts = [{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 100.0}, {"a": 0.0, "b": None}]
    samples = [experience(0, i, 0.0, metadata={"parts": p}) for i, p in enumerate(parts)]
    result = compute_advantages(algorithm(preset="gdpo", advantage={"eps": 0.0}), ExperienceBatch(0, 0, samples))
    total = torch.tensor([2 / 3 / 0.5773503 - 0.7071068, -1 / 3 / 0.5773503 + 0.7071068, -1 / 3 / 0.5773503])
    assert values(result) == pytest.approx(((total - total.mean()) / total.std()).tolist(), abs=1e-5)
    with pytest.raises(QuintetError, match="weights names c, but the reward functions are a, b"):
        compute_advantages(algorithm(preset="gdpo", advantage={"weights": {"c": 1.0}}), ExperienceBatch(0, 0, samples))


def test_m2po_zeroes_the_tokens_that_drifted_most() -> None:
    row = algorithm(correction={"name": "m2po", "threshold": 0.04})
    samples = [experience(0, i, float(i), proximal_logprobs=[-1.0, -1.0 + 2.0 * i]) for i in range(2)]
    result = compute_advantages(row, ExperienceBatch(0, 0, samples))
    assert [e.advantages for e in result.experiences] == [
        pytest.approx([-1.0, -1.0], abs=1e-6),
        pytest.approx([1.0, 0.0], abs=1e-6),
    ]
    with pytest.raises(QuintetError, match=r"train\.old trainer"):
        compute_advantages(row, batch([1.0, 0.0]))


def test_a_users_estimator_is_called_and_its_shape_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_estimator.py").write_text(
        "def tripled(x, *, factor=3.0):\n    return factor * x.rewards_N\n\n\n"
        "def broken(x):\n    return x.rewards_N[:1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert values(compute_advantages(algorithm(advantage="own_estimator:tripled"), batch([1.0, 2.0]))) == [3.0, 6.0]
    with pytest.raises(QuintetError, match="broken returned shape"):
        compute_advantages(algorithm(advantage="own_estimator:broken"), batch([1.0, 2.0]))


def test_pass_at_k_credits_the_best_with_its_lead() -> None:
    result = compute_advantages(algorithm(preset="pass_at_k"), batch([0.2, 0.9, 0.5], [0.3]))
    assert values(result) == pytest.approx([0.0, 0.4, 0.0, 0.0])


def test_opo_weighs_the_baseline_by_loss_tokens() -> None:
    samples = [experience(0, 0, 1.0, mask=[1, 1, 0, 1]), experience(0, 1, 0.0, mask=[1, 0, 0, 0])]
    result = compute_advantages(algorithm(preset="opo"), ExperienceBatch(0, 0, samples))
    assert values(result) == pytest.approx([0.25, -0.75])


def test_gpg_rescales_by_the_share_of_rewards_that_are_not_zero() -> None:
    assert values(compute_advantages(algorithm(preset="gpg"), batch([1.0, 0.0, 0.0, 0.0]))) == [3.0, -1.0, -1.0, -1.0]


def test_the_batch_mean_is_over_all_groups() -> None:
    result = compute_advantages(algorithm(preset="flash_reinforce"), batch([1.0], [0.0], [0.0], [1.0]))
    assert values(result) == [0.5, -0.5, -0.5, 0.5]


def test_discounted_returns_are_per_token() -> None:
    sample = experience(0, 0, 1.0, mask=[1, 0, 1, 1])
    row = algorithm(preset="reinforce", advantage={"name": "returns", "gamma": 0.5})
    assert compute_advantages(row, ExperienceBatch(0, 0, [sample])).experiences[0].advantages == [0.25, 0.0, 0.5, 1.0]


def test_reinforce_pp_baseline_whitens_over_tokens() -> None:
    samples = [experience(0, 0, 1.0, mask=[1, 1, 1]), experience(0, 1, 0.0, mask=[1])]
    row = algorithm(preset="reinforce_pp_baseline", kl="none", advantage={"std": "population"})
    result = compute_advantages(row, ExperienceBatch(0, 0, samples))
    assert values(result) == pytest.approx([1 / 3**0.5, -(3**0.5)], abs=1e-6)


@pytest.mark.parametrize("preset", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "pass_at_k", "reinforce_pp_baseline"])
def test_a_group_of_one_gets_zero(preset: str) -> None:
    result = compute_advantages(algorithm(preset=preset, kl="none"), batch([0.6], [1.0, 0.0]))
    assert values(result)[0] == 0.0
    assert all(abs(v) > 0.1 for v in values(result)[1:] if preset != "pass_at_k")


def test_gae_is_the_discounted_sum_of_td_errors() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    table = torch.tensor([[0.2, 9.0, 0.4]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 0.0, 1.0]], dtype=torch.float64)
    adv, target = estimators.gae(rewards, table, mask, gamma=1.0, lam=0.5)
    assert adv[0].tolist() == pytest.approx([0.5, 0.0, 0.6]) and target[0].tolist() == pytest.approx([0.7, 0.0, 1.0])
    truncated, _ = estimators.gae(rewards, table, mask, gamma=1.0, lam=0.5, bootstrap_N=torch.tensor([0.3]).double())
    assert truncated[0].tolist() == pytest.approx([0.65, 0.0, 0.9])
