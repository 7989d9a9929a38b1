"""What a reward function is given, and what it gives back, as plain picklable data.

A `Sample` is one rollout with the parts of its prompt that a grader may need. It crosses the process
seam to a worker, so that this module imports nothing heavy.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quintet.types import Episode, Failure, FailureKind, FinishReason, Group, Rollout

Info = dict[str, Any]


class Sample(msgspec.Struct):
    """One completion to be graded."""

    prompt_id: str
    text: str  # the response, decoded once, cut at the stop
    response_ids: list[int]
    truncated: bool  # cut by max_tokens or the context
    messages: list[dict[str, Any]] | None = None  # set: the prompt is conversational
    prompt_text: str = ""
    answer: str | None = None
    task_type: str = ""
    test_cases: list[dict[str, Any]] | None = None
    metadata: dict[str, Any] = {}
    episode: Episode | None = None  # set: the rollout took place in an environment
    sampled_tokens: int | None = None  # of `response_ids`, those that the policy sampled; None: all

    @property
    def length(self) -> int:
        """Tokens that the policy wrote: what a tool said is not its length."""
        return len(self.response_ids) if self.sampled_tokens is None else self.sampled_tokens


class Verdict(msgspec.Struct, frozen=True):
    """`value` None: the function abstains. `info` goes into `Score.info` under the function's name."""

    value: float | None
    info: Info = {}


def sample_of(group: Group, index: int) -> Sample:
    """The sample of `group.rollouts[index]`."""
    prompt, rollout = group.prompt, group.rollouts[index]
    return Sample(
        prompt_id=prompt.id,
        text=rollout.text,
        response_ids=rollout.response_ids,
        truncated=rollout.finish_reason == FinishReason.LENGTH,
        messages=prompt.messages,
        prompt_text=prompt.text or "",
        answer=prompt.answer,
        task_type=prompt.task_type,
        test_cases=prompt.test_cases,
        metadata=prompt.metadata,
        episode=rollout.episode,
        sampled_tokens=sum(rollout.loss_mask),
    )


def rollout_failure(rollout: Rollout) -> Failure | None:
    """Why a rollout is not graded at all: the engine or the environment gave no whole response."""
    if rollout.failure is not None:
        return rollout.failure
    if rollout.finish_reason in (FinishReason.ABORTED, FinishReason.FAILED):
        return Failure(FailureKind.UNSCORED, f"the rollout was {rollout.finish_reason}", retryable=True)
    return None
