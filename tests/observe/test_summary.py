from __future__ import annotations

import json
from pathlib import Path

from quintet.observe.summary import build_summary, library_versions, peak_rss_bytes, read_summary, write_summary


def test_the_summary_has_the_promised_fields(tmp_path: Path) -> None:
    evals = {"eval/n": 100, "eval/accuracy_untrained": 0.0, "eval/accuracy_before": 0.4, "eval/accuracy_after": 0.9}
    summary = build_summary(
        recipe="recipes/x.yaml", seed=3, steps=10, seconds=1.23456, evals=evals, config_digest="d", extra={"name": "x"}
    )
    path = write_summary(tmp_path, summary)
    assert path == tmp_path / "summary.json" and [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    read = read_summary(tmp_path)
    assert read == json.loads(json.dumps(summary))
    assert {k: read[k] for k in evals} == evals
    assert (read["recipe"], read["seed"], read["steps"], read["seconds"], read["config_digest"], read["name"]) == (
        "recipes/x.yaml", 3, 10, 1.235, "d", "x",
    )  # fmt: skip
    assert {"python", "torch", "transformers"} <= set(read["versions"])


def test_peak_memory_is_in_bytes_and_grows_with_use() -> None:
    before = peak_rss_bytes()
    block = bytearray(200_000_000)
    block[::4096] = b"x" * len(block[::4096])
    assert before > 10_000_000
    assert peak_rss_bytes() >= 200_000_000


def test_a_library_that_is_not_installed_has_no_version() -> None:
    assert all(library_versions().values())
