"""Runs whose reward can be fooled: the monitor in a run, and the recipes that show its alarm."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

import quintet
from quintet.observe.doctor import diagnose
from quintet.observe.metrics import read_metrics

ROOT = Path(__file__).parents[1]
TINY = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "max_position": 32}
LENGTH = f"{ROOT / 'tests/reward/reward_functions.py'}:trl_length"


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]


def test_a_watched_rule_is_in_the_metrics_and_in_the_accuracy_and_not_in_the_reward(tmp_path: Path) -> None:
    config = {
        "steps": 3,
        "model": {"name": "builtin:tiny", "tiny": TINY},
        "data": {"source": "task:sums", "args": {"max": 9, "template": "{a}+{b}="}, "eval_size": 20},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_tokens": 3},
        "reward": {
            "functions": [
                {"fn": LENGTH, "name": "long", "role": "model"},
                {"fn": "exact", "weight": 0},
            ]
        },
    }
    result = quintet.train(config, out=tmp_path / "run")
    rows = steps_of(result.folder)
    for row in rows:
        assert row["reward/mean"] == row["reward/long/mean"] > 0 and 0 <= row["reward/exact/mean"] < 1
        assert row["reward/hacking_alarm"] == row["reward/hacking_alarm/long~exact"] == 0.0
    evals = [row for row in read_metrics(result.folder / "metrics.jsonl") if "eval/accuracy" in row]
    assert evals[-1]["eval/accuracy"] == evals[-1]["eval/exact/mean"] < 1 < evals[-1]["eval/reward"]


def recipe(name: str, trained: Path, **changes: Any) -> dict[str, Any]:
    """A recipe of ours with another place for its reward model."""
    text = (ROOT / "recipes" / f"{name}.yaml").read_text().replace("runs/reward_hacking_model/final", str(trained))
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree | changes


@pytest.mark.heavy
def test_the_monitor_raises_its_alarm_without_the_mixture_and_not_with_it(tmp_path: Path) -> None:
    quintet.train(ROOT / "recipes/reward_hacking_model.yaml", out=tmp_path / "rm")
    trained = tmp_path / "rm/final"
    fooled = quintet.train(recipe("reward_hacking", trained), out=tmp_path / "fooled")
    warmed = {"model": {"name": str(fooled.folder / "start")}, "warm_start": {"steps": 0}}  # the same start, once
    held = quintet.train(recipe("reward_hacking_mixture", trained, **warmed), out=tmp_path / "held")

    rows = steps_of(fooled.folder)
    right, score = ([row[f"reward/{part}/mean"] for row in rows] for part in ("exact", "model"))
    assert fmean(right[-10:]) < 0.6 * fmean(right[:10]) and fmean(score[-10:]) > fmean(score[:10])
    assert any(row["reward/hacking_alarm"] for row in rows)
    assert "reward-hacking" in {f.key for f in diagnose(rows, {})}
    assert fooled.summary["eval/accuracy_after"] < fooled.summary["eval/accuracy_before"] - 0.1
    assert "is fooling" in (fooled.folder / "report.html").read_text()

    rows = steps_of(held.folder)
    right = [row["reward/exact/mean"] for row in rows]
    assert fmean(right[-10:]) > fmean(right[:10])
    assert not any(row["reward/hacking_alarm"] for row in rows)
    assert "reward-hacking" not in {f.key for f in diagnose(rows, {})}
    assert held.summary["eval/accuracy_after"] > fooled.summary["eval/accuracy_after"] + 0.1
