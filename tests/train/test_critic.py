"""The critic: where its values are read, what it is trained towards, how it is saved, and that PPO's learns."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import quintet
from quintet.algorithms.advantage import compute_advantages
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import resolve
from quintet.models.config import LoraConfig
from quintet.models.lora import apply_lora
from quintet.observe.metrics import read_metrics
from quintet.train.config import TrainConfig
from quintet.train.critic import Critic
from quintet.train.metrics import MetricSums
from quintet.train.value import ValueForward, ValueModel, after_last_token
from quintet.types import Experience, ExperienceBatch, QuintetError
from tests.train.helpers import experiences, make_worker, random_samples, tiny_model

GROUPS = [(4, [3, 5]), (6, [2]), (3, [8, 8])]
PPO = {"preset": "ppo"}


def value_model(seed: int = 0) -> ValueModel:
    """A critic whose head is far from 0."""
    model = ValueModel(tiny_model(seed=seed))
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.head.weight, std=0.3)
    return model


def batch(step: int = 1, truncated: bool = False) -> ExperienceBatch:
    samples = experiences(0, GROUPS)
    for e in samples:
        e.truncated, e.advantages = truncated, None
    return ExperienceBatch(step, 3, samples)


def run(worker: Any, *batches: ExperienceBatch, algorithm: dict[str, Any] = PPO) -> list[dict[str, float]]:
    """prepare -> advantages -> update of each batch; the metrics of every update."""

    async def steps() -> list[dict[str, float]]:
        out = []
        for given in batches:
            ready = compute_advantages(resolve(AlgorithmConfig(**algorithm)), await worker.prepare(given))
            out.append((await worker.update(ready)).values)
        return out

    return asyncio.run(steps())


@pytest.mark.parametrize("shared_prompt", [True, False])
def test_a_value_is_read_where_its_token_is_predicted(shared_prompt: bool) -> None:  # ALG36
    model, samples = value_model(), random_samples(1, GROUPS)
    expected = []
    for s in samples:
        ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
        with torch.no_grad():
            hidden = model.body.get_decoder()(input_ids=ids).last_hidden_state[0]
            rows = slice(len(s.prompt_ids) - 1, len(s.prompt_ids) + len(s.response_ids) - 1)
            expected.append(model.head(hidden[rows])[:, 0] * torch.tensor(s.loss_mask))
    forward = ValueForward(model, TrainConfig(shared_prompt=shared_prompt), torch.float32)
    with torch.no_grad():
        found_BT = forward(samples).values_BT
    for row, values in zip(found_BT, expected, strict=True):
        torch.testing.assert_close(row[: len(values)], values, atol=1e-5, rtol=1e-4)


def test_the_bootstrap_value_has_seen_the_whole_response() -> None:
    model, s = value_model(), random_samples(1, GROUPS)[1]
    with torch.no_grad():
        ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
        expected = float(model.head(model.body.get_decoder()(input_ids=ids).last_hidden_state[0, -1]))
        found_BT = ValueForward(model, TrainConfig(), torch.float32)(
            [after_last_token(s.prompt_ids, s.response_ids)]
        ).values_BT
    assert float(found_BT[0, -1]) == pytest.approx(expected, abs=1e-5)
    critic = Critic.of(value_model(), TrainConfig(), 1, torch.float32)
    cut, ended = batch(truncated=True).experiences, batch().experiences
    critic.fill_values(cut, bootstrap=True)
    critic.fill_values(ended, bootstrap=True)
    assert all(e.bootstrap_value != 0.0 for e in cut) and all(e.bootstrap_value == 0.0 for e in ended)
    critic.fill_values(again := batch(truncated=True).experiences, bootstrap=False)
    assert all(e.bootstrap_value == 0.0 for e in again)


def test_values_are_filled_only_with_a_critic_and_start_at_zero() -> None:
    worker = make_worker(tiny_model(), PPO)
    ready = asyncio.run(worker.prepare(batch()))
    assert all(e.values == [0.0] * len(e.response_ids) for e in ready.experiences)
    ready = asyncio.run(make_worker(tiny_model()).prepare(batch()))
    assert all(e.values is None for e in ready.experiences)


def test_the_critic_is_trained_on_the_clipped_loss_of_its_returns() -> None:
    samples = batch().experiences
    config = TrainConfig(micro_batch_tokens=12, critic={"lr": 1e-3})
    critic = Critic.of(value_model(), config, 10, torch.float32)

    def step(*, old: float, target: float) -> dict[str, float]:
        """One step where the values of before are `old` and the returns `target` away from the values of now."""
        critic.fill_values(samples, bootstrap=False)
        for e in samples:
            assert e.values is not None
            e.values, e.returns = [v + old for v in e.values], [v + target for v in e.values]
        critic.step(samples, sums := MetricSums())
        return sums.values()

    far = step(old=-1.0, target=0.0)
    assert far["critic/loss"] == pytest.approx(0.32, abs=1e-5), "half the square of 1 - clip 0.2"
    assert far["critic/clip_frac"] == 1.0 and far["critic/grad_norm"] == 0.0
    near = step(old=0.0, target=1.0)
    assert near["critic/loss"] == pytest.approx(0.5, abs=1e-5) and near["critic/clip_frac"] == 0.0
    assert near["critic/lr"] == 1e-3 and near["critic/grad_norm"] > 0
    before = critic.describe(samples)["critic/value_mean"]
    critic.fill_values(samples, bootstrap=False)
    assert critic.describe(samples)["critic/value_mean"] > before


def test_warm_up_steps_train_the_critic_alone() -> None:
    model = tiny_model()
    worker = make_worker(model, PPO, lr=0.01, critic={"lr": 0.01, "warmup_steps": 1})
    before = [p.detach().clone() for p in model.parameters()]
    first = run(worker, batch(1))[0]
    assert first["critic/warming_up"] == 1.0 and "actor/grad_norm" not in first
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    second = run(worker, batch(2))[0]
    assert second["critic/warming_up"] == 0.0 and second["actor/grad_norm"] > 0
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert second["critic/loss"] != first["critic/loss"]


def test_values_of_repeated_batches_come_to_explain_the_returns() -> None:
    worker = make_worker(tiny_model(), PPO, lr=0.0, critic={"lr": 3e-3, "clip": None})
    seen = run(worker, *(batch(i) for i in range(1, 41)))
    assert "critic/explained_variance" in seen[0]
    assert seen[-1]["critic/explained_variance"] > 0.5 > seen[0]["critic/explained_variance"]


@pytest.mark.parametrize("lora", [False, True])
def test_the_critic_goes_through_a_checkpoint(tmp_path: Path, lora: bool) -> None:
    def worker() -> Any:
        model: Any = tiny_model()
        if lora:
            model = apply_lora(model, LoraConfig(r=2), seed=0)
        return make_worker(model, PPO, lr=1e-3, critic={"lr": 1e-3})

    first = worker()
    run(first, batch(1))
    asyncio.run(first.save_checkpoint(str(tmp_path)))
    expected = run(first, batch(2))[0]
    second = worker()
    asyncio.run(second.load_checkpoint(str(tmp_path)))
    found = run(second, batch(2))[0]
    for name in ("critic/loss", "critic/grad_norm", "critic/explained_variance", "actor/grad_norm"):
        assert found[name] == expected[name], name
    (tmp_path / "critic_optimizer.safetensors").unlink()
    with pytest.raises(QuintetError, match="critic_optimizer"):
        asyncio.run(worker().load_checkpoint(str(tmp_path)))


def test_under_lora_the_critic_starts_from_the_merged_policy_and_is_trained_whole() -> None:
    critic = ValueModel(apply_lora(tiny_model(), LoraConfig(r=2), seed=0))
    plain = tiny_model()
    assert {n for n, _ in critic.body.named_parameters()} == {n for n, _ in plain.named_parameters()}
    assert all(p.requires_grad for p in critic.parameters())


def test_options_of_the_critic_are_refused_without_one() -> None:
    from quintet.config import load_config

    with pytest.raises(QuintetError, match=r"train\.critic has no effect.*grpo"):
        load_config({"train": {"critic": {"lr": 1e-4}}})
    assert load_config({"algorithm": PPO, "train": {"critic": {"lr": 1e-4}}, "rollout": {"group_size": 1}})


@pytest.mark.heavy
def test_ppo_raises_the_reward_and_its_critic_explains_returns(tmp_path: Path) -> None:
    tiny = {"hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 2, "kv_heads": 1, "max_position": 32}
    config = {
        "steps": 40,
        "model": {"name": "builtin:tiny", "tiny": tiny},
        "data": {"source": "task:sums", "args": {"max": 9, "template": "{a}+{b}="}, "eval_size": 20},
        "warm_start": {"steps": 60, "batch_size": 64, "lr": 3e-3},
        "algorithm": PPO,
        "rollout": {"groups_per_step": 32, "group_size": 4, "max_tokens": 3},
        "reward": {"functions": [{"fn": "exact"}]},
        "train": {"lr": 5e-4, "critic": {"lr": 1e-3, "warmup_steps": 2}},
    }
    result = quintet.train(config, out=tmp_path / "run")
    rows = [r for r in read_metrics(result.folder / "metrics.jsonl") if r["step"] > 0]
    last = [r["critic/explained_variance"] for r in rows[-5:]]
    assert sum(last) / len(last) > 0.0
    assert sum(r["reward/mean"] for r in rows[-5:]) > sum(r["reward/mean"] for r in rows[:5])


def test_experiences_carry_the_returns() -> None:
    samples: list[Experience] = batch().experiences
    for e in samples:
        e.values = [0.5] * len(e.response_ids)
    algorithm = resolve(AlgorithmConfig(preset="ppo", advantage={"lam": 1.0, "whiten": False}))
    for e in compute_advantages(algorithm, ExperienceBatch(1, 3, samples)).experiences:
        assert e.returns is not None and e.advantages is not None
        for a, r, m in zip(e.advantages, e.returns, e.loss_mask, strict=True):
            assert (a, r) == pytest.approx((e.reward - 0.5, e.reward) if m else (0.0, 0.0))
