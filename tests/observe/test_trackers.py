from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.observe.config import LogConfig
from quintet.observe.trackers import open_trackers
from quintet.types import QuintetError


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_holds_the_scalars_and_a_resumed_run_replaces_later_steps(tmp_path: Path) -> None:
    log = LogConfig(trackers=["tensorboard"])
    (sink,) = open_trackers(log, tmp_path, name="run", config={})
    for step in (1, 2, 3):
        sink.log(step, {"reward/mean": step / 4})
    sink.close()
    (sink,) = open_trackers(log, tmp_path, name="run", config={}, resume_step=2)
    sink.log(3, {"reward/mean": 2.0})
    sink.close()
    assert scalars(tmp_path, "reward/mean") == [(1, 0.25), (2, 0.5), (3, 2.0)]


def test_a_tracker_named_twice_is_opened_once_and_none_is_none(tmp_path: Path) -> None:
    assert open_trackers(LogConfig(), tmp_path, name="run", config={}) == []
    sinks = open_trackers(LogConfig(trackers=["tensorboard", "tensorboard"]), tmp_path, name="run", config={})
    assert len(sinks) == 1
    sinks[0].close()


def test_wandb_missing_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(QuintetError, match=r"pip install 'quintet\[wandb\]'"):
        open_trackers(LogConfig(trackers=["wandb"]), tmp_path, name="run", config={})


class FakeWandb:
    """Stands in for the wandb module: records what it is given."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **options: Any) -> SimpleNamespace:
        self.inits.append(options)
        return SimpleNamespace(id=options["id"] or "abc123", log=self._log, finish=self._finish)

    def _log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def _finish(self) -> None:
        self.finished += 1


def test_wandb_gets_the_config_and_a_resumed_run_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = LogConfig(trackers=["wandb"], wandb_project="sums")
    for resume in (None, 1):
        (sink,) = open_trackers(log, tmp_path, name="first", config={"seed": 3}, resume_step=resume)
        sink.log(1, {"reward/mean": 0.5})
        sink.close()
    assert [(i["project"], i["name"], i["config"], i["id"]) for i in fake.inits] == [
        ("sums", "first", {"seed": 3}, None),
        ("sums", "first", {"seed": 3}, "abc123"),
    ]
    assert fake.logged == [(1, {"reward/mean": 0.5})] * 2 and fake.finished == 2
