"""The critic's loss and how well it explains the returns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def value_loss(
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    *,
    clip: float | None = None,
    huber: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(loss of each token, where the clipped branch won) [B, T]; the caller masks and aggregates.

    max of the errors of V and of V kept within +-`clip` of the old value (arXiv:1707.06347). The error is half the
    square, or with `huber` = delta the Huber loss (delta |e| - delta^2 / 2 beyond delta).
    """
    plain = _error(values_BT, returns_BT, huber)
    if clip is None:
        return plain, torch.zeros_like(plain, dtype=torch.bool)
    near = torch.minimum(torch.maximum(values_BT, old_values_BT - clip), old_values_BT + clip)
    clipped = _error(near, returns_BT, huber)
    return torch.maximum(plain, clipped), clipped > plain


def _error(values: Tensor, returns: Tensor, huber: float | None) -> Tensor:
    if huber is None:
        return 0.5 * (values - returns).square()
    return F.huber_loss(values, returns, reduction="none", delta=huber)


def explained_variance(
    values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor, *, ddof: int = 0, eps: float = 0.0
) -> Tensor:
    """1 - Var(R - V) / (Var(R) + eps) over unmasked tokens: 1 is perfect, 0 no better than the mean.

    With eps 0 constant returns give NaN (or -inf): the quantity is undefined there.
    """
    values, returns = values_BT[mask_BT > 0], returns_BT[mask_BT > 0]
    return 1 - (returns - values).var(correction=ddof) / (returns.var(correction=ddof) + eps)
