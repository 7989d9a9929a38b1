"""Losses of one token, as functions of log-probabilities and advantages, all [B, T].

A loss gets a `LossInput` whose masked positions are 0 and whose log ratio is bounded, and returns `LossTerms`; it
neither masks nor averages. Sequence-level losses give every token of a row the sequence's loss, so that the
aggregation `seq-mean-token-mean` is the mean over sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp(20) = 4.9e8 is finite in float32 and bfloat16


@dataclass(frozen=True)
class LossInput:
    """Right-padded [B, T] tensors, 0 where masked; `log_ratio_BT` is log pi - log pi_old within +-LOG_RATIO_BOUND."""

    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    sampler_logprobs_BT: Tensor
    advantages_BT: Tensor
    mask_BT: Tensor
    log_ratio_BT: Tensor
    entropy_BT: Tensor | None = None
    rewards_B: Tensor | None = None

    @property
    def ratio_BT(self) -> Tensor:
        return self.log_ratio_BT.exp()


@dataclass(frozen=True)
class LossTerms:
    """`loss_BT` carries the gradient. `indicators` (bool [B, T]) become `actor/<name>` as shares of the loss tokens."""

    loss_BT: Tensor
    indicators: dict[str, Tensor] = field(default_factory=dict)


def bounded_log_ratio(new_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, bound: float = LOG_RATIO_BOUND) -> Tensor:
    """log pi_new - log pi_old, clamped to +-bound, exactly 0 (and without gradient) where masked."""
    return torch.where(mask_BT > 0, new_BT - old_BT, 0.0).clamp(-bound, bound)


def sequence_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the loss tokens of each row, [B, 1]; 0 for a row without any."""
    return (x_BT * mask_BT).sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1.0)


def ppo(x: LossInput, *, eps_low: float, eps_high: float, dual_clip: float | None = None) -> LossTerms:
    """-min(ratio A, clip(ratio) A) (arXiv:1707.06347); where A < 0 at most -dual_clip A (arXiv:1912.09729)."""
    return _clipped(x.ratio_BT, x.advantages_BT, eps_low, eps_high, dual_clip)


