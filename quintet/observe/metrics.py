"""`metrics.jsonl`: one JSON object per log call, `{"step": n, name: value, ...}`, on disk as soon as it is known.

NaN and infinities become null, because JSON has no word for them; a reader sees a gap. Left out: rotation
and compression (2,000 steps with 60 metrics are about 3 MB).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quintet.files import write_whole
from quintet.types import QuintetError


class JsonlSink:
    """A MetricSink that appends to a file and flushes every line.

    `resume_step`: the last step whose metrics stay; later lines, and a line cut off by a crash, are
    removed, because the steps after it will be done again. None starts the file anew.
    """

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        self.path = Path(path)
        if resume_step is None:
            self.path.write_text("")
        elif self.path.exists():
            _cut_after(self.path, resume_step)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        row = {"step": step} | {name: _finite(value) for name, value in values.items()}
        self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _cut_after(path: Path, step: int) -> None:
    kept = [json.dumps(row, ensure_ascii=False) for row in read_rows(path) if row["step"] <= step]
    write_whole(path, "".join(line + "\n" for line in kept))


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON-lines file in order. A last line without its newline was cut off and is left out.

    Raises QuintetError for a line that is no JSON object with a `step`.
    """
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith("\n") and line.strip():
                yield _row(line, f"{path}:{number}")


def _row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise QuintetError(f"{where} is damaged ({error}): delete that line") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise QuintetError(f"{where} is no line of this file: it has no step. Is it a run folder of quintet?")
    return row


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """One dict per step, ascending: what was logged for the same step is merged, later values winning."""
    merged: dict[int, dict[str, Any]] = {}
    for row in read_rows(path):
        merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]
