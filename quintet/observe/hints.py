"""What a step's numbers mean when they look wrong but are not, or look fine but are not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Hint(NamedTuple):
    key: str  # each kind is shown once in a run
    text: str


def step_hints(values: Mapping[str, float]) -> Iterator[Hint]:
    """Remarks on one step's metrics."""
    if abs(values.get("actor/loss", 1.0)) < 1e-3 and values.get("actor/grad_norm", 0.0) > 0:
        yield Hint(
            "loss-near-zero",
            "actor/loss near 0 is normal: with one update per batch every ratio is 1 and the advantages of a group "
            "sum to 0, yet the gradient is not 0 (actor/grad_norm). Watch reward/mean and eval/accuracy instead.",
        )
    if values.get("rollout/truncated_frac") == 1.0:
        yield Hint(
            "all-truncated",
            "every completion of this step was cut at rollout.max_tokens (rollout/truncated_frac 1.0): raise "
            "rollout.max_tokens, or check that the model's end-of-text token is known.",
        )
    if values.get("reward/zero_std_frac") == 1.0:
        yield Hint(
            "no-spread",
            "in every group of this step all rewards were equal (reward/zero_std_frac 1.0): such a step teaches "
            "nothing. The task may be too hard or too easy, or the reward function too coarse.",
        )
