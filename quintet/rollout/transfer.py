"""How a prompt's KV gets from a prefill server to a decode server: the answer of `/prefill`, and who reads it.

The answer is empty lines as signs of life, one line of JSON (`Header`, or an error), then the KV. Where both servers
run on one machine as one user the KV is in memory that both map instead: an anonymous file of the prefill server, which
the system frees with its last user, whoever of them dies. It is open as long as the answer is.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Collection, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from quintet.rollout.engine.handoff import Header, Prefilled, PrefillFailed, kv_bytes
from quintet.rollout.engine.sequence import OnToken
from quintet.rollout.engine.worker import EngineWorker
from quintet.rollout.http import request_body
from quintet.rollout.streaming import with_signs_of_life
from quintet.types import Group, GroupId, QuintetError, Rollout, SamplingParams

SIGN_OF_LIFE_S = 10.0
_HELD_S = 60.0  # that a reader has to map shared memory
_FIRST_LINE = 2**26  # bytes of it at most
_PIECE = 2**18


def this_machine() -> str:
    """Equal for processes that can open each other's anonymous files: of one boot, PID namespace and user. "": none."""
    if sys.platform != "linux":
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


# -- who answers -----------------------------------------------------------------------------------


async def prefill_answer(found: Awaitable[Prefilled], reader: str) -> AsyncGenerator[bytes | memoryview, None]:
    """The body of an answer to a reader on machine `reader`. Closed early, it cancels what it waits for."""
    prefilled = None
    try:
        async with aclosing(with_signs_of_life(_once(found), SIGN_OF_LIFE_S)) as events:
            async for prefilled in events:
                if prefilled is None:
                    yield b"\n"
    except QuintetError as error:
        yield json.dumps({"error": {"message": str(error)}}).encode() + b"\n"
    if prefilled is None:
        return
    if prefilled.kv is None:
        yield _line(Header.of(prefilled))
    elif reader and reader == this_machine():
        with shared_memory(kv_bytes(prefilled.kv)) as path:
            yield _line(Header.of(prefilled, path))
            await asyncio.sleep(_HELD_S)  # ends when the reader, who has mapped it, closes the connection
    else:
        yield _line(Header.of(prefilled))
        numbers = kv_bytes(prefilled.kv)
        for at in range(
            0, len(numbers), _PIECE
        ):  # a transport keeps what it cannot send yet, and moves it at each send
            yield numbers[at : at + _PIECE]


@contextmanager
def shared_memory(numbers: memoryview) -> Iterator[str]:
    """A path under which other processes of this user can open a copy of `numbers` meanwhile."""
    file = os.memfd_create("quintet-kv")
    try:
        written = 0
        while written < len(numbers):  # one call writes 2 GiB at most
            written += os.write(file, numbers[written:])
        yield f"/proc/{os.getpid()}/fd/{file}"
    finally:
        os.close(file)


def _line(header: Header) -> bytes:
    return msgspec.json.encode(header) + b"\n"


async def _once(found: Awaitable[Prefilled]) -> AsyncIterator[Prefilled]:
    yield await found


# -- who asks --------------------------------------------------------------------------------------


