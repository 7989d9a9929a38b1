"""Loads cases, runs the handler of each `fn`, compares every expected number within the case's own tolerance."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Handler = Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]

WRONG_ON_PURPOSE = {"naive_mean_of_means", "naive_grad"}  # recorded in the data as what must not come out


class NotOfferedError(Exception):
    """quintet does not compute this on purpose; the message says why."""


def choose(table: Mapping[Any, T], key: Any, what: str) -> T:
    """`table[key]`; a variant that the table does not know is not offered."""
    if key not in table:
        raise NotOfferedError(f"{what} {key}")
    return table[key]


@dataclass(frozen=True)
class Result:
    file: str
    name: str
    standard: bool
    failure: str | None = None
    not_offered: str | None = None

    @property
    def failed(self) -> bool:
        return self.failure is not None

    @property
    def used(self) -> bool:
        return self.not_offered is None


def run_folder(folder: Path) -> list[Result]:
    return [run_case(case, path.name) for path in sorted(folder.glob("*.json")) for case in _cases(path)]


def _cases(path: Path) -> list[dict[str, Any]]:
    cases = json.loads(path.read_text())
    return cases if isinstance(cases, list) else []


def run_case(case: dict[str, Any], file: str) -> Result:
    from .handlers import HANDLERS

    where = Result(file, case["name"], bool(case["standard"]))
    handler = HANDLERS.get(case["fn"])
    if handler is None:
        return _with(where, not_offered=f"no function {case['fn']}")
    try:
        got = handler(case["params"], dict(case["inputs"]) | {"_framework": case["framework"]})
    except NotOfferedError as reason:
        return _with(where, not_offered=str(reason))
    except Exception as error:  # a crash is a failed case; the others still run
        return _with(where, failure=f"{type(error).__name__}: {error}")
    return _with(where, failure=next(differences(got, case["expected"], case["tolerance"]), None))


def _with(result: Result, **changes: str | None) -> Result:
    return Result(result.file, result.name, result.standard, **changes)


def differences(got: dict[str, Any], expected: dict[str, Any], tolerance: float) -> Iterator[str]:
    """One text per expected key whose value is missing, has another shape or is too far away."""
    for key, value in expected.items():
        if key in WRONG_ON_PURPOSE:
            continue
        if key not in got:
            yield f"{key}: not computed"
            continue
        mine, theirs = flatten(got[key]), flatten(value)
        if len(mine) != len(theirs):
            yield f"{key}: {len(mine)} numbers, expected {len(theirs)}"
            continue
        worst = max((excess(a, b, tolerance) for a, b in zip(mine, theirs, strict=True)), default=0.0)
        if not worst <= 1.0:
            i = max(range(len(mine)), key=lambda i: excess(mine[i], theirs[i], tolerance))
            yield f"{key}[{i}]: {mine[i]!r}, expected {theirs[i]!r} ({worst:.3g} x tolerance {tolerance:g})"


def flatten(value: Any) -> list[float]:
    if isinstance(value, torch.Tensor):
        return [float(v) for v in value.detach().flatten().tolist()]
    if isinstance(value, list | tuple):
        return [x for v in value for x in flatten(v)]
    return [float(value)]


def excess(a: float, b: float, tolerance: float) -> float:
    """|a - b| in units of the tolerance; non-finite numbers must be the same."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b) / (tolerance * (1 + abs(b)))
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else math.inf


def table(results: list[Result]) -> str:
    """Markdown: of each file the cases, those used, those that fail, and what is left out and why."""
    lines = ["| file | cases | used | standard used | left out, and why |", "|---|---|---|---|---|"]
    for file in dict.fromkeys(r.file for r in results):
        rows = [r for r in results if r.file == file]
        standard = [r for r in rows if r.standard]
        out = "; ".join(f"`{r.name}`: {r.not_offered}" for r in rows if not r.used)
        share = f"{sum(r.used for r in standard)} of {len(standard)}"
        lines.append(f"| {file} | {len(rows)} | {sum(r.used for r in rows)} | {share} | {out} |")
    standard = [r for r in results if r.standard]
    used = sum(r.used for r in standard)
    share = f"{used} of {len(standard)} ({used / max(len(standard), 1):.1%})"
    return "\n".join([*lines, f"| all | {len(results)} | {sum(r.used for r in results)} | {share} | |"])


def summary(results: list[Result]) -> str:
    lines = [f"not offered  {r.file} {r.name}: {r.not_offered}" for r in results if not r.used]
    lines += [f"FAILED       {r.file} {r.name}: {r.failure}" for r in results if r.failed]
    failed, absent = sum(r.failed for r in results), sum(not r.used for r in results)
    lines.append(f"{len(results) - failed - absent} passed, {failed} failed, {absent} not offered")
    return "\n".join(lines)


def tensor(value: Any) -> torch.Tensor:
    """Float64; "nan", "inf" and "-inf" stand for themselves."""
    return torch.tensor(_numbers(value), dtype=torch.float64)


def _numbers(value: Any) -> Any:
    return [_numbers(v) for v in value] if isinstance(value, list) else float(value)
