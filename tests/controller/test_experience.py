"""Groups to experiences: a greedy answer is the baseline of its group's samples and nothing else."""

from __future__ import annotations

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import resolve
from quintet.controller.controller import _failure_of
from quintet.controller.experience import step_batch
from quintet.types import Failure, FailureKind, FinishReason, Group, GroupId, Prompt, Rollout, Score, VersionRun
from tests.controller.simulation import Simulation

BROKEN = Failure(FailureKind.ENGINE, "boom", retryable=True)


def group(rewards: list[float | None], failures: list[Failure | None] | None = None, length: int = 2) -> Group:
    """Samples, and last the greedy answer."""
    group_id, faults = GroupId("p"), failures or [None] * len(rewards)
    rollouts = []
    for i, fault in enumerate(faults):
        ones = [1] * length
        rollout = Rollout(
            group_id, i, [1], [2] * length, "x", [-1.0] * length, ones, [VersionRun(0, length)], FinishReason.STOP
        )
        rollout.failure, rollout.greedy = fault, i == len(rewards) - 1
        rollouts.append(rollout)
    return Group(group_id, Prompt("p", [1]), rollouts, [Score(r) for r in rewards])


def test_samples_know_the_greedy_answers_reward_shaped_as_theirs() -> None:
    row = resolve(AlgorithmConfig(preset="remax", filters=[{"name": "reward_clip", "low": 0.0, "high": 1.0}]))
    batch = step_batch(row, [group([3.0, 0.5, 2.0])], step=1, version=0, max_tokens=4)
    assert [(e.sample_index, e.reward, e.baseline) for e in batch.experiences] == [(0, 1.0, 1.0), (1, 0.5, 1.0)]


def test_samples_without_a_scored_greedy_answer_are_unscored() -> None:
    row = resolve(AlgorithmConfig(preset="remax"))
    batch = step_batch(row, [group([1.0, 0.0, None])], step=1, version=0, max_tokens=4)
    assert [e.reward for e in batch.experiences] == [None, None]


def test_a_group_whose_greedy_answer_failed_is_tried_again() -> None:
    assert _failure_of(group([1.0, 0.0, 1.0], [None, None, BROKEN])) == BROKEN
    assert _failure_of(group([1.0, 0.0, 1.0], [BROKEN, None, None])) is None
    assert _failure_of(group([1.0, 0.0, 1.0], [BROKEN, BROKEN, None])) == BROKEN


def test_the_loop_asks_for_one_greedy_answer_a_group() -> None:
    run = Simulation(steps=2, groups_per_step=3, preset="remax")
    metrics = run.run()
    asked = [name for name, _ in run.rollout.asked]
    assert len(asked) == 2 * 6 and all(asked.count(name) == 2 for name in asked)
    assert all("reward/greedy_mean" in m.values for m in metrics)
