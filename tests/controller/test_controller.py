"""The loop under virtual time: admission, order, staleness, failures, ends, and the redo after a restart."""

from __future__ import annotations

import sqlite3
from itertools import pairwise
from pathlib import Path

import pytest

from quintet.buffer.journal import SqliteJournal
from quintet.controller.controller import RunFailed
from quintet.types import Failure, GroupId, Span
from tests.controller.simulation import Simulation, engine_failure, keyed_seconds


def overlap_s(spans: list[Span]) -> float:
    """Virtual seconds in which an update and a generation ran at the same time."""
    updates = [s for s in spans if s.name == "update"]
    rollouts = [s for s in spans if s.lane == "group"]
    return sum(max(0.0, min(u.end, r.end) - max(u.start, r.start)) for u in updates for r in rollouts)


def test_staleness_0_is_strictly_on_policy_and_nothing_overlaps() -> None:
    run = Simulation(steps=5, max_staleness=0, seconds=keyed_seconds(1.0, 20.0))
    metrics = run.run()
    assert [m.version for m in metrics] == [1, 2, 3, 4, 5]
    assert all(m.values["buffer/staleness_max"] == 0.0 for m in metrics)
    assert overlap_s(run.spans) == 0.0


@pytest.mark.parametrize("eta", [1, 2, 4])
def test_staleness_is_bounded_and_generation_overlaps_training(eta: int) -> None:
    run = Simulation(steps=12, max_staleness=eta, seconds=keyed_seconds(1.0, 20.0), train_seconds=5.0)
    metrics = run.run()
    worst = max(m.values["buffer/staleness_max"] for m in metrics)
    assert 0 < worst <= eta
    assert overlap_s(run.spans) > 0.0


def test_asynchronous_is_faster_on_the_same_lengths() -> None:
    def seconds(eta: int) -> float:
        run = Simulation(steps=20, max_staleness=eta, seconds=keyed_seconds(1.0, 20.0), train_seconds=8.0)
        run.run()
        return run.clock.now()

    assert seconds(2) < 0.7 * seconds(0)


def test_admission_never_exceeds_the_formula() -> None:
    """BUF01: at version v at most (v + 1 + eta) x groups_per_step groups were ever asked for."""
    run = Simulation(steps=8, groups_per_step=4, max_staleness=1, seconds=keyed_seconds(1.0, 9.0))
    run.run()
    for position, (_, version) in enumerate(run.rollout.asked, start=1):
        assert position <= (version + 1 + 1) * 4
    assert len(run.rollout.asked) == 8 * 4


def test_steps_take_groups_in_the_order_of_the_data() -> None:
    run = Simulation(steps=4, max_staleness=2, seconds=keyed_seconds(1.0, 30.0))
    run.run()
    order = [group for _, groups in run.train.trained for group in groups]
    assert order == [f"p{i}/e0.o0.a0" for i in range(16)]


def test_a_run_is_the_same_every_time() -> None:
    def history() -> list[dict[str, float]]:
        return [m.values for m in Simulation(max_staleness=2, seconds=keyed_seconds(1.0, 9.0)).run()]

    assert history() == history()


def test_a_failed_group_comes_back_as_its_next_attempt_and_no_reward_of_0_is_invented() -> None:
    def fails(group_id: GroupId) -> Failure | None:
        return engine_failure() if group_id.prompt_id == "p1" and group_id.attempt == 0 else None

    run = Simulation(steps=2, fails=fails)
    metrics = run.run()
    assert metrics[0].values["dropped/failed:engine"] == 1.0
    assert metrics[0].values["reward/mean"] == 0.5
    assert "p1/e0.o0.a1" in dict(run.train.trained)[1]
    assert "p1/e0.o0.a0" not in [g for _, groups in run.train.trained for g in groups]


def test_a_group_that_keeps_failing_ends_the_run_with_its_reason() -> None:
    run = Simulation(fails=lambda g: engine_failure("out of pages") if g.prompt_id == "p2" else None)
    with pytest.raises(RunFailed, match=r"3 times.*out of pages"):
        run.run()


