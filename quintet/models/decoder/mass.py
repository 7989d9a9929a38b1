"""The sum under a softmax, added up in one order by sampler and trainer, so that their log-probabilities can agree."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # vocabulary entries summed at once, in float32; the blocks are added in float64


def block_sums(mass_BV: Tensor) -> Tensor:
    """Sums of `exp(logit - largest)` over blocks of the vocabulary, float64 [B, blocks]; the last may be short."""
    whole = mass_BV.shape[1] // BLOCK * BLOCK
    sums_BN = mass_BV[:, :whole].unflatten(1, (whole // BLOCK, BLOCK)).sum(-1)
    if whole < mass_BV.shape[1]:
        sums_BN = torch.cat([sums_BN, mass_BV[:, whole:].sum(-1, keepdim=True)], dim=1)
    return sums_BN.double()


def log_share(chosen_B: Tensor, cumulative_BN: Tensor) -> Tensor:
    """Log-probability, float32 [B], of an entry whose `logit - largest` is `chosen_B`.

    `cumulative_BN`: `block_sums` of its row, cumulated.
    """
    return (chosen_B.double() - cumulative_BN[:, -1].log()).float()
