"""The formulas: group-relative advantage, clipped policy loss, and the KL that really holds a policy.

Stands for: the core-algorithms file of a framework such as verl. Grown-up version: quintet/algorithms/*.

The lesson of this file. `mean(log π − log π_ref)` over samples of π *estimates* KL(π‖π_ref) without bias, yet used
as a loss term it pulls nothing back: its gradient is E[∇ log π] = 0, whatever π_ref is. A good estimate of a
number is not a good loss. What does hold the policy, on-policy: the exact KL of every visited state (a bigram
allows it, and the trainer uses it), k2 (its gradient is that of KL(π‖π_ref)), or k3 (that of KL(π_ref‖π)).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

MAX_LOG_RATIO = 20.0  # bounded before exp, so that one broken token cannot overflow the batch


def compute_grpo_advantage(
    rewards: Sequence[float], group_ids: Sequence[Hashable], scale_by_std: bool = True
) -> list[float]:
    """GRPO (arXiv:2402.03300): (r − mean) / (std + 1e-8) within each group, population standard deviation.

    A group whose rewards are all equal, or of one, gets exactly 0.0: it says nothing about what is better.
    `scale_by_std=False` leaves out the division (Dr. GRPO, arXiv:2503.20783).
    """
    if len(rewards) != len(group_ids):
        raise ValueError(f"{len(rewards)} rewards for {len(group_ids)} group ids")
    groups: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, group_ids, strict=True):
        groups.setdefault(group, []).append(reward)
    stats: dict[Hashable, tuple[float, float]] = {}
    for group, values in groups.items():
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        stats[group] = (mean, std + 1e-8 if scale_by_std else 1.0)
    return [
        0.0 if min(groups[g]) == max(groups[g]) else (r - stats[g][0]) / stats[g][1]
        for r, g in zip(rewards, group_ids, strict=True)
    ]


def ppo_clip_loss(logprob_new: float, logprob_old: float, advantage: float, clip_eps: float = 0.2) -> float:
    """PPO (arXiv:1707.06347) for one token: −min(ratio·A, clip(ratio, 1−ε, 1+ε)·A)."""
    if not 0.0 < clip_eps < 1.0:
        raise ValueError(f"clip_eps must lie between 0 and 1, got {clip_eps}")
    ratio = math.exp(max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, logprob_new - logprob_old)))
    return -min(ratio * advantage, max(1.0 - clip_eps, min(1.0 + clip_eps, ratio)) * advantage)


def ppo_clip_gradient(logprob_new: float, logprob_old: float, advantage: float, clip_eps: float = 0.2) -> float:
    """∂ ppo_clip_loss / ∂ logprob_new: −ratio·A where the unclipped branch is the minimum, exactly 0 where clipped."""
    if abs(logprob_new - logprob_old) > MAX_LOG_RATIO:
        return 0.0
    ratio = math.exp(logprob_new - logprob_old)
    clipped = ratio > 1.0 + clip_eps if advantage > 0.0 else ratio < 1.0 - clip_eps
    return 0.0 if clipped else -ratio * advantage


def kl_k1(logprob: float, logprob_ref: float) -> float:
    """log π − log π_ref of one sample: unbiased as a figure, useless as a loss (see the top of this file)."""
    return logprob - logprob_ref


def kl_k2(logprob: float, logprob_ref: float) -> float:
    return 0.5 * (logprob - logprob_ref) ** 2


def kl_k3(logprob: float, logprob_ref: float) -> float:
    """(π_ref/π − 1) − log(π_ref/π): unbiased like k1, and never negative."""
    return math.exp(logprob_ref - logprob) - 1.0 - (logprob_ref - logprob)


def categorical_kl(logprobs: Sequence[float], logprobs_ref: Sequence[float]) -> float:
    """The exact KL(π‖π_ref) of one state, from two rows [vocab]."""
    return sum(math.exp(p) * (p - q) for p, q in zip(logprobs, logprobs_ref, strict=True))


def categorical_kl_gradient(logprobs: Sequence[float], logprobs_ref: Sequence[float]) -> list[float]:
    """∂ KL(π‖π_ref) / ∂ logits, [vocab]: p_j · (log p_j − log q_j − KL)."""
    kl = categorical_kl(logprobs, logprobs_ref)
    return [math.exp(p) * (p - q - kl) for p, q in zip(logprobs, logprobs_ref, strict=True)]
