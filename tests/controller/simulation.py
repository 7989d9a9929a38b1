"""Simulated modules in virtual time: the real controller and buffer, workers that only take time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import resolve
from quintet.buffer.buffer import JournaledBuffer
from quintet.buffer.journal import Journal, NullJournal
from quintet.clock import VirtualClock
from quintet.controller.controller import Controller, ControllerSettings
from quintet.controller.state import ControllerState
from quintet.data.sampler import PromptSampler
from quintet.types import (
    ExperienceBatch,
    Failure,
    FailureKind,
    FinishReason,
    Group,
    GroupId,
    Health,
    Prompt,
    Rollout,
    SamplingParams,
    Score,
    Span,
    StepMetrics,
    TrainMetrics,
    VersionRun,
    WeightRef,
)

Fails = Callable[[GroupId], Failure | None]


@dataclass
class SimulatedRollout:
    """Groups take a keyed random time; the version of a token is the one when it is made."""

    clock: VirtualClock
    seconds: Callable[[GroupId], float]
    fails: Fails = lambda group_id: None
    version: int = 0
    asked: list[tuple[str, int]] = field(default_factory=list)
    aborted: list[GroupId] = field(default_factory=list)

    async def generate(
        self, prompts: list[Group], sampling_params: SamplingParams, weight_version: int
    ) -> list[Rollout]:
        assert self.version >= weight_version
        out = []
        for group in prompts:
            self.asked.append((str(group.group_id), weight_version))
            began = self.version
            await self.clock.sleep(self.seconds(group.group_id))
            failure = self.fails(group.group_id)
            out += [self._rollout(group, i, began, failure) for i in range(sampling_params.n)]
        return out

    def _rollout(self, group: Group, index: int, began: int, failure: Failure | None) -> Rollout:
        if failure is not None:
            return Rollout(group.group_id, index, [1], [], "", [], [], [], FinishReason.FAILED, failure=failure)
        versions = [VersionRun(began, 1), VersionRun(self.version, 1)]
        return Rollout(group.group_id, index, [1], [2, 3], "x", [-1.0, -1.0], [1, 1], versions, FinishReason.STOP)

    async def update_weights(self, weight_path: WeightRef, version: int) -> None:
        self.version = version

    async def health_check(self) -> Health:
        return Health(ok=True, version=self.version)

    async def abort(self, group_ids: list[GroupId]) -> None:
        self.aborted += group_ids


class SimulatedReward:
    """Half of the samples of a group are right; a `prompt_id` starting with `equal` gives every sample the same."""

    async def score(self, groups: list[Group]) -> list[list[Score]]:
        return [[self._score(g, r) for r in g.rollouts] for g in groups]

    def _score(self, group: Group, rollout: Rollout) -> Score:
        equal = group.group_id.prompt_id.startswith("equal")
        value = 1.0 if equal else float(rollout.sample_index % 2)
        return Score(value, {"rule": value})


@dataclass
class SimulatedTrain:
    clock: VirtualClock
    seconds: float
    trained: list[tuple[int, list[str]]] = field(default_factory=list)

    async def prepare(self, batch: ExperienceBatch) -> ExperienceBatch:
        return batch

    async def update(self, batch: ExperienceBatch) -> TrainMetrics:
        await self.clock.sleep(self.seconds)
        self.trained.append((batch.step, list(dict.fromkeys(str(e.group_id) for e in batch.experiences))))
        return TrainMetrics({"actor/loss": 0.0}, optimizer_steps=1)

    async def publish(self, version: int) -> WeightRef:
        return WeightRef(version, f"memory:{version}", f"digest-{version}")

    async def save_checkpoint(self, path: str) -> None: ...

    async def load_checkpoint(self, path: str) -> None: ...

    async def export(self, path: str) -> None: ...


def keyed_seconds(low: float, high: float) -> Callable[[GroupId], float]:
    """A long-tailed time per group, the same in every run."""

    def seconds(group_id: GroupId) -> float:
        u = random.Random(str(group_id)).random()
        return low * (high / low) ** (u**3)

    return seconds


@dataclass
class Simulation:
    """A whole run: `run()` gives the metrics of its steps."""

    steps: int = 6
    groups_per_step: int = 4
    max_staleness: int = 0
    preset: str = "grpo"
    prompt_ids: list[str] = field(default_factory=lambda: [f"p{i}" for i in range(64)])
    seconds: Callable[[GroupId], float] = lambda group_id: 1.0
    train_seconds: float = 2.0
    fails: Fails = lambda group_id: None
    timeout_s: float | None = None
    epochs: int | None = None
    journal: Journal = field(default_factory=NullJournal)
    resume_from: int = 0

    def run(self) -> list[StepMetrics]:
        self.clock = VirtualClock()
        self.rollout = SimulatedRollout(self.clock, self.seconds, self.fails, version=self.resume_from)
        self.train = SimulatedTrain(self.clock, self.train_seconds)
        self.spans: list[Span] = []
        self.metrics: list[StepMetrics] = []
        self.in_flight_at_rest: list[int] = []  # before each step's training
        self.clock.run(self._main())
        return self.metrics

    async def _rest(self) -> None:
        self.in_flight_at_rest.append(self.buffer.stats().in_flight)

    async def _main(self) -> None:
        self.buffer = JournaledBuffer(
            self.journal,
            max_staleness=self.max_staleness,
            resume_from=self.resume_from,
            on_drop=lambda group, reason: self.controller.retry(group),
        )
        sampling = SamplingParams(n=4, max_tokens=2)
        prompts = [Prompt(id=i, token_ids=[1]) for i in self.prompt_ids]
        self.controller = Controller(
            ControllerSettings(self.steps, self.groups_per_step, sampling, group_timeout_s=self.timeout_s),
            resolve(AlgorithmConfig(preset=self.preset, max_staleness=self.max_staleness)),
            rollout=self.rollout,
            reward=SimulatedReward(),
            train=self.train,
            buffer=self.buffer,
            prompts=PromptSampler(prompts, seed=0, shuffle=False, epochs=self.epochs),
            clock=self.clock,
            state=ControllerState(step=self.resume_from, version=self.resume_from),
            on_span=self.spans.append,
            before_training=self._rest,
        )
        await self.controller.resume()

        async def after_step(metrics: StepMetrics) -> None:
            self.metrics.append(metrics)

        await self.controller.run(after_step)


def engine_failure(message: str = "boom", *, retryable: bool = True) -> Failure:
    return Failure(FailureKind.ENGINE, message, retryable)
