"""One trajectory of several turns, token by token: what was sampled, and what came in between.

    prompt | sampled, mask 1 | context (a tool's or a user's words), mask 0 | sampled, mask 1 | ...

Nothing is ever encoded again: ids are appended as the sampler gave them, context as it was fed to the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

from quintet.types import (
    Episode,
    Failure,
    FinishReason,
    GroupId,
    Rollout,
    expand_versions,
    run_length,
)


class Transcript:
    """`ids` is what the engine is fed next; a rollout can be made of it at any time."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = list(prompt_ids)
        self.response_ids: list[int] = []
        self.logprobs: list[float] = []
        self.loss_mask: list[int] = []
        self.versions: list[int] = []
        self.turns = 0

    @property
    def ids(self) -> list[int]:
        return [*self.prompt_ids, *self.response_ids]

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """One turn of the policy. Raises ValueError unless there is one log-probability and version per token: without
        them the turn could not be trained, and nothing would say so."""
        if not len(ids) == len(logprobs) == len(versions):
            raise ValueError(
                f"{len(ids)} sampled tokens came with {len(logprobs)} log-probabilities and {len(versions)} versions"
            )
        self.response_ids += ids
        self.logprobs += logprobs
        self.loss_mask += [1] * len(ids)
        self.versions += versions
        self.turns += 1

    def add_rollout(self, rollout: Rollout) -> None:
        """One turn as a worker gave it."""
        self.add_sampled(rollout.response_ids, rollout.logprobs, expand_versions(rollout.weight_versions))

    def add_context(self, ids: Sequence[int]) -> None:
        """Tokens that the policy did not sample. Before the first sampled token they belong to the prompt."""
        if not self.response_ids:
            self.prompt_ids += ids
            return
        self.response_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.loss_mask += [0] * len(ids)
        self.versions += [self.versions[-1]] * len(ids)

    def rollout(
        self,
        group_id: GroupId,
        sample_index: int,
        *,
        text: str,
        finish_reason: FinishReason,
        episode: Episode | None = None,
        failure: Failure | None = None,
    ) -> Rollout:
        """`text`: the last turn's. Context after the last sampled token is left out: nothing depends on it."""
        end = max((i + 1 for i, mask in enumerate(self.loss_mask) if mask), default=0)
        return Rollout(
            group_id,
            sample_index,
            self.prompt_ids,
            self.response_ids[:end],
            text,
            self.logprobs[:end],
            self.loss_mask[:end],
            run_length(self.versions[:end]),
            finish_reason,
            turns=self.turns,
            episode=episode,
            failure=failure,
        )
