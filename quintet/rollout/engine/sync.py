"""What the worker's thread drives, and what an engine tells of itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from quintet.rollout.engine.sequence import Finished, OnToken
from quintet.types import Group, GroupId, SamplingParams


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made (tokens, seconds, preemptions) and its state now."""

    running: int
    waiting: int
    kv_used: float
    memory_bytes: int
    sampled_tokens: int
    busy_s: float
    preemptions: int
    prompt_tokens: int
    computed_prompt_tokens: int
    update_s: float = 0.0  # spent in loading and packing weights


class SyncEngine(Protocol):
    """What `EngineWorker` drives from its thread. One thread calls all methods; `stats` may be called from any."""

    version: int
    phase: str  # what the last `step` did: "prefill" or "decode"

    @property
    def has_work(self) -> bool: ...

    def add_group(self, group: Group, params: SamplingParams, on_token: OnToken | None = None) -> int:
        """Queue `params.n` samples; the request number that their rollouts will carry."""
        ...

    def step(self) -> list[Finished]:
        """One forward pass; the samples that ended, in any order."""
        ...

    def abort(self, group_ids: Collection[GroupId]) -> None: ...

    def abort_requests(self, requests: Collection[int]) -> None: ...

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None: ...

    def fail_all(self, message: str) -> list[Finished]:
        """End everything with a failure and start from a clean state."""
        ...

    def stats(self) -> EngineStats: ...
