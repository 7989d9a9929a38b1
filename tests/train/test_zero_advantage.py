"""Samples whose advantages are all 0 go through no forward pass, and nothing that is trained changes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from quintet.algorithms.presets import PRESETS
from quintet.types import Experience, ExperienceBatch, TrainMetrics
from tests.train.helpers import experiences, largest_relative_gap, make_worker, tiny_model

GROUPS = [(6, [4, 9, 2]), (5, [3, 1, 12]), (4, [8, 2])]


def batch(*zero_groups: str) -> list[Experience]:
    samples = experiences(7, GROUPS)
    for e in samples:
        if e.group_id.prompt_id in zero_groups:
            e.advantages = [0.0] * len(e.response_ids)
    return samples


def weights_after(
    algorithm: dict[str, Any], steps: list[list[Experience]], **options: Any
) -> tuple[dict[str, torch.Tensor], list[TrainMetrics]]:
    """Weights after one update per batch (momentum on), and each update's metrics."""
    model = tiny_model()
    worker = make_worker(model, algorithm, lr=1e-3, max_grad_norm=0.0, **options)

    async def main() -> list[TrainMetrics]:
        out = [await worker.update(ExperienceBatch(step=i, version=3, experiences=b)) for i, b in enumerate(steps)]
        await worker.close()
        return out

    metrics = asyncio.run(main())
    return {name: p.detach().clone() for name, p in model.named_parameters()}, metrics


NOT_HERE = {"ppo", "reinforce_pp_baseline"}  # a critic's advantages are never all 0; a KL term in the loss


@pytest.mark.parametrize("preset", sorted(PRESETS.keys() - NOT_HERE))
def test_skipping_a_group_without_a_signal_changes_no_weight(preset: str) -> None:
    steps = [batch("p1"), batch("p0", "p2")]
    skipped, metrics = weights_after({"preset": preset}, steps, old="trainer")
    whole, full_metrics = weights_after({"preset": preset}, steps, old="trainer", skip_zero_advantage=False)
    assert largest_relative_gap(skipped, whole) <= 1e-5
    assert [m.values["actor/skipped_frac"] for m in metrics] == [3 / 8, 5 / 8]
    assert full_metrics[0].values["actor/skipped_frac"] == 0.0
    assert metrics[0].values["actor/grad_norm"] == pytest.approx(full_metrics[0].values["actor/grad_norm"], rel=1e-5)


def test_a_batch_without_any_signal_still_moves_by_its_momentum() -> None:
    steps = [batch(), batch("p0", "p1", "p2")]
    skipped, metrics = weights_after({"preset": "grpo"}, steps)
    whole, _ = weights_after({"preset": "grpo"}, steps, skip_zero_advantage=False)
    after_first, _ = weights_after({"preset": "grpo"}, steps[:1])
    assert largest_relative_gap(skipped, whole) <= 1e-6
    assert largest_relative_gap(skipped, after_first) > 1e-5
    assert (metrics[1].optimizer_steps, metrics[1].values["actor/grad_norm"]) == (1, 0.0)


@pytest.mark.parametrize(
    "override",
    [
        {"kl": {"name": "k3", "coef": 0.1}},
        {"entropy_coef": 0.01},
        {"preset": "flash_reinforce", "policy_loss": {"name": "flash_reinforce", "entropy_keep": 0.5}},
    ],
)
def test_what_acts_on_samples_without_an_advantage_keeps_them(override: dict[str, Any]) -> None:
    _, metrics = weights_after({"preset": "grpo", **override}, [batch("p1")], old="sampler")
    assert metrics[0].values["actor/skipped_frac"] == 0.0
