"""`quintet eval`: accuracy and reward on the held-out prompts of a recipe."""

from __future__ import annotations

import json

import typer
from rich.console import Console

from quintet.cli.common import CheckpointOption, RecipeArgument, SetOption
from quintet.config import load_config


def evaluate(recipe: RecipeArgument, set_: SetOption = None, checkpoint: CheckpointOption = None) -> None:
    """Evaluate a model on held-out prompts: JSON on stdout, progress on stderr."""
    config = load_config(recipe, set_ or [], training=False)

    from quintet import api
    from quintet.observe.progress import open_view

    with open_view(config.log, title=f"quintet eval · {config.name}", console=Console(stderr=True)) as view:
        values = api.evaluate(config, checkpoint=checkpoint, on_event=view)
    typer.echo(json.dumps(values, indent=2, ensure_ascii=False))
