"""What a step's samples say: parts, their agreement, what graders spent."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.controller.experience import sample_metrics
from quintet.types import Failure, FailureKind, FinishReason, Group, GroupId, Prompt, Rollout, Score


def metrics(*scores: Score) -> dict[str, float]:
    gid = GroupId("p")
    rollouts = [Rollout(gid, i, [1], [2], "x", [0.0], [1], [], FinishReason.STOP) for i in range(len(scores))]
    return sample_metrics([Group(gid, Prompt("p", [1]), rollouts, list(scores))], 0)


def test_parts_are_averaged_over_the_samples_that_have_them() -> None:
    found = metrics(Score(1.0, {"a": 2.0, "b": None}), Score(0.0, {"a": 0.0, "b": 4.0}), Score(None, {"b": 2.0}))
    assert found["reward/a/mean"] == 1.0 and found["reward/b/mean"] == 3.0 and found["reward/mean"] == 0.5


def test_agreement_is_the_correlation_of_two_parts_within_the_step() -> None:
    rows = [(0.0, 1.0), (1.0, 0.5), (2.0, 0.0)]
    scores = [Score(a, {"model": a, "exact": b}) for a, b in rows]
    assert metrics(*scores)["reward/agreement/exact~model"] == pytest.approx(-1.0)
    lost = Score(None, {"model": 50.0}, Failure(FailureKind.TIMEOUT, "slow"))
    assert metrics(*scores, lost)["reward/agreement/exact~model"] == pytest.approx(-1.0)
    same = [Score(1.0, {"model": 1.0, "exact": b}) for _, b in rows]
    assert not [name for name in metrics(*same) if "agreement" in name]


def test_what_graders_spent_is_summed_over_the_samples() -> None:
    def spent(info: Any) -> Score:
        return Score(1.0, {"judge": 1.0}, info={"judge": info})

    found = metrics(spent({"usage": {"cost": 0.5, "requests": 2}}), spent({"usage": {"cost": 0.25, "requests": 1}}))
    assert found["reward/judge/cost"] == 0.75 and found["reward/judge/requests"] == 3.0
    assert not [name for name in metrics(spent({"usage": 3}), spent("text")) if name.endswith("cost")]
