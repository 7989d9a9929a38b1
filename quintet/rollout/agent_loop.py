"""The agent loop: a rollout worker that plays whole episodes over one that samples turns.

Hundreds of episodes run at once; the engine batches their turns. Each episode is one trajectory: what the policy
sampled is trained, what the environment said is masked. All of it together is bounded by `max_tokens`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from quintet.models.tokenizer import PromptEncoder, Tokenizer
from quintet.protocols import RolloutWorker
from quintet.rollout.config import EnvironmentConfig
from quintet.rollout.engine.sampling import sequence_key
from quintet.rollout.environment import (
    Action,
    Environment,
    EnvironmentFailure,
    MakeEnvironment,
    Message,
    Observation,
    Outcome,
    Step,
)
from quintet.rollout.transcript import Transcript
from quintet.types import (
    Episode,
    Failure,
    FailureKind,
    FinishReason,
    Group,
    GroupId,
    Health,
    Prompt,
    Rollout,
    SamplingParams,
    WeightRef,
)

T = TypeVar("T")
_log = logging.getLogger(__name__)
_LIMITS = (Outcome.MAX_TURNS, Outcome.CONTEXT)


class AgentLoopWorker:
    """`RolloutWorker` whose rollouts are episodes of `make()`'s environments. `worker` samples each turn.

    `context`: the model's, in tokens. A turn's draws go on where the last one's ended, so that an episode depends on
    (random seed, group id, sample index) and its environment alone. Samples of one group get the same environment seed.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        make: MakeEnvironment,
        *,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        config: EnvironmentConfig,
        context: int,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.worker = worker
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.config = config
        self.context = context
        self._make = make
        self._on_close = on_close
        self._places = asyncio.Semaphore(config.max_sessions)
        self._running: dict[GroupId, set[_Running]] = {}

    async def generate(
        self, prompts: list[Group], sampling_params: SamplingParams, weight_version: int
    ) -> list[Rollout]:
        episodes = [
            self._episode(group, index, sampling_params, weight_version)
            for group in prompts
            for index in range(sampling_params.first_sample, sampling_params.first_sample + sampling_params.n)
        ]
        return list(await asyncio.gather(*episodes))

    async def update_weights(self, weight_path: WeightRef, version: int) -> None:
        await self.worker.update_weights(weight_path, version)

    async def health_check(self) -> Health:
        return await self.worker.health_check()

    async def abort(self, group_ids: list[GroupId]) -> None:
        """The turn in progress is cut; episodes that wait for their environment end when it answers."""
        for group_id in group_ids:
            for running in self._running.get(group_id, ()):
                running.aborted = True
        await self.worker.abort(group_ids)

    async def close(self) -> None:
        if self._on_close is not None:
            await self._on_close()
        await self.worker.close()  # type: ignore[attr-defined]

    async def _episode(self, group: Group, index: int, params: SamplingParams, version: int) -> Rollout:
        async with self._places:
            running = _Running(self, group, index, params, version)
            self._running.setdefault(group.group_id, set()).add(running)
            try:
                return await running.play(self._make)
            finally:
                self._running[group.group_id].discard(running)
                if not self._running[group.group_id]:
                    del self._running[group.group_id]


