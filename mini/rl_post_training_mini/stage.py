"""What the scenarios share: printing in two languages, checks, clocks, and the trace file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .clock import FakeClock
from .controller import Controller
from .model import EOS, FILLER, TinyPolicy
from .reward import RewardService
from .rollout import RolloutWorker
from .texts import TEXTS
from .trainer import TrainConfig, TrainWorker

LANGUAGES = ("zh", "en")
LANES = ("rollout", "reward", "train")
Figures = dict[str, float]


class ScenarioFailed(AssertionError):
    """A figure that was just measured does not bear out what the scenario says."""


class Stage:
    """`say` prints a line of texts.py; `verify` prints one with a ✓ if the condition holds, and raises if not."""

    def __init__(self, lang: str = "zh", write: Callable[[str], None] = print) -> None:
        if lang not in LANGUAGES:
            raise ValueError(f"lang must be one of {LANGUAGES}, got {lang!r}")
        self.lang, self.write = LANGUAGES.index(lang), write
        self.clocks: list[tuple[str, FakeClock]] = []

    def text(self, key: str, **figures: Any) -> str:
        return TEXTS[key][self.lang].format(**figures)

    def say(self, key: str, **figures: Any) -> None:
        self.write(self.text(key, **figures))

    def verify(self, holds: bool, key: str, **figures: Any) -> None:
        claim = self.text(key, **figures)
        if not holds:
            raise ScenarioFailed(claim)
        self.write(f"  ✓ {claim}")

    def clock(self, label: str) -> FakeClock:
        """A new virtual clock whose timeline will be in the trace under this label."""
        clock = FakeClock()
        self.clocks.append((label, clock))
        return clock

    def trace(self) -> dict[str, Any]:
        """Chrome trace format: one process per clock, one thread per lane, times in microseconds."""
        events: list[dict[str, Any]] = []
        for pid, (label, clock) in enumerate(self.clocks, start=1):
            events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": label}})
            for tid, lane in enumerate(LANES, start=1):
                events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": lane}})
            for span in clock.timeline:
                start_us, end_us = round(span.start_s * 1e6), round(span.end_s * 1e6)
                where = {"pid": pid, "tid": LANES.index(span.lane) + 1, "ts": start_us, "dur": end_us - start_us}
                events.append({"name": span.name, "cat": span.lane, "ph": "X", **where})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def write_trace(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.trace(), ensure_ascii=False), encoding="utf-8")


def new_run(
    clock: FakeClock, seed: int, config: TrainConfig, alpha: float = 0.0, group_size: int = 8, **options: Any
) -> Controller:
    """The counting task: a controller with its three workers, all on one clock."""
    policy = TinyPolicy.create(seed)
    worker = RolloutWorker(policy, clock, seed, group_size)
    reward, trainer = RewardService(alpha, clock=clock), TrainWorker(policy, config, clock)
    return Controller(worker, reward, trainer, seed=seed, **options)


def sample_text(controller: Controller, prompt: tuple[int, ...]) -> str:
    """One sampled response as text, with the controller's current weights."""
    worker = controller.worker.evaluator(controller.trainer.policy, seed=1, samples=1)
    return as_text(worker.generate([prompt])[0].response)


def as_text(tokens: Sequence[int]) -> str:
    return " ".join({FILLER: "!", EOS: "∎"}.get(token, str(token)) for token in tokens)
