"""`report.html`: one run, or several laid over each other, on one page that needs nothing but itself.

Made from the run folders' files (`run_files.py`); each may be missing, and a run of 0 steps has a report too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from quintet.files import write_whole
from quintet.observe.charts import COLOURS, legend_key, number
from quintet.observe.curves import charts_section, points, run_colour, run_keys
from quintet.observe.doctor import Finding, failure_totals
from quintet.observe.progress import duration
from quintet.observe.run_files import Run, read_run, read_runs
from quintet.observe.samples import read_samples, samples_table
from quintet.types import QuintetError


def write_report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of one run (`<folder>/report.html` unless `out` is given) and return its path.

    Raises QuintetError when the folder does not exist.
    """
    folder = Path(folder)
    run = read_run(folder)
    return write_whole(out or folder / "report.html", render_report(run))


def write_comparison(folders: Sequence[str | Path], out: str | Path) -> Path:
    """Write the page of several runs. Raises QuintetError for a missing folder, one given twice, or too many."""
    if len(folders) > COLOURS:
        raise QuintetError(f"{len(folders)} runs on one page: at most {COLOURS} can be told apart by their colours")
    return write_whole(out, render_comparison(read_runs([Path(f) for f in folders])))


def render_report(run: Run) -> str:
    """The page of one run as text."""
    sections = [
        f"<header><h1>{escape(run.name)}{_badge(run)}</h1><p>{escape(_subtitle(run))}</p></header>",
        f'<div class="tiles">{"".join(_tiles(run))}</div>',
        _doctor_section([run]),
        charts_section([run]),
        _failures_section([run]),
        _samples_section([run]),
        _run_section(run),
    ]
    return _page(run.name, sections)


def render_comparison(runs: Sequence[Run]) -> str:
    """The page of several runs as text."""
    legend = "".join(legend_key(key) for key in run_keys(runs))
    sections = [
        f'<header><h1>{len(runs)} runs</h1><p class="keys">{legend}</p></header>',
        _results_table(runs),
        _doctor_section(runs),
        charts_section(runs),
        _differences_table(runs),
        _failures_section(runs),
        _samples_section(runs),
        *(_run_section(run, f"What {run.label} was") for run in runs),
    ]
    return _page(", ".join(run.label for run in runs), sections)


def _page(title: str, sections: Sequence[str]) -> str:
    style, script = (files("quintet.observe").joinpath(name).read_text("utf-8") for name in ("report.css", "report.js"))
    footer = (
        "<footer>Written by quintet from the files of the run folder. No network was used and none is needed.</footer>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · quintet report</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(sections)}{footer}</main><script>{script}</script></body></html>\n"
    )


# -- the figures at the top --------------------------------------------------------------------------


def _badge(run: Run) -> str:
    if run.finished or not run.config:
        return ""
    return f'<span class="badge">not finished: {run.steps_done} of {run.config.get("steps", "?")} steps</span>'


def _subtitle(run: Run) -> str:
    config = run.config
    parts = [
        str(config.get("model", {}).get("name", "")),
        str(config.get("algorithm", {}).get("preset", "")),
        str(config.get("data", {}).get("source", "")),
        f"seed {run.summary['seed']}" if "seed" in run.summary else "",
    ]
    return " · ".join(part for part in parts if part)


def _tiles(run: Run) -> Iterator[str]:
    summary = run.summary
    before, after = summary.get("eval/accuracy_before"), summary.get("eval/accuracy_after")
    untrained = summary.get("eval/accuracy_untrained")
    if before is not None and after is not None:
        label = f"held-out accuracy, before → after RL ({summary.get('eval/n', 0):.0f} prompts)"
        yield _tile(f"{before:.1%} → {after:.1%}", label)
        yield _tile(_gain(before, after), "points gained by RL")
    elif before is not None:
        yield _tile(f"{before:.1%}", f"held-out accuracy before RL ({summary.get('eval/n', 0):.0f} prompts)")
    if untrained is not None and untrained != before:
        yield _tile(f"{untrained:.1%}", "accuracy before the warm start")
    rewards = points(run.rows, "reward/mean")
    if rewards:
        yield _tile(f"{number(rewards[0][1])} → {number(rewards[-1][1])}", "mean reward, first → last step")
    yield _tile(f"{run.steps_done:,}", "steps")
    if "seconds" in summary:
        yield _tile(duration(summary["seconds"]), "wall time")
    if "peak_rss_bytes" in summary:
        yield _tile(f"{summary['peak_rss_bytes'] / 1e9:.2f} GB", "peak memory")


