"""What a run writes down as it goes: readable rollouts and the time line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quintet.types import Group, Rollout, Score, Span


def write_samples(folder: Path, step: int, groups: list[Group], limit: int, decode: Callable[[list[int]], str]) -> None:
    """Up to `limit` rollouts of a step into `folder/step-NNNNNN.jsonl`: best and worst first, then the others."""
    rows = [(g, r, s) for g in groups for r, s in zip(g.rollouts, g.scores, strict=True)]
    chosen = _from_both_ends(sorted(rows, key=lambda row: _rank(row[2]), reverse=True))[:limit]
    lines = [
        json.dumps(_row(step, group, rollout, score, decode), ensure_ascii=False) + "\n"
        for group, rollout, score in chosen
    ]
    (folder / f"step-{step:06d}.jsonl").write_text("".join(lines), encoding="utf-8")


def _rank(score: Score) -> float:
    return -math.inf if score.reward is None else score.reward


def _from_both_ends(rows: list[Any]) -> list[Any]:
    half = (len(rows) + 1) // 2
    pairs = zip(rows[:half], [*rows[half:][::-1], None], strict=False)
    return [row for pair in pairs for row in pair if row is not None]


def _row(step: int, group: Group, rollout: Rollout, score: Score, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    prompt = group.prompt
    row: dict[str, Any] = {
        "step": step,
        "group": str(group.group_id),
        "sample": rollout.sample_index,
        "prompt": prompt.messages if prompt.text is None else prompt.text,
        "answer": prompt.answer,
        "text": rollout.text,
        "finish_reason": rollout.finish_reason.value,
        "reward": score.reward,
        "parts": score.parts,
        "tokens": [decode([token]) for token in rollout.response_ids],
        "logprobs": rollout.logprobs,
    }
    if score.failure is not None:
        row["failure"] = f"{score.failure.kind.value}: {score.failure.message}"
    return row


class ChromeTrace:
    """Spans as a Chrome-trace JSON array (opens in Perfetto). The closing bracket is optional in that format, so a
    killed run leaves a readable file; a resumed run goes on in it."""

    def __init__(self, path: Path) -> None:
        fresh = not path.exists() or path.stat().st_size == 0
        self._file = path.open("a", encoding="utf-8")
        self._lanes: dict[str, int] = {}
        if fresh:
            self._file.write("[\n")

    def __call__(self, span: Span) -> None:
        """Times are clock seconds; the file has microseconds."""
        lane = self._lane(span.lane)
        self._write(
            {"ph": "X", "pid": 1, "tid": lane, "name": span.name, "ts": round(span.start * 1e6)}
            | {"dur": round((span.end - span.start) * 1e6), "args": span.args}
        )

    def close(self) -> None:
        self._file.close()

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes[name] = len(self._lanes) + 1
            self._write({"ph": "M", "pid": 1, "tid": self._lanes[name], "name": "thread_name", "args": {"name": name}})
        return self._lanes[name]

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + ",\n")
        self._file.flush()
