"""What a person sees while a run goes on: a live view on a terminal, one plain line per step elsewhere.

A view is called as `view(kind, payload)` with these kinds:

    stage     {"name": "warm_start" | "eval" | "train" | ..., "total": int}
    progress  {"stage": str, "done": int, "total": int, "values": {name: float}}
    step      StepMetrics
    eval      {"step": int, "values": {name: float}}
    message   {"level": "info" | "warning" | "error", "text": str}
    done      {"summary": dict, "findings": [Finding] (optional)}, also of a run that was stopped in order

An unknown kind raises ValueError. Views are context managers; on leaving, the terminal is as before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quintet.observe.config import LogConfig
from quintet.observe.doctor import Finding, diagnose
from quintet.types import StepMetrics

EventHandler = Callable[[str, Any], None]

# label, metric names (the first one present is shown), format
FIELDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("reward", ("reward/mean",), ".3f"),
    ("loss", ("offline/loss",), ".4f"),
    ("pair accuracy", ("pairs/accuracy",), ".3f"),
    ("margin", ("pairs/margin",), ".3f"),
    ("kl", ("kl/ref", "kl/approx"), ".4f"),
    ("length", ("rollout/response_length_mean",), ".1f"),
    ("tokens/s", ("rollout/tokens_per_s",), ",.0f"),
    ("staleness", ("buffer/staleness_max",), ".0f"),
    ("mismatch", ("mismatch/max_abs_logprob",), ".1e"),
)
_BARS = "▁▂▃▄▅▆▇█"
_LIVE_WINDOW = 100  # steps that the doctor sees while a run goes on


@dataclass
class RunProgress:
    """What has been reported so far; the views only draw it."""

    stage: str = "starting"
    done: int = 0
    total: int = 0
    values: dict[str, float] = field(default_factory=dict)  # of the running warm start or evaluation
    step: StepMetrics | None = None
    rewards: list[float] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)  # step, greedy held-out accuracy

    def on_stage(self, payload: Mapping[str, Any]) -> None:
        self.stage, self.total, self.values = payload["name"], payload["total"], {}
        self.done = self.step.step if self.stage == "train" and self.step is not None else 0

    def on_progress(self, payload: Mapping[str, Any]) -> None:
        self.stage, self.done, self.total = payload["stage"], payload["done"], payload["total"]
        self.values = dict(payload.get("values", {}))

    def on_step(self, step: StepMetrics) -> None:
        self.step, self.done = step, step.step
        if (reward := step.values.get("reward/mean")) is not None:
            self.rewards.append(reward)
        if (seconds := step.values.get("time/step_s")) is not None:
            self.step_seconds.append(seconds)

    def on_eval(self, payload: Mapping[str, Any]) -> None:
        if (accuracy := payload["values"].get("eval/accuracy")) is not None:
            self.evals.append((payload["step"], accuracy))

    @property
    def eta_s(self) -> float | None:
        """Seconds that the remaining steps take at the pace of the last ten; None before the first."""
        recent = self.step_seconds[-10:]
        return (self.total - self.done) * sum(recent) / len(recent) if recent else None


class View(Protocol):
    def __call__(self, kind: str, payload: Any) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainView:
    """Lines for log files: one per step, ten per warm start, two per evaluation. `quiet`: warnings and errors only."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self._console = console
        self._quiet = quiet
        self._rows: deque[dict[str, Any]] = deque(maxlen=_LIVE_WINDOW)
        self._told: set[str] = set()
        self.progress = RunProgress()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __call__(self, kind: str, payload: Any) -> None:
        handlers: dict[str, Callable[[Any], None]] = {
            "stage": self._stage,
            "progress": self._progress,
            "step": self._step,
            "eval": self._eval,
            "message": self._message,
            "done": self._done,
        }
        if kind not in handlers:
            raise ValueError(f"unknown event kind {kind!r}; known: {', '.join(handlers)}")
        handlers[kind](payload)

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._print(text)

    def _print(self, text: str | Text, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def _stage(self, payload: Mapping[str, Any]) -> None:
        self.progress.on_stage(payload)
        self._line(f"{payload['name'].replace('_', ' ')}: {payload['total']} to do")

    def _progress(self, payload: Mapping[str, Any]) -> None:
        before = self.progress.done
        self.progress.on_progress(payload)
        done, total = self.progress.done, self.progress.total
        if self.progress.stage != "eval" and total and done * 10 // total > before * 10 // total:
            shown = "  ".join(f"{name} {value:.4g}" for name, value in self.progress.values.items())
            self._line(f"{self.progress.stage.replace('_', ' ')} {done}/{total}  {shown}".rstrip())

    def _step(self, step: StepMetrics) -> None:
        self.progress.on_step(step)
        self._line(step_line(self.progress))
        self._diagnose(step)

    def _diagnose(self, step: StepMetrics) -> None:
        """What the rules say so far, each of them once in a run."""
        self._rows.append({"step": step.step, **step.values})
        for finding in diagnose(list(self._rows), {}):
            if finding.key not in self._told:
                self._told.add(finding.key)
                self._message({"level": "info" if finding.level == "note" else "warning", "text": str(finding)})

    def _eval(self, payload: Mapping[str, Any]) -> None:
        self.progress.on_eval(payload)
        shown = "  ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in payload["values"].items())
        self._line(f"held-out evaluation at step {payload['step']}: {shown}")

    def _message(self, payload: Mapping[str, Any]) -> None:
        level, text = payload["level"], payload["text"]
        if not self._quiet or level != "info":
            style = {"warning": "yellow", "error": "bold red"}.get(level, "dim")
            self._print(text if level == "info" else f"{level}: {text}", style)

    def _done(self, payload: Mapping[str, Any]) -> None:
        for line in summary_lines(payload["summary"]):
            self._line(line)
        for line in finding_lines(payload.get("findings", [])):
            self._line(line)


class LiveView(PlainView):
    """A panel that redraws itself at the foot of the terminal; messages and evaluations scroll above it."""

    def __init__(self, console: Console, *, title: str) -> None:
        super().__init__(console)
        self._title = title
        self._live = Live(self.render(), console=console, refresh_per_second=8, get_renderable=self.render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _stage(self, payload: Mapping[str, Any]) -> None:
        self.progress.on_stage(payload)

    def _progress(self, payload: Mapping[str, Any]) -> None:
        self.progress.on_progress(payload)

    def _step(self, step: StepMetrics) -> None:
        self.progress.on_step(step)
        self._diagnose(step)

    def render(self) -> RenderableType:
        """The panel as it is now."""
        p = self.progress
        head = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=max(p.total, 1), completed=p.done, width=30)
        count = Text(f"{p.done}/{p.total}" if p.total else "", style="bold")
        eta = Text(f"eta {duration(p.eta_s)}" if p.stage == "train" and p.eta_s is not None else "", style="dim")
        head.add_row(Text(self._title, style="bold cyan"), Text(p.stage.replace("_", " ")), bar, count, eta)
        parts: list[RenderableType] = [head]
        if p.values:
            parts.append(Text("  ".join(f"{k} {v:.4g}" for k, v in p.values.items()), style="dim"))
        if p.step is not None:
            parts.append(_metric_grid(p))
        if p.evals:
            shown = "  →  ".join(f"{accuracy:.1%} (step {step})" for step, accuracy in p.evals[-4:])
            parts.append(Text.assemble(("held-out accuracy  ", "dim"), (shown, "bold green")))
        return Group(*parts)


def _metric_grid(progress: RunProgress) -> Table:
    grid = Table.grid(padding=(0, 2))
    assert progress.step is not None
    shown = list(shown_fields(progress.step))
    grid.add_row(*(Text(label, style="dim") for label, _ in shown), Text("reward over steps", style="dim"))
    grid.add_row(*(Text(text, style="bold") for _, text in shown), Text(sparkline(progress.rewards, 24), style="green"))
    return grid


def shown_fields(step: StepMetrics) -> list[tuple[str, str]]:
    """(label, formatted value) of the fields that this step has."""
    out = []
    for label, names, form in FIELDS:
        value = next((step.values[name] for name in names if name in step.values), None)
        if value is not None:
            out.append((label, format(value, form)))
    return out


def step_line(progress: RunProgress) -> str:
    """One step in one line."""
    assert progress.step is not None
    fields = "  ".join(f"{label} {text}" for label, text in shown_fields(progress.step))
    eta = f"  eta {duration(progress.eta_s)}" if progress.eta_s is not None else ""
    return f"step {progress.step.step}/{progress.total}  {fields}{eta}"


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """How a run ended, for people."""
    labels = {"untrained": "untrained", "before": "before RL", "after": "after"}
    values = {label: summary.get(f"eval/accuracy_{when}") for when, label in labels.items()}
    known = [f"{label} {value:.1%}" for label, value in values.items() if value is not None]
    word = "done" if summary.get("finished", True) else "stopped"
    lines = [f"{word}: {summary['steps']} steps in {duration(summary['seconds'])}"]
    if known:
        lines.append(f"held-out accuracy ({summary['eval/n']:.0f} prompts): " + " -> ".join(known))
    before, after = summary.get("eval/accuracy_before"), summary.get("eval/accuracy_after")
    if before is not None and after is not None:
        lines.append(f"gain by RL: {100 * (after - before):+.1f} points")
    for name, label in (("pair_accuracy", "pair accuracy"), ("margin", "margin"), ("loss", "loss")):
        before, after = summary.get(f"eval/{name}_before"), summary.get(f"eval/{name}_after")
        if before is not None and after is not None:
            lines.append(f"held-out {label} ({summary['eval/n']:.0f} rows): {before:.3f} -> {after:.3f}")
    return lines


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """The doctor's words at the end of a run; notes, which say that nothing is wrong, are left to the report."""
    return [f"doctor: {finding.level}: {finding}" for finding in findings if finding.level != "note"]


def sparkline(values: list[float], width: int) -> str:
    """At most `width` block characters from lowest to highest; neighbours are averaged when there are more values."""
    if not values:
        return ""
    n = min(width, len(values))
    cuts = [i * len(values) // n for i in range(n + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((m - low) * scale)] for m in means)


def duration(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


def open_view(log: LogConfig, *, title: str, console: Console | None = None) -> View:
    """The view that `log.console` asks for; `auto` looks whether the console is a terminal."""
    console = console or Console()
    if log.console == "live" or (log.console == "auto" and console.is_terminal):
        return LiveView(console, title=title)
    return PlainView(console, quiet=log.console == "quiet")