def _tile(figure: str, label: str) -> str:
    return f'<div class="tile"><b>{figure}</b><span>{escape(label)}</span></div>'


def _gain(before: float, after: float) -> str:
    gain = 100 * (after - before)
    kind = "good" if gain > 0 else "bad" if gain < 0 else ""
    return f'<em class="{kind}">{gain:+.1f}</em>'


def _results_table(runs: Sequence[Run]) -> str:
    head = ("run", "held-out accuracy", "gain", "mean reward", "steps", "wall time", "tokens/s", "peak memory")
    rows = "".join(f"<tr>{_result_cells(run, i)}</tr>" for i, run in enumerate(runs))
    return f'<div class="card results"><table><tr>{"".join(f"<th>{h}</th>" for h in head)}</tr>{rows}</table></div>'


def _result_cells(run: Run, index: int) -> str:
    summary = run.summary
    before, after = summary.get("eval/accuracy_before"), summary.get("eval/accuracy_after")
    rewards, rates = points(run.rows, "reward/mean"), points(run.rows, "rollout/tokens_per_s")
    cells = [
        f'<i class="dot" style="background:{run_colour(index)}"></i>{escape(run.label)}{_badge(run)}',
        _arrow(None if before is None else f"{before:.1%}", None if after is None else f"{after:.1%}"),
        "–" if before is None or after is None else _gain(before, after),
        _arrow(number(rewards[0][1]), number(rewards[-1][1])) if rewards else "–",
        f"{run.steps_done:,}",
        duration(summary["seconds"]) if "seconds" in summary else "–",
        number(sum(v for _, v in rates) / len(rates)) if rates else "–",
        f"{summary['peak_rss_bytes'] / 1e9:.2f} GB" if "peak_rss_bytes" in summary else "–",
    ]
    return "".join(f"<td>{cell}</td>" for cell in cells)


def _arrow(first: str | None, last: str | None) -> str:
    return f"{first or '–'} → {last or '–'}"


def _differences_table(runs: Sequence[Run]) -> str:
    """The options in which the runs differ."""
    flat = [dict(_leaves(run.config)) for run in runs]
    keys = [k for k in dict.fromkeys(k for tree in flat for k in tree) if len({str(t.get(k)) for t in flat}) > 1]
    if not keys:
        return '<h2>What differs</h2><div class="card note">Nothing: all options are the same in these runs.</div>'
    head = "".join(
        f'<th><i class="dot" style="background:{run_colour(i)}"></i>{escape(run.label)}</th>'
        for i, run in enumerate(runs)
    )
    rows = ""
    for key in keys:
        cells = "".join(f"<td>{escape(str(tree.get(key, '–')))}</td>" for tree in flat)
        rows += f"<tr><th>{escape(key)}</th>{cells}</tr>"
    return f'<h2>What differs</h2><div class="card"><table><tr><th></th>{head}</tr>{rows}</table></div>'


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


# -- findings and failures ---------------------------------------------------------------------------


def _doctor_section(runs: Sequence[Run]) -> str:
    """Problems and warnings in full; notes, which say that nothing is wrong, folded away."""
    if not any(run.steps_done for run in runs):
        return ""
    found = [(f, run.label if len(runs) > 1 else "") for run in runs for f in run.findings]
    grave = "".join(_finding(f, label) for f, label in found if f.level != "note")
    notes = [_finding(f, label) for f, label in found if f.level == "note"]
    head = "" if grave else "Nothing found wrong"
    if notes:
        count = f"{len(notes)} note{'s' if len(notes) > 1 else ''}"
        head = f"<details><summary>{head + '; ' if head else ''}{count}</summary>{''.join(notes)}</details>"
    elif head:
        head = f'<div class="note">{head}.</div>'
    return f'<div class="card doctor">{grave}{head}</div>'


