"""Weights for the mismatch between the old policy and the sampler (staleness, another engine's numerics).

They are detached, multiply the policy loss and leave its denominators alone. `log_ratio_BT` is log pi_old - log mu,
0 where masked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quintet.algorithms.policy_loss import LOG_RATIO_BOUND, LossInput, bounded_log_ratio, sequence_mean


def importance_weights(
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: str = "token",
    low: float | None = None,
    high: float | None = None,
    outside: str = "clip",
) -> Tensor:
    """pi_old / mu per token, as product over the sequence, or as its geometric mean; [B, T].

    Outside [low, high] it is clipped (TIS) or 0 (`outside` mask: MIS, IcePop arXiv:2510.18855).
    """
    weights = _sequence_level(log_ratio_BT, mask_BT, level).exp()
    if outside == "clip":
        return weights if low is None and high is None else weights.clamp(low, high)
    return weights * _within(weights, low, high)


def _sequence_level(log_ratio_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    if level == "token":
        return log_ratio_BT
    if level == "geometric":
        return sequence_mean(log_ratio_BT, mask_BT).expand_as(log_ratio_BT)
    total_B1 = (log_ratio_BT * mask_BT).sum(dim=1, keepdim=True).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return total_B1.expand_as(log_ratio_BT)


def _within(x: Tensor, low: float | None, high: float | None) -> Tensor:
    inside = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    return inside


def rejection_mask(
    log_ratio_BT: Tensor,
    mask_BT: Tensor,
    *,
    metric: str = "ratio",
    reduce: str = "token",
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """True where a token is kept, bool [B, T] (richardli.xyz/rl-collapse).

    `metric` of d = log pi_old - log mu: ratio e^d, k1 d, k2 d^2/2, k3 e^d - 1 - d. `reduce` mean, sum or max over the
    sequence judges all its tokens; of a ratio it acts on d (mean: the geometric mean, sum: the product).
    """
    values = log_ratio_BT if metric in ("ratio", "k1") else _divergence(metric, log_ratio_BT)
    if reduce == "mean":
        values = sequence_mean(values, mask_BT)
    elif reduce == "sum":
        values = (values * mask_BT).sum(dim=1, keepdim=True)
    elif reduce == "max":
        values = torch.where(mask_BT > 0, values, -torch.inf).amax(dim=1, keepdim=True)
    if metric == "ratio":
        values = values.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return _within(values, low, high).expand_as(log_ratio_BT) & (mask_BT > 0)


def _divergence(metric: str, log_ratio: Tensor) -> Tensor:
    return 0.5 * log_ratio.square() if metric == "k2" else torch.expm1(log_ratio) - log_ratio


def second_moment_mask(log_ratio_BT: Tensor, mask_BT: Tensor, *, threshold: float) -> Tensor:
    """M2PO (arXiv:2510.01161): 1 for kept tokens, [B, T]. The largest log ratios squared of the batch are dropped
    until the mean of the rest is below `threshold`."""
    valid = mask_BT > 0
    squares, order = log_ratio_BT[valid].square().sort()
    running_mean = squares.cumsum(0) / torch.arange(1, squares.numel() + 1).to(squares)
    kept = torch.zeros_like(squares)
    kept[order] = (running_mean < threshold).to(squares.dtype)
    out = torch.zeros_like(log_ratio_BT)
    out[valid] = kept
    return out


def off_policy_sequence_mask(
    advantages_BT: Tensor, logprobs_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor, *, delta: float
) -> Tensor:
    """OPSM (arXiv:2512.02556): True where A >= 0 or the sequence's mean log(mu / pi) is at most `delta`, [B, T]."""
    mean_B1 = sequence_mean(bounded_log_ratio(sampler_BT, logprobs_BT.detach(), mask_BT), mask_BT)
    return (advantages_BT >= 0) | (mean_B1 <= delta)


def batch_normalised(weights_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Weights divided by their mean over the loss tokens of the batch."""
    return weights_BT / ((weights_BT * mask_BT).sum() / mask_BT.sum().clamp(min=1.0))


def effective_sample_size(weights: Tensor) -> Tensor:
    """Kish: (sum w)^2 / sum w^2, between 1 and the number of weights. Divided by that number it is the share."""
    return weights.sum().square() / weights.square().sum()


def correction_weights(name: str, params: dict[str, Any], x: LossInput) -> Tensor:
    """The row's correction as detached weights [B, T]. m2po has acted on the advantages already: weight 1."""
    if name == "m2po":
        return torch.ones_like(x.mask_BT)
    if name == "opsm":
        keep = off_policy_sequence_mask(x.advantages_BT, x.logprobs_BT, x.sampler_logprobs_BT, x.mask_BT, **params)
        return keep.to(x.mask_BT.dtype)
    log_ratio = bounded_log_ratio(x.old_logprobs_BT, x.sampler_logprobs_BT, x.mask_BT)
    if name == "tis":
        return importance_weights(log_ratio, x.mask_BT, **params)
    if name in ("mis", "icepop"):
        return importance_weights(log_ratio, x.mask_BT, outside="mask", **params)
    if name == "decoupled":
        return importance_weights(log_ratio, x.mask_BT)
    if name == "reject":
        bounds = {k: v for k, v in params.items() if k != "weight"}
        keep = rejection_mask(log_ratio, x.mask_BT, **bounds).to(x.mask_BT.dtype)
        level = params["weight"]
        return keep if level == "none" else keep * importance_weights(log_ratio, x.mask_BT, level=level)
    raise ValueError(f"unknown correction {name!r}")
