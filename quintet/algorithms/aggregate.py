"""How the losses of tokens become one number: one division, by counts of the whole optimizer step.

The counts are those of all micro-batches and ranks that the optimizer sums over, so the result does not depend on
how a step was split. Rows without a loss token are in no count.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Counts:
    """Global denominators of one optimizer step: loss tokens, rows with at least one, and the constant length."""

    tokens: float
    sequences: float
    max_length: int


def count(mask_BT: Tensor, max_length: int | None = None) -> Counts:
    """Counts of one batch that is a whole optimizer step. `max_length`: by default the padded width."""
    return Counts(
        tokens=float(mask_BT.sum()),
        sequences=float((mask_BT.sum(dim=1) > 0).sum()),
        max_length=mask_BT.shape[1] if max_length is None else max_length,
    )


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    counts: Counts,
    mode: str,
    *,
    length: int | None = None,
    length_eps: float = 0.0,
    lengths_B: Tensor | None = None,
) -> Tensor:
    """This batch's share of the step's loss, a scalar; shares of all micro-batches add up to the loss.

    `mode`: token-mean (arXiv:2503.14476), seq-mean-token-mean (arXiv:2402.03300), seq-mean-token-sum and
    seq-mean-token-sum-norm (arXiv:2503.20783; `length`, by default `counts.max_length`), token-sum. `lengths_B`: loss
    tokens of each whole sequence, where a row holds only a part of one. Everything masked gives exactly 0.
    """
    row_sums_B = (loss_BT * mask_BT).sum(dim=1)
    if mode == "token-sum":
        return row_sums_B.sum()
    if mode == "token-mean":
        return row_sums_B.sum() / max(counts.tokens, 1.0)
    sequences = max(counts.sequences, 1.0)
    if mode == "seq-mean-token-mean":
        lengths_B = mask_BT.sum(dim=1) if lengths_B is None else lengths_B
        return (row_sums_B / (lengths_B.clamp(min=1.0) + length_eps)).sum() / sequences
    if mode == "seq-mean-token-sum":
        return row_sums_B.sum() / sequences
    if mode == "seq-mean-token-sum-norm":
        return row_sums_B.sum() / (sequences * (counts.max_length if length is None else length))
    raise ValueError(f"unknown aggregation {mode!r}")
