"""`quintet config`: the resolved tree of a recipe, or every option there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quintet.cli.common import SetOption
from quintet.config import defaults_yaml, load_config, to_yaml
from quintet.types import QuintetError


def config(
    recipe: Annotated[Path | None, typer.Argument(metavar="RECIPE", help="A YAML file; not with --defaults.")] = None,
    set_: SetOption = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="Print every option, its default, its meaning.")] = False,
) -> None:
    """Print the fully resolved configuration of a recipe, after checking it."""
    if defaults == (recipe is not None):
        raise QuintetError("quintet config wants either a RECIPE or --defaults")
    if recipe is None:
        typer.echo(defaults_yaml(), nl=False)
    else:
        typer.echo(to_yaml(load_config(recipe, set_ or [])), nl=False)
