"""Whole runs of a very small model: what is written, what a wrong input says, what a bad reward function does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import quintet
from quintet.observe.metrics import read_metrics
from quintet.rollout.engine.fast import FastEngine
from quintet.rollout.engine.sync import Finished
from quintet.train.worker import LocalTrainWorker
from quintet.types import ExperienceBatch, QuintetError, TrainMetrics
from tests.small_recipe import SMALL, small


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]


def spans(folder: Path, lane: str, name: str | None = None) -> list[tuple[float, float]]:
    """(start, end) of a lane's bars in the run's time line, in microseconds."""
    events = json.loads((folder / "trace.json").read_text().rstrip().rstrip(",") + "]")
    lanes = {e["tid"] for e in events if e["name"] == "thread_name" and e["args"]["name"] == lane}
    bars = [e for e in events if e["ph"] == "X" and e["tid"] in lanes and name in (None, e["name"])]
    return [(e["ts"], e["ts"] + e["dur"]) for e in bars]


def starts_with_a_low_digit(completions: list[str], **columns: Any) -> list[float]:
    return [float(c[:1] in ("0", "1", "2", "3")) for c in completions]


def test_a_run_writes_what_it_promises(tmp_path: Path) -> None:
    config = small(warm_start={"steps": 5, "batch_size": 16}, log={"trackers": ["tensorboard"]}, eval={"every": 2})
    result = quintet.train(config, out=tmp_path / "run")
    wanted = {"recipe", "seed", "steps", "seconds", "eval/n", "eval/accuracy_untrained", "eval/accuracy_before"}
    wanted |= {"eval/accuracy_after", "peak_rss_bytes", "config_digest", "versions"}
    assert wanted <= result.summary.keys()
    assert result.summary["steps"] == 3 and result.summary["eval/n"] == 20
    assert json.loads((result.folder / "summary.json").read_text()) == result.summary
    for name in ("config.yaml", "journal.sqlite", "report.html", "final/model.safetensors", "checkpoints/step-3"):
        assert (result.folder / name).exists(), name
    assert any((result.folder / "tensorboard").iterdir())
    assert len(list((result.folder / "rollouts").glob("*.jsonl"))) == 3
    rows = steps_of(result.folder)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["mismatch/max_abs_logprob"] <= 1e-4
        assert row["buffer/staleness_max"] == 0
        assert 0 <= row["reward/zero_std_frac"] <= 1


def test_the_final_folder_loads_with_transformers_and_answers_as_evaluated(tmp_path: Path) -> None:
    config = small(warm_start={"steps": 5, "batch_size": 16})
    result = quintet.train(config, out=tmp_path / "run")
    del config["warm_start"]
    config["model"] = str(result.folder / "final")
    assert quintet.evaluate(config)["eval/accuracy"] == result.summary["eval/accuracy_after"]


def test_a_finished_run_is_left_alone_and_another_config_is_refused(tmp_path: Path) -> None:
    first = quintet.train(small(steps=1), out=tmp_path / "run")
    before = (first.folder / "final/model.safetensors").stat().st_mtime_ns
    assert quintet.train(small(steps=1), out=tmp_path / "run").summary == first.summary
    assert (first.folder / "final/model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(QuintetError, match=r"train\.lr"):
        quintet.train(small(steps=1, train={"lr": 0.5}), out=tmp_path / "run")


def generating_lasts_until_an_update_runs(monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    """Where one may run meanwhile: the tiny model's samples are else often finished before the next update begins."""
    step, run_update = FastEngine.step, LocalTrainWorker._run_update
    updating = threading.Event()

    def patient_step(engine: FastEngine) -> list[Finished]:
        updating.wait(patience_s)
        return step(engine)

    def noted_update(worker: LocalTrainWorker, batch: ExperienceBatch) -> TrainMetrics:
        updating.set()
        try:
            return run_update(worker, batch)
        finally:
            updating.clear()

    monkeypatch.setattr(FastEngine, "step", patient_step)
    monkeypatch.setattr(LocalTrainWorker, "_run_update", noted_update)


