"""`quintet grade`: what the rewards say of the answers in a file, and whether that is what the file expects."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from quintet.cli.common import examples
from quintet.types import QuintetError

if TYPE_CHECKING:
    from quintet.data.rows import Row
    from quintet.reward.math import Graded

PATIENCE_S = 2.0  # until progress is shown
_PLAIN_EVERY_S = 10.0  # between lines of progress where there is no terminal

FileArgument = Annotated[str, typer.Argument(metavar="FILE", help="A .jsonl, .json or .parquet file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object: every row, the counts, the times.")]


def grade_math(
    file: FileArgument,
    as_json: JsonOption = False,
    unboxed: Annotated[bool, typer.Option("--unboxed", help="Responses may do without a box (reward math).")] = False,
    second_opinion: Annotated[
        bool, typer.Option(help="Ask math-verify about sums, products, integrals and limits left unevaluated.")
    ] = True,
) -> None:
    """Grade rows of gold, answer, form (final or response) and optional expect (true or false).

    Exit code 1 when a verdict is not the expected one.
    """
    from quintet.data.readers import read_file

    rows = read_file(file)

    from quintet.reward.math import grade_rows

    graded = grade_rows((row.values for row in rows), unboxed=unboxed, second_opinion=second_opinion)
    _audit(rows, _located(rows, graded), as_json, timed=True)


def grade_code(
    file: FileArgument,
    as_json: JsonOption = False,
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=0.1, help="Wall time of one run.")] = 5.0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the reward code, e.g. sandbox.backend=process."),
    ] = None,
) -> None:
    """Grade rows of code (a program) or response (a text with one), tests and optional expect (true or false).

    Exit code 1 when a verdict is not the expected one.
    """
    from quintet.data.readers import read_file
    from quintet.recipe import Recipe, with_overrides

    rows, args = read_file(file), with_overrides(Recipe({}), set_ or []).data

    from quintet.reward.code_rows import grade_rows

    _audit(rows, grade_rows(rows, args, timeout_s), as_json, timed=False)


grade_app = typer.Typer(help="Grade the answers in a file as a reward would.", no_args_is_help=True)
grade_app.command("math", epilog=examples("quintet grade math pairs.jsonl"))(grade_math)
grade_app.command("code", epilog=examples(
    "quintet grade code programs.jsonl",
    "quintet grade code mine.jsonl --set sandbox.backend=process --json",
))(grade_code)  # fmt: skip


@dataclass(frozen=True)
class _Line:
    """One row's verdict. `seconds` counts from the verdict before it."""

    row: Row
    graded: Graded
    seconds: float

    @property
    def verdict(self) -> str:
        return "right" if self.graded.right else "wrong"

    def text(self) -> str:
        miss = "" if self.graded.passed else f"  MISS, expected {'right' if self.graded.expect else 'wrong'}"
        return f"{self.row.where}  {self.verdict}  {self.graded.reason}{miss}"

    def miss(self) -> str:
        """With the texts in question, for the list of misses."""
        shown = {k: v for k, v in self.row.values.items() if k in ("id", "gold", "answer", "code", "response", "why")}
        return f"{self.text()}\n    {json.dumps(shown, ensure_ascii=False)[:400]}"

    def plain(self) -> dict[str, Any]:
        out = {"row": self.row.where, "right": self.graded.right, "reason": self.graded.reason}
        if self.graded.expect is not None:
            out |= {"expect": self.graded.expect, "passed": self.graded.passed}
        return out


def _located(rows: Sequence[Row], graded: Iterator[Graded]) -> Iterator[Graded]:
    """Complaints about row N name the place in the file instead."""
    for number, row in enumerate(rows, start=1):
        try:
            yield next(graded)
        except QuintetError as error:
            raise QuintetError(f"{row.where}: {str(error).removeprefix(f'row {number}: ')}") from error


def _audit(rows: Sequence[Row], graded: Iterator[Graded], as_json: bool, *, timed: bool) -> None:
    lines: list[_Line] = []
    start = time.perf_counter()
    for line in _watched(_lines(rows, graded), len(rows), seen=not as_json and sys.stdout.isatty()):
        lines.append(line)
        if not as_json:
            typer.echo(line.text())
    summary = _summary(lines, time.perf_counter() - start, timed)
    if as_json:
        typer.echo(json.dumps({"rows": [line.plain() for line in lines]} | summary, indent=2, ensure_ascii=False))
    else:
        _print_summary(lines, summary)
    if any(not line.graded.passed for line in lines):
        raise typer.Exit(1)


def _lines(rows: Sequence[Row], graded: Iterator[Graded]) -> Iterator[_Line]:
    before = time.perf_counter()
    for row, item in zip(rows, graded, strict=True):
        now = time.perf_counter()
        yield _Line(row, item, now - before)
        before = time.perf_counter()


def _summary(lines: Sequence[_Line], seconds: float, timed: bool) -> dict[str, Any]:
    expected = [line for line in lines if line.graded.expect is not None]
    out: dict[str, Any] = {"right": sum(line.graded.right for line in lines)}
    out["wrong"] = len(lines) - out["right"]
    if expected:
        out["passed"] = sum(line.graded.passed for line in expected)
        out["failed"] = len(expected) - out["passed"]
    out["seconds"] = round(seconds, 3)
    if timed:
        worst = max(lines, key=lambda line: line.seconds)
        out["median_ms"] = round(1e3 * statistics.median(line.seconds for line in lines), 3)
        out["worst_ms"], out["worst_row"] = round(1e3 * worst.seconds, 3), worst.row.where
    return out


def _print_summary(lines: Sequence[_Line], summary: dict[str, Any]) -> None:
    misses = [line for line in lines if not line.graded.passed]
    if misses:
        typer.echo("\nmisses:")
        for line in misses:
            typer.echo(f"  {line.miss()}")
    times = f"{summary['seconds']} s"
    if "median_ms" in summary:
        times += f"; median {summary['median_ms']} ms, worst {summary['worst_ms']} ms ({summary['worst_row']})"
    typer.echo(f"\n{summary['right']} right, {summary['wrong']} wrong in {times}")
    if "passed" in summary:
        typer.echo(f"{summary['passed']} passed, {summary['failed']} failed")


def _watched(lines: Iterable[_Line], total: int, *, seen: bool) -> Iterator[_Line]:
    """Progress on stderr once it takes longer than a moment, unless the verdicts themselves are `seen` to go by."""
    console = Console(stderr=True)
    if seen:
        yield from lines
        return
    start = time.monotonic()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task, said = None, start + PATIENCE_S - _PLAIN_EVERY_S
        for done, line in enumerate(lines, start=1):
            yield line
            now = time.monotonic()
            if now - start < PATIENCE_S:
                continue
            if not console.is_terminal and now - said >= _PLAIN_EVERY_S:
                said = now
                console.print(f"graded {done} of {total}", highlight=False)
            task = progress.add_task("grading", total=total) if task is None else task
            progress.update(task, completed=done)