class _Running:
    """One episode."""

    def __init__(self, loop: AgentLoopWorker, group: Group, index: int, params: SamplingParams, version: int) -> None:
        self.aborted = False
        self._loop = loop
        self._group = group
        self._index = index
        self._params = params
        self._version = version
        self._transcript = Transcript(group.prompt.token_ids)
        self._messages: list[Message] = []
        self._tools: list[dict[str, Any]] | None = None
        self._rewards: list[float] = []
        self._episode = Episode(Outcome.DONE)

    async def play(self, make: MakeEnvironment) -> Rollout:
        environment: Environment | None = None
        try:
            environment = make()
            return await self._turns(environment)
        except EnvironmentFailure as error:
            return self._end(FinishReason.FAILED, "", Failure(error.kind, str(error), error.retryable))
        finally:
            if environment is not None:
                await self._close(environment)

    async def _turns(self, environment: Environment) -> Rollout:
        await self._begin(environment)
        for turn in range(self._loop.config.max_turns):
            room = self._room()
            if room <= 0:
                return await self._limit(environment, Outcome.CONTEXT, "")
            sampled = await self._sample(environment, room)
            if sampled.failure is not None or sampled.finish_reason is FinishReason.ABORTED:
                return self._end(sampled.finish_reason, sampled.text, sampled.failure)
            step = await self._act(environment, sampled)
            if self.aborted:
                return self._end(FinishReason.ABORTED, sampled.text)
            if step.done and step.outcome in _LIMITS:
                return await self._limit(environment, Outcome(step.outcome), sampled.text)
            if step.done:
                self._episode.outcome = step.outcome
                return self._end(FinishReason.STOP, sampled.text)
            if not self._see(step.observation):
                return await self._limit(environment, Outcome.CONTEXT, sampled.text)
            if turn + 1 == self._loop.config.max_turns:
                return await self._limit(environment, Outcome.MAX_TURNS, sampled.text)
        raise AssertionError("environment.max_turns is at least 1")

    async def _begin(self, environment: Environment) -> None:
        """The prompt, with the tools in it and what the environment says first."""
        prompt, encoder = self._group.prompt, self._loop.encoder
        key = sequence_key(self._params.seed, self._group.group_id, -1)
        first = await self._guard(environment.reset(prompt, key % 2**31), "reset")
        self._tools = environment.tools
        if not encoder.uses_chat_template:
            if first is not None:
                self._transcript.add_context(self._loop.tokenizer.encode(_plain(first)))
            return
        self._messages = encoder.conversation(prompt.messages, prompt.text)
        if isinstance(first, list):
            self._messages += first
        if self._tools or isinstance(first, list):
            self._transcript = Transcript(encoder.encode(self._messages, self._tools))
        if isinstance(first, str):
            self._transcript.add_context(self._loop.tokenizer.encode(first))

    def _room(self) -> int:
        transcript = self._transcript
        return min(self._params.max_tokens - len(transcript.response_ids), self._loop.context - len(transcript.ids))

    async def _sample(self, environment: Environment, room: int) -> Rollout:
        params = msgspec.structs.replace(
            self._params,
            n=1,
            first_sample=self._index,
            first_position=self._params.first_position + len(self._transcript.response_ids),
            max_tokens=min(room, self._loop.config.turn_tokens or room),
            stop=(*self._params.stop, *environment.stop),
        )
        turn = Group(self._group.group_id, Prompt(self._group.prompt.id, self._transcript.ids))
        (sampled,) = await self._loop.worker.generate([turn], params, self._version)
        self._transcript.add_rollout(sampled)
        return sampled

    async def _act(self, environment: Environment, sampled: Rollout) -> Step:
        text = self._loop.tokenizer.decode(sampled.response_ids)
        step = await self._guard(environment.step(Action(text, sampled.finish_reason)), "step")
        self._messages.append({"role": "assistant", "content": text})
        self._episode.tool_calls += step.tool_calls
        self._episode.malformed_calls += step.malformed_calls
        if step.reward is not None:
            self._rewards.append(step.reward)
        return step

    def _see(self, observation: Observation | None) -> bool:
        """Append what the environment said; False when it leaves no room to answer."""
        ids = self._observed(observation) if observation else []
        self._transcript.add_context(ids)
        return self._room() > 0

    def _observed(self, observation: Observation) -> list[int]:
        tokenizer, encoder = self._loop.tokenizer, self._loop.encoder
        if isinstance(observation, str) or not encoder.uses_chat_template:
            return tokenizer.encode(_plain(observation))
        answer = len(self._messages) - 1
        self._messages += observation
        ended = self._transcript.response_ids[-1] in tokenizer.eos_ids
        return encoder.encode_after(self._messages, answer, ended=ended, tools=self._tools)

    async def _limit(self, environment: Environment, outcome: Outcome, text: str) -> Rollout:
        self._episode.outcome = outcome
        reward = await self._guard(environment.finish(outcome), "finish")
        if reward is not None:
            self._rewards.append(reward)
        return self._end(FinishReason.LENGTH, text)

    def _end(self, reason: FinishReason, text: str, failure: Failure | None = None) -> Rollout:
        self._episode.reward = sum(self._rewards) if self._rewards else None
        return self._transcript.rollout(
            self._group.group_id,
            self._index,
            text=text,
            finish_reason=reason,
            episode=self._episode,
            failure=failure,
        )

    async def _guard(self, work: Awaitable[T], what: str) -> T:
        """An exception or a time-out of the environment is its failure, typed."""
        timeout_s = self._loop.config.timeout_s
        try:
            return await asyncio.wait_for(work, timeout_s)
        except EnvironmentFailure:
            raise
        except TimeoutError:
            message = f"the environment's {what} took longer than {timeout_s:g} s"
            raise EnvironmentFailure(message, kind=FailureKind.TIMEOUT) from None
        except Exception as error:
            message = f"the environment's {what} raised {type(error).__name__}: {error}"
            _log.warning("%s", message, exc_info=True)
            raise EnvironmentFailure(message) from error

    async def _close(self, environment: Environment) -> None:
        try:
            await self._guard(environment.close(), "close")
        except EnvironmentFailure as error:  # the episode itself is whole
            _log.warning("group %s, sample %d: %s", self._group.group_id, self._index, error)


def _plain(observation: Observation) -> str:
    return observation if isinstance(observation, str) else "".join(str(m.get("content") or "") for m in observation)
