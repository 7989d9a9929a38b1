"""`quintet report`: what came of one run, or of several side by side, as a page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, e.g. runs/first.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="The page; if absent, RUN/report.html, or comparison.html for several runs."
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page: results, curves, samples, what went wrong, what the run was."""
    from quintet.observe.report import write_comparison, write_report

    path = write_report(runs[0], out) if len(runs) == 1 else write_comparison(runs, out or Path("comparison.html"))
    typer.echo(path)
