"""Entry point of `quintet`.

A user's mistake (QuintetError) is one message on stderr and exit code 2; Ctrl-C is exit code 130; a mistake
of ours keeps its traceback.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from quintet import __version__
from quintet.cli.algorithms import algorithms
from quintet.cli.check import check
from quintet.cli.common import examples
from quintet.cli.config import config
from quintet.cli.eval import evaluate
from quintet.cli.generate import generate
from quintet.cli.grade import grade_app
from quintet.cli.replay import replay
from quintet.cli.report import report
from quintet.cli.serve import serve_app
from quintet.cli.sft import sft
from quintet.cli.train import train
from quintet.types import QuintetError

app = typer.Typer(
    name="quintet",
    help="RL post-training for language models in five replaceable modules.",
    epilog=examples(
        "quintet train recipes/sums_tiny.yaml --out runs/first",
        "quintet config --defaults",
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quintet {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


app.command("train", epilog=examples(
    "quintet train recipes/sums_tiny.yaml",
    "quintet train recipes/sums_tiny.yaml --set train.lr=1e-4 --out runs/slow",
))(train)  # fmt: skip
app.command("sft", epilog=examples("quintet sft recipes/sums_tiny.yaml --set warm_start.steps=500 --out runs/sft"))(sft)
app.command("eval", epilog=examples(
    "quintet eval recipes/sums_tiny.yaml",
    "quintet eval recipes/sums_tiny.yaml --checkpoint runs/first/final",
))(evaluate)  # fmt: skip
app.command("generate", epilog=examples(
    "quintet generate recipes/smollm2_sums.yaml 'What is 7 + 8?'",
    "quintet generate recipes/sums_tiny.yaml '07+08=' --checkpoint runs/first/final --n 4",
))(generate)  # fmt: skip
app.command("algorithms", epilog=examples("quintet algorithms", "quintet algorithms --json"))(algorithms)
app.command("replay", epilog=examples(
    "quintet replay runs/first --step 12",
    "quintet replay runs/first --step 12 --inspect",
))(replay)  # fmt: skip
app.command("report", epilog=examples(
    "quintet report runs/first",
    "quintet report runs/first runs/second --out both.html",
))(report)  # fmt: skip
app.command("check", epilog=examples(
    "quintet check recipes/sums_tiny.yaml",
    "quintet check recipes/smollm2_sums.yaml --set rollout.max_tokens=64",
))(check)  # fmt: skip
app.add_typer(grade_app, name="grade")
app.add_typer(serve_app, name="serve")
app.command("config", epilog=examples(
    "quintet config recipes/sums_tiny.yaml --set rollout.group_size=16",
    "quintet config --defaults",
))(config)  # fmt: skip


def main() -> None:
    """Run the command line of this process."""
    try:
        app()
    except QuintetError as error:
        print(f"quintet: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
