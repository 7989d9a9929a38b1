"""Whole runs of offline presets: what is written, resume, what is refused, and what they reach."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from safetensors.torch import load_file

import quintet
from quintet.config import load_config
from quintet.observe.metrics import read_metrics
from quintet.train.offline import OfflineTrainer
from quintet.types import QuintetError
from tests.small_recipe import TINY_MODEL

TINY = TINY_MODEL["tiny"]
RECIPES = Path(__file__).parents[1] / "recipes"
PAIRS: dict[str, Any] = {
    "name": "pairs",
    "steps": 4,
    "model": TINY_MODEL,
    "data": {"source": "task:sums_pairs", "args": {"max": 9, "template": "{a}+{b}="}, "eval_size": 20},
    "offline": {"batch_size": 8},
    "train": {"lr": 1e-3},
}


def recipe(preset: str, **sections: Any) -> dict[str, Any]:
    out = {**PAIRS, "algorithm": {"preset": preset}}
    for name, value in sections.items():
        out[name] = {**out.get(name, {}), **value} if isinstance(value, dict) else value
    return out


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]


@pytest.mark.parametrize("preset", ["dpo", "simpo", "kto", "reward_model", "sft"])
def test_a_run_writes_what_it_promises(tmp_path: Path, preset: str) -> None:
    config = recipe(preset, warm_start={"steps": 3, "batch_size": 16}, eval={"every": 2})
    result = quintet.train(config, out=tmp_path / "run")
    for name in ("config.yaml", "report.html", "final/model.safetensors", "checkpoints/step-4", "start/config.json"):
        assert (result.folder / name).exists(), name
    assert json.loads((result.folder / "summary.json").read_text()) == result.summary
    assert result.summary["steps"] == 4 and result.summary["finished"] and result.summary["eval/n"] == 20
    rows = rows_of(result.folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert {"offline/loss", "offline/grad_norm", "offline/lr", "time/step_s"} <= rows[0].keys()
    assert "eval/loss" in rows[1] and ("pairs/margin" in rows[0]) == (preset != "sft")
    kind = "LlamaForSequenceClassification" if preset == "reward_model" else "LlamaForCausalLM"
    assert json.loads((result.folder / "final/config.json").read_text())["architectures"] == [kind]


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    config = recipe("dpo", steps=6, checkpoint={"every": 2}, warm_start={"steps": 3, "batch_size": 16})
    whole = quintet.train(config, out=tmp_path / "whole")

    def stop_after_three(kind: str, payload: Any) -> None:
        if kind == "step" and payload.step == 3:
            raise RuntimeError("the power went off")

    with pytest.raises(RuntimeError, match="power"):
        quintet.train(config, out=tmp_path / "cut", on_event=stop_after_three)
    resumed = quintet.train(config, out=tmp_path / "cut")
    wanted = ("offline/loss", "offline/grad_norm", "pairs/margin")
    found, expected = ([[row[n] for n in wanted] for row in rows_of(r.folder)] for r in (resumed, whole))
    assert found == expected
    assert (resumed.folder / "final/model.safetensors").read_bytes() == (
        whole.folder / "final/model.safetensors"
    ).read_bytes()
    assert quintet.train(config, out=tmp_path / "cut").summary == resumed.summary


@pytest.mark.parametrize("preset", ["reward_model", "sft"])
def test_the_best_evaluation_is_kept_beside_the_newest(
    tmp_path: Path, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pairs: the highest accuracy; without pairs the lowest loss. Evaluations after steps 0, 1, 2 and at the end."""
    worths = iter([0.1, 0.9, 0.5, 0.2])
    real = OfflineTrainer.evaluate

    def evaluate(self: OfflineTrainer, rows: Any) -> dict[str, float]:
        worth = next(worths)
        return real(self, rows) | ({"eval/pair_accuracy": worth} if preset == "reward_model" else {"eval/loss": -worth})

    monkeypatch.setattr(OfflineTrainer, "evaluate", evaluate)
    config = recipe(preset, steps=3, eval={"every": 1}, checkpoint={"keep_best": True, "keep_last": 1})
    root = quintet.train(config, out=tmp_path / "run").folder / "checkpoints"
    assert sorted(p.name for p in root.glob("step-*")) == ["step-1", "step-3"]
    assert json.loads((root / "best.json").read_text()) == {"step": 1, "accuracy": 0.9}


