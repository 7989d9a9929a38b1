from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from quintet.observe.config import LogConfig
from quintet.observe.doctor import Finding
from quintet.observe.progress import LiveView, PlainView, duration, open_view, sparkline, summary_lines
from quintet.types import StepMetrics

STEP = {
    "reward/mean": 0.4125,
    "kl/ref": 0.00312,
    "rollout/response_length_mean": 5.25,
    "rollout/tokens_per_s": 1234.4,
    "buffer/staleness_max": 0.0,
    "mismatch/max_abs_logprob": 2.1e-6,
    "time/step_s": 2.0,
}


def played(events: list[tuple[str, Any]], log: LogConfig | None = None, terminal: bool = False) -> str:
    """What a view printed for these events."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, color_system=None)
    with open_view(log or LogConfig(), title="quintet · demo", console=console) as view:
        for kind, payload in events:
            view(kind, payload)
    return out.getvalue()


def step(n: int, **values: float) -> tuple[str, StepMetrics]:
    return "step", StepMetrics(step=n, version=n, values=STEP | values)


def test_a_pipe_gets_one_plain_line_per_step() -> None:
    text = played([("stage", {"name": "train", "total": 30}), step(1), step(2)])
    assert text.splitlines() == [
        "train: 30 to do",
        "step 1/30  reward 0.412  kl 0.0031  length 5.2  tokens/s 1,234  staleness 0  mismatch 2.1e-06  eta 0:58",
        "step 2/30  reward 0.412  kl 0.0031  length 5.2  tokens/s 1,234  staleness 0  mismatch 2.1e-06  eta 0:56",
    ]


def test_a_long_line_is_not_wrapped() -> None:
    text = played([("message", {"level": "info", "text": "x" * 500})])
    assert text == "x" * 500 + "\n"


def test_warm_start_prints_ten_lines_however_long() -> None:
    events = [
        ("progress", {"stage": "warm_start", "done": i + 1, "total": 250, "values": {"loss": 1.5}}) for i in range(250)
    ]
    text = played([("stage", {"name": "warm_start", "total": 250}), *events])
    assert len(text.splitlines()) == 11
    assert "warm start 250/250  loss 1.5" in text


def test_an_evaluation_between_steps_is_two_lines_and_does_not_reset_the_count() -> None:
    done = [("progress", {"stage": "eval", "done": i + 1, "total": 50, "values": {}}) for i in range(50)]
    result = ("eval", {"step": 1, "values": {"eval/accuracy": 0.5}})
    train = ("stage", {"name": "train", "total": 3})
    text = played([train, step(1), ("stage", {"name": "eval", "total": 50}), *done, result, train, step(2)])
    shown = [line.split("  ")[0] for line in text.splitlines()]
    assert shown == [
        "train: 3 to do",
        "step 1/3",
        "eval: 50 to do",
        "held-out evaluation at step 1: accuracy 0.5",
        "train: 3 to do",
        "step 2/3",
    ]
    view = LiveView(Console(file=io.StringIO()), title="")
    for kind, payload in (train, step(1), train):
        view(kind, payload)
    assert view.progress.done == 1


def test_kl_of_the_update_stands_in_where_there_is_no_reference() -> None:
    values = {k: v for k, v in STEP.items() if k != "kl/ref"} | {"kl/approx": 0.25}
    text = played([("stage", {"name": "train", "total": 1}), ("step", StepMetrics(1, 1, values))])
    assert "kl 0.2500" in text


def test_eval_messages_and_the_end_are_told() -> None:
    summary = {
        "steps": 30,
        "seconds": 3725.0,
        "eval/n": 100.0,
        "eval/accuracy_before": 0.31,
        "eval/accuracy_after": 0.7,
    }
    text = played([
        ("eval", {"step": 10, "values": {"eval/accuracy": 0.5}}),
        ("message", {"level": "warning", "text": "[look] here"}),
        ("done", {"summary": summary}),
    ])  # fmt: skip
    assert text.splitlines() == [
        "held-out evaluation at step 10: accuracy 0.5",
        "warning: [look] here",
        "done: 30 steps in 1:02:05",
        "held-out accuracy (100 prompts): before RL 31.0% -> after 70.0%",
        "gain by RL: +39.0 points",
    ]


def test_quiet_keeps_only_warnings() -> None:
    events = [("stage", {"name": "train", "total": 1}), step(1), ("message", {"level": "info", "text": "no"}),
              ("message", {"level": "warning", "text": "yes"})]  # fmt: skip
    assert played(events, LogConfig(console="quiet")) == "warning: yes\n"


def test_an_unknown_event_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="unknown event kind 'sted'; known: stage, progress, step"):
        played([("sted", {})])


def test_a_loss_of_zero_is_explained_once_cfg07() -> None:
    zero = {"actor/loss": 1e-9, "actor/grad_norm": 0.3}
    text = played([("stage", {"name": "train", "total": 2}), step(1, **zero), step(2, **zero)])
    assert text.count("actor/loss near 0 is normal") == 1
    assert "Watch reward/mean and eval/accuracy" in text
    assert "near 0" not in played(
        [("stage", {"name": "train", "total": 2}), step(1, **{"actor/loss": 0.0, "actor/grad_norm": 0.0})]
    )


def test_a_step_cut_off_throughout_is_warned_about_rol15() -> None:
    text = played([("stage", {"name": "train", "total": 1}), step(1, **{"rollout/truncated_frac": 1.0})])
    assert "warning: 100% of the responses were cut off at rollout.max_tokens (this step)" in text


def test_the_doctors_words_end_a_run_and_its_notes_are_left_to_the_report() -> None:
    findings = [Finding("a", "problem", "It is broken.", "Mend it."), Finding("b", "note", "All is well.", "")]
    text = played([("done", {"summary": {"steps": 0, "seconds": 1.0}, "findings": findings})])
    assert text.splitlines() == ["done: 0 steps in 0:01", "doctor: problem: It is broken. Mend it."]


def test_a_terminal_gets_the_live_panel() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    view = open_view(LogConfig(), title="quintet · demo", console=console)
    assert isinstance(view, LiveView)
    view("stage", {"name": "train", "total": 4})
    for n, reward in ((1, 0.0), (2, 1.0)):
        view(*step(n, **{"reward/mean": reward}))
    view("eval", {"step": 2, "values": {"eval/accuracy": 0.435}})
    plain = Console(file=(text := io.StringIO()), width=120, color_system=None)
    plain.print(view.render())
    shown = text.getvalue()
    for part in ("quintet · demo", "train", "2/4", "eta 0:04", "1.000", "1,234", "▁█", "43.5% (step 2)"):
        assert part in shown


def test_the_console_option_overrides_the_terminal() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True)
    assert type(open_view(LogConfig(console="plain"), title="", console=terminal)) is PlainView
    assert type(open_view(LogConfig(console="live"), title="", console=Console(file=io.StringIO()))) is LiveView


def test_the_live_view_leaves_the_cursor_visible() -> None:
    text = played([("stage", {"name": "train", "total": 1}), step(1)], terminal=True)
    assert text.rstrip("\n").endswith("\x1b[?25h")


def test_sparkline_and_duration() -> None:
    assert sparkline([], 5) == "" and sparkline([3.0], 5) == "▁" and sparkline([0, 7], 5) == "▁█"
    assert sparkline([0, 2, 6, 8], 2) == "▁█"
    assert len(sparkline([float(i) for i in range(2000)], 24)) == 24
    assert [duration(s) for s in (0, 59.6, 3600)] == ["0:00", "1:00", "1:00:00"]


def test_summary_lines_say_only_what_is_known() -> None:
    assert summary_lines({"steps": 0, "seconds": 1.0}) == ["done: 0 steps in 0:01"]
