"""The loss of one micro-batch: policy loss x correction, KL, entropy, aggregated by the counts of the step.

It is this micro-batch's *share*: the sum over the micro-batches of an optimizer step is the step's loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quintet.algorithms.aggregate import Counts, aggregate
from quintet.algorithms.correction import correction_weights
from quintet.algorithms.kl import kl_estimate
from quintet.algorithms.plugins import load_custom
from quintet.algorithms.policy_loss import POLICY_LOSSES, LossInput, LossTerms, bounded_log_ratio
from quintet.algorithms.presets import Algorithm, Cell
from quintet.types import QuintetError

__all__ = ["Counts", "Stats", "TokenBatch", "policy_objective", "token_losses"]

Stats = dict[str, tuple[Tensor, Tensor]]


@dataclass
class TokenBatch:
    """Right-padded [B, T] tensors of response tokens; `mask` is 1.0 on loss tokens, `rewards` [B].

    `logprobs` carries the gradient. `old_logprobs` None means `old: self`: the current policy, detached.
    `sampler_logprobs` may be NaN where the engine gave none: such a token is taken to come from the old policy and has
    importance weight 1. `versions_match` (1.0 where a token was sampled with the weights that are being updated) is
    for the train worker's mismatch metric; no loss reads it. `full_kl` (with gradient) is the KL of the policy's and
    the reference's whole distributions, for a row whose KL cell is `full`.
    """

    logprobs: Tensor
    old_logprobs: Tensor | None
    sampler_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    versions_match: Tensor | None = None
    rewards: Tensor | None = None
    full_kl: Tensor | None = None


def policy_objective(algorithm: Algorithm, batch: TokenBatch, counts: Counts) -> tuple[Tensor, Stats]:
    """This micro-batch's share of the loss (scalar, with gradient) and its statistics: `token_losses`, aggregated.

    A statistic is (numerator, denominator), detached, to be summed over micro-batches before dividing; one whose name
    ends in `_max` is (maximum, 1), to be combined by max. A correction leaves the denominators alone. The KL term acts
    on every loss token, also in groups whose advantages are 0. Raises ValueError if a tensor the row needs is missing.
    """
    loss_BT, stats = token_losses(algorithm, batch)
    cell = algorithm.aggregation
    return aggregate(loss_BT, batch.mask, counts, cell.name, **cell.params), stats


def token_losses(algorithm: Algorithm, batch: TokenBatch) -> tuple[Tensor, Stats]:
    """The loss of each token [B, T] before aggregation: policy loss x correction, KL and entropy; and the statistics.

    Raises ValueError if a tensor the row needs is missing.
    """
    x = _loss_input(batch)
    terms = _policy_terms(algorithm.policy_loss, x)
    loss_BT = terms.loss_BT
    stats = _ratio_stats(x, terms)
    if algorithm.correction is not None:
        weights_BT = correction_weights(algorithm.correction.name, dict(algorithm.correction.params), x).detach()
        loss_BT = loss_BT * weights_BT
        stats |= _correction_stats(weights_BT, x.mask_BT)
    if algorithm.kl is not None and (algorithm.kl_in_loss or not algorithm.needs_full_kl):
        kl_BT = _kl_term(algorithm.kl, x, batch)
        stats["kl/ref"] = _mean(kl_BT, x.mask_BT)
        if algorithm.kl_in_loss and algorithm.kl.params["coef"] > 0:
            loss_BT = loss_BT + algorithm.kl.params["coef"] * kl_BT
    if x.entropy_BT is not None:
        stats["actor/entropy"] = _mean(x.entropy_BT, x.mask_BT)
    if algorithm.entropy_coef != 0.0:
        if x.entropy_BT is None:
            raise ValueError("entropy_coef is not 0: TokenBatch.entropy must be given")
        loss_BT = loss_BT - algorithm.entropy_coef * x.entropy_BT
    return loss_BT, stats


def _loss_input(batch: TokenBatch) -> LossInput:
    valid = batch.mask > 0

    def clean(x: Tensor) -> Tensor:
        return torch.where(valid, x, 0.0)

    logprobs = clean(batch.logprobs)
    old = logprobs.detach() if batch.old_logprobs is None else clean(batch.old_logprobs)
    sampler = clean(batch.sampler_logprobs)
    return LossInput(
        logprobs_BT=logprobs,
        old_logprobs_BT=old,
        sampler_logprobs_BT=torch.where(sampler.isnan(), old, sampler),
        advantages_BT=clean(batch.advantages).to(logprobs.dtype),
        mask_BT=batch.mask,
        log_ratio_BT=bounded_log_ratio(logprobs, old, batch.mask),
        entropy_BT=None if batch.entropy is None else clean(batch.entropy),
        rewards_B=batch.rewards,
    )


def _policy_terms(cell: Cell, x: LossInput) -> LossTerms:
    if not cell.custom:
        return POLICY_LOSSES[cell.name](x, **cell.params)
    terms = load_custom(cell.name, "policy_loss")(x, **cell.params)
    if not isinstance(terms, LossTerms) or terms.loss_BT.shape != x.mask_BT.shape:
        raise QuintetError(
            f"algorithm.policy_loss {cell.name} must return LossTerms with loss_BT of the mask's shape [B, T]"
        )
    return LossTerms(torch.where(x.mask_BT > 0, terms.loss_BT, 0.0), terms.indicators)


def _kl_term(kl: Cell, x: LossInput, batch: TokenBatch) -> Tensor:
    needed = batch.full_kl if kl.name == "full" else batch.ref_logprobs
    if needed is None:
        name = "full_kl" if kl.name == "full" else "ref_logprobs"
        raise ValueError(f"the row has a KL term: TokenBatch.{name} must be given")
    if kl.name == "full":
        return torch.where(x.mask_BT > 0, needed, 0.0)
    return kl_estimate(
        kl.name,
        x.logprobs_BT,
        torch.where(x.mask_BT > 0, needed, 0.0),
        bound=kl.params["bound"],
        clamp=kl.params["clamp"],
        gradient=kl.params["gradient"],
        log_ratio=x.log_ratio_BT if kl.params["importance_weight"] else None,
    )


def _mean(value_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    return (value_BT.detach() * mask_BT).sum(), mask_BT.sum()


def _maximum(value_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    value = torch.where(mask_BT > 0, value_BT.detach(), 0.0).amax()
    return value, torch.ones_like(value)


def _ratio_stats(x: LossInput, terms: LossTerms) -> Stats:
    ratio = x.ratio_BT.detach()
    stats = {
        "actor/ratio_mean": _mean(ratio, x.mask_BT),
        "actor/ratio_max": _maximum(ratio, x.mask_BT),
        "kl/approx": _mean(-x.log_ratio_BT, x.mask_BT),
    }
    return stats | {f"actor/{k}": _mean(v.to(x.mask_BT.dtype), x.mask_BT) for k, v in terms.indicators.items()}


def _correction_stats(weights_BT: Tensor, mask_BT: Tensor) -> Stats:
    """Effective sample size as a share of the tokens: weight_mean^2 / weight_square_mean."""
    return {
        "correction/weight_mean": _mean(weights_BT, mask_BT),
        "correction/weight_square_mean": _mean(weights_BT.square(), mask_BT),
        "correction/weight_max": _maximum(weights_BT, mask_BT),
        "correction/masked_frac": _mean((weights_BT == 0).to(mask_BT.dtype), mask_BT),
    }
