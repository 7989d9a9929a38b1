"""Whole runs of algorithms that ask more of the modules: a greedy answer beside each group, an adaptive KL, a KL of
whole distributions. Cut off, resumed and replayed, they give the same numbers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import quintet
from quintet.buffer.reading import JournalReader
from quintet.cluster.folder import RunFolder
from quintet.cluster.replay import replay
from quintet.observe.metrics import read_metrics
from tests.small_recipe import without_clock

TINY = {"hidden_size": 32, "intermediate_size": 48, "layers": 1, "heads": 2, "kv_heads": 1, "max_position": 16}
ADAPTIVE = {"coef": 0.05, "target": 1e-4, "horizon": 20}


def recipe(**algorithm: Any) -> dict[str, Any]:
    return {
        "name": "own",
        "steps": 4,
        "model": {"name": "builtin:tiny", "tiny": TINY},
        "algorithm": algorithm,
        "data": {"source": "task:sums", "args": {"max": 9, "template": "{a}+{b}="}, "eval_size": 4},
        "rollout": {"groups_per_step": 3, "group_size": 2, "max_tokens": 3, "numerics": "reproducible"},
        "reward": {"workers": 0, "functions": [{"fn": "format", "args": {"pattern": "[0-4].*"}}]},
        "train": {"lr": 1e-2},
        "checkpoint": {"every": 2},
        "cluster": {"threads": 1},
        "log": {"samples_per_step": 0},
    }


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [without_clock(row) for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "remax", "kl": {"name": "full", **ADAPTIVE}},
        {"preset": "reinforce_pp", "kl": {"name": "k1", "placement": "reward", **ADAPTIVE}},
    ],
    ids=["remax, full adaptive KL in the loss", "adaptive KL in the reward"],
)
def test_a_cut_run_goes_on_and_replays_bit_for_bit(tmp_path: Path, algorithm: dict[str, Any]) -> None:
    def power_off(kind: str, payload: Any) -> None:
        if kind == "step" and payload.step == 3:
            raise RuntimeError("the power went off")

    whole = quintet.train(recipe(**algorithm), out=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="power"):
        quintet.train(recipe(**algorithm), out=tmp_path / "cut", on_event=power_off)
    quintet.train(recipe(**algorithm), out=tmp_path / "cut")
    found, expected = rows_of(tmp_path / "cut"), rows_of(whole.folder)
    assert found == expected
    coefs = [row["kl/coef"] for row in expected]
    assert len(set(coefs)) > 2, "the coefficient moves"
    again = asyncio.run(replay(RunFolder(tmp_path / "cut"), 4))
    assert again.equal
    middle = asyncio.run(replay(RunFolder(tmp_path / "cut"), 3, inspect=True))
    assert middle.equal and middle.inspection is not None


def test_the_greedy_answer_is_journaled_scored_and_not_trained_on(tmp_path: Path) -> None:
    result = quintet.train(recipe(preset="remax") | {"steps": 1}, out=tmp_path / "run")
    with JournalReader.open(result.folder / "journal.sqlite") as journal:
        groups = journal.step_groups(1)
    assert [[r.greedy for r in g.rollouts] for g in groups] == [[False, False, True]] * 3
    assert [[r.sample_index for r in g.rollouts] for g in groups] == [[0, 1, 2]] * 3
    (row,) = rows_of(result.folder)
    rewards = [[s.reward for s in g.scores] for g in groups]
    assert row["actor/samples"] == 6
    assert row["reward/greedy_mean"] == pytest.approx(sum(r[2] for r in rewards) / 3)
    assert row["reward/mean"] == pytest.approx(sum(sum(r[:2]) for r in rewards) / 6)
    advantages = [r[i] - r[2] for r in rewards for i in (0, 1)]
    tokens = [sum(r.loss_mask) for g in groups for r in g.samples]
    mean = sum(a * n for a, n in zip(advantages, tokens, strict=True)) / sum(tokens)
    assert row["advantage/mean"] == pytest.approx(mean, abs=1e-9)