class PrefillClient:
    """One prefill server as a decode server sees it. `shared`: use shared memory where both are on one machine.

    `silence_s`: how long it may say nothing at all."""

    def __init__(self, url: str, *, key: str, shared: bool = True, silence_s: float = 60.0) -> None:
        self.url = url
        self._machine = this_machine() if shared else ""
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(silence_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def prefill(self, body: dict[str, Any]) -> Prefilled:
        """The answer to the body of a `/prefill` request. Raises PrefillFailed when another try may succeed,
        QuintetError when the server refuses the request."""
        try:
            async with self._client.stream("POST", "/prefill", json=body | {"machine": self._machine}) as reply:
                if reply.status_code == 200:
                    return await _read(reply)
                await reply.aread()
                raise _refusal(f"prefill server {self.url}: {_said(reply)}", reply.status_code)
        except (httpx.HTTPError, msgspec.MsgspecError, OSError) as error:
            raise PrefillFailed(f"prefill server {self.url}: {type(error).__name__}: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()


def _refusal(message: str, status: int) -> QuintetError:
    """409: it has older weights; 500 and more: a fault of its own."""
    return PrefillFailed(message) if status == 409 or status >= 500 else QuintetError(message)


def _said(reply: httpx.Response) -> str:
    try:
        return str(reply.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {reply.status_code}: {reply.text[:200]}"


async def _read(reply: httpx.Response) -> Prefilled:
    chunks = reply.aiter_raw()
    head = b""
    async for chunk in chunks:
        head = (head + chunk).lstrip(b"\n") if not head else head + chunk
        if b"\n" in head or len(head) > _FIRST_LINE:
            break
    line, _, first = head.partition(b"\n")
    said = msgspec.json.decode(line)
    if "error" in said:
        raise PrefillFailed(str(said["error"]["message"]))
    header = msgspec.convert(said, Header)
    if header.shared:
        return header.with_kv(_mapped(header))
    numbers, at = bytearray(header.kv_bytes), len(first)
    numbers[:at] = first
    async for chunk in chunks:
        numbers[at : at + len(chunk)] = chunk
        at += len(chunk)
    if at < header.kv_bytes:
        raise PrefillFailed(f"{at} bytes of KV came, of {header.kv_bytes}")
    return header.with_kv(numbers)


def _mapped(header: Header) -> mmap.mmap:
    with open(header.shared, "rb") as file:
        return mmap.mmap(file.fileno(), header.kv_bytes, access=mmap.ACCESS_COPY)


class SplitDecoder:
    """`generate` of a `TokenWorker`: prompts are computed by a prefill server, what follows by this engine."""

    def __init__(self, worker: EngineWorker, source: PrefillClient) -> None:
        self._worker = worker
        self._source = source
        self._prefilling: list[GroupId] = []
        self._aborted: set[GroupId] = set()  # of those

    async def generate(
        self,
        prompts: list[Group],
        sampling_params: SamplingParams,
        weight_version: int,
        *,
        on_token: OnToken | None = None,
    ) -> list[Rollout]:
        """Raises PrefillFailed when the prompts cannot be had with this engine's weights."""
        made = await asyncio.gather(*(self._one(group, sampling_params, weight_version, on_token) for group in prompts))
        return [rollout for rollouts in made for rollout in rollouts]

    def abort(self, group_ids: Collection[GroupId]) -> None:
        """Groups that this engine does not have yet; they end as aborted when they get here."""
        self._aborted |= set(group_ids) & set(self._prefilling)

    async def close(self) -> None:
        await self._source.close()

    async def _one(
        self, group: Group, params: SamplingParams, weight_version: int, on_token: OnToken | None
    ) -> list[Rollout]:
        found, aborted = await self._prefill(group, params, weight_version)
        work = asyncio.ensure_future(self._worker.decode(group, params, found, on_token=on_token))
        try:
            if aborted:
                await asyncio.sleep(0)  # the engine is told of the group, then of its end
                await self._worker.abort([group.group_id])
            return await work
        finally:
            work.cancel()

    async def _prefill(self, group: Group, params: SamplingParams, weight_version: int) -> tuple[Prefilled, bool]:
        prompt, sampling = request_body(group, params)
        version = max(weight_version, (await self._worker.health_check()).version)
        self._prefilling.append(group.group_id)
        try:
            found = await self._source.prefill({"prompt": prompt, "sampling": sampling, "weight_version": version})
            broken = next((r.failure for r in found.rollouts if r.failure and r.failure.retryable), None)
            if broken is not None:
                raise PrefillFailed(f"prefill server {self._source.url}: {broken.message}")
            return found, group.group_id in self._aborted
        finally:
            self._prefilling.remove(group.group_id)
            if group.group_id not in self._prefilling:
                self._aborted.discard(group.group_id)