@pytest.mark.parametrize("eta", [0, 2])
def test_the_reward_rises_and_staleness_stays_within_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eta: int
) -> None:
    generating_lasts_until_an_update_runs(monkeypatch, 0.2 if eta else 0.01)
    config = small(
        steps=30, algorithm={"max_staleness": eta}, rollout={"group_size": 8}, data={"eval_size": 0}, train={"lr": 3e-3}
    )
    result = quintet.train(config, reward=starts_with_a_low_digit, out=tmp_path / "run")
    rows = steps_of(result.folder)
    staleness = [row["buffer/staleness_max"] for row in rows]
    assert max(staleness) <= eta
    gaps = [row["mismatch/max_abs_logprob"] for row in rows if "mismatch/max_abs_logprob" in row]
    assert 0.0 < max(gaps) <= 1e-4, "fast numerics agree to rounding"
    updates, rollouts = spans(result.folder, "train", "update"), spans(result.folder, "rollout")
    overlap = sum(max(0.0, min(u[1], r[1]) - max(u[0], r[0])) for u in updates for r in rollouts)
    assert (overlap > 0) == (eta > 0)
    assert (max(staleness) > 0) == (eta > 0)
    rewards = [row["reward/mean"] for row in rows]
    assert fmean(rewards[-5:]) > fmean(rewards[:5]) + 0.2


def test_lora_with_a_reference_trains_and_exports_merged_weights(tmp_path: Path) -> None:
    config = small(algorithm={"kl": {"name": "k3", "coef": 0.01}}, train={"lr": 1e-2})
    config["model"] = {**SMALL["model"], "lora": {"r": 4, "alpha": 8}}
    result = quintet.train(config, reward=starts_with_a_low_digit, out=tmp_path / "run")
    rows = steps_of(result.folder)
    assert rows[0]["kl/ref"] == 0.0 and rows[-1]["kl/ref"] > 0.0
    assert all(row["mismatch/max_abs_logprob"] <= 1e-4 for row in rows)
    assert not list((result.folder / "final").glob("adapter*"))


def test_the_transformers_engine_runs_the_same_recipe(tmp_path: Path) -> None:
    result = quintet.train(small(rollout={"engine": "transformers"}), out=tmp_path / "run")
    assert all(row["mismatch/max_abs_logprob"] <= 1e-4 for row in steps_of(result.folder))


def test_mini_batches_and_epochs_are_optimizer_steps_on_exactly_what_was_sampled(tmp_path: Path) -> None:
    config = small(
        rollout={"numerics": "reproducible", "max_tokens": 20, "temperature": 0.9},
        train={"epochs": 2, "mini_batches": 2, "old": "trainer", "lr": 1e-3, "micro_batch_tokens": 60}
        | {"skip_zero_advantage": False},
    )
    rows = steps_of(quintet.train(config, reward=starts_with_a_low_digit, out=tmp_path / "run").folder)
    assert [row["mismatch/max_abs_logprob"] for row in rows] == [0.0] * 3
    assert [row["mismatch/mean_abs_logprob"] for row in rows] == [0.0] * 3
    assert all(row["actor/optimizer_steps"] == 4 for row in rows)
    assert any(row["kl/approx"] != 0.0 for row in rows)


# -- reward functions that misbehave: never a reward of 0 ----------------------------------------------


def half(bad: Callable[[], Any]) -> Callable[..., Any]:
    """1.0 for the first samples; what `bad` gives for the last one of every group."""

    def score(completions: list[str], **columns: Any) -> list[Any]:
        return [1.0] * (len(completions) - 1) + [bad()]

    return score


def test_none_and_nan_leave_the_sample_out_and_are_counted(tmp_path: Path) -> None:
    for name, bad in (("none", lambda: None), ("nan", lambda: float("nan"))):
        config = small(steps=1, data={"eval_size": 0})
        result = quintet.train(config, reward=half(bad), out=tmp_path / name)
        row = steps_of(result.folder)[0]
        assert row["reward/mean"] == 1.0, name
        assert row["reward/unscored_frac"] == 0.25, name


