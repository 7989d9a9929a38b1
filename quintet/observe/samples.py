"""Readable rollouts of a run folder: picking some, and showing them with each token's surprise.

A line of `rollouts/*.jsonl` has `step`, `prompt`, `text`, `reward` (null: unscored), `parts`, and optionally
`answer` (the reference), `failure`, `finish_reason`, and `tokens` with `logprobs` of the same length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from quintet.observe.metrics import read_rows

MAX_CHARS = 4000  # of one text in the page
_FILES_SEARCHED = 50  # newest files in which the most surprising samples are looked for

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Samples:
    """Samples of the earliest step, of the latest (empty when it is the same), and of the latest steps together."""

    first: list[dict[str, Any]]
    last: list[dict[str, Any]]
    recent: list[dict[str, Any]]


def read_samples(folder: Path) -> Samples:
    """Reads the first file and the last ones only: a run of 2,000 steps has as many. Names ascend with the steps."""
    paths = sorted(folder.glob("*.jsonl"))
    recent = [row for path in paths[-_FILES_SEARCHED:] for row in read_rows(path)]
    early = list(read_rows(paths[0])) if paths else []
    first_step, last_step = (f(r["step"] for r in early + recent) if early else None for f in (min, max))
    first = [r for r in early if r["step"] == first_step]
    last = [r for r in recent if r["step"] == last_step]
    return Samples(first, [] if first_step == last_step else last, recent)


def best_and_worst(rows: Sequence[Row], n: int) -> tuple[list[Row], list[Row]]:
    """The `n` highest and the `n` lowest rewards, none of them twice; unscored samples and equal answers to one
    prompt are left out."""
    ranked = sorted((r for r in _different(rows) if r["reward"] is not None), key=lambda r: -r["reward"])
    best = ranked[: min(n, (len(ranked) + 1) // 2)]
    worst = ranked[len(best) :][-n:][::-1]
    return best, worst


def most_surprising(rows: Sequence[Row], n: int) -> list[Row]:
    """The `n` with the lowest mean log-probability; rows without log-probabilities are left out."""
    return sorted((r for r in _different(rows) if r.get("logprobs")), key=mean_logprob)[:n]


def _different(rows: Sequence[Row]) -> list[Row]:
    """Equal texts as answers to one prompt only once."""
    return list({(str(r["prompt"]), r["text"]): r for r in reversed(rows)}.values())[::-1]


def mean_logprob(row: Row) -> float:
    """Nats per token under the policy that sampled it."""
    return fmean(row["logprobs"])


def samples_table(samples: Samples, *, n: int = 4) -> str:
    """An HTML table: best, worst and unscored of the latest step, the most surprising of the latest steps, and the
    earliest step's best and worst for comparison."""
    latest = samples.last or samples.first
    best, worst = best_and_worst(latest, n)
    unscored = [row for row in latest if row["reward"] is None][:n]
    odd = most_surprising(samples.recent, n)
    body = _block(f"Best of the latest step ({_step(latest)})", best)
    body += _block(f"Worst of the latest step ({_step(latest)})", worst)
    body += _block(f"Not scored of the latest step ({_step(latest)})", unscored)
    if odd:
        steps = sorted({row["step"] for row in samples.recent})
        span = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
        body += _block(f"Most surprising: lowest mean log-probability ({span})", odd, where=True)
    if samples.last:
        best, worst = best_and_worst(samples.first, n // 2)
        body += _block(f"Best of the first step ({_step(samples.first)})", best)
        body += _block(f"Worst of the first step ({_step(samples.first)})", worst)
    return f'<table class="samples">{body}</table>'


def _step(rows: Sequence[Row]) -> str:
    return str(rows[0]["step"]) if rows else "-"


def _block(title: str, rows: Sequence[Row], *, where: bool = False) -> str:
    if not rows:
        return ""
    return f'<tr class="head"><th colspan="3">{escape(title)}</th></tr>' + "".join(
        _sample_row(row, where=where) for row in rows
    )


def _sample_row(row: Row, *, where: bool) -> str:
    """`where`: say the step too."""
    reward = "not scored" if row["reward"] is None else f"{row['reward']:.3g}"
    notes = [f"{n} {'abstained' if v is None else f'{v:.3g}'}" for n, v in (row.get("parts") or {}).items()]
    notes += [row["failure"]] if row.get("failure") else []
    notes += ["cut off"] if row.get("finish_reason") == "length" else []
    if row.get("logprobs"):
        notes.append(f"{mean_logprob(row):.2f} nats/token")
    notes += [f"step {row['step']}"] if where else []
    reference = f'<span class="answer">→ {escape(_clip(str(row["answer"])))}</span>' if row.get("answer") else ""
    return (
        f'<tr><td class="reward">{reward}<span class="parts">{escape(" · ".join(notes))}</span></td>'
        f'<td class="prompt"><pre>{escape(_clip(_prompt_text(row["prompt"])))}</pre>{reference}</td>'
        f'<td class="text"><pre>{_response(row)}</pre></td></tr>'
    )


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, list):
        return "\n".join(f"{turn.get('role', '?')}: {turn.get('content', '')}" for turn in prompt)
    return str(prompt)


def _response(row: Row) -> str:
    """The answer token by token; a token without text, such as the end of the text, is a dot."""
    tokens, logprobs = row.get("tokens"), row.get("logprobs")
    if not tokens or not logprobs or len(tokens) != len(logprobs):
        return escape(_clip(row["text"])) or "<i>(empty)</i>"
    out, used = [], 0
    for token, logprob in zip(tokens, logprobs, strict=True):
        probability = math.exp(min(logprob, 0.0))
        shade = round(min(-logprob / 4, 1.0) * 0.75, 2) if logprob < 0 else 0
        out.append(f'<span class="t" style="--s:{shade}" title="p = {probability:.3g}">{escape(token) or "·"}</span>')
        used += len(token)
        if used > MAX_CHARS:
            return "".join(out) + " …"
    return "".join(out)


def _clip(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + " …"
