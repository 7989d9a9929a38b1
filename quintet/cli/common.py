"""What the commands share: their arguments, their examples, and what they say when they are stopped."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML file, e.g. recipes/sums_tiny.yaml.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one option; the value is read as YAML. May be repeated."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Run folder; runs/NAME if absent."),
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", metavar="DIR", help="A model folder, e.g. runs/first/final; the recipe's model if absent."
    ),
]


def examples(*commands: str) -> str:
    """An epilog with one example a line."""
    return "\n\n".join(["[bold]Examples[/bold]", *(f"  {command}" for command in commands)])


@contextlib.contextmanager
def resumable(recipe: Path, overrides: list[str], folder: Path) -> Iterator[str]:
    """Say how a stopped run is taken up again, then end: Ctrl-C with exit code 130, a failed run with its error.

    Yields the words, for an end that does not come by here.
    """
    words = ["quintet", "train", str(recipe), *(w for text in overrides for w in ("--set", text)), "--out", str(folder)]
    advice = f"resume with: {shlex.join(words)}"
    try:
        yield advice
    except KeyboardInterrupt:
        report = folder / "report.html"
        seen = f"report:     {report}\n" if report.exists() else ""
        print(f"{seen}stopped; {advice}", file=sys.stderr)
        raise typer.Exit(130) from None
    except Exception as error:
        from quintet.controller.controller import RunFailed

        if isinstance(error, RunFailed):
            print(advice, file=sys.stderr)
        raise
