"""`quintet generate`: answers of a model to given prompts, sampled as the recipe says."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from rich.console import Console

from quintet.cli.common import CheckpointOption, RecipeArgument, SetOption
from quintet.config import load_config
from quintet.types import QuintetError


def generate(
    recipe: RecipeArgument,
    prompts: Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="- reads one a line.")] = None,
    set_: SetOption = None,
    checkpoint: CheckpointOption = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers per prompt.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per answer, with token ids.")] = False,
) -> None:
    """Print a model's answers. Greedy with --set rollout.temperature=0."""
    wanted = _read(prompts or [])
    config = load_config(recipe, [*(set_ or []), f"rollout.group_size={n}"], training=False)

    from quintet import api
    from quintet.observe.progress import open_view

    with open_view(config.log, title=f"quintet generate · {config.name}", console=Console(stderr=True)) as view:
        rollouts = api.generate(config, wanted, checkpoint=checkpoint, on_event=view)
    for rollout in rollouts:
        if as_json:
            row = {"group": str(rollout.group_id), "sample": rollout.sample_index, "text": rollout.text}
            row |= {"finish_reason": rollout.finish_reason.value, "response_ids": rollout.response_ids}
            typer.echo(json.dumps(row | {"logprobs": rollout.logprobs}, ensure_ascii=False))
        else:
            typer.echo(rollout.text)


def _read(prompts: list[str]) -> list[str]:
    lines = [line.rstrip("\n") for line in sys.stdin] if prompts == ["-"] else prompts
    if not lines:
        raise QuintetError("no prompt given: put it after the recipe, or - to read one a line from standard input")
    return lines
