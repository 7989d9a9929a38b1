"""What a batch of given answers costs: from scores of answers to one number whose shares add up over micro-batches.

Left out: dropout of the policy (that which is compared with a reference should differ from it by its weights alone).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quintet.algorithms import preference


@dataclass(frozen=True)
class AnswerScores:
    """The N answers of one micro-batch; in pairs, chosen and rejected in turn.

    `total_N` is the sum of an answer's token log-probabilities, or the reward model's number.
    """

    total_N: Tensor
    tokens_N: Tensor
    desirable_N: Tensor  # bool
    margin_N: Tensor  # of a pair at the chosen answer's place
    paired: bool
    ref_N: Tensor | None = None

    @property
    def log_ratio_N(self) -> Tensor:
        assert self.ref_N is not None, "the trait NEEDS_REF fills it"
        return self.total_N - self.ref_N

    @property
    def mean_N(self) -> Tensor:
        """Mean log-probability of an answer's tokens."""
        return self.total_N / self.tokens_N


@dataclass(frozen=True)
class StepTotals:
    """Denominators of one optimizer step, and KTO's z0 where it is wanted."""

    rows: float
    answers: float
    wanted_tokens: float  # of chosen (or the only) answers
    baseline: Tensor | None = None


Result = tuple[Tensor, Tensor]  # this micro-batch's share of the loss, the implicit (or the model's) reward [N]
Objective = Callable[..., Result]


def objective_share(name: str, params: Mapping[str, Any], scores: AnswerScores, totals: StepTotals) -> Result:
    """Shares of all micro-batches of a step add up to the step's loss."""
    return OBJECTIVES[name](scores, totals, **params)


def _dpo(s: AnswerScores, t: StepTotals, *, loss: str, beta: float, label_smoothing: float, per_token: bool) -> Result:
    assert s.ref_N is not None
    lengths = (s.tokens_N[0::2], s.tokens_N[1::2]) if loss == "ipo" and per_token else (None, None)
    losses = preference.dpo(
        s.total_N[0::2],
        s.total_N[1::2],
        s.ref_N[0::2],
        s.ref_N[1::2],
        kind=loss,
        beta=beta,
        label_smoothing=label_smoothing,
        lengths_chosen=lengths[0],
        lengths_rejected=lengths[1],
    )
    return losses.sum() / t.rows, beta * s.log_ratio_N


def _simpo(s: AnswerScores, t: StepTotals, *, beta: float, gamma: float) -> Result:
    losses = preference.simpo(s.mean_N[0::2], s.mean_N[1::2], beta=beta, gamma=gamma)
    return losses.sum() / t.rows, beta * s.mean_N


def _orpo(s: AnswerScores, t: StepTotals, *, beta: float) -> Result:
    odds = preference.orpo_odds(s.mean_N[0::2], s.mean_N[1::2], beta=beta).sum() / t.rows
    return odds - s.total_N[0::2].sum() / t.wanted_tokens, beta * s.mean_N


def _kto(s: AnswerScores, t: StepTotals, *, beta: float, weight_desirable: float, weight_undesirable: float) -> Result:
    assert s.ref_N is not None and t.baseline is not None
    losses = preference.kto(
        s.total_N,
        s.ref_N,
        s.desirable_N,
        t.baseline,
        beta=beta,
        weight_desirable=weight_desirable,
        weight_undesirable=weight_undesirable,
    )
    return losses.sum() / t.answers, beta * s.log_ratio_N


def _bradley_terry(s: AnswerScores, t: StepTotals, *, centre: float) -> Result:
    losses = preference.bradley_terry(s.total_N[0::2], s.total_N[1::2], s.margin_N[0::2], centre=centre)
    return losses.sum() / t.rows, s.total_N


def _likelihood(s: AnswerScores, t: StepTotals) -> Result:
    return -s.total_N.sum() / t.wanted_tokens, s.mean_N


OBJECTIVES: Mapping[str, Objective] = {
    "dpo": _dpo,
    "simpo": _simpo,
    "orpo": _orpo,
    "kto": _kto,
    "bradley_terry": _bradley_terry,
    "likelihood": _likelihood,
}


def reward_stats(rewards_N: Tensor, scores: AnswerScores) -> dict[str, tuple[Tensor, Tensor]]:
    """(numerator, denominator) of `pairs/*`, or of unpaired answers `labels/*`. A tie counts as half right."""
    rewards_N = rewards_N.detach()
    one = torch.ones_like(rewards_N)
    if scores.paired:
        chosen, rejected = rewards_N[0::2], rewards_N[1::2]
        count = torch.tensor(float(len(chosen)))
        right = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
        return {
            "pairs/accuracy": (right.sum(), count),
            "pairs/margin": ((chosen - rejected).sum(), count),
            "pairs/chosen_reward": (chosen.sum(), count),
            "pairs/rejected_reward": (rejected.sum(), count),
        }
    good = scores.desirable_N
    return {
        "labels/desirable_reward": (rewards_N[good].sum(), one[good].sum()),
        "labels/undesirable_reward": (rewards_N[~good].sum(), one[~good].sum()),
    }
