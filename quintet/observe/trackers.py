"""TensorBoard and wandb as metric sinks. Their libraries load only when a recipe asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintet.observe.config import LogConfig
from quintet.types import MetricSink, QuintetError


class TensorBoardSink:
    """Scalars in `<folder>/tensorboard`. `resume_step`: events of later steps are hidden, they are done again."""

    def __init__(self, folder: Path, *, resume_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """One wandb run per run folder: its id is kept in `<folder>/wandb_id`, so that a resumed run goes on in it."""

    def __init__(self, folder: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise QuintetError("log.trackers has wandb, which is not installed: pip install 'quintet[wandb]'") from None
        id_file = folder / "wandb_id"
        known = id_file.read_text().strip() if id_file.exists() else None
        self._run = wandb.init(
            project=project, name=name, config=dict(config), dir=str(folder), id=known, resume="allow"
        )
        id_file.write_text(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open_trackers(
    log: LogConfig, folder: Path, *, name: str, config: Mapping[str, Any], resume_step: int | None = None
) -> list[MetricSink]:
    """The sinks named in `log.trackers`; the caller closes them. Raises QuintetError when a library is missing."""
    sinks: list[MetricSink] = []
    for tracker in dict.fromkeys(log.trackers):
        if tracker == "tensorboard":
            sinks.append(TensorBoardSink(folder, resume_step=resume_step))
        else:
            sinks.append(WandbSink(folder, project=log.wandb_project, name=name, config=config))
    return sinks
