"""What a run tells as it goes, and at its end: metrics, summary, report, findings, events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from quintet.cluster.folder import RunFolder
from quintet.cluster.stages import EventHandler
from quintet.config import RunConfig, digest
from quintet.observe.doctor import diagnose
from quintet.observe.metrics import JsonlSink, read_metrics
from quintet.observe.report import write_report
from quintet.observe.summary import build_summary, machine, read_summary, write_summary
from quintet.observe.trackers import open_trackers
from quintet.types import MetricSink, StepMetrics


class Logbook:
    """Of one sitting; `resuming` takes up what the sittings before have written. `sinks` are the user's own."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        sinks: Sequence[MetricSink],
        on_event: EventHandler,
        resuming: bool,
    ) -> None:
        self._config = config
        self._folder = folder
        self._own_sinks = sinks
        self._sinks: list[MetricSink] = []
        self.event = on_event
        self._resuming = resuming
        self._started = time.monotonic()
        known = resuming and (folder.root / "summary.json").exists()
        self.summary: dict[str, Any] = read_summary(folder.root) if known else {}
        self._seconds_before = float(self.summary.get("seconds", 0.0))
        self.evals = {k: v for k, v in self.summary.items() if k.startswith("eval/")}

    def open(self, step: int) -> None:
        """Metrics later than `step`, where the run goes on, are written anew."""
        resume_step = step if self._resuming else None
        tree = self._config.model_dump(mode="json")
        root, name = self._folder.root, self._config.name
        trackers = open_trackers(self._config.log, root, name=name, config=tree, resume_step=resume_step)
        self._sinks = [JsonlSink(self._folder.metrics, resume_step=resume_step), *trackers, *self._own_sinks]

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def is_finished(self) -> bool:
        """Whether the run was finished before this sitting; says so."""
        if self.summary.get("finished"):
            self.message("info", f"the run in {self._folder.root} is finished; nothing to do")
            return True
        return False

    def message(self, level: str, text: str) -> None:
        self.event("message", {"level": level, "text": text})

    def step(self, metrics: StepMetrics) -> None:
        for sink in self._sinks:
            sink.log(metrics.step, metrics.values)
        self.event("step", metrics)

    def evaluated(self, when: str, step: int, values: Mapping[str, float], kept: Mapping[str, float]) -> None:
        """`kept` goes into the summary, unless this evaluation is one of many `during` the run."""
        for sink in self._sinks:
            sink.log(step, dict(values))
        self.event("eval", {"step": step, "when": when, "values": values})
        if when != "during":
            self.evals |= kept
            self.write_summary(step, finished=False)

    def write_summary(self, step: int, *, finished: bool) -> None:
        self.summary = build_summary(
            recipe=self._config.name,
            seed=self._config.seed,
            steps=step,
            seconds=self._seconds_before + time.monotonic() - self._started,
            evals=self.evals,
            config_digest=digest(self._config),
            extra={"finished": finished, "machine": machine()},
        )
        write_summary(self._folder.root, self.summary)

    async def end(self, step: int, *, finished: bool) -> None:
        """Summary and report of a run that is finished or stopped, and what the doctor finds."""
        self.write_summary(step, finished=finished)
        await asyncio.to_thread(write_report, self._folder.root)
        findings = diagnose(read_metrics(self._folder.metrics), self._config.model_dump(mode="json"))
        self.event("done", {"summary": self.summary, "findings": findings})
