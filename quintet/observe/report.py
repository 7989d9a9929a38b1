"""`report.html`: one run on one page that needs nothing but itself, written from the run folder's files.

Reads `metrics.jsonl`, `summary.json`, `config.yaml` and `rollouts/*.jsonl`, each of which may be missing: a
run of 0 steps has a report too. Left out: comparing runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from quintet.files import write_whole
from quintet.observe.charts import Series, line_chart, number, stacked_chart
from quintet.observe.metrics import read_metrics
from quintet.observe.progress import duration
from quintet.observe.samples import first_and_last_step, samples_table
from quintet.observe.summary import read_summary

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    metrics: tuple[tuple[str, str], ...]  # metric, label; those that a run lacks are left out; a last * is any rest
    floor: float | None = 0.0
    ceiling: float | None = None


CHARTS: tuple[Chart, ...] = (
    Chart("Held-out accuracy", "Greedy answers to prompts that were never trained on.",
          (("eval/accuracy", "greedy"), ("eval_sampled/accuracy", "sampled"), ("eval_sampled/pass_at_*", "pass@")),
          0.0, 1.0),
    Chart("Reward", "Mean reward of a step's samples: what training pushes up.", (("reward/mean", "mean"),), None),
    Chart("Pair accuracy", "Share of pairs whose chosen answer has the higher reward; 0.5 is chance.",
          (("eval/pair_accuracy", "held out"), ("pairs/accuracy", "trained on")), 0.0, 1.0),
    Chart("Margin", "Reward of the chosen minus that of the rejected answer.",
          (("eval/margin", "held out"), ("pairs/margin", "trained on")), None),
    Chart("Loss on given answers", "", (("eval/loss", "held out"), ("offline/loss", "trained on")), None),
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
    Chart("Throughput", "Sampled tokens per second.", (("rollout/tokens_per_s", "tokens/s"),)),
    Chart("Gradient norm", "Before clipping.", (("actor/grad_norm", "norm"),)),
)  # fmt: skip


def write_report(folder: str | Path) -> Path:
    """Write `<folder>/report.html` and return its path. Raises FileNotFoundError when the folder does not exist."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no run folder {folder}")
    return write_whole(folder / "report.html", render_report(folder))


