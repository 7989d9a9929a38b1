"""AdamW, the schedule by optimizer step, clipping, and the guard against non-finite gradients."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from quintet.train.config import TrainConfig
from quintet.train.optimizer import Optimizer, lr_at


def rates(total: int, **options: object) -> list[float]:
    config = TrainConfig(lr=1.0, **options)
    return [round(lr_at(step, config, total), 6) for step in range(total + 1)]


def test_schedules_are_the_hand_computed_ones() -> None:
    assert rates(3) == [1.0, 1.0, 1.0, 1.0]
    assert rates(4, warmup_steps=2) == [0.5, 1.0, 1.0, 1.0, 1.0]
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(6, schedule="linear", warmup_steps=2, min_lr_ratio=0.2) == [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates(4, schedule="cosine") == [
        1.0,
        round(0.5 + math.sqrt(0.125), 6),
        0.5,
        round(0.5 - math.sqrt(0.125), 6),
        0,
    ]
    assert lr_at(99, TrainConfig(lr=2.0, schedule="cosine", min_lr_ratio=0.1), 10) == pytest.approx(0.2)


def test_linear_decay_at_a_tenth_of_the_run() -> None:
    """CKP02: lr 1.0, linear to 0 over 1,000 steps: 0.9 at the step after 100 were taken."""
    assert lr_at(100, TrainConfig(lr=1.0, schedule="linear"), 1000) == pytest.approx(0.9)


def test_one_adamw_step_is_the_formula() -> None:
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.fill_(2.0)
    optimizer = Optimizer(layer, TrainConfig(lr=0.1, weight_decay=0.5, max_grad_norm=0.0), total_steps=1)
    layer.weight.grad, layer.bias.grad = torch.tensor([[3.0]]), torch.tensor([3.0])
    result = optimizer.step()
    # bias-corrected first step: m / sqrt(v) = 1, decoupled decay 1 - lr * wd, of the matrix only
    assert float(layer.weight) == pytest.approx(2.0 * 0.95 - 0.1, abs=1e-6)
    assert float(layer.bias) == pytest.approx(2.0 - 0.1, abs=1e-6)
    assert result.grad_norm == pytest.approx(math.sqrt(18)) and result.lr == 0.1 and result.applied
    assert layer.weight.grad is None


def test_clipping_scales_the_whole_gradient_and_reports_the_norm_before() -> None:
    layer = nn.Linear(2, 1, bias=False)
    optimizer = Optimizer(layer, TrainConfig(lr=0.1, max_grad_norm=1.0), total_steps=1)
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    assert optimizer.step().grad_norm == pytest.approx(5.0)
    moment = optimizer.state_tensors()["weight.exp_avg"]
    torch.testing.assert_close(moment, 0.1 * torch.tensor([[0.6, 0.8]]), rtol=1e-5, atol=1e-7)


def test_rate_zero_leaves_every_bit_of_the_weights() -> None:
    layer = nn.Linear(7, 5)
    before = [p.detach().clone() for p in layer.parameters()]
    optimizer = Optimizer(layer, TrainConfig(lr=0.0, weight_decay=0.1), total_steps=3)
    for _ in range(3):
        layer(torch.randn(4, 7)).square().sum().backward()
        assert optimizer.step().applied
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    assert float(optimizer.state_tensors()["weight.exp_avg"].abs().sum()) > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_is_skipped_and_said(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(2, 2)
    optimizer = Optimizer(layer, TrainConfig(lr=0.1), total_steps=3)
    before = layer.weight.detach().clone()
    layer.weight.grad, layer.bias.grad = torch.full((2, 2), bad), torch.ones(2)
    with caplog.at_level(logging.WARNING):
        result = optimizer.step()
    assert not result.applied and optimizer.steps == 0 and not math.isfinite(result.grad_norm)
    assert torch.equal(layer.weight, before) and optimizer.state_tensors() == {}
    assert "skipped" in caplog.text
    layer.weight.grad = torch.ones(2, 2)
    assert optimizer.step().applied and optimizer.steps == 1


def test_contradicting_options_are_refused_with_the_mend() -> None:
    with pytest.raises(ValidationError, match="use old: trainer"):
        TrainConfig(epochs=2)
    with pytest.raises(ValidationError, match=r"mini_batches = 1 x 4"):
        TrainConfig(mini_batches=4, old="self")
    with pytest.raises(ValidationError, match="min_lr_ratio has no effect"):
        TrainConfig(min_lr_ratio=0.5)
    assert TrainConfig(epochs=2, mini_batches=4, old="trainer").conflict() is None
