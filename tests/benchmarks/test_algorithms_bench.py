"""The benchmark of all presets, on two of them and a very small model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quintet.types import QuintetError

FILE = Path(__file__).parents[2] / "benchmarks" / "algorithms.py"
SMALL = [
    *("--steps", "2", "--offline-steps", "2", "--groups", "4", "--group-size", "4", "--warm-start-steps", "3"),
    *("--set", "model.tiny.hidden_size=32", "--set", "model.tiny.intermediate_size=64", "--set", "model.tiny.layers=2"),
    *("--jobs", "1"),
    *("--set", "warm_start.batch_size=16", "--set", "data.args.max=19", "--set", "data.eval_size=20"),
]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("algorithms_bench", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "algorithms_bench", module)
    spec.loader.exec_module(module)
    return module


def test_two_presets_give_a_table_and_finished_runs_are_not_run_again(bench: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{bench.BEGIN}\nold\n{bench.END}\nafter\n")
    arguments = [*SMALL, "--presets", "grpo,dpo", "--seeds", "2", "--out", str(tmp_path / "out"), "--page", str(page)]
    results = bench.main(arguments)
    assert [(r.preset, len(r.after)) for r in results] == [("grpo", 2), ("dpo", 1)]
    assert results[0].before == results[1].before, "one start for all"
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| `grpo` | arXiv:2402.03300 |" in text and "| `dpo` | arXiv:2305.18290 |" in text
    model = tmp_path / "out" / "runs" / "grpo-1" / "final" / "model.safetensors"
    written = model.stat().st_mtime_ns
    assert [r.after for r in bench.main(arguments)] == [r.after for r in results]
    assert model.stat().st_mtime_ns == written


def test_held_out_questions_are_in_neither_stage(bench: ModuleType, tmp_path: Path) -> None:
    options: Any = bench.parse([*SMALL, "--presets", "grpo"])
    bench.prepare(options, tmp_path)
    import json

    prompts = {
        name: {json.loads(line)["prompt"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
        for name in ("train", "held_out", "pairs", "held_out_pairs")
    }
    assert len(prompts["held_out"]) == 20 and not prompts["train"] & prompts["held_out"]
    assert prompts["pairs"] == prompts["train"] and prompts["held_out_pairs"] == prompts["held_out"]


def test_a_page_without_marks_and_unknown_presets_are_refused(bench: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(QuintetError, match="has no lines"):
        bench.write_page(tmp_path / "page.md", "table")
    with pytest.raises(SystemExit):
        bench.parse(["--presets", "grop"])


def test_every_preset_has_a_recipe_that_is_accepted(bench: ModuleType, tmp_path: Path) -> None:
    from quintet.config import load_config

    options = bench.parse([])
    made = bench.Bench(tmp_path, tmp_path, options)
    for preset in options.presets:
        offline = preset in bench.OFFLINE_PRESETS
        load_config(made._offline(preset, 0) if offline else made._online(preset, 0))