def _clipped(
    ratio: Tensor, advantages: Tensor, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> LossTerms:
    plain = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    loss = torch.maximum(plain, clipped)
    indicators = {
        "clip_frac": clipped > plain,
        "clip_frac_low": (ratio < 1 - eps_low) & (advantages < 0),
        "clip_frac_high": (ratio > 1 + eps_high) & (advantages > 0),
    }
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        indicators["clip_frac_dual"] = (loss > ceiling) & (advantages < 0)
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return LossTerms(loss, indicators)


def gspo(x: LossInput, *, eps_low: float, eps_high: float) -> LossTerms:
    """ppo on s = exp(mean over the sequence of log ratio) (arXiv:2507.18071)."""
    s_B1 = sequence_mean(x.log_ratio_BT, x.mask_BT).exp()
    return _clipped(s_B1.expand_as(x.log_ratio_BT), x.advantages_BT, eps_low, eps_high)


def gspo_token(x: LossInput, *, eps_low: float, eps_high: float) -> LossTerms:
    """ppo on sg[s] pi / sg[pi]: the sequence's ratio with a token's own gradient (arXiv:2507.18071)."""
    mean_B1 = sequence_mean(x.log_ratio_BT, x.mask_BT).detach()
    ratio = (mean_B1 + x.logprobs_BT - x.logprobs_BT.detach()).exp()
    return _clipped(ratio, x.advantages_BT, eps_low, eps_high)


def cispo(x: LossInput, *, eps_low: float | None, eps_high: float) -> LossTerms:
    """-sg[clip(ratio, 1 - eps_low, 1 + eps_high)] A log pi (arXiv:2506.13585)."""
    ratio = x.ratio_BT.detach()
    weight = ratio.clamp(None if eps_low is None else 1 - eps_low, 1 + eps_high)
    return LossTerms(-weight * x.advantages_BT * x.logprobs_BT, {"clip_frac": weight != ratio})


def gmpo(x: LossInput, *, eps_low: float, eps_high: float) -> LossTerms:
    """-A exp(mean of the clipped log ratios), clipped on the side of A's sign only (arXiv:2507.20673)."""
    sign = x.advantages_BT.sign()
    clipped = x.log_ratio_BT.clamp(-eps_low, eps_high)
    chosen = sign * torch.minimum(sign * x.log_ratio_BT, sign * clipped)
    loss = -x.advantages_BT * sequence_mean(chosen, x.mask_BT).exp()
    return LossTerms(loss, {"clip_frac": chosen != x.log_ratio_BT})


def sapo(x: LossInput, *, tau_pos: float, tau_neg: float) -> LossTerms:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A (arXiv:2511.20347)."""
    tau = _by_sign(x.advantages_BT > 0, tau_pos, tau_neg, x.logprobs_BT)
    return LossTerms(-4 / tau * (tau * (x.ratio_BT - 1)).sigmoid() * x.advantages_BT)


def _by_sign(condition: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    """`yes` or `no` in the dtype of `like`: two Python numbers alone would become float32."""
    return torch.where(condition, like.new_tensor(yes), like.new_tensor(no))


def topr(x: LossInput, *, level: str) -> LossTerms:
    """-w A log pi, w = 1 where the reward is above 0, else min(1, ratio) (arXiv:2503.14286). Needs `rewards_B`."""
    if x.rewards_B is None:
        raise ValueError("topr needs the rewards of the samples")
    ratio = x.log_ratio_BT if level == "token" else x.log_ratio_BT.sum(dim=1, keepdim=True).expand_as(x.log_ratio_BT)
    truncated = ratio.detach().clamp(max=0.0).exp()
    weight = torch.where((x.rewards_B > 0)[:, None], torch.ones_like(truncated), truncated)
    return LossTerms(-weight * x.advantages_BT * x.logprobs_BT, {"clip_frac": ratio.detach().exp() != weight})


def dppo(x: LossInput, *, divergence: str, delta_low: float, delta_high: float, cap: float) -> LossTerms:
    """-sg[min(ratio, cap)] A log pi without the tokens outside the trust region (arXiv:2602.04879).

    tv: A > 0 needs p - p_old <= delta_high, else p - p_old >= -delta_low. kl: the same with the Bernoulli KL of old
    and new as distance and the sign of p - p_old as direction.
    """
    p, p_old = x.logprobs_BT.detach().exp(), x.old_logprobs_BT.exp()
    distance = (p - p_old).abs() if divergence == "tv" else bernoulli_kl(x.old_logprobs_BT, x.logprobs_BT.detach())
    too_high = (distance > delta_high) & (p > p_old)
    too_low = (distance > delta_low) & (p < p_old)
    kept = ~torch.where(x.advantages_BT > 0, too_high, too_low)
    weight = x.ratio_BT.detach().clamp(max=cap) * kept
    return LossTerms(-weight * x.advantages_BT * x.logprobs_BT, {"clip_frac": ~kept})


def bernoulli_kl(logp: Tensor, logq: Tensor, floor: float = 1e-6) -> Tensor:
    """KL of Bernoulli(p) from Bernoulli(q) in nats, probabilities clamped to [floor, 1 - floor]."""
    p, q = logp.exp().clamp(floor, 1 - floor), logq.exp().clamp(floor, 1 - floor)
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def vespo(x: LossInput, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> LossTerms:
    """-sg[e^lambda W^k e^(-lambda W)] A log pi, W the product of the sequence's ratios (arXiv:2602.10693)."""
    log_w = x.log_ratio_BT.detach().sum(dim=1, keepdim=True).clamp(log(1e-8), LOG_RATIO_BOUND)
    positive = x.advantages_BT >= 0
    k = _by_sign(positive, k_pos, k_neg, log_w)
    lam = _by_sign(positive, lambda_pos, lambda_neg, log_w)
    weight = (lam + k * log_w - lam * log_w.exp()).exp()
    return LossTerms(-weight * x.advantages_BT * x.logprobs_BT)


def dro(x: LossInput, *, beta: float) -> LossTerms:
    """-(A log pi - beta / 2 (log pi - log pi_old)^2) (arXiv:2405.19107)."""
    return LossTerms(-(x.advantages_BT * x.logprobs_BT - beta / 2 * x.log_ratio_BT.square()))


def reinforce(x: LossInput) -> LossTerms:
    """-A log pi."""
    return LossTerms(-x.advantages_BT * x.logprobs_BT)


def flash_reinforce(x: LossInput, *, delta: float, entropy_keep: float = 1.0) -> LossTerms:
    """-m sg[pi / mu] A log pi (FlashREINFORCE, 2026); denominators stay those of the whole batch.

    m is 0 for a sequence whose mean Bernoulli KL from the sampler exceeds `delta`. With `entropy_keep` below 1, failed
    sequences (reward <= 0) keep only that share of their tokens, those of highest entropy; needs `entropy_BT` and
    `rewards_B`.
    """
    weight = bounded_log_ratio(x.logprobs_BT.detach(), x.sampler_logprobs_BT, x.mask_BT).exp()
    distance = bernoulli_kl(x.sampler_logprobs_BT, x.logprobs_BT.detach())
    admitted_B1 = sequence_mean(distance, x.mask_BT) <= delta
    kept = admitted_B1.expand_as(weight)
    if entropy_keep < 1.0:
        if x.entropy_BT is None or x.rewards_B is None:
            raise ValueError("flash_reinforce with entropy_keep needs the entropies and the rewards")
        chosen = highest_entropy(x.entropy_BT, x.mask_BT, entropy_keep)
        kept = kept & torch.where((x.rewards_B <= 0)[:, None], chosen, torch.ones_like(chosen))
    return LossTerms(-(weight * kept) * x.advantages_BT * x.logprobs_BT, {"gated_frac": ~kept})


def highest_entropy(entropy_BT: Tensor, mask_BT: Tensor, share: float) -> Tensor:
    """The ceil(share x length) loss tokens of each row with the highest entropy, bool [B, T]; ties: the earlier one."""
    valid = mask_BT > 0
    ordered = torch.where(valid, entropy_BT.detach(), -torch.inf)
    rank = ordered.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    keep_B1 = (share * mask_BT.double().sum(dim=1, keepdim=True)).ceil()
    return (rank < keep_B1) & valid


POLICY_LOSSES: dict[str, Callable[..., LossTerms]] = {
    "ppo": ppo,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "topr": topr,
    "dppo": dppo,
    "vespo": vespo,
    "dro": dro,
    "reinforce": reinforce,
    "flash_reinforce": flash_reinforce,
}
