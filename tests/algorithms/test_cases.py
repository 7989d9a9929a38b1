"""Mistakes that users of other frameworks reported, as numbers: tests/data/cases_algorithm.jsonl, by id.

ALG36 (which logits belong to which token) is tested where logits are gathered, in the train worker.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.algorithms import estimators
from quintet.algorithms.advantage import compute_advantages
from quintet.algorithms.aggregate import Counts, aggregate, count
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.filters import overlong_penalty, shape_samples
from quintet.algorithms.kl import kl_estimate
from quintet.algorithms.logprobs import entropy, kept_tokens, token_logprobs
from quintet.algorithms.loss import TokenBatch, policy_objective
from quintet.algorithms.presets import Algorithm, resolve
from quintet.types import Experience, ExperienceBatch, GroupId, QuintetError

DATA = Path(__file__).parents[1] / "data" / "cases_algorithm.jsonl"
CASES = {case["id"]: case for case in map(json.loads, DATA.read_text().splitlines())}


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return CASES[name]["input"], CASES[name]["expect"]


def f64(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def algorithm(**options: Any) -> Algorithm:
    return resolve(AlgorithmConfig(**options))


def experience(group: int, index: int, reward: float | None, **more: Any) -> Experience:
    defaults = {"response_ids": [5], "logprobs": [-1.0], "loss_mask": [1]} | more
    group_id = GroupId("one prompt text", occurrence=group)
    return Experience(group_id, index, [1], reward=reward, weight_version=0, **defaults)


def advantages(groups: list[list[float | None]], **cell: Any) -> list[float]:
    samples = [experience(g, i, r) for g, rewards in enumerate(groups) for i, r in enumerate(rewards)]
    return result(samples, **cell)[0]


def result(samples: list[Experience], **cell: Any) -> tuple[list[float], dict[str, float]]:
    row = algorithm(advantage={"name": "grpo", **cell}) if "name" not in cell else algorithm(advantage=cell)
    batch = compute_advantages(row, ExperienceBatch(0, 0, samples))
    return [e.advantage for e in batch.experiences], batch.metrics


def token_batch(new: Any, old: Any, advantage: Any, **more: Any) -> TokenBatch:
    old_BT = f64(old)
    mask = more.pop("mask", None)
    return TokenBatch(
        logprobs=f64(new).requires_grad_(),
        old_logprobs=old_BT,
        sampler_logprobs=more.pop("sampler", old_BT),
        advantages=f64(advantage),
        mask=torch.ones_like(old_BT) if mask is None else f64(mask),
        **more,
    )


def test_alg01_equal_rewards_are_exact_zeros_and_a_visible_share() -> None:
    given, expect = case("ALG01")
    values, metrics = result([experience(0, i, r) for i, r in enumerate(given["rewards_one_group"])])
    assert values == expect["advantages"]
    assert metrics["reward/zero_std_frac"] == expect["metric_zero_std_fraction"]


def test_alg03_a_group_of_one_is_zero_on_every_path() -> None:
    given, _ = case("ALG03")
    for name in ("grpo", "rloo", "opo", "gpg", "reinforce_pp_baseline"):
        assert advantages([given["rewards"], [1.0, 0.0]], name=name)[0] == 0.0


def test_alg04_a_ragged_group_of_one_does_not_spread() -> None:
    given, expect = case("ALG04")
    values = advantages(given["groups"], std="sample")
    assert sum(values[:2]) == pytest.approx(expect["first_group_sum"]) and values[2] == 0.0
    assert values[0] == pytest.approx(0.7071068, abs=1e-6)


def test_alg05_four_conventions_four_numbers() -> None:
    given, expect = case("ALG05")
    groups = [given["rewards_one_group"]]
    assert advantages(groups, std="none") == pytest.approx(expect["center_only"])
    assert advantages(groups, std="sample", eps=0.0) == pytest.approx(expect["center_over_sample_std_ddof1"])
    population = advantages(groups, std="population", eps=0.0)
    assert population == pytest.approx(expect["center_over_population_std_ddof0"], abs=1e-6)
    assert advantages(groups, name="rloo") == pytest.approx(expect["leave_one_out"], abs=1e-6)


def test_alg07_normalised_inside_each_group() -> None:
    given, expect = case("ALG07")
    assert advantages(given["groups"], std="sample", eps=0.0) == pytest.approx(expect["advantages"], abs=1e-6)


def test_alg08_the_same_prompt_twice_is_two_groups() -> None:
    given, expect = case("ALG08")
    assert advantages([given["rewards_group_A"], given["rewards_group_B"]]) == expect["advantages"]


def test_alg10_none_is_not_zero() -> None:
    given, expect = case("ALG10")
    values = advantages([given["one_reward_fn_outputs"]], std="sample", eps=0.0)
    assert values[:2] == pytest.approx(expect["advantages_of_scored"], abs=1e-6) and values[2] == 0.0


def ragged(rows: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    loss = f64([r + [0.0] * (width - len(r)) for r in rows])
    return loss, f64([[1.0] * len(r) + [0.0] * (width - len(r)) for r in rows])


def test_alg12_four_aggregations_four_numbers() -> None:
    given, expect = case("ALG12")
    loss, mask = ragged(given["token_losses"])
    counts = count(mask, given["max_len"])
    assert aggregate(loss, mask, counts, "token-mean") == expect["token_mean"]
    assert aggregate(loss, mask, counts, "seq-mean-token-mean") == expect["seq_mean_of_token_means"]
    assert aggregate(loss, mask, counts, "seq-mean-token-sum") == expect["seq_mean_of_token_sums"]
    assert aggregate(loss, mask, counts, "seq-mean-token-sum-norm") == expect["constant_length_norm"]
    assert aggregate(loss, mask, counts, "seq-mean-token-sum-norm", length=7) == pytest.approx(0.5)


def test_alg13_accumulated_is_whole() -> None:
    given, expect = case("ALG13")
    loss, mask = ragged(given["token_losses"])
    shares = [aggregate(loss[rows], mask[rows], count(mask), "token-mean") for rows in given["micro_batches"]]
    assert sum(shares) == expect["accumulated_loss"]


def test_alg15_alg16_the_divisor_is_the_window_of_the_optimizer_and_divides_once() -> None:
    given, expect = case("ALG15")
    tokens = given["tokens_per_micro_step"]
    loss, mask = torch.full((1, tokens), given["loss_per_token"]), torch.ones(1, tokens)
    window = Counts(tokens=float(tokens * given["accumulation_steps"]), sequences=2.0, max_length=tokens)
    steps = [aggregate(loss, mask, window, "token-mean") for _ in range(given["accumulation_steps"])]
    assert float(sum(steps)) == expect["loss_per_optimizer_step"]
    given, expect = case("ALG16")
    leaf = torch.zeros(given["accumulation_steps"], 1, requires_grad=True)
    losses = given["true_gradient"] * given["accumulation_steps"] * leaf
    whole = count(torch.ones_like(leaf))
    for row in losses.split(1):
        aggregate(row, torch.ones(1, 1), whole, "token-mean").backward(retain_graph=True)
    assert leaf.grad is not None and leaf.grad.mean() == expect["gradient"]


def test_alg18_truncated_samples_leave_numerator_and_denominator() -> None:
    given, expect = case("ALG18")
    rows = [given["seq_A_token_losses"], given["seq_B_truncated_token_losses"]]
    samples = [
        experience(
            0, i, 1.0, response_ids=[5] * len(r), logprobs=[-1.0] * len(r), loss_mask=[1] * len(r), truncated=i == 1
        )
        for i, r in enumerate(rows)
    ]
    shaped = shape_samples(algorithm(filters=["overlong_mask"]), samples, max_tokens=3)
    loss, _ = ragged(rows)
    mask = f64([e.loss_mask + [0] * (3 - len(e.loss_mask)) for e in shaped])
    assert aggregate(loss, mask, count(mask), "token-mean") == expect["loss"]


def test_alg20_temperature_belongs_in_the_logprob() -> None:
    given, expect = case("ALG20")
    logits, sampled = f64(given["logits"]), torch.tensor(given["sampled"])
    with_temperature = token_logprobs(logits, sampled, temperature=given["temperature"])
    assert with_temperature.item() == pytest.approx(expect["logprob"], abs=1e-5)
    assert token_logprobs(logits, sampled).item() == pytest.approx(expect["logprob_if_temperature_forgotten"], abs=1e-5)


def test_alg22_alg24_estimators_and_their_gradients() -> None:
    given, values = case("ALG22")
    slopes = case("ALG24")[1]
    for name in ("k1", "k2", "k3"):
        logp = f64(given["logp"]).requires_grad_()
        estimate = kl_estimate(name, logp, f64(given["ref_logp"]))
        assert estimate.item() == pytest.approx(values[name], abs=1e-6)
        assert torch.autograd.grad(estimate, logp)[0].item() == pytest.approx(slopes[f"d_{name}"], abs=1e-6)
    with pytest.raises(QuintetError, match="no restoring gradient"):
        algorithm(kl={"name": "k1", "placement": "loss"})


def test_alg25_kl_counts_once() -> None:
    given, expect = case("ALG25")
    kl = given["per_token_kl"]
    sample = experience(
        0, 0, given["reward"], response_ids=[5, 5], logprobs=kl, ref_logprobs=[0.0, 0.0], loss_mask=[1, 1]
    )
    batch = ExperienceBatch(0, 0, [sample])
    tensors = token_batch([kl], [kl], [[1.0, 1.0]], ref_logprobs=f64([[0.0, 0.0]]))
    penalty = {"name": "k1", "coef": given["kl_coef"]}
    in_reward = algorithm(preset="reinforce", advantage="returns", kl={**penalty, "placement": "reward"})
    first = compute_advantages(in_reward, batch).experiences[0].advantages[0]
    assert first == pytest.approx(expect["kl_in_reward_only"]["return_first_token_gamma1"])
    plain = algorithm(preset="reinforce", advantage="returns")
    counts = count(tensors.mask)
    assert torch.equal(policy_objective(in_reward, tensors, counts)[0], policy_objective(plain, tensors, counts)[0])
    in_loss = algorithm(preset="reinforce", advantage="returns", kl={**penalty, "placement": "loss", "gradient": "k2"})
    returned = compute_advantages(in_loss, batch).experiences[0].advantages[0]
    assert returned == expect["kl_in_loss_only"]["return_first_token"]
    assert policy_objective(in_loss, tensors, counts)[0] > policy_objective(plain, tensors, counts)[0]


@pytest.mark.parametrize("preset", ["grpo", "gspo", "cispo", "gmpo", "sapo", "dppo_kl", "vespo", "flash_reinforce"])
def test_alg26_a_huge_log_ratio_with_advantage_zero_is_zero(preset: str) -> None:
    given, expect = case("ALG26")
    batch = token_batch([[given["logp"]]], [[given["old_logp"]]], [[given["advantage"]]])
    for dtype in (torch.float64, torch.float32):
        leaf = batch.logprobs.detach().to(dtype).requires_grad_()
        old = batch.old_logprobs.to(dtype)
        typed = TokenBatch(leaf, old, old, batch.advantages.to(dtype), batch.mask.to(dtype))
        loss, _ = policy_objective(algorithm(preset=preset), typed, count(typed.mask))
        loss.backward()
        assert loss.item() == expect["loss"] and leaf.grad is not None and leaf.grad.isfinite().all()


@pytest.mark.parametrize("name", ["ALG28", "ALG29"])
def test_alg28_alg29_clip_and_dual_clip_by_the_sign_of_the_advantage(name: str) -> None:
    given, expect = case(name)
    ratio, advantage = zip(*given["pairs_ratio_advantage"], strict=True)
    eps = {"eps_low": given["eps"], "eps_high": given["eps"]}
    dual = {"dual_clip": float(given["dual_clip_c"])} if "dual_clip_c" in given else {}
    row = algorithm(policy_loss={"name": "ppo", **eps, **dual}, aggregation="token-sum")
    for r, a, objective in zip(ratio, advantage, expect["objective"], strict=True):
        batch = token_batch([[float(torch.log(f64(r)))]], [[0.0]], [[a]])
        assert -policy_objective(row, batch, count(batch.mask))[0].item() == pytest.approx(objective)


def test_alg32_alg33_gae_reads_neither_padding_nor_tools() -> None:
    for name in ("ALG32", "ALG33"):
        given, expect = case(name)
        mask = f64([given["mask"]])
        adv, target = estimators.gae(
            f64([given["rewards"]]), f64([given["values"]]), mask, gamma=given["gamma"], lam=given["lambda"]
        )
        valid = mask[0] > 0
        if name == "ALG32":
            assert adv[0].tolist() == pytest.approx(expect["advantages"])
            assert target[0][valid].tolist() == pytest.approx(expect["returns_of_valid"])
        else:
            assert adv[0][valid].tolist() == pytest.approx(expect["advantages_on_actions"])


def test_alg35_the_return_crosses_a_tool_span() -> None:
    given, expect = case("ALG35")
    mask = f64([given["mask"]])
    returns = estimators.returns_to_go(f64([given["rewards"]]), mask, gamma=given["gamma"])
    assert returns[0][mask[0] > 0].tolist() == expect["returns_on_actions"]


def test_alg38_soft_punishment_and_its_refusal() -> None:
    given, expect = case("ALG38")
    limits = {"max_tokens": given["max_len"], "buffer": given["buffer"], "factor": float(given["factor"])}
    assert [overlong_penalty(n, **limits) for n in given["lengths"]] == pytest.approx(expect["penalty"])
    row = algorithm(filters=[{"name": "overlong_penalty", "buffer": 101}])
    with pytest.raises(QuintetError, match="longer than rollout"):
        shape_samples(row, [], given["max_len"])


def test_alg40_length_counts_generated_tokens() -> None:
    given, expect = case("ALG40")
    mask = given["action_mask"]
    sample = experience(0, 0, 0.0, response_ids=[5] * 6, logprobs=[-1.0] * 6, loss_mask=mask)
    row = algorithm(filters=[{"name": "overlong_penalty", "buffer": 6}])
    penalised = shape_samples(row, [sample], max_tokens=6)[0]
    assert penalised.reward == pytest.approx(-expect["response_length"] / 6)


def test_alg41_old_and_new_over_the_same_support() -> None:
    given, expect = case("ALG41")
    logits, sampled = f64(given["probs"]).log(), torch.tensor(given["sampled"])
    kept = kept_tokens(logits, top_p=given["top_p"])
    renormalised = token_logprobs(logits, sampled, kept_V=kept).item()
    assert renormalised == pytest.approx(expect["renormalised_logprob"], abs=1e-6)
    assert token_logprobs(logits, sampled).item() == pytest.approx(expect["full_logprob"], abs=1e-6)


def test_alg42_an_unscored_token_weighs_one() -> None:
    given, expect = case("ALG42")
    sampler = f64([[float("nan") if v is None else v for v in given["rollout_logprobs"]]])
    old = [given["train_old_logprobs"]]
    batch = token_batch(old, old, [[1.0, 1.0, 1.0]], sampler=sampler)
    row = algorithm(preset="reinforce", aggregation="token-sum", correction="tis")
    loss, _ = policy_objective(row, batch, count(batch.mask))
    loss.backward()
    assert (-batch.logprobs.grad)[0].tolist() == pytest.approx(expect["is_weights"], abs=1e-6)


def test_alg45_entropy_over_action_tokens() -> None:
    given, expect = case("ALG45")
    zeros = [[0.0, 0.0, 0.0]]
    batch = token_batch(zeros, zeros, zeros, mask=[given["mask"]], entropy=f64([given["token_entropies"]]))
    numerator, denominator = policy_objective(algorithm(), batch, count(batch.mask))[1]["actor/entropy"]
    assert numerator / denominator == expect["logged_entropy"]
    uniform = entropy(torch.zeros(given["uniform_over"], dtype=torch.float64))
    assert uniform.item() == pytest.approx(expect["entropy_uniform_4"], abs=1e-6)


@pytest.mark.parametrize("std", ["population", "sample", "none"])
def test_alg46_the_kl_term_acts_on_groups_without_spread_whatever_the_scaling(std: str) -> None:
    given, _ = case("ALG46")
    row = algorithm(advantage={"std": std}, kl={"name": "k2", "coef": given["beta"]})
    batch = token_batch([[-1.0, -2.0]], [[-1.0, -2.0]], [[0.0, 0.0]], ref_logprobs=f64([[-1.5, -1.0]]))
    loss, _ = policy_objective(row, batch, count(batch.mask))
    loss.backward()
    assert batch.logprobs.grad[0].tolist() == pytest.approx([0.1 * 0.5 / 2, 0.1 * -1.0 / 2])
