"""Estimates of the divergence from a reference policy, per token.

`mean(log pi - log ref)` (k1) as a loss term pulls nothing back: its expected gradient on-policy is 0. The gradient of
k2 is that of KL(pi || ref), that of k3 KL(ref || pi).
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_estimate(
    name: str,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    *,
    bound: float | None = None,
    clamp: float | None = None,
    gradient: str = "own",
    log_ratio: Tensor | None = None,
) -> Tensor:
    """k1, k2, k3 or abs of joschu.net/blog/kl-approx, in nats, the shape of `logprobs`.

    `bound`: h = log pi - log ref is clamped to +-bound before the formula. `clamp`: the estimate is clamped to +-clamp
    (either takes the gradient away outside). `gradient` k2: the value stays, the gradient is k2's. `log_ratio`
    (log pi / pi_old): the estimate is multiplied by its exp, the gradient flowing through both (arXiv:2512.02556).
    """
    h = logprobs - ref_logprobs
    if bound is not None:
        h = h.clamp(-bound, bound)
    value = _estimate(name, h)
    if clamp is not None:
        value = value.clamp(-clamp, clamp)
    if gradient == "k2":
        k2 = 0.5 * (logprobs - ref_logprobs).square()
        value = value.detach() + (k2 - k2.detach())
    return value if log_ratio is None else value * log_ratio.exp()


def _estimate(name: str, h: Tensor) -> Tensor:
    if name == "k1":
        return h
    if name == "k2":
        return 0.5 * h.square()
    if name == "k3":
        return torch.expm1(-h) + h
    if name == "abs":
        return h.abs()
    raise ValueError(f"unknown KL estimator {name!r}")


def adapted_coef(coef: float, kl: float, *, target: float, horizon: int, samples: int) -> float:
    """The coefficient after a batch of `samples` whose mean KL was `kl` nats (Ziegler et al., arXiv:1909.08593, 2.2).

    coef (1 + clip(kl / target - 1, -0.2, 0.2) samples / horizon). There KL is a sequence's sum; here it is a token's
    mean, so that `target` is read off the metric that is logged.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return max(coef * (1.0 + error * samples / horizon), 0.0)


def full_kl(logits_V: Tensor, ref_logits_V: Tensor, direction: str = "reverse") -> Tensor:
    """Exact KL over the vocabulary (last dimension): reverse is KL(pi || ref), forward KL(ref || pi)."""
    logp, ref = logits_V.log_softmax(-1), ref_logits_V.log_softmax(-1)
    if direction == "forward":
        logp, ref = ref, logp
    return (logp.exp() * (logp - ref)).sum(-1)