def test_a_prompt_that_can_never_be_served_is_replaced_not_retried() -> None:
    too_long = engine_failure("too long", retryable=False)
    run = Simulation(steps=2, fails=lambda g: too_long if g.prompt_id == "p0" else None)
    run.run()
    assert dict(run.train.trained)[1] == [f"p{i}/e0.o0.a0" for i in (1, 2, 3, 4)]


def test_when_no_prompt_can_be_served_the_run_ends_with_the_reason() -> None:
    run = Simulation(fails=lambda g: engine_failure("too long", retryable=False))
    with pytest.raises(RunFailed, match="too long"):
        run.run()


def test_a_worker_that_never_returns_is_aborted_and_its_group_tried_again() -> None:
    """BUF03."""
    run = Simulation(steps=2, timeout_s=50.0, seconds=lambda g: 1e9 if g.prompt_id == "p3" and g.attempt == 0 else 1.0)
    metrics = run.run()
    assert len(metrics) == 2
    assert run.rollout.aborted == [GroupId("p3")]
    assert "p3/e0.o0.a1" in dict(run.train.trained)[1]


def test_equal_reward_groups_are_replaced_until_the_step_is_full() -> None:
    ids = [f"equal{i}" if i % 3 == 0 else f"p{i}" for i in range(64)]
    run = Simulation(steps=3, preset="dapo", prompt_ids=ids)
    metrics = run.run()
    assert all(m.values["reward/zero_std_frac"] == 0.0 for m in metrics)
    assert sum(m.values.get("dropped/equal_rewards", 0.0) for m in metrics) > 0
    assert all(len(groups) == 4 for _, groups in run.train.trained)


def test_a_filter_that_drops_everything_ends_the_run_instead_of_sampling_for_ever() -> None:
    run = Simulation(steps=3, groups_per_step=4, preset="dapo", prompt_ids=[f"equal{i}" for i in range(64)])
    with pytest.raises(RunFailed, match=r"41 groups \(equal_rewards\), more than max_refill 10 x 4"):
        run.run()
    assert run.metrics == []


def test_the_run_ends_by_itself_when_the_data_ends() -> None:
    """BUF04: 10 prompts, 4 a step: two steps, the last two prompts are dropped with that reason."""
    run = Simulation(steps=100, prompt_ids=[f"p{i}" for i in range(10)], epochs=1)
    assert len(run.run()) == 2
    assert run.buffer.stats().dropped == {"incomplete_step": 2}


def test_a_restart_redoes_assigned_steps_and_generates_nothing_finished_again(tmp_path: Path) -> None:
    """BUF06 and the promise of the redo log: each group is trained once, in the same order as without the restart."""
    whole = Simulation(steps=6, seconds=keyed_seconds(1.0, 9.0))
    whole.run()
    path = tmp_path / "journal.sqlite"
    first = Simulation(steps=3, seconds=keyed_seconds(1.0, 9.0), journal=SqliteJournal(path))
    first.run()
    second = Simulation(steps=6, seconds=keyed_seconds(1.0, 9.0), journal=SqliteJournal(path), resume_from=1)
    second.run()
    assert [*first.train.trained[:1], *second.train.trained] == whole.train.trained
    asked = [name for name, _ in first.rollout.asked + second.rollout.asked]
    assert len(asked) == len(set(asked))
    edges = sqlite3.connect(path).execute("SELECT count(*), count(DISTINCT group_id) FROM edges WHERE state='trained'")
    assert edges.fetchone() == (24, 24)


def test_the_metric_history_has_one_entry_per_step_and_rising_versions() -> None:
    metrics = Simulation(steps=5, max_staleness=1).run()
    assert [m.step for m in metrics] == [1, 2, 3, 4, 5]
    assert all(b.version == a.version + 1 for a, b in pairwise(metrics))


def test_on_policy_nothing_is_in_flight_when_the_trainer_begins() -> None:
    """An engine that shares its GPU may sleep then."""
    strict, overlapping = Simulation(steps=5), Simulation(steps=5, max_staleness=1)
    strict.run(), overlapping.run()
    assert strict.in_flight_at_rest == [0] * 5
    assert len(overlapping.in_flight_at_rest) == 5 and max(overlapping.in_flight_at_rest) > 0
