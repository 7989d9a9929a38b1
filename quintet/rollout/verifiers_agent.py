"""Episodes of an environment of the verifiers package, unchanged: it talks to the gateway as to any OpenAI server, and
its own rubric gives the reward.

The environment runs in a process of its own, for all episodes of a run: it may want other versions of packages than we
do, it sets signal handlers, and its tools may block. A process that dies fails the episodes that were in it; the next
one starts it again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import tempfile
from collections.abc import Mapping
from typing import Any

from quintet.data.verifiers import SOURCE, verifiers_command
from quintet.rollout.agents import AgentTask
from quintet.types import QuintetError

_log = logging.getLogger(__name__)
_LINE = 1 << 28  # bytes of one message at most


class EpisodeFailed(Exception):
    """What the environment said of an episode that it could not bring to its end."""


class VerifiersAgent:
    """`run` is an agent in the sense of `agents.py`. `args` as `data.verifiers.verifiers_command` takes them."""

    def __init__(self, env_id: str, args: Mapping[str, Any]) -> None:
        self._name = f"{SOURCE}{env_id}"
        self._command = [*verifiers_command(env_id, args), "serve"]
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[float]] = {}
        self._said = tempfile.TemporaryFile("a+b")  # noqa: SIM115 (open until `close`)

    async def start(self) -> None:
        """Returns when the environment is loaded. Raises QuintetError when it cannot be."""
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._said,
                limit=_LINE,
                start_new_session=True,  # Ctrl-C is for us: the step in progress still needs its episodes
            )
            first = await self._line(self._process)
            if "ready" not in first:
                await self._process.wait()
                raise QuintetError(f"environment.kind: {self._name}: {first.get('error', self._last_words())}")
            _log.info("%s runs on verifiers %s in process %d", self._name, first["ready"], self._process.pid)
            self._reading = asyncio.ensure_future(self._read(self._process))

    async def run(self, task: AgentTask) -> float:
        """One episode; its reward. Raises EpisodeFailed, QuintetError."""
        if "verifiers" not in task.metadata:
            raise EpisodeFailed(f"the prompt is not of data.source {self._name}")
        await self.start()
        assert self._process is not None and self._process.stdin is not None
        number, result = next(self._numbers), asyncio.get_running_loop().create_future()
        self._waiting[number] = result
        try:
            self._write({"id": number, "input": task.metadata["verifiers"], "model": task.model} | _address(task))
            return await result
        except asyncio.CancelledError:
            self._write({"cancel": number})
            raise
        finally:
            del self._waiting[number]

    async def close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), 10.0)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        if self._reading is not None:
            await self._reading
        self._said.close()

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand results to those who wait for them, until the process ends; then tell those who are left."""
        while message := await self._line(process):
            waiting = self._waiting.get(message["id"])
            if waiting is None or waiting.done():
                continue  # it was cancelled
            if "error" in message:
                waiting.set_exception(EpisodeFailed(f"{self._name}: {message['error']}"))
            else:
                waiting.set_result(message["reward"])
        await process.wait()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EpisodeFailed(f"{self._name}: its process ended: {self._last_words()}"))

    async def _line(self, process: asyncio.subprocess.Process) -> dict[str, Any]:
        """The next message; empty at the end."""
        assert process.stdout is not None
        line = await process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {}
        return found

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-600:].decode(errors="replace").strip()


def _address(task: AgentTask) -> dict[str, str]:
    return {"base_url": task.base_url, "api_key": task.api_key}
