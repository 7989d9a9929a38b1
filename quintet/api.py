"""quintet from Python: the same runs that the command line starts.

import quintet

def reward(completions, answer, **columns):          # TRL's signature; verl's works as well
    return [float(a in c) for c, a in zip(completions, answer)]

result = quintet.train("recipes/sums_tiny.yaml", reward=reward, out="runs/mine")
print(result.summary["eval/accuracy_after"])
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from quintet.config import ConfigSource, RunConfig, load_config, run_folder
from quintet.observe.progress import EventHandler
from quintet.types import MetricSink, QuintetError, Rollout

T = TypeVar("T")
RewardFunction = Callable[..., Any]


@dataclass(frozen=True)
class RunResult:
    """`summary` as in summary.json, and the run folder."""

    summary: dict[str, Any]
    folder: Path


def train(
    config: ConfigSource,
    *,
    reward: RewardFunction | Sequence[RewardFunction] | None = None,
    out: str | Path | None = None,
    sinks: Sequence[MetricSink] = (),
    on_event: EventHandler | None = None,
    handle_signals: bool = False,
    on_abort: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train by reinforcement learning, or on given answers with an offline preset (dpo, reward_model, sft ...); an
    unfinished run in the folder `out` is resumed.

    `reward` replaces `reward.functions` of the recipe. `on_event(kind, payload)` sees progress (kinds in
    `observe/progress.py`). `handle_signals`: the first SIGINT or SIGTERM ends the run in order (raises
    KeyboardInterrupt), the second one calls `on_abort` and ends the process at once, with exit code 130.
    Raises QuintetError for wrong input and for a run that cannot go on.
    """
    run_config = load_config(config)
    from quintet.algorithms.offline import is_offline
    from quintet.cluster.folder import RunFolder
    from quintet.cluster.local import LocalRun
    from quintet.cluster.offline import OfflineRun
    from quintet.cluster.stopping import StopFlag

    offline = is_offline(run_config.algorithm)
    if offline and reward is not None:
        raise QuintetError(f"train(reward=...) has no effect: preset {run_config.algorithm.preset} samples nothing")
    functions = [reward] if callable(reward) else reward
    folder = RunFolder(run_folder(run_config, out))
    event = on_event or _log_event
    stop = StopFlag(event, on_abort)
    with folder.locked(), stop.handling_signals(handle_signals):
        if offline:
            trained = OfflineRun(run_config, folder, sinks=sinks, on_event=event, stop=stop)
            return RunResult(_run(trained.run()), folder.root)
        run = LocalRun(run_config, folder, reward=functions, sinks=sinks, on_event=event, stop=stop)
        return RunResult(_run(run.run()), folder.root)


def fork(config: ConfigSource, old: str | Path, *, say: Callable[[str], None] = print) -> Path:
    """A new run folder beside `old` that starts from its newest weights with this config; `train(out=...)` trains it.

    `old` is only read. Raises QuintetError when it holds no run or a run of another model.
    """
    run_config = load_config(config)
    from quintet.cluster.folder import RunFolder
    from quintet.cluster.replay import fork as fork_run

    return _run(fork_run(RunFolder(Path(old)), run_config, say)).root


def sft(config: ConfigSource, *, out: str | Path | None = None, on_event: EventHandler | None = None) -> RunResult:
    """Only the supervised stage of a recipe (`warm_start`), exported to `<out>/final`."""
    run_config = load_config(config, training=False)
    from quintet.cluster.folder import RunFolder
    from quintet.cluster.stages import supervised

    folder = RunFolder(run_folder(run_config, out))
    with folder.locked():
        return RunResult(_run(supervised(run_config, folder, on_event or _log_event)), folder.root)


def evaluate(
    config: ConfigSource,
    *,
    checkpoint: str | None = None,
    reward: RewardFunction | Sequence[RewardFunction] | None = None,
    on_event: EventHandler | None = None,
) -> dict[str, float]:
    """Accuracy and reward on the held-out prompts, greedy and (`eval.samples`) sampled."""
    run_config = _with_checkpoint(load_config(config, training=False), checkpoint)
    from quintet.cluster.stages import held_out

    functions = [reward] if callable(reward) else reward
    return _run(held_out(run_config, functions, on_event or _log_event))


def generate(
    config: ConfigSource,
    prompts: Sequence[str],
    *,
    checkpoint: str | None = None,
    on_event: EventHandler | None = None,
) -> list[Rollout]:
    """`rollout.group_size` answers per prompt, sampled as the recipe says (temperature 0 is greedy)."""
    run_config = _with_checkpoint(load_config(config, training=False), checkpoint)
    from quintet.cluster.stages import answers

    return _run(answers(run_config, list(prompts), on_event or _log_event))


def _with_checkpoint(config: RunConfig, checkpoint: str | None) -> RunConfig:
    if checkpoint is None:
        return config
    if not (Path(checkpoint) / "config.json").exists():
        raise QuintetError(f"{checkpoint} is no model folder (it has no config.json); a run's model is in RUN/final")
    return config.model_copy(update={"model": config.model.model_copy(update={"name": checkpoint})})


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end, from a script or from inside a running event loop (a notebook)."""
    inside = False
    with contextlib.suppress(RuntimeError):
        inside = asyncio.get_running_loop() is not None
    if not inside:  # not in an `except`: it would take the place of the context that an error of the work brings
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, work).result()


def _log_event(kind: str, payload: Any) -> None:
    level = logging.WARNING if kind == "message" and payload["level"] != "info" else logging.INFO
    logging.getLogger("quintet").log(level, "%s %s", kind, payload)