def test_a_hanging_sample_fails_alone_and_the_run_goes_on(tmp_path: Path) -> None:
    def slow(completions: list[str], **columns: Any) -> list[float]:
        if len(completions) > 1 or "7" in completions[0]:
            time.sleep(60)
        return [1.0] * len(completions)

    config = small(steps=1, reward={"timeout_s": 0.3, "max_failure_frac": 1.0}, data={"eval_size": 0})
    row = steps_of(quintet.train(config, reward=slow, out=tmp_path / "run").folder)[0]
    assert row["reward/mean"] == 1.0


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (lambda completions, **columns: 1 / 0, "ZeroDivisionError"),
        (lambda completions, **columns: [1.0], "1 values? for 4"),
        (lambda completions, **columns: 1.0, "float"),
    ],
)
def test_a_function_that_always_fails_ends_the_run_with_its_name_and_reason(
    tmp_path: Path, bad: Callable[..., Any], reason: str
) -> None:
    config = small(data={"eval_size": 0})
    with pytest.raises(QuintetError, match=reason):
        quintet.train(config, reward=bad, out=tmp_path / "run")
    with pytest.raises(QuintetError, match=reason):
        quintet.train({**config, "reward": {"on_failure": "stop"}}, reward=bad, out=tmp_path / "stop")


# -- wrong inputs: one clear sentence before the model loads ------------------------------------------


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


WRONG_INPUTS = (
    "missing file",
    "missing column",
    "empty data",
    "broken line",
    "unknown task",
    "unknown preset",
    "unknown reward",
    "reward that does not import",
    "missing model",
    "group of one",
    "mini-batches",
    "unknown engine",
    "prompt longer than the context",
)


def wrong_inputs(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    rows = write(tmp_path / "rows.jsonl", '{"question": "1+1=", "answer": "2"}\n' * 30)
    empty = write(tmp_path / "empty.jsonl", "")
    broken = write(tmp_path / "broken.jsonl", '{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    file_data = {"args": {}, "eval_size": 0}
    return {
        "missing file": (small(data={"source": "nowhere.jsonl", **file_data}), r"nowhere\.jsonl"),
        "missing column": (small(data={"source": rows, **file_data}), "question"),
        "empty data": (small(data={"source": empty, **file_data}), "empty"),
        "broken line": (small(data={"source": broken, **file_data}), r"broken\.jsonl:2"),
        "unknown task": (small(data={"source": "task:summs"}), "sums"),
        "unknown preset": (small(algorithm={"preset": "grpoo"}), "grpo"),
        "unknown reward": (small(reward={"functions": [{"fn": "exactt"}]}), "exact"),
        "reward that does not import": (small(reward={"functions": [{"fn": "no_such_module:f"}]}), "no_such_module"),
        "missing model": (small(model={"name": "./no-model", "tiny": {}}), "no-model"),
        "group of one": (small(rollout={"group_size": 1}), "n>=2"),
        "mini-batches": (small(train={"mini_batches": 3, "old": "trainer"}), "mini_batches 3"),
        "unknown engine": (small(rollout={"engine": "vlm"}), "vlm"),
        "prompt longer than the context": (small(rollout={"max_tokens": 32}), "context"),
    }


@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_a_wrong_input_is_refused_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    config, fragment = wrong_inputs(tmp_path)[case]

    def no_model(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("quintet.cluster.local.load_policy", no_model)
    with pytest.raises(QuintetError, match=fragment) as refused:
        quintet.train(config, out=tmp_path / "run")
    assert len(str(refused.value).splitlines()) <= 3


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(QuintetError, match="not empty"):
        quintet.train(small(), out=tmp_path)
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["thesis.tex"]


def test_a_run_that_was_refused_may_be_mended_in_the_same_folder(tmp_path: Path) -> None:
    with pytest.raises(QuintetError):
        quintet.train(small(steps=1, data={"source": "nowhere.jsonl", "args": {}}), out=tmp_path / "run")
    assert quintet.train(small(steps=1), out=tmp_path / "run").summary["steps"] == 1


def test_a_warm_start_ends_early_at_its_loss(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    def watch(kind: str, payload: Any) -> None:
        if kind == "progress" and payload["stage"] == "warm_start":
            seen.append(payload["values"])

    config = small(steps=0, warm_start={"steps": 200, "batch_size": 16, "lr": 3e-3, "until_loss": 2.0})
    quintet.train(config, out=tmp_path / "run", on_event=watch)
    losses = [values["sft/loss"] for values in seen]
    assert 5 <= len(losses) < 200
    assert fmean(losses[-5:]) <= 2.0 < fmean(losses[-6:-1])
