"""A reward service that runs elsewhere (`quintet serve reward`), behind the same protocol: `reward.url`.

Requests that fail in passing are tried again, see `http.py`; what is left at the end is a typed failure of every sample
of the group. A request that the server refuses (a wrong key, a column that a function misses) stops the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from quintet.reward.background import BackgroundLoop
from quintet.reward.config import RewardConfig
from quintet.reward.errors import FunctionFailed, RewardError
from quintet.reward.failures import FailureWindow
from quintet.reward.http import HttpOptions, JsonClient
from quintet.reward.sample import rollout_failure
from quintet.reward.wire import ReferenceResponse, ScoreResponse, WireGroup, WirePrompt
from quintet.types import Failure, FailureKind, Group, Prompt, QuintetError, Score

NAME = "remote"
REFERENCES_AT_ONCE = 1000

Answer = TypeVar("Answer")


class RemoteRewardService:
    """`start` opens the client, `close` ends it; the first `score` starts it if nobody did."""

    def __init__(self, config: RewardConfig, *, samples_per_step: int | None = None) -> None:
        if config.url is None:
            raise QuintetError("reward.url is not set")
        options = HttpOptions.model_validate({"urls": config.url, "api_key_env": config.api_key_env})
        self._client = JsonClient(NAME, options)
        self._window = FailureWindow(config, samples_per_step)
        self._background: BackgroundLoop | None = None

    @property
    def names(self) -> list[str]:
        return [NAME]

    def start(self) -> None:
        """Raises QuintetError when the API key is not set."""
        if self._background is None:
            self._background = BackgroundLoop()
            self._background.run(self._client.start())

    def close(self) -> None:
        if self._background is not None:
            self._background.run(self._client.close())
            self._background.close()
            self._background = None

    async def score(self, groups: list[Group]) -> list[list[Score]]:
        """Raises RewardError when the server refuses a request, and as `on_failure` and `max_failure_frac` say."""
        self.start()
        scored = await asyncio.gather(*(self._score_group(group) for group in groups))
        self._window.note(
            sum(len(scores) for scores, _ in scored), [(NAME, reason) for _, faults in scored for reason in faults]
        )
        return [scores for scores, _ in scored]

    def unusable_references(self, prompts: Sequence[Prompt]) -> list[tuple[int, str]]:
        """As the server sees it. Raises QuintetError when it cannot be asked."""
        self.start()
        assert self._background is not None
        return self._background.run(self._references(prompts))

    def take_metrics(self) -> dict[str, float]:
        """The server keeps its own, at `/metrics`."""
        return {}

    async def _score_group(self, group: Group) -> tuple[list[Score], list[str]]:
        """Scores, and the reasons of the samples that a grader or the way to it failed on."""
        lost = [rollout_failure(rollout) for rollout in group.rollouts]
        scores = [Score(None, failure=failure) for failure in lost]
        graded = [i for i, failure in enumerate(lost) if failure is None]
        if not graded:
            return scores, []
        asked = msgspec.structs.replace(group, rollouts=[group.rollouts[i] for i in graded])
        for i, score in zip(graded, await self._ask(asked), strict=True):
            scores[i] = score
        failures = [failure for i in graded if (failure := scores[i].failure) is not None]
        return scores, [failure.message for failure in failures if failure.kind is not FailureKind.UNSCORED]

    async def _ask(self, group: Group) -> list[Score]:
        assert self._background is not None
        body = {"groups": [msgspec.to_builtins(WireGroup.of(group))]}
        try:
            answer = await self._background.wait(self._post("/score", body, ScoreResponse))
        except FunctionFailed as error:
            if not error.retryable:
                raise RewardError(NAME, error.message) from error
            return [Score(None, failure=Failure(error.kind, error.message, retryable=True))] * len(group.rollouts)
        counts = [len(scores) for scores in answer.scores]
        if counts != [len(group.rollouts)]:
            raise RewardError(NAME, f"the server gave {counts} scores for a group of {len(group.rollouts)} samples")
        return answer.scores[0]

    async def _references(self, prompts: Sequence[Prompt]) -> list[tuple[int, str]]:
        found: list[tuple[int, str]] = []
        for first in range(0, len(prompts), REFERENCES_AT_ONCE):
            some = [msgspec.to_builtins(WirePrompt.of(p)) for p in prompts[first : first + REFERENCES_AT_ONCE]]
            try:
                answer = await self._post("/references", {"prompts": some}, ReferenceResponse)
            except FunctionFailed as error:
                raise QuintetError(f"the reward service (reward.url) cannot be asked: {error.message}") from error
            found += [(first + row, reason) for row, reason in answer.unusable]
        return found

    async def _post(self, path: str, body: Mapping[str, Any], kind: type[Answer]) -> Answer:
        try:
            return msgspec.convert(await self._client.post(path, body), kind)
        except msgspec.ValidationError as error:
            raise FunctionFailed(f"{path} answered something else: {error}", FailureKind.TRANSPORT) from error
