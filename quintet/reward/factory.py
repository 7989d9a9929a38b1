"""The reward service that a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quintet.reward.config import RewardConfig
from quintet.reward.remote import RemoteRewardService
from quintet.reward.service import LocalRewardService
from quintet.types import Group, Prompt, Score


class ManagedRewardService(Protocol):
    """A `RewardService` with what a run does around it; each method is described in `LocalRewardService`."""

    @property
    def names(self) -> list[str]: ...

    def start(self) -> None: ...

    def close(self) -> None: ...

    async def score(self, groups: list[Group]) -> list[list[Score]]: ...

    def unusable_references(self, prompts: Sequence[Prompt]) -> list[tuple[int, str]]: ...

    def take_metrics(self) -> dict[str, float]: ...


def make_reward_service(
    config: RewardConfig,
    *,
    functions: Sequence[Callable[..., Any]] | None = None,
    samples_per_step: int | None = None,
) -> ManagedRewardService:
    """In this process, unless `reward.url` is set. Functions given in code replace the recipe's, its url too."""
    if config.url is not None and functions is None:
        return RemoteRewardService(config, samples_per_step=samples_per_step)
    return LocalRewardService(config, functions=functions, samples_per_step=samples_per_step)
