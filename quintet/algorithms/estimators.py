"""Advantage estimators as pure functions. Rewards are float64 [N], groups are int64 indices [N], masks [N, T].

Every function gets scored samples only. A group whose rewards are all equal gets exactly 0: the rounding error of a
mean, divided by an eps of 1e-8, can otherwise be an advantage of order 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _counts(group_N: Tensor, like: Tensor) -> Tensor:
    """Size of each sample's group, [N]."""
    sizes = torch.zeros(int(group_N.max()) + 1, dtype=like.dtype).index_add_(0, group_N, torch.ones_like(like))
    return sizes[group_N]


def group_sum(x_N: Tensor, group_N: Tensor) -> Tensor:
    """Sum over each sample's group, [N]."""
    return torch.zeros(int(group_N.max()) + 1, dtype=x_N.dtype).index_add_(0, group_N, x_N)[group_N]


def group_mean(x_N: Tensor, group_N: Tensor) -> Tensor:
    return group_sum(x_N, group_N) / _counts(group_N, x_N)


def group_spread(x_N: Tensor, group_N: Tensor) -> Tensor:
    """max - min of each sample's group, [N]: 0 exactly when all are equal."""
    n = int(group_N.max()) + 1
    high = torch.full((n,), -torch.inf, dtype=x_N.dtype).scatter_reduce_(0, group_N, x_N, "amax")
    low = torch.full((n,), torch.inf, dtype=x_N.dtype).scatter_reduce_(0, group_N, x_N, "amin")
    return (high - low)[group_N]


def group_centred(rewards_N: Tensor, group_N: Tensor, *, singleton: str = "zero") -> Tensor:
    """r - mean of the group; exactly 0 for equal rewards. `singleton` raw: a group of one keeps its reward."""
    centred = rewards_N - group_mean(rewards_N, group_N)
    centred = torch.where(group_spread(rewards_N, group_N) == 0, torch.zeros_like(centred), centred)
    if singleton == "raw":
        centred = torch.where(_counts(group_N, rewards_N) == 1, rewards_N, centred)
    return centred


def group_normalised(
    rewards_N: Tensor,
    group_N: Tensor,
    *,
    std: str = "population",
    eps: float = 1e-8,
    scale: str = "group",
    singleton: str = "zero",
) -> Tensor:
    """GRPO (arXiv:2402.03300): (r - mean) / (std + eps). `std` none: r - mean (Dr. GRPO, arXiv:2503.20783).

    `scale` batch divides by the deviation of all rewards (arXiv:2508.08221).
    """
    centred = group_centred(rewards_N, group_N, singleton=singleton)
    if std == "none":
        return centred
    ddof = 1 if std == "sample" else 0
    if scale == "batch":
        return centred / (_std(rewards_N, ddof) + eps)
    sizes = _counts(group_N, rewards_N)
    squares = group_sum((rewards_N - group_mean(rewards_N, group_N)).square(), group_N)
    deviation = (squares / (sizes - ddof).clamp(min=1.0)).sqrt()
    deviation = torch.where(sizes == 1, torch.ones_like(deviation), deviation)  # acts with `singleton` raw only
    varies = (group_spread(rewards_N, group_N) > 0) | (sizes == 1)
    return torch.where(varies, centred / torch.where(varies, deviation + eps, 1.0), 0.0)


def _std(x_N: Tensor, ddof: int) -> Tensor:
    """Deviation of all values; 0 for a single one."""
    return ((x_N - x_N.mean()).square().sum() / max(x_N.numel() - ddof, 1)).sqrt()


def leave_one_out(
    rewards_N: Tensor, group_N: Tensor, *, normalise: bool = False, eps: float = 1e-4, singleton: str = "zero"
) -> Tensor:
    """RLOO (arXiv:2402.14740): r minus the mean of the others, G/(G-1) (r - mean). `normalise`: then whitened."""
    sizes = _counts(group_N, rewards_N)
    factor = torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1.0), 1.0)
    advantage = factor * group_centred(rewards_N, group_N, singleton=singleton)
    if not normalise:
        return advantage
    return (advantage - advantage.mean()) / (_std(advantage, 1) + eps)


def length_weighted(rewards_N: Tensor, group_N: Tensor, lengths_N: Tensor, *, singleton: str = "zero") -> Tensor:
    """OPO (arXiv:2505.23585): r minus the group's length-weighted mean reward."""
    weight = group_sum(lengths_N, group_N)
    baseline = group_sum(lengths_N * rewards_N, group_N) / weight.clamp(min=1.0)
    advantage = torch.where(group_spread(rewards_N, group_N) == 0, 0.0, rewards_N - baseline)
    if singleton == "raw":
        advantage = torch.where(_counts(group_N, rewards_N) == 1, rewards_N, advantage)
    return advantage


