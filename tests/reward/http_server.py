"""A small HTTP server on a real socket that answers what a test scripts, misbehaviour included."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Answer:
    """`body`: JSON, or bytes as they are. `status` 0: the connection is cut instead."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: Any


Script = Callable[[int, Request], Answer]  # of the request's number


class HttpServer:
    """`requests` are those that came so far; `most_at_once` how many were open together."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.most_at_once = 0
        self._open = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _stop(self) -> None:
        self._server.close()
        running = asyncio.all_tasks() - {asyncio.current_task()}
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (head := await self._head(reader)) is not None:
            lines = head.decode().split("\r\n")
            headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines[1:] if line)}
            body = json.loads(await reader.readexactly(int(headers["content-length"])))
            request = Request(lines[0].split()[1], headers, body)
            self.requests.append(request)
            self._open += 1
            self.most_at_once = max(self.most_at_once, self._open)
            answer = self.script(len(self.requests) - 1, request)
            await asyncio.sleep(answer.after_s)
            self._open -= 1
            if answer.status == 0:
                break
            writer.write(_encoded(answer))
            await writer.drain()
        writer.close()

    async def _head(self, reader: asyncio.StreamReader) -> bytes | None:
        try:
            return await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


def _encoded(answer: Answer) -> bytes:
    body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    headers = {"Content-Length": str(len(body)), **answer.headers}
    head = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    return f"HTTP/1.1 {answer.status} X\r\n{head}\r\n".encode() + body


@contextmanager
def serving(*answers: Answer | Script) -> Iterator[HttpServer]:
    """Answers in turn, the last one for ever; or one function."""
    if len(answers) == 1 and callable(answers[0]):
        script = answers[0]
    else:
        script = lambda n, _request: answers[min(n, len(answers) - 1)]  # type: ignore[assignment, return-value]  # noqa: E731
    server = HttpServer(script)
    try:
        yield server
    finally:
        server.close()
