"""One training step under the magnifying glass: loss, ratio and advantage of every token, gradient norm of every layer.

Log-probabilities, ratios and losses are those of the weights before the step, so for more than one
optimizer step they are exact for the first; gradient norms are those of each optimizer step, before clipping.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import exp, sqrt
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from quintet.algorithms.aggregate import Counts, aggregate
from quintet.algorithms.loss import TokenBatch, token_losses
from quintet.algorithms.presets import Algorithm
from quintet.cluster.build import Base
from quintet.train.batching import counts, mini_batches, trainable
from quintet.train.config import TrainConfig
from quintet.train.worker import LocalTrainWorker
from quintet.types import Experience, ExperienceBatch

_LAYER = re.compile(r"(layers\.\d+)\.")


class TokenView(msgspec.Struct, frozen=True):
    """One response token. `sampler` is the engine's log-probability, `ratio` is exp(logprob - old)."""

    id: int
    text: str
    trained: bool
    logprob: float
    sampler: float
    ratio: float
    advantage: float
    loss: float  # before aggregation


class SampleView(msgspec.Struct, frozen=True):
    """`loss` is the sample's share of its optimizer step's loss: the shares add up to it."""

    group: str
    sample: int
    reward: float
    advantage: float
    loss: float
    tokens: list[TokenView]


class Inspection(msgspec.Struct, frozen=True):
    samples: list[SampleView]
    gradient_norms: list[dict[str, float]]  # one entry per optimizer step: layer -> norm
    metrics: dict[str, float]  # what the update reported


async def inspect_update(
    train: LocalTrainWorker, batch: ExperienceBatch, config: TrainConfig, algorithm: Algorithm, base: Base
) -> Inspection:
    """Train on `batch`, and say what happened."""
    samples = trainable(batch.experiences)
    algorithm = algorithm.with_kl_coef(batch.kl_coef)
    logprobs = await train.logprobs(samples)
    if algorithm.needs_full_kl and algorithm.kl_in_loss:
        for sample, kl in zip(samples, await train.full_kl(samples), strict=True):
            sample.full_kl = kl
    views: list[SampleView] = []
    rows = iter(logprobs)
    for mini_batch in mini_batches(samples, config.mini_batches):
        step_counts = counts(mini_batch)
        views += [_sample(e, next(rows), step_counts, config, algorithm, base) for e in mini_batch]
    with _gradient_norms(train.model) as norms:
        metrics = await train.update(batch)
    return Inspection(views, norms, metrics.values)


def _sample(
    e: Experience, logprobs: list[float], step_counts: Counts, config: TrainConfig, algorithm: Algorithm, base: Base
) -> SampleView:
    old = {"self": logprobs, "trainer": e.proximal_logprobs, "sampler": e.logprobs}[config.old]
    assert old is not None and e.advantages is not None and e.reward is not None
    batch = TokenBatch(
        logprobs=_row(logprobs),
        old_logprobs=_row(old),
        sampler_logprobs=_row(e.logprobs),
        advantages=_row(e.advantages),
        mask=_row(e.loss_mask),
        ref_logprobs=None if e.ref_logprobs is None else _row(e.ref_logprobs),
        entropy=torch.zeros(1, len(logprobs)),
        rewards=torch.tensor([e.reward]),
        full_kl=None if e.full_kl is None else _row(e.full_kl),
    )
    loss_BT, _ = token_losses(algorithm, batch)
    share = aggregate(loss_BT, batch.mask, step_counts, algorithm.aggregation.name, **algorithm.aggregation.params)
    columns = zip(
        e.response_ids, e.loss_mask, logprobs, e.logprobs, old, e.advantages, loss_BT[0].tolist(), strict=True
    )
    tokens = [
        TokenView(i, base.tokenizer.decode([i]), bool(m), lp, mu, exp(lp - o) if m else 1.0, a, loss if m else 0.0)
        for i, m, lp, mu, o, a, loss in columns
    ]
    return SampleView(str(e.group_id), e.sample_index, e.reward, e.advantage, float(share), tokens)


def _row(values: Sequence[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float32)


@contextmanager
def _gradient_norms(model: nn.Module) -> Iterator[list[dict[str, float]]]:
    """Filled while updates run: one dict per optimizer step, layer -> norm of its accumulated gradient."""
    squares: dict[str, float] = {}
    steps: list[dict[str, float]] = []

    def remember(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        squares[name] = float(parameter.grad.detach().double().square().sum())

    def end_step(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        layers: defaultdict[str, float] = defaultdict(float)
        for name, square in squares.items():
            layers[_layer(name)] += square
        steps.append({name: sqrt(total) for name, total in layers.items()})
        squares.clear()

    handles = [
        p.register_post_accumulate_grad_hook(lambda p, name=name: remember(name, p))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    handles.append(register_optimizer_step_pre_hook(end_step))
    try:
        yield steps
    finally:
        for handle in handles:
            handle.remove()


def _layer(parameter: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `layers.3`; outside the layers the module's own name."""
    found = _LAYER.search(parameter)
    return found[1] if found else parameter.rsplit(".", 2)[-2]
