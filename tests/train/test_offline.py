"""The supervised loop before RL."""

from __future__ import annotations

import pytest
import torch

from quintet.train.config import TrainConfig, WarmStartConfig
from quintet.train.offline import sft, warm_start_config
from tests.train.helpers import gradients, plain_logprobs, random_samples, tiny_model

SAMPLES = [
    s._replace(loss_mask=[1] * len(s.response_ids)) for s in random_samples(3, [(4, [3, 5]), (6, [2]), (3, [8])])
]
BATCH = [(s.prompt_ids, s.response_ids) for s in SAMPLES]


@pytest.mark.parametrize("micro_batch_tokens", [1, 20, 10_000])
def test_the_loss_is_the_mean_over_the_batch_tokens_however_it_is_cut(micro_batch_tokens: int) -> None:
    model = tiny_model()
    expected = -sum(plain_logprobs(model, s, 1.0).sum().item() for s in SAMPLES) / 18
    config = TrainConfig(lr=0.0, micro_batch_tokens=micro_batch_tokens)
    metrics = sft(model, [BATCH], config=config, total_steps=1)
    assert metrics["sft/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics["sft/tokens"] == 18 and metrics["sft/steps"] == 1


def test_it_learns_and_reports_every_step() -> None:
    model, seen = tiny_model(), []
    config = TrainConfig(lr=0.01, schedule="linear")
    metrics = sft(
        model, (BATCH for _ in range(100)), config=config, total_steps=30, progress=lambda s, m: seen.append((s, m))
    )
    assert [step for step, _ in seen] == list(range(1, 31)) and metrics["sft/steps"] == 30
    assert seen[0][1]["sft/lr"] == 0.01 and seen[15][1]["sft/lr"] == pytest.approx(0.005)
    assert metrics["sft/loss"] < 0.3 * seen[0][1]["sft/loss"]
    assert model.config._attn_implementation == "sdpa", "the model has its own attention again"
    assert gradients(model) == {}


def test_the_first_step_is_adamw_on_the_plain_gradient() -> None:
    model, reference = tiny_model(), tiny_model()
    sft(model, [BATCH], config=TrainConfig(lr=0.01, max_grad_norm=0.0), total_steps=1)
    (-torch.stack([plain_logprobs(reference, s, 1.0).sum() for s in SAMPLES]).sum() / 18).backward()
    torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.0).step()
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4, msg=name)


def test_the_warm_start_has_its_own_rate_and_keeps_the_memory_options() -> None:
    train = TrainConfig(lr=1e-6, schedule="cosine", min_lr_ratio=0.1, micro_batch_tokens=77, head_chunk_tokens=9)
    warm = warm_start_config(train, WarmStartConfig(lr=0.1, warmup_steps=3, max_grad_norm=0.5))
    assert (warm.lr, warm.schedule, warm.warmup_steps, warm.max_grad_norm) == (0.1, "constant", 3, 0.5)
    assert (warm.micro_batch_tokens, warm.head_chunk_tokens) == (77, 9) and warm.conflict() is None
