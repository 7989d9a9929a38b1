"""`quintet algorithms`: every preset, its paper and its cells."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.docs import ONLINE_COLUMNS, preset_table
from quintet.algorithms.offline import resolve_offline
from quintet.algorithms.presets import OFFLINE_PRESETS, resolve


def algorithms(
    as_json: Annotated[bool, typer.Option("--json", help="Every parameter of every cell, as JSON.")] = False,
) -> None:
    """Print the table of presets: paper, advantage, policy loss, aggregation, KL, correction, filters."""
    rows = preset_table()
    if as_json:
        typer.echo(json.dumps([_resolved(row) for row in rows], indent=2, ensure_ascii=False))
        return
    console = Console()
    # a pipe has no width of its own: nothing is wrapped there
    width = None if console.is_terminal else 240
    for title, columns, offline in (
        ("presets that sample", ONLINE_COLUMNS, False),
        ("presets that train on given answers", ("objective",), True),
    ):
        table = Table("preset", "paper", *(c.replace("_", " ") for c in columns), title=title, title_justify="left")
        for row in rows:
            if ("objective" in row) == offline:
                table.add_row(row["preset"], row["paper"], *(row[c] for c in columns))
        Console(width=width).print(table)
    typer.echo("formulas and every parameter: docs/algorithms.md; a recipe takes one with algorithm.preset")


def _resolved(row: dict[str, str]) -> dict[str, Any]:
    config = AlgorithmConfig(preset=row["preset"])
    algorithm: Any = resolve_offline(config) if row["preset"] in OFFLINE_PRESETS else resolve(config)
    return {"preset": row["preset"], "paper": row["paper"], "doc": row["doc"]} | asdict(algorithm)
