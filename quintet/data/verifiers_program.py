"""Runs an environment of the verifiers package. Its own interpreter runs it, so that it imports nothing of quintet.

    python -P verifiers_program.py ENV_ID '{"argument": 1}' rows train|eval
    python -P verifiers_program.py ENV_ID '{"argument": 1}' serve

It writes lines of JSON to the standard output, and nothing else: what the environment prints goes to the standard
error. The first line is {"ready": version of verifiers}, or {"error": what is wrong}, which is then the last.

`rows` writes one line {"row": {...}} for each row of the data set. `serve` reads {"id", "input", "base_url", "api_key",
"model"} a line, plays that episode beside the others and writes {"id", "reward"} or {"id", "error"} when it is over;
{"cancel": id} ends one that nobody waits for any more. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
from functools import partial
from typing import Any, TextIO

SERVED = ((0, 2), (0, 4))  # versions of verifiers: from, below. Both ends have other signatures


class Refused(Exception):
    """What the user is told."""


def load(env_id: str, arguments: dict[str, Any]) -> Any:
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise Refused(
            f"{sys.executable} has no package verifiers: pip install 'verifiers>=0.2,<0.4' 'openai<3'"
        ) from None
    if not SERVED[0] <= tuple(int(part) for part in version.split(".")[:2]) < SERVED[1]:
        raise Refused(f"verifiers {version} has another interface: pip install 'verifiers>=0.2,<0.4'")
    import verifiers

    try:
        environment = verifiers.load_environment(env_id, **arguments)
    except Exception as error:
        cause = error.__cause__ or error
        raise Refused(f"{error} ({type(cause).__name__}: {cause})") from error
    if environment.requires_group_rollouts:
        raise Refused(f"the rubric of {env_id} compares the samples of a group, which are played one by one here")
    return environment


def write_rows(environment: Any, split: str, out: TextIO) -> None:
    data = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    for number, row in enumerate(data):
        try:
            line = json.dumps({"row": row})
        except TypeError as error:
            raise Refused(f"row {number} of its data cannot be written as JSON: {error}") from error
        out.write(line + "\n")


class Server:
    """Plays episodes; `out` takes their results."""

    def __init__(self, environment: Any, out: TextIO) -> None:
        self._environment = environment
        self._out = out
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        reader = asyncio.StreamReader(limit=1 << 28)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            request = json.loads(line)
            if "cancel" in request:
                if request["cancel"] in self._running:
                    self._running[request["cancel"]].cancel()
                continue
            task = asyncio.ensure_future(self._answer(request))
            self._running[request["id"]] = task
            task.add_done_callback(partial(self._forget, request["id"]))
        for task in self._running.values():
            task.cancel()

    def _forget(self, key: int, _: asyncio.Task[None]) -> None:
        del self._running[key]

    async def _answer(self, request: dict[str, Any]) -> None:
        try:
            said = await self._play(request)
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        self._out.write(json.dumps({"id": request["id"]} | said) + "\n")
        self._out.flush()

    async def _play(self, request: dict[str, Any]) -> dict[str, Any]:
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with AsyncOpenAI(base_url=request["base_url"], api_key=request["api_key"]) as client:
            wrapped = OpenAIChatCompletionsClient(client)
            output = await self._environment.run_rollout(request["input"], wrapped, request["model"], {})
        if output["error"] is not None:
            return {"error": json.dumps(output["error"], default=str)}
        return {"reward": float(output["reward"])}


def main(env_id: str, arguments: str, mode: str, split: str = "train") -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the environment may print
    sys.path.insert(0, os.getcwd())  # a user's own environment is a module beside the recipe
    try:
        environment = load(env_id, json.loads(arguments))
        out.write(json.dumps({"ready": importlib.metadata.version("verifiers")}) + "\n")
        if mode == "rows":
            write_rows(environment, split, out)
    except Refused as error:
        out.write(json.dumps({"error": str(error)}) + "\n")
        return
    finally:
        out.flush()
    if mode == "serve":
        asyncio.run(Server(environment, out).serve())


if __name__ == "__main__":
    main(*sys.argv[1:])
