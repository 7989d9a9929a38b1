"""`quintet replay`: a past step's weights again, and what the step did to each token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quintet.cluster.inspection import Inspection, SampleView
    from quintet.cluster.replay import Replayed

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, e.g. runs/first.")]


def replay(
    run: RunArgument,
    step: Annotated[int, typer.Option("--step", min=0, help="Rebuild the weights after this step (0: the start).")],
    inspect: Annotated[
        bool, typer.Option("--inspect", help="Also loss, ratio and advantage per token, gradient norm per layer.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
) -> None:
    """Rebuild a past step's weights from checkpoint and journal. Exit code 1 when they are not the recorded ones."""
    import asyncio

    import msgspec

    from quintet.cluster.folder import RunFolder
    from quintet.cluster.replay import replay as rebuild

    found = asyncio.run(rebuild(RunFolder(run), step, inspect=inspect))
    if as_json:
        typer.echo(msgspec.json.encode(msgspec.to_builtins(found) | {"equal": found.equal}).decode())
    else:
        _show(found)
    if not found.equal:
        raise typer.Exit(1)


def _show(found: Replayed) -> None:
    begun = f"checkpoint step-{found.from_step}" if found.from_step else "the start of the run"
    typer.echo(f"step {found.step}, rebuilt from {begun}\ndigest   {found.digest}\nrecorded {found.recorded}")
    typer.echo("equal" if found.equal else "DIFFERENT")
    if not found.equal:
        for difference in found.differences:
            typer.echo(f"  {difference}")
    if found.inspection is not None:
        _show_inspection(found.inspection)


def _show_inspection(inspection: Inspection) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    layers = Table(title="gradient norm per layer, before clipping", title_justify="left")
    layers.add_column("layer")
    for number in range(1, len(inspection.gradient_norms) + 1):
        layers.add_column(f"optimizer step {number}", justify="right")
    for name in inspection.gradient_norms[0] if inspection.gradient_norms else ():
        layers.add_row(name, *(f"{norms[name]:.3e}" for norms in inspection.gradient_norms))
    console.print(layers)
    for sample in inspection.samples:
        console.print(_sample_table(sample, Table))


def _sample_table(sample: SampleView, table_class: type) -> object:
    title = (
        f"{sample.group} sample {sample.sample}: reward {sample.reward:g}, advantage {sample.advantage:+.4f}, "
        f"loss {sample.loss:+.3e}"
    )
    table = table_class(title=title, title_justify="left")
    for name in ("token", "logprob", "sampler", "ratio", "advantage", "loss"):
        table.add_column(name, justify="left" if name == "token" else "right")
    for t in sample.tokens:
        numbers = (f"{t.logprob:.4f}", f"{t.sampler:.4f}", f"{t.ratio:.4f}", f"{t.advantage:+.4f}", f"{t.loss:+.4f}")
        table.add_row(repr(t.text), *(numbers if t.trained else ("", f"{t.sampler:.4f}", "", "", "")))
    return table
