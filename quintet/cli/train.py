"""`quintet train`: a recipe to a trained model."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from quintet.cli.common import OutOption, RecipeArgument, SetOption, resumable
from quintet.config import load_config, require_writable, run_folder

ForkOption = Annotated[
    bool,
    typer.Option(
        "--fork", help="Start a new run DIR-fork1 (or the next free number) from the newest weights of the run in DIR."
    ),
]


def train(recipe: RecipeArgument, set_: SetOption = None, out: OutOption = None, fork: ForkOption = False) -> None:
    """Train by reinforcement learning, or on given answers (preset dpo, reward_model, sft ...). The same command on an
    existing run folder resumes it."""
    overrides = set_ or []
    config = load_config(recipe, overrides)
    folder = run_folder(config, out)

    from quintet import api

    if fork:
        folder = api.fork(config, folder, say=typer.echo)
    require_writable(folder)
    from quintet.observe.progress import open_view

    title = f"quintet · {config.name} · seed {config.seed}"
    with resumable(recipe, overrides, folder) as advice, open_view(config.log, title=title) as view:

        def leave() -> None:
            view.__exit__(None, None, None)
            os.write(2, f"\nstopped at once; {advice}\n".encode())  # past buffers that the main thread may hold

        result = api.train(config, out=folder, on_event=view, handle_signals=True, on_abort=leave)
    if config.log.console != "quiet":
        typer.echo(f"run folder: {result.folder}\nreport:     {result.folder / 'report.html'}")
