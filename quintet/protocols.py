"""The five modules as seen from the outside: at most seven methods each.

The controller knows its neighbours by these protocols only; no module knows the controller.
"""

from __future__ import annotations

from typing import Protocol

from quintet.types import (
    BufferState,
    BufferStats,
    ExperienceBatch,
    Group,
    GroupId,
    GroupState,
    Health,
    Rollout,
    SamplingParams,
    Score,
    TrainMetrics,
    WeightRef,
)


class RolloutWorker(Protocol):
    """Turns prompts into trajectories with the newest weights it was given."""

    async def generate(
        self, prompts: list[Group], sampling_params: SamplingParams, weight_version: int
    ) -> list[Rollout]:
        """`sampling_params.n` rollouts per group, groups in the given order, samples in order of index.

        A prompt that cannot be served yields rollouts with `finish_reason` failed and a `failure`; it
        never raises for one prompt among many. `weight_version` is the version the caller believes
        current; an engine that is *older* raises `QuintetError`.
        """
        ...

    async def update_weights(self, weight_path: WeightRef, version: int) -> None:
        """Load a version, whole or not at all. Running sequences go on with the new weights: their KV
        is recomputed and later tokens carry the new version. Caches of the old version are dropped."""
        ...

    async def health_check(self) -> Health: ...

    async def abort(self, group_ids: list[GroupId]) -> None:
        """Running samples of these groups end with `finish_reason` aborted and the tokens so far."""
        ...


class RewardService(Protocol):
    async def score(self, groups: list[Group]) -> list[list[Score]]:
        """One list per group, one score per rollout, in order. Faults come back as `Score.failure`."""
        ...


class TrainWorker(Protocol):
    async def prepare(self, batch: ExperienceBatch) -> ExperienceBatch:
        """Fill `ref_logprobs`, `proximal_logprobs` and `values` where the algorithm needs them."""
        ...

    async def update(self, batch: ExperienceBatch) -> TrainMetrics:
        """Epochs x mini-batches over the batch; the optimizer steps exactly once per mini-batch.

        Raises StepAbandoned, with everything as it was before, when the run is to stop.
        """
        ...

    async def publish(self, version: int) -> WeightRef: ...

    async def save_checkpoint(self, path: str) -> None:
        """Weights, optimizer, schedule, RNG into an existing empty folder."""
        ...

    async def load_checkpoint(self, path: str) -> None: ...

    async def export(self, path: str) -> None:
        """A Hugging Face folder (`config.json`, tokenizer, `model.safetensors`), LoRA merged."""
        ...


class ExperienceBuffer(Protocol):
    """The group state machine, made durable. See `buffer/buffer.py` for its edges."""

    async def admit(self, groups: list[Group]) -> None: ...

    async def advance(self, group: Group, state: GroupState) -> None: ...

    async def take(self, n_groups: int, current_version: int) -> list[Group]: ...

    async def commit(self, step: int, version: int) -> None: ...

    async def drop(self, group: Group, reason: str) -> None: ...

    async def resume(self) -> BufferState: ...

    def stats(self) -> BufferStats: ...
