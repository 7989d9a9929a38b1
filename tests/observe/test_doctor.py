"""Each rule: when it speaks, what numbers it names, and when it keeps quiet."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.observe.doctor import Finding, diagnose, failure_totals

SOUND = {
    "reward/mean": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/zero_std_frac": 0.2,
    "reward/unscored_frac": 0.0,
    "rollout/truncated_frac": 0.1,
    "actor/entropy": 1.0,
    "actor/loss": 0.5,
    "actor/grad_norm": 1.0,
    "actor/lr": 1e-5,
    "kl/ref": 0.01,
    "mismatch/max_abs_logprob": 1e-5,
    "time/step_s": 10.0,
    "time/reward_s": 0.5,
}


def run_of(n: int, **values: Any) -> list[dict[str, Any]]:
    """A sound run of n steps whose reward rises; a value may be a list, one per step. `a__b` stands for `a/b`."""
    rows: list[dict[str, Any]] = [{"step": 0, "eval/accuracy": 0.1}]
    for i in range(n):
        row = {"step": i + 1, **SOUND, "reward/mean": 0.2 + 0.5 * i / n}
        rows.append(row | {k.replace("__", "/"): v[i] if isinstance(v, list) else v for k, v in values.items()})
    return rows


def found(rows: list[dict[str, Any]], config: dict[str, Any] | None = None) -> dict[str, Finding]:
    return {f.key: f for f in diagnose(rows, config or {})}


@pytest.mark.parametrize("steps", [0, 1, 4, 30, 300])
def test_a_sound_run_of_any_length_gives_no_finding(steps: int) -> None:
    assert diagnose(run_of(steps), {"model": {"dtype": "float32"}}) == []


def test_equal_rewards_are_told_apart_by_their_cause() -> None:
    config = {"rollout": {"group_size": 8}}
    hard = found(run_of(12, reward__zero_std_frac=0.75, reward__mean=0.05), config)["equal-rewards"]
    assert hard.level == "warning" and "75% of the groups of 8 samples" in hard.text and "easier prompts" in hard.mend
    solved = found(run_of(12, reward__zero_std_frac=0.75, reward__mean=0.97))["equal-rewards"]
    assert solved.level == "note" and "0.97 of at most 1" in solved.mend
    blind = found(run_of(12, reward__zero_std_frac=1.0, reward__mean=0.0, reward__max=0.0))["equal-rewards"]
    assert blind.level == "problem" and "Every sample of the run had reward 0" in blind.mend


def test_few_steps_must_be_total_before_a_share_counts() -> None:
    assert "truncated" not in found(run_of(4, rollout__truncated_frac=0.9))
    assert "truncated" in found(run_of(5, rollout__truncated_frac=0.9))
    assert "truncated" in found(run_of(1, rollout__truncated_frac=1.0))


def test_truncation_names_the_limit() -> None:
    finding = found(run_of(10, rollout__truncated_frac=0.4), {"rollout": {"max_tokens": 24}})["truncated"]
    assert "40% of the responses were cut off at rollout.max_tokens (24) (last 10 steps)" in finding.text


def test_a_fall_of_entropy_is_a_warning_unless_the_task_is_solved() -> None:
    falling = [1.0] * 15 + [0.02] * 15
    finding = found(run_of(30, actor__entropy=falling))["entropy-collapse"]
    assert finding.level == "warning" and "from 1 to 0.02 nats" in finding.text and "entropy_coef" in finding.mend
    assert found(run_of(30, actor__entropy=falling, reward__mean=0.99))["entropy-collapse"].level == "note"
    assert "entropy-collapse" not in found(run_of(19, actor__entropy=falling[:19]))


def test_a_loss_of_zero_is_explained_only_where_there_is_a_gradient() -> None:
    finding = found(run_of(3, actor__loss=1e-8, actor__grad_norm=2.5))["loss-near-zero"]
    assert finding.level == "note" and "actor/grad_norm 2.5" in finding.text
    assert "loss-near-zero" not in found(run_of(3, actor__loss=0.0, actor__grad_norm=0.0))


def test_what_mismatch_is_usual_depends_on_the_dtype() -> None:
    rows = run_of(10, mismatch__max_abs_logprob=0.2)
    assert "mismatch" in found(rows, {"model": {"dtype": "float32"}})
    assert "mismatch" not in found(rows, {"model": {"dtype": "bfloat16"}})
    rows = run_of(10, mismatch__max_abs_logprob=1e-6)
    assert "mismatch" not in found(rows, {"model": {"dtype": "float32"}})
    reproducible = {"model": {"dtype": "float32"}, "rollout": {"numerics": "reproducible"}}
    assert "mismatch" in found(rows, reproducible)
    assert "mismatch" not in found(run_of(10, mismatch__max_abs_logprob=0.0), reproducible)


def test_kl_explosion_names_the_worst_step() -> None:
    finding = found(run_of(20, kl__ref=[0.1] * 17 + [6.0, 40.0, 9.0]))["kl-explosion"]
    assert "over 5 in 3 steps (worst 40, step 19)" in finding.text
    assert "kl-explosion" not in found(run_of(20, kl__ref=[0.1] * 19 + [6.0]))


def test_gradient_spikes_matter_more_when_nothing_clips() -> None:
    rows = run_of(20, actor__grad_norm=[1.0] * 18 + [50.0, 20.0])
    clipped = found(rows, {"train": {"max_grad_norm": 1.0}})["gradient-spikes"]
    assert clipped.level == "note" and "in 2 steps, worst 50 at step 19" in clipped.text
    assert found(rows, {"train": {"max_grad_norm": 0.0}})["gradient-spikes"].level == "warning"


def test_failures_are_counted_by_kind() -> None:
    rows = run_of(10, failures__timeout=3.0, dropped__stale=1.0, reward__unscored_frac=0.02)
    rows[1]["dropped/failed:engine"] = 2.0
    assert failure_totals(rows) == {"failures/timeout": 30, "dropped/stale": 10, "dropped/failed:engine": 2}
    finding = found(rows)["failures"]
    assert "32 samples or groups were lost to faults (timeout 30, engine 2); 2.0%" in finding.text
    assert finding.level == "warning" and "reward.timeout_s" in finding.mend
    assert "failures" not in found(run_of(10, dropped__stale=5.0))  # not a fault


def test_a_learning_rate_of_zero_and_skipped_updates_are_problems_and_come_first() -> None:
    rows = run_of(10, actor__lr=0.0, actor__skipped_nonfinite=[0.0] * 7 + [1.0, 1.0, 0.0], rollout__truncated_frac=0.5)
    keys = [f.key for f in diagnose(rows, {})]
    assert keys == ["nonfinite", "lr-zero", "truncated"]
    assert (
        "2 optimizer steps were skipped" in found(rows)["nonfinite"].text and "step 8" in found(rows)["nonfinite"].text
    )
    assert "lr-zero" not in found(run_of(3, actor__lr=[0.0, 0.0, 1e-6]))  # a warm-up begins at 0


def test_steps_without_a_gradient_are_counted() -> None:
    finding = found(run_of(10, actor__grad_norm=[0.0] * 3 + [1.0] * 7))["no-gradient"]
    assert finding.text.startswith("3 of 10 steps")
    assert "no-gradient" not in found(run_of(10, actor__grad_norm=[0.0] + [1.0] * 9))


def test_a_reward_that_falls_or_stays_is_told() -> None:
    down = found(run_of(40, reward__mean=[0.5 - i / 100 for i in range(40)]))["reward-falls"]
    assert down.level == "problem" and "made it worse" in down.text
    flat = found(run_of(40, reward__mean=[0.5 + 0.1 * (i % 2) for i in range(40)]))["reward-falls"]
    assert flat.level == "warning" and "no more than its noise" in flat.text


def test_slow_rewards_are_told_with_their_share() -> None:
    finding = found(run_of(10, time__reward_s=4.0))["slow-reward"]
    assert finding.text.startswith("40% of the time") and "4 s a step" in finding.text


def test_the_mend_for_slow_rewards_fits_the_functions() -> None:
    def mend(*functions: str) -> str:
        config = {"reward": {"functions": [{"fn": fn} for fn in functions]}}
        return found(run_of(10, time__reward_s=4.0), config)["slow-reward"].mend

    assert "reward.workers" in mend("math") and "sandbox" not in mend("math")
    assert "sandbox" in mend("code") and "reward.workers" not in mend("code")
    assert "batch_tokens" in mend("model", "graders.py:mine") and "reward.workers" in mend("model", "graders.py:mine")
