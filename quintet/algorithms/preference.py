"""Losses on pairs of answers and on labelled answers, one number per pair or answer; the caller takes the mean.

`policy_*` and `ref_*` are log-probabilities summed over the answer's tokens, [N], unless a docstring says averages.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    kind: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    lengths_chosen: Tensor | None = None,
    lengths_rejected: Tensor | None = None,
) -> Tensor:
    """DPO and its relatives on h = log-ratio of the chosen minus that of the rejected answer, [N].

    `kind`: sigmoid (arXiv:2305.18290; with `label_smoothing` conservative DPO), hinge (arXiv:2305.10425), ipo
    (arXiv:2310.12036; with lengths the log-ratios are averaged per token), robust (arXiv:2403.00409).
    """
    log_ratio_chosen, log_ratio_rejected = policy_chosen - ref_chosen, policy_rejected - ref_rejected
    if lengths_chosen is not None and lengths_rejected is not None:
        log_ratio_chosen, log_ratio_rejected = log_ratio_chosen / lengths_chosen, log_ratio_rejected / lengths_rejected
    h = log_ratio_chosen - log_ratio_rejected
    smooth = label_smoothing
    if kind == "sigmoid":
        return -(1 - smooth) * F.logsigmoid(beta * h) - smooth * F.logsigmoid(-beta * h)
    if kind == "hinge":
        return (1 - beta * h).relu()
    if kind == "ipo":
        return (h - 1 / (2 * beta)).square()
    if kind == "robust":
        return (-(1 - smooth) * F.logsigmoid(beta * h) + smooth * F.logsigmoid(-beta * h)) / (1 - 2 * smooth)
    raise ValueError(f"unknown DPO loss {kind!r}")


def simpo(average_chosen: Tensor, average_rejected: Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """SimPO (arXiv:2405.14734): -log sigmoid(beta (chosen - rejected) - gamma) of per-token averages, [N]."""
    return -F.logsigmoid(beta * (average_chosen - average_rejected) - gamma)


def orpo_odds(average_chosen: Tensor, average_rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """ORPO's odds-ratio loss (arXiv:2403.07691), -beta log sigmoid(log odds ratio) of per-token averages, [N].

    The whole objective is the negative log-likelihood of the chosen answer plus this.
    """
    log_odds = average_chosen - average_rejected - (_log1mexp(average_chosen) - _log1mexp(average_rejected))
    return -beta * F.logsigmoid(log_odds)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0."""
    return torch.log(-torch.expm1(x))


def kto_baseline(policy_mismatched: Tensor, ref_mismatched: Tensor) -> Tensor:
    """z0 of KTO: mean log-ratio of mismatched prompt-answer pairs, at least 0, detached."""
    return (policy_mismatched - ref_mismatched).mean().clamp(min=0.0).detach()


def kto(
    policy: Tensor,
    ref: Tensor,
    desirable: Tensor,
    baseline: Tensor,
    *,
    beta: float = 0.1,
    weight_desirable: float = 1.0,
    weight_undesirable: float = 1.0,
) -> Tensor:
    """KTO (arXiv:2402.01306) of answers labelled desirable (bool [N]) or not, [N]."""
    h = policy - ref
    good = weight_desirable * (1 - (beta * (h - baseline)).sigmoid())
    bad = weight_undesirable * (1 - (beta * (baseline - h)).sigmoid())
    return torch.where(desirable, good, bad)


def bradley_terry(
    reward_chosen: Tensor, reward_rejected: Tensor, margin: Tensor | None = None, *, centre: float = 0.0
) -> Tensor:
    """-log sigmoid(r_chosen - r_rejected - margin) (arXiv:2203.02155, margin arXiv:2307.09288), [N].

    `centre` adds centre (r_chosen + r_rejected)^2, which keeps rewards around 0 (arXiv:2312.09244).
    """
    difference = reward_chosen - reward_rejected
    if margin is not None:
        difference = difference - margin
    return -F.logsigmoid(difference) + centre * (reward_chosen + reward_rejected).square()