def _finding(finding: Finding, label: str) -> str:
    head = f"{finding.level} · {label}" if label else finding.level
    return (
        f'<div class="finding {finding.level}"><b>{escape(head)}</b>'
        f"<p>{escape(finding.text)} <span>{escape(finding.mend)}</span></p></div>"
    )


_EXPLAINED = {
    "failures/": "samples that could not be scored; left out of advantage and loss",
    "dropped/failed": "groups whose every rollout failed; tried again",
    "dropped/stale": "groups older than max_staleness; generated again",
    "dropped/equal_rewards": "groups without a spread, replaced by new prompts (dynamic sampling)",
}


def _failures_section(runs: Sequence[Run]) -> str:
    totals = [failure_totals(run.rows) for run in runs]
    names = list(dict.fromkeys(name for total in totals for name in total))
    if not any(run.steps_done for run in runs):
        return ""
    if not names:
        return '<h2>Failures and drops</h2><div class="card note">None: every sample was scored and trained on.</div>'
    head = "".join(f"<th>{escape(run.label)}</th>" for run in runs) if len(runs) > 1 else "<th>count</th>"
    rows = ""
    for name in names:
        what = next((text for start, text in _EXPLAINED.items() if name.startswith(start)), "dropped before training")
        counts = "".join(f"<td>{total.get(name, 0):,}</td>" for total in totals)
        rows += f"<tr><th>{escape(name)}</th>{counts}<td>{escape(what)}</td></tr>"
    return (
        f'<h2>Failures and drops</h2><div class="card"><table><tr><th>kind</th>{head}<th></th></tr>{rows}</table></div>'
    )


# -- samples and facts -------------------------------------------------------------------------------


def _samples_section(runs: Sequence[Run]) -> str:
    note = "→ marks the reference answer; the deeper a token's colour, the less likely it was"
    out = f"<h2>Samples <small>{note}</small></h2>"
    for run in runs:
        samples = read_samples(run.folder / "rollouts")
        if not samples.first:
            out += '<div class="card note">No rollouts were kept (log.samples_per_step).</div>'
        elif len(runs) == 1:
            out += f'<div class="card">{samples_table(samples)}</div>'
        else:
            out += (
                f'<details class="card"><summary>{escape(run.label)}</summary>{samples_table(samples, n=2)}</details>'
            )
    return out


def _run_section(run: Run, title: str = "What the run was") -> str:
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in _facts(run))
    full = f"<details><summary>config.yaml, fully resolved</summary><pre>{escape(run.config_text)}</pre></details>"
    table = f'<div class="card facts"><table>{rows}</table>{full if run.config_text else ""}</div>'
    return f"<h2>{escape(title)}</h2>{table}"


def _facts(run: Run) -> list[tuple[str, str]]:
    config, summary = run.config, run.summary
    rollout, train, algorithm = (config.get(name, {}) for name in ("rollout", "train", "algorithm"))
    facts = [("folder", str(run.folder))]
    if "recipe" in summary:
        facts.append(("recipe", f"{summary['recipe']}, seed {summary.get('seed')}"))
    if rollout:
        size = f"{rollout.get('groups_per_step')} prompts × {rollout.get('group_size')} samples a step"
        limits = f"at most {rollout.get('max_tokens')} tokens, {rollout.get('engine')} engine"
        facts.append(("rollout", f"{size}, {limits}, numerics {rollout.get('numerics')}"))
    if train:
        schedule = f"learning rate {train.get('lr')}, {train.get('schedule')}"
        facts.append(("train", f"{schedule}, old policy: {train.get('old')}"))
    if algorithm:
        facts.append(("algorithm", ", ".join(f"{k} {v}" for k, v in algorithm.items() if v is not None)))
    if config.get("reward"):
        functions = config["reward"].get("functions", [])
        facts.append(("reward", ", ".join(f"{f['fn']} × {f.get('weight', 1.0):g}" for f in functions)))
    if "machine" in summary:
        machine = summary["machine"]
        facts.append(("machine", f"{machine['processor']}, {machine['cores']} cores, {machine['system']}"))
    if "versions" in summary:
        facts.append(("versions", ", ".join(f"{name} {value}" for name, value in summary["versions"].items())))
    if "config_digest" in summary:
        facts.append(("config digest", str(summary["config_digest"])))
    return facts
