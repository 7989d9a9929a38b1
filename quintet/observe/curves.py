"""Which curves a report has, for one run or for several laid over each other."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from quintet.observe.charts import COLOURS, Key, Series, line_chart, stacked_chart
from quintet.observe.run_files import Run
from quintet.observe.timeline import PARTS

Rows = Sequence[Mapping[str, Any]]
DASHES = ("", "5 3", "1.5 3", "8 3 2 3")


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    metrics: tuple[tuple[str, str], ...]  # name, label; those that a run lacks are left out; * is any text, and shown
    floor: float | None = 0.0
    ceiling: float | None = None


CHARTS: tuple[Chart, ...] = (
    Chart("Held-out accuracy", "Greedy answers to prompts that were never trained on.",
          (("eval/accuracy", "greedy"), ("eval_sampled/accuracy", "sampled"), ("eval_sampled/pass_at_*", "pass@*")),
          0.0, 1.0),
    Chart("Reward", "Mean reward of a step's samples: what training pushes up.", (("reward/mean", "mean"),), None),
    Chart("Reward parts", "Each reward function's mean, before its weight.", (("reward/*/mean", "*"),), None),
    Chart("Agreement of parts", "Correlation of two reward functions over the samples of a step.",
          (("reward/agreement/*", "*"),), -1.0, 1.0),
    Chart("Parts moving together", "Correlation of a learned part's mean with a verifiable one's over the last 20 "
          "steps; below 0 they part ways.", (("reward/correlation/*", "*"),), -1.0, 1.0),
    Chart("Hacking alarm", "Steps over which the learned part rose while the verifiable one fell, both significantly.",
          (("reward/hacking_alarm/*", "*"),)),
    Chart("Pair accuracy", "Share of pairs whose chosen answer has the higher reward; 0.5 is chance.",
          (("eval/pair_accuracy", "held out"), ("pairs/accuracy", "trained on")), 0.0, 1.0),
    Chart("Margin", "Reward of the chosen minus that of the rejected answer.",
          (("eval/margin", "held out"), ("pairs/margin", "trained on")), None),
    Chart("Loss on given answers", "What an offline preset pushes down.",
          (("eval/loss", "held out"), ("offline/loss", "trained on")), None),
    Chart("Explained variance", "How well the critic's values explain the returns: 1 is all of it, 0 nothing.",
          (("critic/explained_variance", "critic"),), None, 1.0),
    Chart("KL", "Distance of the policy from the reference, and of the update from the old policy.",
          (("kl/ref", "to reference"), ("kl/approx", "of the update"))),
    Chart("Entropy", "Nats per token. A fall to 0 means that the policy stopped exploring.",
          (("actor/entropy", "entropy"),)),
    Chart("Response length", "Tokens per response.",
          (("rollout/response_length_mean", "mean"), ("rollout/response_length_max", "longest"))),
    Chart("Cut short", "Share of responses that ran into max_tokens.", (("rollout/truncated_frac", "cut"),), 0.0, 1.0),
    Chart("Clip fraction", "Share of tokens whose ratio left the trust region.", (("actor/clip_frac", "clipped"),)),
    Chart("Zero-spread groups", "Share of groups whose rewards are all equal: they teach nothing.",
          (("reward/zero_std_frac", "groups"),), 0.0, 1.0),
    Chart("Engine / trainer mismatch", "Largest log-probability difference on the sampled tokens, before the update.",
          (("mismatch/max_abs_logprob", "max"),)),
    Chart("Staleness", "Weight versions between sampling and training; 0 is on-policy.",
          (("buffer/staleness_max", "max"), ("buffer/staleness_mean", "mean"))),
    Chart("Throughput", "Tokens per second: sampled while generating, trained while updating.",
          (("rollout/tokens_per_s", "sampled"), ("actor/tokens_per_s", "trained"))),
    Chart("Gradient norm", "Before clipping.", (("actor/grad_norm", "norm"),)),
    Chart("Step time", "Seconds per controller step.", (("time/step_s", "step"),)),
)  # fmt: skip
_PART_COLOURS = {name: f"var(--p-{name})" for name in PARTS}


def charts_section(runs: Sequence[Run]) -> str:
    """All charts that have something to show; what was 0 in every step of every run is one line instead."""
    figures, flat = [], []
    for chart in CHARTS:
        found = {run.label: _series(run.rows, chart) for run in runs}
        if all(not series for series in found.values()):
            continue
        if all(value == 0.0 for series in found.values() for s in series for _, value in s.points):
            flat.append(chart.title)
        else:
            figures.append(_draw(chart, found))
    figures += [split for run in runs if (split := _time_split(run, named=len(runs) > 1))]
    if not figures:
        return '<h2>Curves</h2><div class="card note">No training step has been recorded in this folder yet.</div>'
    head = "<h2>Curves <small>by controller step; point at a chart to read it</small></h2>"
    note = f'<p class="flat">0 in every step: {escape(", ".join(flat))}.</p>' if flat else ""
    return f'{head}<div class="charts">{"".join(figures)}</div>{note}'


def run_keys(runs: Sequence[Run]) -> list[Key]:
    """The colour of each run, the same in every chart."""
    return [Key(run.label, run_colour(i)) for i, run in enumerate(runs)]


def run_colour(index: int) -> str:
    return f"var(--c{index % COLOURS})"


def points(rows: Rows, metric: str) -> list[tuple[int, float]]:
    """(step, value) of the rows that have a finite value of this name."""
    return [(row["step"], float(row[metric])) for row in rows if _is_finite(row.get(metric))]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _series(rows: Rows, chart: Chart) -> list[Series]:
    named = [pair for metric, label in chart.metrics for pair in _expand(rows, metric, label)]
    series = [Series(label, found) for metric, label in named if (found := points(rows, metric))]
    if chart.title == "Reward parts" and len(series) == 1 and series[0].points == points(rows, "reward/mean"):
        return []  # the only part is the reward itself
    return series


def _expand(rows: Rows, metric: str, label: str) -> list[tuple[str, str]]:
    """`eval_sampled/pass_at_*` as the metrics of that form that there are; what the * stood for goes into the label."""
    if "*" not in metric:
        return [(metric, label)]
    before, after = metric.split("*")
    names = sorted({name for row in rows for name in row if fnmatch.fnmatchcase(name, metric)})
    return [(name, label.replace("*", name.removeprefix(before).removesuffix(after))) for name in names]


def _draw(chart: Chart, found: Mapping[str, list[Series]]) -> str:
    if len(found) == 1:
        (series,) = found.values()
        lines = [Series(s.name, s.points, dash=DASHES[i % 4]) for i, s in enumerate(series)]
        return line_chart(chart.title, chart.note, lines, floor=chart.floor, ceiling=chart.ceiling)
    labels = list(dict.fromkeys(s.name for series in found.values() for s in series))
    dashes = {label: DASHES[i % 4] for i, label in enumerate(labels)}
    lines, keys = [], []
    for i, (run, series) in enumerate(found.items()):
        name = run if len(labels) == 1 else f"{run} {{}}"
        lines += [Series(name.format(s.name), s.points, run_colour(i), dashes[s.name]) for s in series]
        keys += [Key(run, run_colour(i))] if series else []
    keys += [Key(label, "var(--soft)", dash) for label, dash in dashes.items()] if len(labels) > 1 else []
    return line_chart(chart.title, chart.note, lines, keys=keys, floor=chart.floor, ceiling=chart.ceiling)


def _time_split(run: Run, *, named: bool) -> str:
    """Shares of `time/step_s`; what the parts leave of it is called other."""
    timed = [row for row in run.rows if _is_finite(row.get("time/step_s"))]
    parts = {n: [(row["step"], float(row.get(f"time/{n}_s") or 0.0)) for row in timed] for n in PARTS if n != "other"}
    parts = {name: series for name, series in parts.items() if any(v for _, v in series)}
    if not parts:
        return ""
    known = [sum(series[i][1] for series in parts.values()) for i in range(len(timed))]
    rest = [(row["step"], max(row["time/step_s"] - k, 0.0)) for row, k in zip(timed, known, strict=True)]
    series = [Series(name, found, _PART_COLOURS[name]) for name, found in {**parts, "other": rest}.items()]
    title = "Where a step's time goes" + (f": {run.label}" if named else "")
    return stacked_chart(title, "Share of the controller's step; idle is waiting with nothing in progress.", series)
