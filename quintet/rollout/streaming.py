"""Tokens as they are sampled: from an engine's thread to an async consumer, and from ids to text that can be shown."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from typing import Protocol, TypeVar

from quintet.rollout.engine.sequence import OnToken
from quintet.types import Group, GroupId, Health, QuintetError, Rollout, SampledToken, SamplingParams, WeightRef

T = TypeVar("T")


class OutdatedWeights(QuintetError):
    """A worker has older weights than a request asks for, e.g. because it was started again."""


class Generator(Protocol):
    """`RolloutWorker.generate` that tells of each token as it is sampled."""

    async def generate(
        self,
        prompts: list[Group],
        sampling_params: SamplingParams,
        weight_version: int,
        *,
        on_token: OnToken | None = None,
    ) -> list[Rollout]: ...


class TokenWorker(Generator, Protocol):
    """A `RolloutWorker` that tells of each token as it is sampled; every worker of this package is one."""

    async def update_weights(self, weight_path: WeightRef, version: int) -> None: ...

    async def health_check(self) -> Health: ...

    async def abort(self, group_ids: list[GroupId]) -> None: ...


async def stream(
    worker: Generator, groups: list[Group], params: SamplingParams, version: int
) -> AsyncGenerator[SampledToken | list[Rollout], None]:
    """Tokens in the order in which they are sampled, then the rollouts. A consumer that leaves early (`aclose`) takes
    the samples out of the engine's batch."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[SampledToken | None] = asyncio.Queue()

    def on_token(token: SampledToken) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, token)

    work = asyncio.ensure_future(worker.generate(groups, params, version, on_token=on_token))
    work.add_done_callback(lambda _: queue.put_nowait(None))  # scheduled after every token's own call
    try:
        while (token := await queue.get()) is not None:
            yield token
        yield await work
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([work])


async def with_signs_of_life(events: AsyncIterator[T], every_s: float) -> AsyncGenerator[T | None, None]:
    """`events`, and None whenever nothing has come for `every_s`: a reader can tell slow from dead."""
    upcoming = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait([upcoming], timeout=every_s)
            if not done:
                yield None
                continue
            try:
                event = upcoming.result()
            except StopAsyncIteration:
                return
            yield event
            upcoming = asyncio.ensure_future(anext(events))
    finally:
        upcoming.cancel()
        await asyncio.wait([upcoming])


class TextStream:
    """Text of one sample, handed out as soon as later tokens cannot change it.

    Held back are bytes that do not make a whole character yet and what may be the beginning of one of `barriers`
    (stop strings, the mark of a tool call); from a barrier on nothing is shown. `finish` gives the rest.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], *, barriers: Sequence[str] = (), silent_ids: Collection[int] = ()
    ) -> None:
        self._decode = decode
        self._barriers = tuple(barriers)
        self._silent = silent_ids
        self._ids: list[int] = []
        self._window = 0  # decoding starts here: the ids before it have been shown
        self._read = 0
        self._text = ""  # decoded, not yet shown
        self._shown = 0  # characters handed out
        self._closed = False

    def push(self, token_id: int) -> str:
        """The text that this token allows to be shown."""
        if self._closed or token_id in self._silent:
            return ""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window : self._read])
        now = self._decode(self._ids[self._window :])
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._text += now[len(before) :]
            self._window, self._read = self._read, len(self._ids)
        return self._release()

    def finish(self, text: str) -> str:
        """What is missing of the sample's whole text."""
        return text[self._shown :]

    def _release(self) -> str:
        found = [at for barrier in self._barriers if (at := self._text.find(barrier)) >= 0]
        if found:
            self._closed = True
            ready = self._text[: min(found)]
        else:
            ready = self._text[: len(self._text) - held_back(self._text, self._barriers)]
        self._text = self._text[len(ready) :]
        self._shown += len(ready)
        return ready


def held_back(text: str, barriers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a barrier."""
    longest = min(len(text), max(map(len, barriers), default=1) - 1)
    for size in range(longest, 0, -1):
        if any(len(barrier) > size and barrier.startswith(text[-size:]) for barrier in barriers):
            return size
    return 0