def render_report(folder: Path) -> str:
    """The page as text."""
    rows = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
    summary = read_summary(folder) if (folder / "summary.json").exists() else {}
    config_text = (folder / "config.yaml").read_text(encoding="utf-8") if (folder / "config.yaml").exists() else ""
    config = yaml.safe_load(config_text) or {}
    title = str(config.get("name", folder.name))
    first, last = first_and_last_step(folder / "rollouts")
    sections = [
        f"<header><h1>{escape(title)}</h1><p>{escape(_subtitle(config, summary))}</p></header>",
        f'<div class="tiles">{"".join(_tiles(rows, summary))}</div>',
        _charts_section(rows),
        _samples_section(first, last),
        _run_section(config, summary, config_text),
        "<footer>Written by quintet from the files of the run folder. No network was used and none is needed.</footer>",
    ]
    style, script = (files("quintet.observe").joinpath(name).read_text("utf-8") for name in ("report.css", "report.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · quintet report</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(sections)}</main><script>{script}</script></body></html>\n"
    )


def _subtitle(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    parts = [
        str(config.get("model", {}).get("name", "")),
        str(config.get("algorithm", {}).get("preset", "")),
        str(config.get("data", {}).get("source", "")),
        f"seed {summary['seed']}" if "seed" in summary else "",
    ]
    return " · ".join(part for part in parts if part)


# -- the figures at the top --------------------------------------------------------------------------


def _tiles(rows: Rows, summary: Mapping[str, Any]) -> list[str]:
    out = []
    before, after = summary.get("eval/accuracy_before"), summary.get("eval/accuracy_after")
    if before is not None and after is not None:
        gain = 100 * (after - before)
        kind = "good" if gain > 0 else "bad" if gain < 0 else ""
        label = f"held-out accuracy, before → after RL ({summary.get('eval/n', 0):.0f} prompts)"
        out.append(_tile(f"{before:.1%} → {after:.1%}", label))
        out.append(_tile(f'<span class="{kind}" style="font-size:inherit">{gain:+.1f}</span>', "points gained by RL"))
    if summary.get("eval/accuracy_untrained") is not None:
        out.append(_tile(f"{summary['eval/accuracy_untrained']:.1%}", "accuracy of the untrained model"))
    rewards = _points(rows, "reward/mean")
    if rewards:
        out.append(_tile(f"{number(rewards[0][1])} → {number(rewards[-1][1])}", "mean reward, first → last step"))
    out.append(_tile(f"{summary.get('steps', len(rewards)):,}", "steps"))
    if "seconds" in summary:
        out.append(_tile(duration(summary["seconds"]), "wall time"))
    if "peak_rss_bytes" in summary:
        out.append(_tile(f"{summary['peak_rss_bytes'] / 1e9:.2f} GB", "peak memory"))
    return out


def _tile(figure: str, label: str) -> str:
    return f'<div class="tile"><b>{figure}</b><span>{escape(label)}</span></div>'


# -- charts ------------------------------------------------------------------------------------------


def _points(rows: Rows, metric: str) -> list[tuple[int, float]]:
    return [(row["step"], float(row[metric])) for row in rows if _is_finite(row.get(metric))]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _charts_section(rows: Rows) -> str:
    figures = [figure for chart in CHARTS if (figure := _chart(rows, chart))]
    split = _time_split(rows)
    if split:
        figures.append(split)
    if not figures:
        return '<h2>Curves</h2><div class="card note">No training step has been recorded in this folder yet.</div>'
    head = "<h2>Curves <small>by controller step; point at a chart to read it</small></h2>"
    return f'{head}<div class="charts">{"".join(figures)}</div>'


def _chart(rows: Rows, chart: Chart) -> str:
    named = [pair for metric, label in chart.metrics for pair in _expand(rows, metric, label)]
    series = [Series(label, points) for metric, label in named if (points := _points(rows, metric))]
    if not series:
        return ""
    return line_chart(chart.title, chart.note, series, floor=chart.floor, ceiling=chart.ceiling)


def _expand(rows: Rows, metric: str, label: str) -> list[tuple[str, str]]:
    """`eval_sampled/pass_at_*` as the metrics of that name that there are, the rest of the name added to the label."""
    if not metric.endswith("*"):
        return [(metric, label)]
    prefix = metric.removesuffix("*")
    found = sorted({name for row in rows for name in row if name.startswith(prefix)})
    return [(name, label + name.removeprefix(prefix)) for name in found]


def _time_split(rows: Rows) -> str:
    """Shares of `time/step_s` that the other `time/*_s` metrics take; what they leave is called other."""
    timed = [row for row in rows if _is_finite(row.get("time/step_s"))]
    names = sorted({n for row in timed for n in row if n.startswith("time/") and n.endswith("_s")} - {"time/step_s"})
    if not timed or not names:
        return ""
    parts = {name: [(row["step"], float(row.get(name) or 0.0)) for row in timed] for name in names}
    known = [sum(points[i][1] for points in parts.values()) for i in range(len(timed))]
    rest = [(row["step"], max(row["time/step_s"] - k, 0.0)) for row, k in zip(timed, known, strict=True)]
    series = [Series(n.removeprefix("time/").removesuffix("_s").replace("_", " "), p) for n, p in parts.items()]
    series.append(Series("other", rest))
    return stacked_chart("Where a step's time goes", "Share of the controller's step.", series)


# -- samples and facts -------------------------------------------------------------------------------


def _samples_section(first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]) -> str:
    note = "→ marks the reference answer; the deeper a token's colour, the less likely it was"
    head = f"<h2>Samples <small>{note}</small></h2>"
    if not first:
        return f'{head}<div class="card note">No rollouts were kept (log.samples_per_step).</div>'
    return f'{head}<div class="card">{samples_table(first, last)}</div>'


def _run_section(config: Mapping[str, Any], summary: Mapping[str, Any], config_text: str) -> str:
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in _facts(config, summary))
    full = f"<details><summary>config.yaml, fully resolved</summary><pre>{escape(config_text)}</pre></details>"
    return f'<h2>What the run was</h2><div class="card"><table>{rows}</table>{full if config_text else ""}</div>'


def _facts(config: Mapping[str, Any], summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    rollout, train = config.get("rollout", {}), config.get("train", {})
    facts: list[tuple[str, str]] = []
    if "recipe" in summary:
        facts.append(("recipe", str(summary["recipe"])))
    if rollout:
        size = f"{rollout.get('groups_per_step')} prompts × {rollout.get('group_size')} samples a step"
        limits = f"at most {rollout.get('max_tokens')} tokens, numerics {rollout.get('numerics')}"
        facts.append(("rollout", f"{size}, {limits}"))
    if train:
        schedule = f"learning rate {train.get('lr')}, {train.get('schedule')}"
        facts.append(("train", f"{schedule}, old policy: {train.get('old')}"))
    if config.get("algorithm"):
        algorithm = {k: v for k, v in config["algorithm"].items() if v is not None}
        facts.append(("algorithm", ", ".join(f"{k} {v}" for k, v in algorithm.items())))
    if config.get("reward"):
        functions = config["reward"].get("functions", [])
        facts.append(("reward", ", ".join(f"{f['fn']} × {f.get('weight', 1.0):g}" for f in functions)))
    if "versions" in summary:
        facts.append(("versions", ", ".join(f"{name} {value}" for name, value in summary["versions"].items())))
    if "config_digest" in summary:
        facts.append(("config digest", str(summary["config_digest"])))
    return facts
