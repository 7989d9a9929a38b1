"""What a multi-turn rollout takes place in: the policy acts, the environment answers, until one of them is done.

Two kinds of ends are told apart. What the policy brings about itself (no turns or context left, a call that does not
parse) is an *outcome*, with its reason, scored as the environment says. What the environment or a tool's host does not
manage (an exception, a time-out) is a *failure*: typed, never a reward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from quintet.types import FailureKind, FinishReason, Prompt

Message = dict[str, Any]
Observation = str | list[Message]  # plain text, or chat messages where the model has a chat template


class Outcome(StrEnum):
    """Why an episode ended."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    CONTEXT = "context"  # rollout.max_tokens, or the model's context
    MALFORMED = "malformed_call"


@dataclass(frozen=True)
class Action:
    """One turn of the policy: its text, a stop string included. `finish_reason` length: it was cut."""

    text: str
    finish_reason: FinishReason


@dataclass(frozen=True)
class Step:
    """The environment's answer. `reward` is added to the episode's; None leaves the verdict to reward functions."""

    observation: Observation | None = None
    done: bool = False
    reward: float | None = None
    outcome: str = Outcome.DONE  # counts when done
    tool_calls: int = 0
    malformed_calls: int = 0


class Environment(Protocol):
    """One episode. Methods may raise `EnvironmentFailure`; any other exception is one of kind `environment`."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end a turn, beside the end of the answer."""
        ...

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """JSON schemas for the chat template, in OpenAI's form."""
        ...

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        """Begin; what the policy sees after the prompt, if anything."""
        ...

    async def step(self, action: Action) -> Step: ...

    async def finish(self, outcome: Outcome) -> float | None:
        """The policy ran out of turns or context: what that is worth."""
        ...

    async def close(self) -> None:
        """Called once, whatever happened."""
        ...


MakeEnvironment = Callable[[], Environment]


class EnvironmentFailure(Exception):
    """Not the policy's doing. The sample is left out of advantage and loss."""

    def __init__(self, message: str, *, kind: FailureKind = FailureKind.ENVIRONMENT, retryable: bool = True) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable


class TextEnvironment:
    """What most environments have in common: no tools, no stop strings, nothing to end, limits worth `limit_reward`."""

    stop: tuple[str, ...] = ()
    tools: list[dict[str, Any]] | None = None

    def __init__(self, limit_reward: float | None = None) -> None:
        self._limit_reward = limit_reward

    async def finish(self, outcome: Outcome) -> float | None:
        return self._limit_reward

    async def close(self) -> None:
        return
