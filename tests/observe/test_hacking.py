"""The hacking monitor: what it watches, when it raises its alarm, and what it says."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from quintet.observe.doctor import diagnose
from quintet.observe.hacking import HackingMonitor, mann_kendall, opposite_trends, role_of, watched_pairs
from quintet.reward.config import RewardConfig

ALARM = "reward/hacking_alarm"
PAIR = "model~exact"


def config(*functions: dict[str, Any]) -> RewardConfig:
    return RewardConfig.model_validate({"functions": list(functions)})


FOOLED = config({"fn": "model"}, {"fn": "exact", "weight": 0})


def step(model: float, rule: float) -> dict[str, float]:
    return {"reward/model/mean": model, "reward/exact/mean": rule}


def run(steps: int, model_slope: float, rule_slope: float, *, noise: float = 0.02, seed: int = 0) -> list[Any]:
    draw = random.Random(seed)
    return [
        step(i * model_slope + draw.gauss(0, noise), 0.5 + i * rule_slope + draw.gauss(0, noise)) for i in range(steps)
    ]


def alarms(rows: list[Any], reward: RewardConfig = FOOLED) -> list[int]:
    """The steps, from 1, whose alarm is raised."""
    monitor = HackingMonitor(reward)
    return [i for i, row in enumerate(rows, start=1) if monitor.note(row)[ALARM]]


# ---- the test ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "p"),
    [
        ([1, 2, 3, 4], 0.0447),  # S 6, Var 8.667, z 5 / 2.944
        ([1, 1, 2, 3], 0.0743),  # S 5, Var (156 - 18) / 18, z 4 / 2.769
        ([4, 3, 2, 1], 1.0),
        ([2, 2, 2, 2], 1.0),
        ([2, 2, 2, 3], 0.1855),  # S 3, Var (156 - 66) / 18, z 2 / 2.236
        (list(range(20)), 4.34e-10),  # S 190, Var 950, z 189 / 30.82
    ],
)
def test_mann_kendall_against_hand_computed_values(values: list[float], p: float) -> None:
    assert mann_kendall(np.array(values, dtype=float)) == pytest.approx(p, rel=0.02)


def test_the_alarm_needs_a_rising_score_and_a_falling_rule() -> None:
    assert alarms(run(40, 0.01, -0.01))[0] in range(20, 30)
    assert alarms(run(40, 0.01, 0.01)) == []  # both learn
    assert alarms(run(40, -0.01, -0.01)) == []  # both fall: worse, but nobody is fooled
    assert alarms(run(40, -0.01, 0.01)) == []
    assert alarms(run(40, 0.01, 0.0)) == []
    assert alarms(run(19, 0.1, -0.1)) == []  # too few steps to tell


def test_a_slow_drift_is_seen_over_a_longer_window() -> None:
    rows = run(200, 0.0005, -0.0005)
    first = alarms(rows)[0]
    assert first > 40
    monitor = HackingMonitor(FOOLED, rows[: first - 1])
    assert monitor.note(rows[first - 1])[f"{ALARM}/{PAIR}"] in (40.0, 80.0, 160.0)


def test_the_alarm_ends_when_the_rule_recovers() -> None:
    rows = run(30, 0.01, -0.01) + [step(0.3, 0.2 + 0.02 * i) for i in range(200)]
    raised = alarms(rows)
    assert raised[0] < 30 and raised[-1] < 200


def test_noise_raises_no_alarm() -> None:
    assert [seed for seed in range(12) if alarms(run(60, 0.0, 0.0, seed=seed))] == []


def test_the_window_is_the_shortest_that_shows_it() -> None:
    assert opposite_trends([(i, -i) for i in range(100)]) == 20
    assert opposite_trends([(i % 7, -(i % 7)) for i in range(100)]) == 0
    assert opposite_trends([]) == 0


# ---- what is watched ---------------------------------------------------------------------------


def test_learned_parts_that_are_trained_on_are_watched_against_every_rule() -> None:
    reward = config(
        {"fn": "model", "name": "rm"},
        {"fn": "judge", "weight": 0},  # only watched itself: nothing learns to fool it
        {"fn": "remote_model", "weight": 0.1},
        {"fn": "exact"},
        {"fn": "pkg.mod:mine", "role": "rule", "weight": 0},
        {"fn": "pkg.mod:other"},
        {"fn": "format"},
    )
    assert watched_pairs(reward) == [
        ("rm", "exact"),
        ("rm", "mine"),
        ("remote_model", "exact"),
        ("remote_model", "mine"),
    ]
    assert [role_of(f) for f in reward.functions] == ["model", "model", "model", "rule", "rule", "other", "other"]


def test_without_a_pair_there_is_no_metric() -> None:
    assert HackingMonitor(config({"fn": "exact"})).note({"reward/exact/mean": 1.0}) == {}


def test_the_correlation_is_rolling() -> None:
    monitor = HackingMonitor(FOOLED)
    found = [monitor.note(step(i, i if i < 20 else 40 - i)) for i in range(40)]
    name = f"reward/correlation/{PAIR}"
    assert name not in found[1] and found[2][name] == pytest.approx(1.0)
    assert found[39][name] == pytest.approx(-1.0)
    assert monitor.note({"reward/model/mean": 9.0})[name] == pytest.approx(-1.0)  # without both a step changes nothing


def test_a_resumed_run_goes_on_with_the_same_numbers() -> None:
    rows = [{"step": i + 1} | row for i, row in enumerate(run(60, 0.005, -0.005))]
    whole = HackingMonitor(FOOLED)
    expected = [whole.note(row) for row in rows]
    resumed = HackingMonitor(FOOLED, [{"step": 0, "eval/accuracy": 0.5}, *rows[:35]])
    assert [resumed.note(row) for row in rows[35:]] == expected[35:]


# ---- the doctor --------------------------------------------------------------------------------


def test_the_doctor_says_it_in_words_without_the_config() -> None:
    monitor = HackingMonitor(FOOLED)
    rows = [{"step": i + 1} | row | monitor.note(row) for i, row in enumerate(run(30, 0.01, -0.01, noise=0.0))]
    [finding] = [f for f in diagnose(rows, {}) if f.key == "reward-hacking"]
    assert finding.level == "problem"
    assert "The score of `model` rose (0.12 to 0.27) while `exact` fell (0.38 to 0.23) in the 20 steps" in finding.text
    assert "up to step 30 (alarm first raised at step 20)" in finding.text and "gate" in finding.mend
    assert not [f for f in diagnose(rows[:19], {}) if f.key == "reward-hacking"]