def test_a_reward_model_trains_adapters_and_is_exported_merged(tmp_path: Path) -> None:
    config = recipe("reward_model", steps=6, model={"lora": {"r": 2}}, train={"lr": 0.03}, checkpoint={"every": 3})

    def cut(kind: str, payload: Any) -> None:
        if kind == "step" and payload.step == 4:
            raise RuntimeError("the power went off")

    whole = quintet.train(config, out=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="power"):
        quintet.train(config, out=tmp_path / "cut", on_event=cut)
    resumed = quintet.train(config, out=tmp_path / "cut")
    assert (resumed.folder / "final/model.safetensors").read_bytes() == (
        whole.folder / "final/model.safetensors"
    ).read_bytes()
    saved = load_file(whole.folder / "checkpoints/step-6/model.safetensors")
    assert {"head.weight"} < saved.keys() and all("lora_" in name for name in saved.keys() - {"head.weight"})
    names = load_file(whole.folder / "final/model.safetensors").keys()
    assert "score.weight" in names and not any("lora" in name for name in names)
    assert whole.summary["eval/loss_after"] != whole.summary["eval/loss_before"]


def test_files_with_the_usual_columns_are_trained_on(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i)} for i in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = {"source": str(tmp_path / "pairs.jsonl"), "args": {}, "eval_size": 2, "epochs": 1}
    result = quintet.train(recipe("orpo", data=data, offline={"batch_size": 4}), out=tmp_path / "run")
    assert result.summary["eval/n"] == 2
    assert [row["offline/rows"] for row in rows_of(result.folder)] == [4, 3], "one pass over the seven rows"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (recipe("dpo", train={"old": "trainer"}), r"train\.old has no effect"),
        (recipe("dpo", train={"epochs": 2, "old": "trainer"}), r"train\.epochs has no effect"),
        (recipe("dpo", data={"answers": {"margin": "gap"}}), r"data\.answers\.margin has no effect"),
        (recipe("grpo"), "offline has no effect"),
        (recipe("dpo", algorithm={"preset": "dpo", "kl": "k3"}), r"algorithm\.kl has no effect"),
        (recipe("dpo", offline={"train_on": "all"}), r"offline\.train_on all has no effect"),
        (recipe("reward_modle"), "did you mean reward_model"),
    ],
)
def test_options_that_would_do_nothing_are_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(QuintetError, match=words):
        load_config(config)


def test_a_reward_function_and_missing_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(QuintetError, match="samples nothing"):
        quintet.train(recipe("dpo"), reward=lambda completions, **_: [0.0], out=tmp_path / "a")
    with pytest.raises(QuintetError, match=r"'chosen' \(data\.answers\.chosen\), 'rejected'"):
        quintet.train(recipe("dpo", data={"source": "task:sums"}), out=tmp_path / "b")


@pytest.mark.heavy
def test_dpo_tells_right_from_wrong_on_questions_never_seen(tmp_path: Path) -> None:
    args = {"max": 29, "wrong": 4, "digits": 2, "answer_digits": 2, "reverse": True, "template": "{a}+{b}="}
    config = recipe(
        "dpo",
        steps=80,
        model={"tiny": {**TINY, "hidden_size": 64, "intermediate_size": 128}},
        data={"args": args, "eval_size": 200},
        warm_start={"steps": 250, "batch_size": 128, "lr": 3e-3},
        offline={"batch_size": 64},
    )
    summary = quintet.train(config, out=tmp_path / "run").summary
    assert summary["eval/margin_after"] > 0.5 > summary["eval/margin_before"]
    assert summary["eval/pair_accuracy_after"] >= 0.8


@pytest.mark.heavy
def test_a_reward_model_learns_the_pairs_and_grpo_on_it_alone_raises_the_rule_reward(tmp_path: Path) -> None:
    """The two recipes as they are; the rule (`exact`) only watches, with weight 0."""
    learned = quintet.train(load_config(RECIPES / "sums_reward_model.yaml", ["log.console=quiet"]), out=tmp_path / "rm")
    assert learned.summary["eval/pair_accuracy_after"] >= 0.8
    assert learned.summary["eval/margin_after"] > 1.0 > learned.summary["eval/margin_before"]
    config = load_config(RECIPES / "sums_learned_reward.yaml", ["log.console=quiet"])
    assert [f.weight for f in config.reward.functions if f.fn != "model"] == [0.0]
    config.reward.functions[0].args["path"] = str(learned.folder / "final")
    rule = [row["reward/exact/mean"] for row in rows_of(quintet.train(config, out=tmp_path / "grpo").folder)]
    assert fmean(rule[-20:]) > fmean(rule[:20]) + 0.05
