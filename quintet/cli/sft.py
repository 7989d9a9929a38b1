"""`quintet sft`: only the supervised stage of a recipe."""

from __future__ import annotations

import typer

from quintet.cli.common import OutOption, RecipeArgument, SetOption
from quintet.config import load_config, require_writable, run_folder


def sft(recipe: RecipeArgument, set_: SetOption = None, out: OutOption = None) -> None:
    """Supervised fine-tuning on the training prompts and their reference answers (the warm_start section)."""
    overrides = set_ or []
    config = load_config(recipe, overrides, training=False)
    folder = run_folder(config, out)
    require_writable(folder)

    from quintet import api
    from quintet.observe.progress import open_view

    title = f"quintet sft · {config.name} · seed {config.seed}"
    try:
        with open_view(config.log, title=title) as view:
            result = api.sft(config, out=folder, on_event=view)
    except KeyboardInterrupt:
        typer.echo("stopped; this stage keeps no checkpoints, the same command starts it anew", err=True)
        raise typer.Exit(130) from None
    if config.log.console != "quiet":
        typer.echo(f"model: {result.folder / 'final'}")