def gpg(rewards_N: Tensor, group_N: Tensor, *, singleton: str = "zero") -> Tensor:
    """GPG (arXiv:2504.02546): (N / number of rewards other than 0) (r - mean of the group)."""
    informative = max(int((rewards_N != 0).sum()), 1)
    return rewards_N.numel() / informative * group_centred(rewards_N, group_N, singleton=singleton)


def pass_at_k(rewards_N: Tensor, group_N: Tensor) -> Tensor:
    """Pass@k (arXiv:2503.19595): the best of a group gets its lead over the second best, the others 0."""
    advantage = torch.zeros_like(rewards_N)
    for g in group_N.unique():
        index = (group_N == g).nonzero().flatten()
        if index.numel() > 1:
            best = rewards_N[index].topk(2)
            advantage[index[best.indices[0]]] = best.values[0] - best.values[1]
    return advantage


def batch_centred(rewards_N: Tensor) -> Tensor:
    """r - mean over the whole batch (FlashREINFORCE); exactly 0 for equal rewards."""
    if rewards_N.max() == rewards_N.min():
        return torch.zeros_like(rewards_N)
    return rewards_N - rewards_N.mean()


def decoupled_parts(parts_NK: Tensor, group_N: Tensor, weights_K: Tensor, *, eps: float = 1e-4) -> Tensor:
    """GDPO (arXiv:2601.05242) before batch whitening: each reward normalised in its group, weighted, summed; [N].

    NaN marks a reward that abstained: outside its group's statistics, contributing 0.
    """
    total = torch.zeros(parts_NK.shape[0], dtype=parts_NK.dtype)
    for values_N, weight in zip(parts_NK.T, weights_K, strict=True):
        given = ~values_N.isnan()
        if given.any():
            total[given] += weight * group_normalised(values_N[given], group_N[given], std="sample", eps=eps)
    return total


def standardise(x_N: Tensor, *, eps: float = 1e-4) -> Tensor:
    """(x - mean) / (sample deviation + eps) over the batch."""
    return (x_N - x_N.mean()) / (_std(x_N, 1) + eps)


def whiten(x_NT: Tensor, mask_NT: Tensor, *, std: str = "sample", eps: float = 1e-8, eps_mode: str = "add") -> Tensor:
    """Mean 0, variance 1 over all unmasked tokens; 0 where masked. `eps_mode`: variance + eps, or at least eps."""
    tokens = mask_NT.sum().clamp(min=1.0)
    centred = (x_NT - (x_NT * mask_NT).sum() / tokens) * mask_NT
    ddof = 1.0 if std == "sample" else 0.0
    variance = centred.square().sum() / (tokens - ddof).clamp(min=1.0)
    variance = variance + eps if eps_mode == "add" else variance.clamp(min=eps)
    return centred * variance.rsqrt()


def returns_to_go(token_rewards_NT: Tensor, mask_NT: Tensor, *, gamma: float = 1.0) -> Tensor:
    """G_t = r_t + gamma G_next of unmasked tokens, [N, T], 0 where masked; a tool span neither discounts nor resets."""
    running = torch.zeros_like(token_rewards_NT[:, 0])
    out = torch.zeros_like(token_rewards_NT)
    for t in range(token_rewards_NT.shape[1] - 1, -1, -1):
        valid = mask_NT[:, t] > 0
        running = torch.where(valid, token_rewards_NT[:, t] + gamma * running, running)
        out[:, t] = torch.where(valid, running, 0.0)
    return out


def remax(token_rewards_NT: Tensor, greedy_rewards_N: Tensor, mask_NT: Tensor, *, gamma: float = 1.0) -> Tensor:
    """ReMax (arXiv:2310.10505): reward to go minus the reward of the greedy answer, [N, T]."""
    return (returns_to_go(token_rewards_NT, mask_NT, gamma=gamma) - greedy_rewards_N[:, None]) * mask_NT


def gae(
    token_rewards_NT: Tensor,
    values_NT: Tensor,
    mask_NT: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """GAE (arXiv:1506.02438) over unmasked tokens: (advantages, value targets), both [N, T], 0 where masked.

    "Next" is the next unmasked token: tool and padding values are never read. `bootstrap_N`: value after the last
    token of a truncated sequence, 0 for one that ended.
    """
    value_next = torch.zeros_like(values_NT[:, 0]) if bootstrap_N is None else bootstrap_N.clone()
    running = torch.zeros_like(value_next)
    out = torch.zeros_like(values_NT)
    for t in range(values_NT.shape[1] - 1, -1, -1):
        valid = mask_NT[:, t] > 0
        delta = token_rewards_NT[:, t] + gamma * value_next - values_NT[:, t]
        running = torch.where(valid, delta + gamma * lam * running, running)
        value_next = torch.where(valid, values_NT[:, t], value_next)
        out[:, t] = torch.where(valid, running, 0.0)
    return out, torch.where(mask_NT > 0, out + values_NT, 0.0)
