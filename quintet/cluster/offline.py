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
from quintet.cluster.logbook import Logbook
from quintet.cluster.stages import EventHandler
from quintet.cluster.stopping import StopFlag, Stopped
from quintet.config import RunConfig
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
        self._log = Logbook(config, folder, sinks=sinks, on_event=on_event, resuming=self.resuming)
        self._event, self._stop = on_event, stop
        self._executor: ThreadPoolExecutor

    async def run(self) -> dict[str, Any]:
        """Train to the end and return the summary. Raises Stopped after an orderly stop."""
        if self._log.is_finished():
            return self._log.summary
        base = Base.of(self.config)
        train, held_out = self._load_data(base)
        checkpoint, state = self._newest_state()
        self._log.open(state.step)
        threads = torch.get_num_threads()  # OpenMP keeps the number per thread
        self._executor = ThreadPoolExecutor(1, "offline", initializer=torch.set_num_threads, initargs=(threads,))
        try:
            await self._train(base, train, held_out, checkpoint, state)
        except Stopped:
            await self._log.end(state.step, finished=False)
            raise
        finally:
            self._executor.shutdown()
            self._log.close()
        return self._log.summary

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
            raise Stopped
        await self._in_thread(self._export, trainer, base)
        await self._log.end(state.step, finished=True)

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

        if state.step == 0 and "eval/loss_before" not in self._log.evals:
            await self._evaluate(trainer, held_out, "before", 0)
        self._event("stage", {"name": "train", "total": config.steps})
        while state.step < config.steps and not self._stop.is_set and (batch := batches.batch(state.step)):
            started = time.monotonic()
            values = await self._in_thread(trainer.step, batch)
            state.step += 1
            self._log.step(StepMetrics(state.step, 0, values | {"time/step_s": time.monotonic() - started}))
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
        return load_answered(self.config, self._algorithm, base, lambda note: self._log.message("warning", note))

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
            self._log.message("warning", complaint)
        state = ControllerState() if checkpoint is None else read_state(checkpoint)
        forget_best_after(self.folder.checkpoints, state.step)
        self._log.message("info", f"resuming {self.folder.root} after step {state.step}")
        return checkpoint, state

    # -- reporting -------------------------------------------------------------------------------

    async def _evaluate(
        self, trainer: OfflineTrainer, held_out: list[Answered], when: str, step: int
    ) -> dict[str, float] | None:
        """The values of `OfflineTrainer.evaluate`; None when nothing is held out."""
        if not held_out:
            return None
        self._event("stage", {"name": "eval", "total": len(held_out)})
        values = await self._in_thread(trainer.evaluate, held_out)
        kept = {"eval/n": values["eval/n"]} | {f"{name}_{when}": values[name] for name in KEPT if name in values}
        self._log.evaluated(when, step, values, kept)
        return values

    def _warm_start_progress(self, step: int, values: dict[str, float]) -> None:
        if self._stop.is_set:
            raise Stopped
        total = self.config.warm_start.steps
        self._event("progress", {"stage": "warm_start", "done": step, "total": total, "values": values})
