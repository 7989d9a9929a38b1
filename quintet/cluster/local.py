"""A whole run in this process: build the modules, hand them to the controller, write down what comes of it.

Order of a fresh run: data, reward functions, model, untrained evaluation, warm start, evaluation before,
steps (with evaluations and checkpoints between them), final export, evaluation after, report. A resumed
run takes the newest whole checkpoint and the journal instead and goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
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
    before_training,
    engine_worker,
    in_environment,
    load_data,
    load_policy,
    sampling_params,
    shared_kernels,
    warm_start,
    weight_store,
    with_adapters,
)
from quintet.cluster.durable import Keeper
from quintet.cluster.folder import RunFolder
from quintet.cluster.logbook import Logbook
from quintet.cluster.stages import EventHandler, evaluate_all
from quintet.cluster.stopping import StopFlag, Stopped
from quintet.config import RunConfig, to_yaml
from quintet.controller.controller import Controller, ControllerSettings
from quintet.controller.state import ControllerState
from quintet.data.sampler import PromptSampler
from quintet.models.export import save_hf_folder
from quintet.observe.hacking import HackingMonitor
from quintet.observe.metrics import read_metrics
from quintet.observe.record import write_samples
from quintet.observe.summary import library_versions
from quintet.observe.timeline import Timeline
from quintet.observe.trace import ChromeTrace
from quintet.protocols import RewardService, RolloutWorker
from quintet.reward.factory import ManagedRewardService, make_reward_service
from quintet.rollout.engine.worker import EngineWorker
from quintet.rollout.metered import MeteredWorker
from quintet.train.worker import LocalTrainWorker
from quintet.types import Group, MetricSink, StepMetrics

UNTRAINED = -1  # the weight version before the warm start


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
        self._log = Logbook(config, folder, sinks=sinks, on_event=on_event, resuming=self.resuming)
        self._keeper = Keeper(config, folder, lambda text: self._log.message("warning", text))
        self._reward_functions = reward
        self._event = on_event
        self._stop = stop
        self._algorithm: Algorithm = resolve(config.algorithm).bound_to(config.rollout.max_tokens)

    async def run(self) -> dict[str, Any]:
        """Train to the end and return the summary. Raises Stopped after an orderly stop."""
        if self._log.is_finished():
            return self._log.summary
        base = Base.of(self.config)
        data = load_data(self.config, base)
        for note in data.notes:
            self._log.message("warning", note)
        async with self._reward_service() as reward:
            self._leave_out_ungradable(data, reward)
            checkpoint, state = self._newest_state()
            self._log.open(state.step)
            self._monitor = HackingMonitor(self.config.reward, read_metrics(self.folder.metrics))
            try:
                await self._train(base, data, reward, checkpoint, state)
            except Stopped:
                await self._log.end(state.step, finished=False)
                raise
            finally:
                self._log.close()
        return self._log.summary

    def _leave_out_ungradable(self, data: Data, reward: ManagedRewardService) -> None:
        """Prompts whose own reference answer no rule can grade would only teach that everything is wrong."""
        for prompts in (data.train, data.held_out):
            bad = dict(reward.unusable_references(prompts))
            for reason in sorted(set(bad.values())):
                rows = [prompts[i].id for i, why in bad.items() if why == reason]
                self._log.message("warning", f"{len(rows)} prompts left out, {reason}: {', '.join(rows[:5])}")
            prompts[:] = [p for i, p in enumerate(prompts) if i not in bad]

    # -- stages ----------------------------------------------------------------------------------

    async def _train(
        self, base: Base, data: Data, reward: ManagedRewardService, checkpoint: Path | None, state: ControllerState
    ) -> None:
        model, rollout = await self._starting_policy(base, data, reward)
        async with contextlib.AsyncExitStack() as open_parts:  # each is closed, whatever another raises
            trace = ChromeTrace(self.folder.trace)
            open_parts.callback(trace.close)
            self._timeline = Timeline(trace)
            if isinstance(self._engine, EngineWorker):  # engines of a user's own do not tell their phases
                self._engine.on_span = self._timeline
            train = LocalTrainWorker(
                model,
                tokenizer=base.tokenizer,
                config=self.config.train,
                algorithm=self._algorithm,
                temperature=self.config.rollout.temperature,
                total_steps=self.config.steps,
                dtype=base.dtype,
                store=weight_store(self.config),
                seed=self.config.seed,
                on_span=self._timeline,
                stopping=lambda: self._stop.is_set,
                kernels=shared_kernels(self.config, model),
            )
            open_parts.push_async_callback(train.close)
            open_parts.push_async_callback(rollout.close)  # type: ignore[attr-defined]
            if checkpoint is not None:
                await train.load_checkpoint(str(checkpoint))
            published = await train.publish(state.version)
            journal = self._keeper.open(checkpoint, published)
            open_parts.callback(journal.close)
            await rollout.update_weights(published, state.version)
            journal.environment(self._environment(base))
            controller = self._controller(base, data, rollout, reward, train, journal, state)
            if state.step == 0 and "eval/accuracy_before" not in self._log.evals:
                await self._evaluate("before", 0, 0, data, rollout, reward)
            await self._steps(controller, data, rollout, reward, train)

    async def _starting_policy(self, base: Base, data: Data, reward: RewardService) -> tuple[nn.Module, RolloutWorker]:
        """The policy that RL starts from, and a rollout worker; the warm start happens here, once."""
        config, start = self.config, self.folder.start
        is_warm = (start / "config.json").exists()
        policy = await asyncio.to_thread(load_policy, config.model, start=start if is_warm else None)
        self._end_if_stopping()
        self._engine = engine_worker(config, base, policy, UNTRAINED)
        rollout = in_environment(config, base, self._engine)
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
        reward: ManagedRewardService,
        train: LocalTrainWorker,
    ) -> None:
        config = self.config
        await controller.resume()
        self._stop_with_signals(controller)

        async def save() -> None:
            with self._timeline.measure("controller", "checkpoint"):
                await self._keeper.save(controller.state, train.save_checkpoint)

        async def after_step(metrics: StepMetrics) -> None:
            metrics.values |= self._timeline.step_parts(metrics.values)
            metrics.values |= self._monitor.note(metrics.values)
            metrics.values |= reward.take_metrics()
            if isinstance(self._engine, MeteredWorker):
                metrics.values |= self._engine.metrics()
            self._log.step(metrics)
            step, last = metrics.step, metrics.step == config.steps
            if config.eval.every and step % config.eval.every == 0 and not last:
                with self._timeline.measure("controller", "evaluate"):
                    accuracy = await self._evaluate("during", step, metrics.version, data, rollout, reward)
                await self._keeper.note_accuracy(accuracy, controller.state, train.save_checkpoint)
                self._event("stage", {"name": "train", "total": config.steps})
            if config.checkpoint.every and step % config.checkpoint.every == 0 and not last:
                await save()

        self._event("stage", {"name": "train", "total": config.steps})
        try:
            await controller.run(after_step)
        finally:
            self._stop.on_set = lambda: None
        await save()
        self._end_if_stopping()
        await train.export(str(self.folder.final))
        accuracy = await self._evaluate("after", controller.state.step, controller.state.version, data, rollout, reward)
        await self._keeper.note_accuracy(accuracy, controller.state, train.save_checkpoint)
        await self._log.end(controller.state.step, finished=True)

    def _stop_with_signals(self, controller: Controller) -> None:
        """From now on a first Ctrl-C reaches the controller, also one that came before."""
        loop = asyncio.get_running_loop()

        def stop() -> None:
            loop.call_soon_threadsafe(controller.stop)

        self._stop.on_set = stop
        if self._stop.is_set:
            controller.stop()

    def _end_if_stopping(self) -> None:
        if self._stop.is_set:
            raise Stopped

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
            before_training=before_training(config, rollout),
        )
        return controller

    @contextlib.asynccontextmanager
    async def _reward_service(self) -> AsyncIterator[ManagedRewardService]:
        rollout = self.config.rollout
        samples = rollout.groups_per_step * self._algorithm.rollouts_per_group(rollout.group_size)
        service = make_reward_service(self.config.reward, functions=self._reward_functions, samples_per_step=samples)
        try:
            await asyncio.to_thread(service.start)
            yield service
        finally:
            service.close()

    def _newest_state(self) -> tuple[Path | None, ControllerState]:
        if not self.resuming:
            return None, ControllerState()
        checkpoint, state = self._keeper.newest()
        self._log.message("info", f"resuming {self.folder.root} after step {state.step}")
        return checkpoint, state

    async def _evaluate(
        self, when: str, step: int, version: int, data: Data, rollout: RolloutWorker, reward: RewardService
    ) -> float | None:
        """Greedy, and with `eval.samples` also sampled; logged under `eval/` and `eval_sampled/`. Returns the accuracy,
        None when nothing is held out."""
        if not data.held_out:
            return None
        values = await evaluate_all(self.config, rollout, reward, data.held_out, version, self._event)
        if when == "before":
            self._log.evals.setdefault("eval/accuracy_untrained", values["eval/accuracy"])
        kept = {"eval/n": values["eval/n"], f"eval/accuracy_{when}": values["eval/accuracy"]}
        self._log.evaluated(when, step, values, kept)
        return values["eval/accuracy"]

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
        self._end_if_stopping()
        self._event(
            "progress",
            {"stage": "warm_start", "done": step, "total": self.config.warm_start.steps, "values": values},
        )
