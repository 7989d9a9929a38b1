"""Parts of a step's wall time: hand-computed, and of a whole run."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

import quintet
from quintet.observe.metrics import read_metrics
from quintet.observe.timeline import PARTS, Timeline
from quintet.types import Span
from tests.observe.test_trace import events
from tests.small_recipe import small

WAIT = Span("controller", "wait", 0.0, 10.0)
TRAINED = {"time/forward_s": 2.0, "time/backward_s": 3.0, "time/optimizer_s": 0.5}


def parts_of(spans: list[Span], values: dict[str, float] | None = None) -> dict[str, float]:
    timeline = Timeline(lambda span: None)
    for span in spans:
        timeline(span)
    return {name[5:-2]: v for name, v in timeline.step_parts(values or {}).items()}


def a_step() -> list[Span]:
    return [
        Span("rollout", "prefill", 1.0, 2.0),
        Span("rollout", "decode", 2.0, 6.0),
        Span("group", "a", 0.5, 6.5),
        Span("reward", "a", 5.0, 7.0),
        Span("reward", "b", 6.5, 8.0),
        WAIT,
        Span("train", "prepare", 10.0, 11.0),
        Span("train", "update", 11.0, 17.0),
        Span("controller", "publish", 17.0, 17.5),
        Span("controller", "load", 17.5, 18.0),
        Span("step", "step 1", 0.0, 20.0),
    ]


def test_the_parts_are_those_and_add_up_to_the_step() -> None:
    parts = parts_of(a_step(), TRAINED)
    assert parts == {
        "prefill": 1.0,
        "decode": 4.0,
        "reward": 2.0,  # from 6 to 8: the second before is decoding, and two at a time count once
        "idle": 3.0,  # 0 to 1 and 8 to 10
        "prepare": 1.0,
        "forward": 2.0,
        "backward": 3.0,
        "optimizer": 0.5,
        "sync": 1.0,
        "other": 2.5,
    }
    assert sum(parts.values()) == 20.0 and tuple(parts) == PARTS


def test_generation_behind_an_update_costs_the_step_nothing() -> None:
    hidden = [Span("rollout", "decode", 11.0, 17.0), Span("reward", "c", 16.0, 18.0)]
    assert parts_of([*hidden, *a_step()], TRAINED) == parts_of(a_step(), TRAINED)


def test_a_phase_that_began_in_the_step_before_counts_from_the_wait_on() -> None:
    timeline = Timeline(lambda span: None)
    for span in a_step():
        timeline(span)
    timeline.step_parts({})
    later = [Span("rollout", "decode", 19.0, 22.0), Span("controller", "wait", 20.0, 23.0)]
    for span in [*later, Span("step", "step 2", 20.0, 24.0)]:
        timeline(span)
    parts = timeline.step_parts({})
    assert (parts["time/decode_s"], parts["time/idle_s"], parts["time/other_s"]) == (2.0, 1.0, 1.0)
    assert parts["time/prefill_s"] == parts["time/sync_s"] == 0.0


def test_an_engine_that_does_not_tell_its_phases_decodes_while_it_has_a_group() -> None:
    silent = [s for s in a_step() if s.lane != "rollout"]
    parts = parts_of(silent)
    assert (parts["prefill"], parts["decode"], parts["reward"], parts["idle"]) == (0.0, 6.0, 1.5, 2.5)


def test_every_span_goes_on_to_the_trace_and_a_block_is_measured_though_it_fails() -> None:
    seen: list[Span] = []
    now = iter([1.0, 3.0])
    timeline = Timeline(seen.append, now=lambda: next(now))
    with pytest.raises(RuntimeError), timeline.measure("controller", "checkpoint"):
        raise RuntimeError
    assert seen == [Span("controller", "checkpoint", 1.0, 3.0)]
    with pytest.raises(ValueError, match="no step has ended"):
        timeline.step_parts({})


@pytest.mark.parametrize("eta", [0, 1])
def test_a_whole_run_tells_where_its_time_went_and_its_trace_holds_every_kind_of_bar(tmp_path: Path, eta: int) -> None:
    config = small(steps=4, algorithm={"max_staleness": eta}, data={"eval_size": 10})
    folder = quintet.train(config, reward=first_letter, out=tmp_path / "run").folder
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    assert len(rows) == 4
    for row in rows:
        parts = [row[f"time/{name}_s"] for name in PARTS]
        assert sum(parts) == pytest.approx(row["time/step_s"], rel=1e-6) and min(parts) >= 0.0
        assert row["time/forward_s"] > 0 and row["time/backward_s"] > 0 and row["time/sync_s"] > 0
    assert rows[0]["time/decode_s"] > 0 and rows[0]["time/prefill_s"] > 0
    found = events(folder / "trace.json")
    lanes = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    bars = [(lanes[e["tid"]], e["name"], e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X"]
    kinds = {(lane, name) for lane, name, _, _ in bars if lane != "step"}
    assert kinds == {
        *(("rollout", name) for name in ("prefill", "decode")),
        *(("train", name) for name in ("prepare", "update", "forward", "backward", "optimizer")),
        *(("controller", name) for name in ("wait", "publish", "load", "checkpoint")),
    }
    assert {e["cat"] for e in found if e["ph"] == "b"} == {"group", "reward"}
    for lane in lanes.values():
        assert nested_or_apart([(begin, end) for name, _, begin, end in bars if name == lane]), lane


def nested_or_apart(bars: list[tuple[int, int]]) -> bool:
    """What a viewer needs of the bars of one lane."""
    pairs = combinations(sorted(bars, key=lambda bar: (bar[0], -bar[1])), 2)
    return all(second[0] >= first[1] or second[1] <= first[1] for first, second in pairs)


def first_letter(completions: list[str], **columns: object) -> list[float]:
    return [float(text[:1] < "5") for text in completions]
