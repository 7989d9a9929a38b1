"""Log-probabilities and entropy of the *sampling* distribution: temperature and truncation included.

A full [.., V] tensor is held here; the train worker computes the same in chunks. Temperature forgotten in the
recomputed log-probability makes the ratio of an unchanged policy differ from 1; so does a missing renormalisation
after top-k, top-p or min-p.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kept_tokens(
    logits_V: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Which tokens can be sampled, bool [.., V]: temperature, then top-k, then top-p, then min-p.

    top-k keeps all ties at its boundary; top-p is the smallest set whose renormalised probability reaches p; min-p
    keeps probabilities of at least min_p times the largest. The largest always stays.
    """
    scores = logits_V / temperature
    if top_k is not None:
        kth = scores.topk(min(top_k, scores.shape[-1]), dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if top_p is not None:
        ordered, index = scores.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        beyond = (before >= top_p).index_fill(-1, torch.tensor([0], device=scores.device), False)
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
    if min_p is not None:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores > -torch.inf


def token_logprobs(
    logits_V: Tensor, tokens: Tensor, *, temperature: float = 1.0, kept_V: Tensor | None = None
) -> Tensor:
    """log p(token) at `temperature`, renormalised over `kept_V`; -inf for a token outside it. Shape of `tokens`."""
    return _log_softmax(logits_V, temperature, kept_V).gather(-1, tokens[..., None]).squeeze(-1)


def entropy(logits_V: Tensor, *, temperature: float = 1.0, kept_V: Tensor | None = None) -> Tensor:
    """-sum p log p in nats over the same distribution, shape [..]."""
    logp = _log_softmax(logits_V, temperature, kept_V)
    finite = logp > -torch.inf
    return -(logp.exp() * torch.where(finite, logp, 0.0)).sum(-1)


def _log_softmax(logits_V: Tensor, temperature: float, kept_V: Tensor | None) -> Tensor:
    scores = logits_V / temperature
    if kept_V is not None:
        scores = scores.masked_fill(~kept_V, -torch.inf)
    return scores.log_softmax(-1)
