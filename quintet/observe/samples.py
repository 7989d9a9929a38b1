"""Readable rollouts of a run folder: picking some, and showing them with each token's surprise.

A line of `rollouts/*.jsonl` has `step`, `prompt`, `text`, `reward` (null: unscored), `parts`, and optionally
`answer` (the reference), `failure`, and `tokens` with `logprobs` of the same length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from quintet.observe.metrics import read_rows

MAX_CHARS = 4000  # of one text in the page


def first_and_last_step(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The samples of the earliest and of the latest step; the second list is empty when they are the same step."""
    first: list[dict[str, Any]] = []
    last: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.jsonl")):
        for row in read_rows(path):
            first = _keep(first, row, earlier=True)
            last = _keep(last, row, earlier=False)
    return (first, []) if first and first[0]["step"] == last[0]["step"] else (first, last)


def _keep(rows: list[dict[str, Any]], row: dict[str, Any], *, earlier: bool) -> list[dict[str, Any]]:
    if not rows or (row["step"] < rows[0]["step"] if earlier else row["step"] > rows[0]["step"]):
        return [row]
    return [*rows, row] if row["step"] == rows[0]["step"] else rows


def best_and_worst(rows: Sequence[dict[str, Any]], n: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The `n` highest and the `n` lowest rewards, none of them twice; unscored samples are left out."""
    ranked = sorted((r for r in rows if r["reward"] is not None), key=lambda r: -r["reward"])
    best = ranked[: min(n, (len(ranked) + 1) // 2)]
    worst = ranked[len(best) :][-n:][::-1]
    return best, worst


def samples_table(first: Sequence[dict[str, Any]], last: Sequence[dict[str, Any]]) -> str:
    """An HTML table: the latest step's best and worst, then the earliest step's for comparison."""
    body = ""
    for label, rows, n in (("latest step", last or first, 4), ("first step", first if last else [], 2)):
        best, worst = best_and_worst(rows, n)
        unscored = [row for row in rows if row["reward"] is None][:n]
        for kind, chosen in (("Best", best), ("Worst", worst), ("Not scored", unscored)):
            if chosen:
                body += f'<tr class="head"><th colspan="3">{kind} of the {label} ({chosen[0]["step"]})</th></tr>'
                body += "".join(_sample_row(row) for row in chosen)
    return f'<table class="samples">{body}</table>'


def _sample_row(row: Mapping[str, Any]) -> str:
    reward = "not scored" if row["reward"] is None else f"{row['reward']:.3g}"
    notes = [f"{n} {'abstained' if v is None else f'{v:.3g}'}" for n, v in (row.get("parts") or {}).items()]
    notes += [row["failure"]] if row.get("failure") else []
    reference = f"\n→ {row['answer']}" if row.get("answer") is not None else ""
    return (
        f'<tr><td class="reward">{reward}<span class="parts">{"".join(f"<br>{escape(n)}" for n in notes)}</span></td>'
        f'<td class="prompt"><pre>{escape(_clip(_prompt_text(row["prompt"])) + reference)}</pre></td>'
        f'<td class="text"><pre>{_response(row)}</pre></td></tr>'
    )


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, list):
        return "\n".join(f"{turn.get('role', '?')}: {turn.get('content', '')}" for turn in prompt)
    return str(prompt)


def _response(row: Mapping[str, Any]) -> str:
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
