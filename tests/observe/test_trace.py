"""The time line: valid Chrome trace, one file over all sittings, never going back in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.observe.trace import LANES, ChromeTrace
from quintet.types import Span


def events(path: Path) -> list[dict[str, Any]]:
    """As a trace viewer reads it: the closing bracket may be missing, the last comma too many."""
    found: list[dict[str, Any]] = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    return found


def bars(path: Path) -> list[tuple[str, int, int]]:
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events(path) if e["ph"] == "X"]


def sitting(path: Path, spans: list[Span], *, now: float, wall: float) -> None:
    trace = ChromeTrace(path, now=lambda: now, wall=lambda: wall)
    for span in spans:
        trace(span)
    trace.close()


def test_lanes_have_names_and_bars_have_microseconds(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = [Span("rollout", "decode", 10.0, 10.5, {"steps": 3}), Span("train", "forward", 10.5, 10.75)]
    sitting(path, spans, now=9.0, wall=1e9)
    names = {e["tid"]: e["args"]["name"] for e in events(path) if e["name"] == "thread_name"}
    assert names == dict(enumerate(LANES, start=1))
    assert bars(path) == [("decode", 1_000_000, 1_500_000), ("forward", 1_500_000, 1_750_000)]
    decode = next(e for e in events(path) if e["name"] == "decode")
    assert names[decode["tid"]] == "rollout" and decode["args"] == {"steps": 3}


def test_overlapping_groups_are_asynchronous_pairs_with_ids_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for _ in range(2):
        groups = [Span("group", f"p{i}/e0.o0.a0", 1.0 + i / 10, 2.0 + i / 10) for i in range(3)]
        sitting(path, groups, now=0.0, wall=1e9)
    pairs = [e for e in events(path) if e["ph"] in "be"]
    begins = [e["id"] for e in pairs if e["ph"] == "b"]
    assert len(set(begins)) == len(begins) == 6 and sorted(begins) == sorted(e["id"] for e in pairs if e["ph"] == "e")
    assert {e["cat"] for e in pairs} == {"group"}


def test_a_resumed_run_goes_on_by_the_time_of_day_though_the_clock_began_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sitting(path, [Span("step", "step 1", 5000.0, 5002.0)], now=5000.0, wall=1e9)
    sitting(path, [Span("step", "step 2", 3.0, 4.0)], now=2.0, wall=1e9 + 60)
    assert bars(path) == [("step 1", 0, 2_000_000), ("step 2", 61_000_000, 62_000_000)]
    assert [e["ts"] for e in events(path) if e["name"] == "resumed"] == [60_000_000]


def test_a_time_of_day_that_was_set_back_does_not_lay_a_sitting_over_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    sitting(path, [Span("step", "step 1", 0.0, 2.0)], now=0.0, wall=1e9)
    sitting(path, [Span("step", "step 2", 100.0, 101.0)], now=100.0, wall=1e9 - 3600)
    assert bars(path) == [("step 1", 0, 2_000_000), ("step 2", 2_000_000, 3_000_000)]


@pytest.mark.parametrize("torn", ['{"ph": "X", "pi', '{"ph": "X", "pid": 1}'])
def test_a_line_torn_by_a_kill_is_cut_off(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "trace.json"
    sitting(path, [Span("step", "step 1", 0.0, 1.0)], now=0.0, wall=1e9)
    path.write_text(path.read_text() + torn)
    sitting(path, [Span("step", "step 2", 0.0, 1.0)], now=0.0, wall=1e9 + 10)
    assert [name for name, _, _ in bars(path)] == ["step 1", "step 2"]


def test_a_file_cut_before_its_first_event_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[\n")
    sitting(path, [Span("step", "step 1", 0.0, 1.0)], now=0.0, wall=1e9)
    assert bars(path) == [("step 1", 0, 1_000_000)]


def test_the_tail_of_a_long_file_is_enough_to_go_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = [Span("rollout", "decode", float(i), i + 1.0) for i in range(2000)]
    sitting(path, spans, now=0.0, wall=1e9)
    sitting(path, [Span("step", "late", 0.0, 1.0)], now=0.0, wall=1e9)
    assert path.stat().st_size > 2 * 65536
    assert bars(path)[-1] == ("late", 2_000_000_000, 2_001_000_000)
