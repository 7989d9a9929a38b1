"""A whole run in this process: build the modules, hand them to the controller, write down what comes of it.

Order of a fresh run: data, reward functions, model, untrained evaluation, warm start, evaluation before,
steps (with evaluations and checkpoints between them), final export, evaluation after, report. A resumed
run takes the newest whole checkpoint and the journal instead and goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quintet.algorithms.presets import Algorithm, resolve
from quintet.buffer.buffer import JournaledBuffer
from quintet.buffer.journal import SqliteJournal
from quintet.cluster.build import (
    Base,
    Data,
    load_data,
    load_policy,
    rollout_worker,
    sampling_params,
    warm_start,
    weight_store,
    with_adapters,
)
from quintet.cluster.durable import Keeper
from quintet.cluster.folder import RunFolder
from quintet.cluster.stages import EventHandler, evaluate_all
from quintet.config import RunConfig, digest, to_yaml
from quintet.controller.controller import Controller, ControllerSettings
from quintet.controller.state import ControllerState
from quintet.data.sampler import PromptSampler
from quintet.models.export import save_hf_folder
from quintet.observe.doctor import Finding, diagnose
from quintet.observe.metrics import JsonlSink, read_metrics
from quintet.observe.record import write_samples
from quintet.observe.report import write_report
from quintet.observe.summary import build_summary, library_versions, machine, read_summary, write_summary
from quintet.observe.timeline import Timeline
from quintet.observe.trace import ChromeTrace
from quintet.observe.trackers import open_trackers
from quintet.protocols import RewardService, RolloutWorker
from quintet.reward.service import LocalRewardService
from quintet.rollout.agent_loop import AgentLoopWorker
from quintet.rollout.engine.worker import EngineWorker
from quintet.train.worker import LocalTrainWorker
from quintet.types import Group, MetricSink, StepMetrics

logger = logging.getLogger(__name__)

UNTRAINED = -1  # the weight version before the warm start


class Stopped(KeyboardInterrupt):
    """The user asked the run to stop; everything finished is saved."""


class StopFlag:
    """Set by the first Ctrl-C; the second one interrupts at once."""

    def __init__(self, on_event: EventHandler) -> None:
        self._on_event = on_event
        self.is_set = False
        self.on_set: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def handling_sigint(self, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _interrupt(self, *_: object) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        text = "stopping after this step; press Ctrl-C again to stop at once (nothing finished is lost)"
        self._on_event("message", {"level": "warning", "text": text})
        self.on_set()


class LocalRun:
    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        *,
        reward: Sequence[Callable[..., Any]] | None,
        sinks: Sequence[MetricSink],
        on_event: EventHandler,
        stop: StopFlag,
    ) -> None:
        self.config = config
        self.folder = folder
        self.resuming = folder.claim(config)
        self._keeper = Keeper(config, folder, lambda text: self._message("warning", text))
        self._reward_functions = reward
        self._extra_sinks = sinks
        self._event = on_event
        self._stop = stop
        self._started = time.monotonic()
        self._algorithm: Algorithm = resolve(config.algorithm).bound_to(config.rollout.max_tokens)
        self._summary: dict[str, Any] = self._old_summary() if self.resuming else {}
        self._seconds_before = float(self._summary.get("seconds", 0.0))
        self._evals = {k: v for k, v in self._summary.items() if k.startswith("eval/")}

    async def run(self) -> dict[str, Any]:
        """Train to the end and return the summary. Raises Stopped after an orderly stop."""
        if self._summary.get("finished"):
            self._message("info", f"the run in {self.folder.root} is finished; nothing to do")
            return self._summary
        base = Base.of(self.config)
        data = load_data(self.config, base)
        for note in data.notes:
            self._message("warning", note)
        async with self._reward_service() as reward:
            self._leave_out_ungradable(data, reward)
            checkpoint, state = self._newest_state()
            self._sinks = self._open_sinks(state.step)
            try:
                await self._train(base, data, reward, checkpoint, state)
            finally:
                for sink in self._sinks:
                    sink.close()
        return self._summary

    def _leave_out_ungradable(self, data: Data, reward: LocalRewardService) -> None:
        """Prompts whose own reference answer no rule can grade would only teach that everything is wrong."""
        for prompts in (data.train, data.held_out):
            bad = dict(reward.unusable_references(prompts))
            for reason in sorted(set(bad.values())):
                rows = [prompts[i].id for i, why in bad.items() if why == reason]
                self._message("warning", f"{len(rows)} prompts left out, {reason}: {', '.join(rows[:5])}")
            prompts[:] = [p for i, p in enumerate(prompts) if i not in bad]

    # -- stages ----------------------------------------------------------------------------------

    async def _train(
        self, base: Base, data: Data, reward: RewardService, checkpoint: Path | None, state: ControllerState
    ) -> None:
        model, rollout = await self._starting_policy(base, data, reward)
        store = weight_store(self.config)
        trace = ChromeTrace(self.folder.trace)
        self._timeline = Timeline(trace)
        engine = rollout.worker if isinstance(rollout, AgentLoopWorker) else rollout
        if isinstance(engine, EngineWorker):  # engines of a user's own do not tell their phases
            engine.on_span = self._timeline
        train = LocalTrainWorker(
            model,
            tokenizer=base.tokenizer,
            config=self.config.train,
            algorithm=self._algorithm,
            temperature=self.config.rollout.temperature,
            total_steps=self.config.steps,
            dtype=base.dtype,
            store=store,
            seed=self.config.seed,
            on_span=self._timeline,
        )
        if checkpoint is not None:
            await train.load_checkpoint(str(checkpoint))
        published = await train.publish(state.version)
        journal = self._keeper.open(checkpoint, published)
        try:
            await rollout.update_weights(published, state.version)
            journal.environment(self._environment(base))
            controller = self._controller(base, data, rollout, reward, train, journal, state)
            if state.step == 0 and "eval/accuracy_before" not in self._evals:
                await self._evaluate("before", 0, 0, data, rollout, reward)
            await self._steps(controller, data, rollout, reward, train)
        finally:
            journal.close()
            await rollout.close()  # type: ignore[attr-defined]
            await train.close()
            trace.close()

    async def _starting_policy(self, base: Base, data: Data, reward: RewardService) -> tuple[nn.Module, RolloutWorker]:
        """The policy that RL starts from, and a rollout worker; the warm start happens here, once."""
        config, start = self.config, self.folder.start
        is_warm = (start / "config.json").exists()
        policy = await asyncio.to_thread(load_policy, config.model, start=start if is_warm else None)
        rollout = rollout_worker(config, base, policy, UNTRAINED)
        if config.warm_start.steps > 0 and not is_warm:
            await self._evaluate("untrained", 0, UNTRAINED, data, rollout, reward)
            self._event("stage", {"name": "warm_start", "total": config.warm_start.steps})
            await asyncio.to_thread(warm_start, config, base, policy, data.train, self._warm_start_progress)
            await asyncio.to_thread(save_hf_folder, policy, base.tokenizer, start)
        return with_adapters(policy, config.model, config.seed), rollout

    async def _steps(
        self,
        controller: Controller,
        data: Data,
        rollout: RolloutWorker,
        reward: RewardService,
        train: LocalTrainWorker,
    ) -> None:
        config = self.config
        await controller.resume()
        self._stop.on_set = controller.stop
        if self._stop.is_set:
            controller.stop()

        async def save() -> None:
            with self._timeline.measure("controller", "checkpoint"):
                await self._keeper.save(controller.state, train.save_checkpoint)

        async def after_step(metrics: StepMetrics) -> None:
            metrics.values |= self._timeline.step_parts(metrics.values)
            self._log_step(metrics)
            step, last = metrics.step, metrics.step == config.steps
            if config.eval.every and step % config.eval.every == 0 and not last:
                with self._timeline.measure("controller", "evaluate"):
                    accuracy = await self._evaluate("during", step, metrics.version, data, rollout, reward)
                await self._keeper.note_accuracy(accuracy, controller.state, train.save_checkpoint)
                self._event("stage", {"name": "train", "total": config.steps})
            if config.checkpoint.every and step % config.checkpoint.every == 0 and not last:
                await save()

        self._event("stage", {"name": "train", "total": config.steps})
        await controller.run(after_step)
        await save()
        if self._stop.is_set:
            self._write_summary(controller.state.step, finished=False)
            raise Stopped
        await train.export(str(self.folder.final))
        accuracy = await self._evaluate("after", controller.state.step, controller.state.version, data, rollout, reward)
        await self._keeper.note_accuracy(accuracy, controller.state, train.save_checkpoint)
        self._write_summary(controller.state.step, finished=True)
        await asyncio.to_thread(write_report, self.folder.root)
        self._event("done", {"summary": self._summary, "findings": self._findings()})

    # -- parts -----------------------------------------------------------------------------------

    def _controller(
        self,
        base: Base,
        data: Data,
        rollout: RolloutWorker,
        reward: RewardService,
        train: LocalTrainWorker,
        journal: SqliteJournal,
        state: ControllerState,
    ) -> Controller:
        config = self.config
        buffer = JournaledBuffer(
            journal,
            max_staleness=self._algorithm.max_staleness,
            resume_from=state.step,
            on_drop=lambda group, reason: controller.retry(group, reason),
        )
        settings = ControllerSettings(
            total_steps=config.steps,
            groups_per_step=config.rollout.groups_per_step,
            sampling=sampling_params(config),
            group_timeout_s=config.rollout.timeout_s,
        )

        def record_batch(step: int, groups: list[Group]) -> None:
            write_samples(self.folder.rollouts, step, groups, config.log.samples_per_step, base.tokenizer.decode)

        controller = Controller(
            settings,
            self._algorithm,
            rollout=rollout,
            reward=reward,
            train=train,
            buffer=buffer,
            prompts=PromptSampler(data.train, seed=config.seed, shuffle=config.data.shuffle, epochs=config.data.epochs),
            state=state,
            on_span=self._timeline,
            on_publish=self._keeper.record_version,
            on_batch=record_batch,
        )
        return controller

    @contextlib.asynccontextmanager
    async def _reward_service(self) -> AsyncIterator[LocalRewardService]:
        samples = self.config.rollout.groups_per_step * self.config.rollout.group_size
        service = LocalRewardService(self.config.reward, functions=self._reward_functions, samples_per_step=samples)
        try:
            await asyncio.to_thread(service.start)
            yield service
        finally:
            service.close()

    def _newest_state(self) -> tuple[Path | None, ControllerState]:
        if not self.resuming:
            return None, ControllerState()
        checkpoint, state = self._keeper.newest()
        self._message("info", f"resuming {self.folder.root} after step {state.step}")
        return checkpoint, state

    def _open_sinks(self, step: int) -> list[MetricSink]:
        resume_step = step if self.resuming else None
        root, config = self.folder.root, self.config
        tree = config.model_dump(mode="json")
        trackers = open_trackers(config.log, root, name=config.name, config=tree, resume_step=resume_step)
        return [JsonlSink(self.folder.metrics, resume_step=resume_step), *trackers, *self._extra_sinks]

    async def _evaluate(
        self, when: str, step: int, version: int, data: Data, rollout: RolloutWorker, reward: RewardService
    ) -> float | None:
        """Greedy, and with `eval.samples` also sampled; logged under `eval/` and `eval_sampled/`. Returns the accuracy,
        None when nothing is held out."""
        if not data.held_out:
            return None
        values = await evaluate_all(self.config, rollout, reward, data.held_out, version, self._event)
        for sink in self._sinks:
            sink.log(step, values)
        self._event("eval", {"step": step, "when": when, "values": values})
        if when != "during":
            self._evals |= {"eval/n": values["eval/n"], f"eval/accuracy_{when}": values["eval/accuracy"]}
            self._write_summary(step, finished=False)
        return values["eval/accuracy"]

    def _findings(self) -> list[Finding]:
        return diagnose(read_metrics(self.folder.metrics), self.config.model_dump(mode="json"))

    # -- reporting -------------------------------------------------------------------------------

    def _log_step(self, metrics: StepMetrics) -> None:
        for sink in self._sinks:
            sink.log(metrics.step, metrics.values)
        self._event("step", metrics)

    def _write_summary(self, step: int, *, finished: bool) -> None:
        evals = dict(self._evals)
        evals.setdefault("eval/accuracy_untrained", evals.get("eval/accuracy_before", float("nan")))
        self._summary = build_summary(
            recipe=self.config.name,
            seed=self.config.seed,
            steps=step,
            seconds=self._seconds_before + time.monotonic() - self._started,
            evals={k: v for k, v in evals.items() if v == v},
            config_digest=digest(self.config),
            extra={"finished": finished, "machine": machine()},
        )
        write_summary(self.folder.root, self._summary)

    def _old_summary(self) -> dict[str, Any]:
        return read_summary(self.folder.root) if (self.folder.root / "summary.json").exists() else {}

    def _environment(self, base: Base) -> dict[str, Any]:
        return {
            "versions": library_versions(),
            "threads": torch.get_num_threads(),
            "device": str(base.device),
            "dtype": str(base.dtype),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "config": to_yaml(self.config),
        }

    def _warm_start_progress(self, step: int, values: dict[str, float]) -> None:
        if self._stop.is_set:
            raise Stopped
        self._event(
            "progress",
            {"stage": "warm_start", "done": step, "total": self.config.warm_start.steps, "values": values},
        )

    def _message(self, level: str, text: str) -> None:
        self._event("message", {"level": level, "text": text})
