"""The HTTP client that served reward models and judges share: JSON in, JSON out, to one of several equal servers.

A call goes to the server with the fewest requests in flight. What may pass (429, 408, 5xx, a timeout, a broken
connection, an answer that is no JSON) is tried again, on another server where there is one, after an exponential pause
with jitter, or after what `Retry-After` asks for. A server that failed `breaker_faults` times in a row is left alone
for `breaker_s` seconds (circuit breaker), then gets one probe; a 429 is not a fault, the server is well. When all are
resting the call waits. What is left at the end is a FunctionFailed, never a value.

Requests without an answer may have been computed: the endpoints used here only read.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import json
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, field_validator

from quintet.reward.errors import FunctionFailed
from quintet.types import FailureKind, QuintetError

Item = TypeVar("Item")
Result = TypeVar("Result")


class HttpOptions(BaseModel):
    """Where the servers are and how patient we are with them."""

    model_config = ConfigDict(extra="forbid")

    urls: list[str] = Field(min_length=1, description="one URL, or several servers of the same model")
    api_key_env: str | None = Field(None, description="name of the environment variable that holds the API key")
    timeout_s: float = Field(60.0, gt=0, description="of one request")
    deadline_s: float = Field(300.0, gt=0, description="of one call with its retries, not counting the queue")
    attempts: int = Field(5, ge=1)
    backoff_s: float = Field(0.5, gt=0, description="pause before the second attempt; doubles with each further one")
    max_backoff_s: float = Field(30.0, gt=0)
    concurrency: int = Field(64, ge=1, description="requests in flight, over all servers")
    breaker_faults: int = Field(5, ge=1, description="faults in a row after which a server is left alone")
    breaker_s: float = Field(10.0, gt=0, description="for so long, until one request probes it")

    @field_validator("urls", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("urls")
    @classmethod
    def _with_scheme(cls, urls: list[str]) -> list[str]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} does not begin with http:// or https://")
        return [url.rstrip("/") for url in urls]


@dataclass
class Breaker:
    """Closed -> open after `faults` faults in a row -> half open, one probe, after `rest_s` -> closed or open again."""

    faults: int
    rest_s: float
    _in_a_row: int = 0
    _opened_at: float | None = None
    _probing: bool = False

    def wait_s(self, now: float) -> float:
        """Seconds until a request may go out; infinite while a probe is on its way."""
        if self._opened_at is None:
            return 0.0
        return math.inf if self._probing else max(0.0, self._opened_at + self.rest_s - now)

    def begin(self) -> None:
        self._probing = self._opened_at is not None

    def succeed(self) -> None:
        self._in_a_row, self._opened_at, self._probing = 0, None, False

    def fail(self, now: float) -> None:
        self._in_a_row += 1
        if self._probing or self._in_a_row >= self.faults:
            self._opened_at, self._probing = now, False

    def abandon(self) -> None:
        """The request was given up: nothing is known of the server."""
        self._probing = False


@dataclass
class _Server:
    url: str
    breaker: Breaker
    in_flight: int = 0


class _Passing(Exception):
    """A fault that may pass. `blames`: it speaks against the server; `pause_s`: what the server asked for."""

    def __init__(
        self, message: str, kind: FailureKind = FailureKind.TRANSPORT, *, blames: bool = True, pause_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.blames = blames
        self.pause_s = pause_s


class JsonClient:
    """Belongs to the loop that `start` runs in. `start` raises QuintetError when the API key is not set."""

    def __init__(self, function: str, options: HttpOptions) -> None:
        self._function = function
        self._options = options
        self._servers = [_Server(url, Breaker(options.breaker_faults, options.breaker_s)) for url in options.urls]
        self._jitter = random.Random()  # not keyed: it spreads load and changes no result

    async def start(self) -> None:
        self._slots = asyncio.Semaphore(self._options.concurrency)
        self._changed = asyncio.Event()
        limits = httpx.Limits(max_connections=self._options.concurrency)
        self._http = httpx.AsyncClient(headers=self._headers(), limits=limits, timeout=None)

    async def close(self) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The decoded answer. Raises FunctionFailed: retryable when the servers could not be reached or were unwell,
        not when one refused the request (another 4xx)."""
        async with self._slots:
            seen: list[_Passing] = []
            try:
                async with asyncio.timeout(self._options.deadline_s):
                    return await self._attempts(path, body, seen)
            except TimeoutError:
                last = f"; the last fault: {seen[-1]}" if seen else ""
                message = f"no answer within deadline_s {self._options.deadline_s:g}{last}"
                raise FunctionFailed(message, FailureKind.TIMEOUT, retryable=True) from None

    def _headers(self) -> dict[str, str]:
        name = self._options.api_key_env
        if name is None:
            return {}
        if not (key := os.environ.get(name)):
            raise QuintetError(
                f"reward function `{self._function}`: the environment variable {name} (api_key_env) is not set"
            )
        return {"Authorization": f"Bearer {key}"}

    async def _attempts(self, path: str, body: Mapping[str, Any], seen: list[_Passing]) -> Any:
        last: _Server | None = None
        for attempt in range(self._options.attempts):
            if seen:
                await asyncio.sleep(max(seen[-1].pause_s, self._pause_s(attempt)))
            last = await self._choose(avoid=last)
            try:
                return await self._send(last, path, body)
            except _Passing as fault:
                seen.append(fault)
        message = f"{seen[-1]} (attempt {len(seen)} of {self._options.attempts})"
        raise FunctionFailed(message, seen[-1].kind, retryable=True)

    def _pause_s(self, attempt: int) -> float:
        longest = min(self._options.backoff_s * 2 ** (attempt - 1), self._options.max_backoff_s)
        return longest * self._jitter.uniform(0.5, 1.0)

    async def _choose(self, avoid: _Server | None) -> _Server:
        """The least busy server that may be asked, rather another one than `avoid`; waits while all are resting."""
        loop = asyncio.get_running_loop()
        while True:
            waits = {id(s): s.breaker.wait_s(loop.time()) for s in self._servers}
            ready = [s for s in self._servers if waits[id(s)] == 0.0]
            if ready:
                return min(ready, key=lambda s: (s is avoid, s.in_flight))
            self._changed.clear()
            soonest = min(waits.values())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if math.isinf(soonest) else soonest)

    async def _send(self, server: _Server, path: str, body: Mapping[str, Any]) -> Any:
        server.breaker.begin()
        server.in_flight += 1
        try:
            answer = await self._request(server.url + path, body)
        except _Passing as fault:
            if fault.blames:
                server.breaker.fail(asyncio.get_running_loop().time())
            else:
                server.breaker.succeed()
            raise
        except FunctionFailed:
            server.breaker.succeed()  # it refused, so it is there
            raise
        except BaseException:
            server.breaker.abandon()
            raise
        else:
            server.breaker.succeed()
            return answer
        finally:
            server.in_flight -= 1
            self._changed.set()

    async def _request(self, url: str, body: Mapping[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._options.timeout_s):
                response = await self._http.post(url, json=body)
        except TimeoutError:
            message = f"{url} did not answer within timeout_s {self._options.timeout_s:g}"
            raise _Passing(message, FailureKind.TIMEOUT) from None
        except httpx.TransportError as error:
            raise _Passing(f"{url}: {type(error).__name__}: {error}".rstrip(": ")) from error
        status = response.status_code
        if status in (408, 429) or status >= 500:
            pause_s = _retry_after_s(response.headers.get("Retry-After"))
            raise _Passing(f"{url} answered {status}{_excerpt(response)}", blames=status != 429, pause_s=pause_s)
        if status != 200:
            raise FunctionFailed(f"{url} answered {status}{_excerpt(response)}", FailureKind.TRANSPORT)
        try:
            return response.json()
        except ValueError as error:
            raise _Passing(f"{url} answered no JSON{_excerpt(response)}") from error


def _retry_after_s(value: str | None) -> float:
    """Seconds, or an HTTP date (RFC 9110, 10.2.3); 0 for anything else."""
    if value is None:
        return 0.0
    if value.strip().isdigit():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return 0.0


def _excerpt(response: httpx.Response) -> str:
    text = " ".join(response.text.split())
    return f": {text[:200]}" if text else ""


@dataclass
class Batcher(Generic[Item, Result]):
    """Requests that come within `window_s` go out together, at most `max_batch` at once.

    `send` takes the items and gives one result or one FunctionFailed each; what it raises reaches all of them.
    """

    send: Callable[[Sequence[Item]], Awaitable[Sequence[Result | FunctionFailed]]]
    window_s: float
    max_batch: int
    _waiting: list[tuple[Item, asyncio.Future[Result]]] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def submit(self, item: Item) -> Result:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((item, future))
        if len(self._waiting) >= self.max_batch:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(self.window_s, self._flush)
        return await future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        task = asyncio.ensure_future(self._deliver(batch))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _deliver(self, batch: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        results: Sequence[Result | FunctionFailed]
        try:
            results = await self.send([item for item, _ in batch])
        except FunctionFailed as error:
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():  # its caller was cancelled
                continue
            if isinstance(result, FunctionFailed):
                future.set_exception(result)
            else:
                future.set_result(result)


def digest_of(value: Any) -> bytes:
    """Canonical JSON bytes, for keys."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
