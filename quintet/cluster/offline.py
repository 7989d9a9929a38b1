"""A whole run of an offline preset: rows with given answers in, a policy or a reward model out.

The same run folder, checkpoints, metrics and summary as a run that samples; without rollouts there is no journal. The
rows of a step are a function of (seed, step), so a run resumed from a checkpoint goes on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from quintet.algorithms.offline import OfflineAlgorithm, resolve_offline
from quintet.cluster.answered import load_answered
from quintet.cluster.build import Base, epochs_of, load_policy, with_adapters
from quintet.cluster.folder import RunFolder
from quintet.cluster.local import StopFlag, Stopped
from quintet.cluster.stages import EventHandler
from quintet.config import RunConfig, digest
from quintet.controller.state import (
    ControllerState,
    forget_best_after,
    is_best,
    mark_best,
    newest_checkpoint,
    read_state,
    write_checkpoint,
)
from quintet.data.answers import Answered, BatchSampler
from quintet.models.export import save_hf_folder, save_reward_folder
from quintet.observe.metrics import JsonlSink
from quintet.observe.report import write_report
from quintet.observe.summary import build_summary, read_summary, write_summary
from quintet.observe.trackers import open_trackers
from quintet.train.offline import Example, OfflineTrainer, sft, warm_start_config
from quintet.train.value import ValueModel, plain_copy
from quintet.types import MetricSink, StepMetrics

T = TypeVar("T")

KEPT = ("eval/pair_accuracy", "eval/margin", "eval/loss")  # of an evaluation, in summary.json


class OfflineRun:
    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        sinks: Sequence[MetricSink],
        on_event: EventHandler,
        stop: StopFlag,
    ) -> None:
        self.config, self.folder = config, folder
        self.resuming = folder.claim(config)
        self._algorithm: OfflineAlgorithm = resolve_offline(config.algorithm)
        self._extra_sinks, self._event, self._stop = sinks, on_event, stop
        self._started = time.monotonic()
        known = self.resuming and (folder.root / "summary.json").exists()
        self._summary: dict[str, Any] = read_summary(folder.root) if known else {}
        self._seconds_before = float(self._summary.get("seconds", 0.0))
        self._evals = {k: v for k, v in self._summary.items() if k.startswith("eval/")}
        self._executor: ThreadPoolExecutor

    async def run(self) -> dict[str, Any]:
        """Train to the end and return the summary. Raises Stopped after an orderly stop."""
        if self._summary.get("finished"):
            self._message("info", f"the run in {self.folder.root} is finished; nothing to do")
            return self._summary
        base = Base.of(self.config)
        train, held_out = self._load_data(base)
        checkpoint, state = self._newest_state()
        self._sinks = self._open_sinks(state.step)
        threads = torch.get_num_threads()  # OpenMP keeps the number per thread
        self._executor = ThreadPoolExecutor(1, "offline", initializer=torch.set_num_threads, initargs=(threads,))
        try:
            await self._train(base, train, held_out, checkpoint, state)
        finally:
            self._executor.shutdown()
            for sink in self._sinks:
                sink.close()
        return self._summary

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """The run's one working thread: the event loop stays free, and calls run one after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *args)

    async def _train(
        self,
        base: Base,
        rows: list[Answered],
        held_out: list[Answered],
        checkpoint: Path | None,
        state: ControllerState,
    ) -> None:
        config = self.config
        policy = await self._in_thread(self._starting_policy, base, rows)
        trainer = OfflineTrainer(
            with_adapters(policy, config.model, config.seed),
            algorithm=self._algorithm,
            config=config.train,
            total_steps=config.steps,
            dtype=base.dtype,
            seed=config.seed,
        )
        try:
            if checkpoint is not None:
                trainer.load_checkpoint(checkpoint)
            await self._steps(trainer, rows, held_out, state)
        finally:
            trainer.close()
        if self._stop.is_set:
            self._write_summary(state.step, finished=False)
            raise Stopped
        await self._in_thread(self._export, trainer, base)
        self._write_summary(state.step, finished=True)
        await self._in_thread(write_report, self.folder.root)
        self._event("done", {"summary": self._summary})

    async def _steps(
        self, trainer: OfflineTrainer, rows: list[Answered], held_out: list[Answered], state: ControllerState
    ) -> None:
        config = self.config
        data = config.data
        batches = BatchSampler(
            rows, config.offline.batch_size, seed=config.seed, shuffle=data.shuffle, epochs=data.epochs
        )

        async def save() -> None:
            async def save_trainer(path: str) -> None:
                await self._in_thread(trainer.save_checkpoint, path)

            await write_checkpoint(self.folder.checkpoints, state, save_trainer, keep_last=config.checkpoint.keep_last)

        async def note(values: dict[str, float] | None) -> None:
            """With `checkpoint.keep_best`, keep the weights of the best evaluation so far."""
            if not config.checkpoint.keep_best or values is None:
                return
            root, worth = self.folder.checkpoints, values.get("eval/pair_accuracy", -values["eval/loss"])
            if is_best(root, worth):
                await save()
                mark_best(root, state.step, worth, keep_last=config.checkpoint.keep_last)

        if state.step == 0 and "eval/loss_before" not in self._evals:
            await self._evaluate(trainer, held_out, "before", 0)
        self._event("stage", {"name": "train", "total": config.steps})
        while state.step < config.steps and not self._stop.is_set and (batch := batches.batch(state.step)):
            started = time.monotonic()
            values = await self._in_thread(trainer.step, batch)
            state.step += 1
            self._log_step(StepMetrics(state.step, 0, values | {"time/step_s": time.monotonic() - started}))
            last = state.step == config.steps
            if config.eval.every and state.step % config.eval.every == 0 and not last:
                await note(await self._evaluate(trainer, held_out, "during", state.step))
                self._event("stage", {"name": "train", "total": config.steps})
            if config.checkpoint.every and state.step % config.checkpoint.every == 0 and not last:
                await save()
        await save()
        if not self._stop.is_set:
            await note(await self._evaluate(trainer, held_out, "after", state.step))

    # -- parts -----------------------------------------------------------------------------------

    def _load_data(self, base: Base) -> tuple[list[Answered], list[Answered]]:
        return load_answered(self.config, self._algorithm, base, lambda note: self._message("warning", note))

    def _starting_policy(self, base: Base, rows: list[Answered]) -> PreTrainedModel:
        """The model that the run starts from; the warm start (supervised, on the wanted answers) happens here, once."""
        config, start = self.config, self.folder.start
        is_warm = (start / "config.json").exists()
        policy = load_policy(config.model, start=start if is_warm else None)
        if config.warm_start.steps == 0 or is_warm:
            return policy
        self._event("stage", {"name": "warm_start", "total": config.warm_start.steps})
        examples: list[Example] = [(row.prompt_ids, row.response_ids) for row in rows if row.desirable]
        batches: Iterator[list[Example]] = epochs_of(examples, config.warm_start.batch_size, config.seed)
        train = warm_start_config(config.train, config.warm_start)
        steps = config.warm_start.steps
        sft(policy, batches, config=train, total_steps=steps, dtype=base.dtype, progress=self._warm_start_progress)
        save_hf_folder(policy, base.tokenizer, start)
        return policy

    def _export(self, trainer: OfflineTrainer, base: Base) -> None:
        if isinstance(trainer.model, ValueModel):
            save_reward_folder(plain_copy(trainer.model.body), trainer.model.head, base.tokenizer, self.folder.final)
        else:
            save_hf_folder(trainer.model, base.tokenizer, self.folder.final)

    def _newest_state(self) -> tuple[Path | None, ControllerState]:
        if not self.resuming:
            return None, ControllerState()
        checkpoint, complaints = newest_checkpoint(self.folder.checkpoints)
        for complaint in complaints:
            self._message("warning", complaint)
        state = ControllerState() if checkpoint is None else read_state(checkpoint)
        forget_best_after(self.folder.checkpoints, state.step)
        self._message("info", f"resuming {self.folder.root} after step {state.step}")
        return checkpoint, state

    def _open_sinks(self, step: int) -> list[MetricSink]:
        resume_step = step if self.resuming else None
        root, config = self.folder.root, self.config
        tree = config.model_dump(mode="json")
        trackers = open_trackers(config.log, root, name=config.name, config=tree, resume_step=resume_step)
        return [JsonlSink(self.folder.metrics, resume_step=resume_step), *trackers, *self._extra_sinks]

    # -- reporting -------------------------------------------------------------------------------

    async def _evaluate(
        self, trainer: OfflineTrainer, held_out: list[Answered], when: str, step: int
    ) -> dict[str, float] | None:
        """The values of `OfflineTrainer.evaluate`; None when nothing is held out."""
        if not held_out:
            return None
        self._event("stage", {"name": "eval", "total": len(held_out)})
        values = await self._in_thread(trainer.evaluate, held_out)
        for sink in self._sinks:
            sink.log(step, values)
        self._event("eval", {"step": step, "when": when, "values": values})
        if when != "during":
            self._evals |= {"eval/n": values["eval/n"]}
            self._evals |= {f"{name}_{when}": values[name] for name in KEPT if name in values}
            self._write_summary(step, finished=False)
        return values

    def _log_step(self, metrics: StepMetrics) -> None:
        for sink in self._sinks:
            sink.log(metrics.step, metrics.values)
        self._event("step", metrics)

    def _write_summary(self, step: int, *, finished: bool) -> None:
        self._summary = build_summary(
            recipe=self.config.name,
            seed=self.config.seed,
            steps=step,
            seconds=self._seconds_before + time.monotonic() - self._started,
            evals=self._evals,
            config_digest=digest(self.config),
            extra={"finished": finished, "threads": torch.get_num_threads()},
        )
        write_summary(self.folder.root, self._summary)

    def _warm_start_progress(self, step: int, values: dict[str, float]) -> None:
        if self._stop.is_set:
            raise Stopped
        total = self.config.warm_start.steps
        self._event("progress", {"stage": "warm_start", "done": step, "total": total, "values": values})

    def _message(self, level: str, text: str) -> None:
        self._event("message", {"level": level, "text": text})
