"""The supervised loop: a warm start before RL, and `quintet sft`.

Same forward, optimizer and batching as the RL worker. The loss is the mean negative log-likelihood over
the response tokens of a batch, divided once by the batch's token count.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from quintet.train.batching import micro_batches
from quintet.train.config import TrainConfig, WarmStartConfig
from quintet.train.forward import PolicyForward
from quintet.train.optimizer import Optimizer
from quintet.train.packing import TokenSample

log = logging.getLogger(__name__)

Example = tuple[Sequence[int], Sequence[int]]  # prompt ids, response ids
Progress = Callable[[int, dict[str, float]], None]  # optimizer step from 1, its metrics


def warm_start_config(train: TrainConfig, warm: WarmStartConfig) -> TrainConfig:
    """The train section with the warm start's rate, schedule and clipping."""
    own = {"lr": warm.lr, "schedule": warm.schedule, "warmup_steps": warm.warmup_steps, "min_lr_ratio": 0.0}
    return train.model_copy(update=own | {"max_grad_norm": warm.max_grad_norm})


def sft(
    model: nn.Module,
    batches: Iterable[Sequence[Example]],
    *,
    config: TrainConfig,
    total_steps: int,
    dtype: torch.dtype = torch.float32,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Train on batches of (prompt_ids, response_ids), one optimizer step each, in place.

    At most `total_steps` batches are taken. Returns `sft/loss` of the last step, `sft/steps`,
    `sft/tokens`, `sft/skipped_nonfinite` and `sft/seconds`. Of `config` the optimizer, schedule and
    memory options count; `epochs`, `mini_batches` and `old` belong to RL.
    """
    forward = PolicyForward(
        model,
        dtype=dtype,
        shared_prompt=config.shared_prompt,
        head_chunk_tokens=config.head_chunk_tokens,
        activation_checkpointing=config.activation_checkpointing,
    )
    optimizer, start = Optimizer(model, config, total_steps), time.perf_counter()
    totals = {"sft/steps": 0.0, "sft/tokens": 0.0, "sft/skipped_nonfinite": 0.0}
    try:
        forward.training_mode()
        for _, batch in zip(range(total_steps), batches, strict=False):
            samples = [TokenSample(prompt, response, [1] * len(response)) for prompt, response in batch if response]
            if not samples:
                log.warning("a supervised batch without response tokens was left out")
                continue
            loss, tokens = _gradient(forward, samples, config.micro_batch_tokens)
            result = optimizer.step()
            totals["sft/steps"] += 1
            totals["sft/tokens"] += tokens
            totals["sft/skipped_nonfinite"] += not result.applied
            totals["sft/loss"] = loss
            if progress is not None:
                step = {"sft/loss": loss, "sft/lr": result.lr, "sft/grad_norm": result.grad_norm, "sft/tokens": tokens}
                progress(int(totals["sft/steps"]), step)
    finally:
        forward.release()
    return totals | {"sft/seconds": time.perf_counter() - start}


def _gradient(forward: PolicyForward, samples: Sequence[TokenSample], max_tokens: int) -> tuple[float, float]:
    """Accumulate the gradient of the token-mean loss; returns the loss and the token count."""
    tokens, total = float(sum(len(s.response_ids) for s in samples)), 0.0
    for run in micro_batches(samples, max_tokens, forward.layout):
        loss = -forward(samples[run.start : run.stop]).logprobs_BT.sum() / tokens
        loss.backward()
        total += float(loss.detach())
    return total, tokens
