"""A run on the code task: programs in the namespace sandbox are the only reward."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

import quintet
from quintet.observe.metrics import read_metrics
from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.factory import make_sandbox
from quintet.types import QuintetError

RECIPE = Path(__file__).parents[1] / "recipes" / "code_tiny.yaml"


def need_namespaces() -> None:
    try:
        make_sandbox(SandboxConfig(backend="namespace"))
    except QuintetError as error:
        pytest.skip(str(error))


def test_two_steps_of_the_recipe_grade_every_sample(tmp_path: Path) -> None:
    need_namespaces()
    config = {
        **quintet.load_config(RECIPE).model_dump(exclude_unset=True),
        "steps": 2,
        "warm_start": {"steps": 3, "batch_size": 16},
        "rollout": {"groups_per_step": 4, "group_size": 4, "max_tokens": 8},
        "train": {"lr": 1e-4},
    }
    config["data"]["eval_size"] = 4
    config["model"]["tiny"] |= {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1}
    result = quintet.train(config, out=tmp_path / "run")
    rows = [row for row in read_metrics(result.folder / "metrics.jsonl") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0.0 <= row["reward/mean"] <= 1.0 for row in rows)
    assert not any(name.startswith("failures/") for row in rows for name in row)


@pytest.mark.heavy
def test_the_reward_of_the_recipe_rises(tmp_path: Path) -> None:
    need_namespaces()
    result = quintet.train(RECIPE, out=tmp_path / "run")
    rewards = [row["reward/mean"] for row in read_metrics(result.folder / "metrics.jsonl") if row["step"] > 0]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.2
    assert result.summary["eval/accuracy_after"] > result.summary["eval/accuracy_before"] + 0.1
