"""`quintet check`: find what is wrong with a recipe before it costs a run."""

from __future__ import annotations

import shlex
import textwrap
from collections import Counter
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.text import Text

from quintet.cli.common import OutOption, RecipeArgument, SetOption
from quintet.config import load_config, run_folder

if TYPE_CHECKING:
    from quintet.cluster.check import Line

_INDENT = 19  # columns before a line's text
_PIPE_WIDTH = 120
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def check(recipe: RecipeArgument, set_: SetOption = None, out: OutOption = None) -> None:
    """Check a recipe without training: data, template, rewards, batches, memory, disk, and two samples (of an offline
    preset: its rows, batches, memory and disk).

    Exit code 0 when it can be trained, 2 when there is a problem.
    """
    overrides = set_ or []
    config = load_config(recipe, overrides)

    import asyncio

    from quintet.cluster.check import Line, Verdict
    from quintet.cluster.check_offline import checker_of

    console = Console()
    title = f"recipe {config.name}: {config.algorithm.preset}, {config.steps} steps, seed {config.seed}"
    console.print(title, markup=False, highlight=False)
    lines = asyncio.run(checker_of(config, run_folder(config, out), lambda line: _print(console, line)).run())
    counts = Counter(line.verdict for line in lines)
    warnings = f", {counts[Verdict.WARNING]} to look at" if counts[Verdict.WARNING] else ""
    problems = [line for line in lines if line.verdict is Verdict.PROBLEM]
    if problems:
        console.print(f"\nNot ready: {len(problems)} to mend{warnings}", style="bold red", highlight=False)
        for line in problems:
            _print(console, Line(line.about, line.verdict, line.text.split("\n")[0]))
        raise typer.Exit(2)
    words = ["quintet", "train", str(recipe), *(w for text in overrides for w in ("--set", text))]
    words += ["--out", str(out)] if out is not None else []
    verdict = f"\nOK: ready to train{warnings}. {shlex.join(words)}"
    console.print(verdict, style="bold green", highlight=False, soft_wrap=True)


def _print(console: Console, line: Line) -> None:
    width = (console.width if console.is_terminal else _PIPE_WIDTH) - _INDENT
    wrapped = [part for text in line.text.split("\n") for part in textwrap.wrap(text, max(width, 40)) or [""]]
    head = Text.assemble((f"{line.verdict.value:9}", _STYLES[line.verdict]), f"{line.about:{_INDENT - 9}}", wrapped[0])
    body = "".join(f"\n{' ' * _INDENT}{part}".rstrip() for part in wrapped[1:])
    console.print(head.append(body), soft_wrap=True)
