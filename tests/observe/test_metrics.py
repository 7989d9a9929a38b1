from __future__ import annotations

import json
import math
from pathlib import Path

from quintet.observe.metrics import JsonlSink, read_metrics, read_rows


def lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_step_is_on_disk_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(1, {"reward/mean": 0.5})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]
    sink.close()


def test_values_that_json_cannot_say_become_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(1, {"a": math.nan, "b": math.inf, "c": 1e-300})
    sink.close()
    assert lines(tmp_path / "m.jsonl") == [{"step": 1, "a": None, "b": None, "c": 1e-300}]


def test_resuming_cuts_later_steps_and_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(
        '{"step": 1, "x": 1}\n{"step": 2, "x": 2}\n{"step": 3, "x": 3}\n{"step": 2, "y": 9}\n{"step": 4, "x"'
    )
    sink = JsonlSink(path, resume_step=2)
    sink.log(3, {"x": 30.0})
    sink.close()
    assert lines(path) == [{"step": 1, "x": 1}, {"step": 2, "x": 2}, {"step": 2, "y": 9}, {"step": 3, "x": 30.0}]


def test_a_fresh_sink_starts_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 9}\n')
    JsonlSink(path).close()
    assert path.read_text() == ""


def test_resuming_without_a_file_starts_one(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "m.jsonl", resume_step=0).close()
    assert list(read_rows(tmp_path / "m.jsonl")) == []


def test_what_was_logged_for_one_step_is_read_as_one_row(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(2, {"reward/mean": 0.5})
    sink.log(2, {"eval/accuracy": 0.25})
    sink.log(1, {"reward/mean": 0.1})
    sink.close()
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"step": 1, "reward/mean": 0.1},
        {"step": 2, "reward/mean": 0.5, "eval/accuracy": 0.25},
    ]


def test_chinese_names_stay_readable_cfg13(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(1, {"reward/求和/mean": 1.0})
    sink.close()
    assert "求和" in (tmp_path / "m.jsonl").read_text(encoding="utf-8")
