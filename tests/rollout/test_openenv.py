"""Environments behind an OpenEnv server: the messages of its `/ws` route, and the real server where it is installed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.server import ServerConnection, serve

from quintet.rollout.config import EnvironmentConfig
from quintet.rollout.environment import Action, EnvironmentFailure, Step
from quintet.rollout.environments import EnvironmentFactory, check_environment
from quintet.types import FinishReason, Prompt, QuintetError

SERVER = Path(__file__).parents[1] / "data" / "openenv_server.py"
PYTHON = Path(os.environ.get("QUINTET_OPENENV_PYTHON", ".venv-openenv/bin/python"))
PROMPT = Prompt("p", [], metadata={"secret": "b", "unknown": 1})


def environment(url: str, **args: Any) -> Any:
    return EnvironmentFactory(EnvironmentConfig(kind="openenv", args={"url": url} | args))()


def say(text: str) -> Action:
    return Action(text, FinishReason.STOP)


async def guess(url: str, texts: list[str], **args: Any) -> tuple[Any, list[Step]]:
    """An episode: what was seen first, and the steps."""
    playing = environment(url, **args)
    try:
        return await playing.reset(PROMPT, 7), [await playing.step(say(text)) for text in texts]
    finally:
        await playing.close()


class Recorded:
    """Answers as openenv-core 0.3.0 does, in the same shape; keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    async def __call__(self, connection: ServerConnection) -> None:
        assert connection.request is not None and connection.request.path == "/ws"
        async for raw in connection:
            message = json.loads(raw)
            self.told.append(message)
            text = message["data"].get("guess")
            if text == "die":
                return
            if text == "fail":
                answer: dict[str, Any] = {"message": "boom", "code": "EXECUTION_ERROR"}
                await connection.send(json.dumps({"type": "error", "data": answer}))
                continue
            seen = {"hint": f"heard {text}", "tries": len(self.told)}
            answer = {"observation": seen, "reward": None if text is None else 0.5, "done": text == "b"}
            await connection.send(json.dumps({"type": "observation", "data": answer}))


def with_server(handler: Recorded, program: Callable[[str], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with serve(handler, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            return await program(f"http://127.0.0.1:{port}/")

    return asyncio.run(run())


def test_text_goes_into_one_field_and_is_read_from_another() -> None:
    handler = Recorded()
    first, steps = with_server(handler, lambda url: guess(url, ["a", "b"], action="guess", observation="hint"))
    assert first == [{"role": "user", "content": "heard None"}]
    assert [(s.observation, s.reward, s.done) for s in steps] == [
        ([{"role": "user", "content": "heard a"}], 0.5, False),
        ([{"role": "user", "content": "heard b"}], 0.5, True),
    ]
    assert handler.told == [
        {"type": "reset", "data": {"secret": "b", "unknown": 1, "seed": 7}},
        {"type": "step", "data": {"guess": "a"}},
        {"type": "step", "data": {"guess": "b"}},
    ]


def test_an_observation_without_a_named_field_is_read_as_json() -> None:
    first, _ = with_server(Recorded(), lambda url: guess(url, []))
    assert first == [{"role": "user", "content": '{"hint": "heard None", "tries": 1}'}]


@pytest.mark.parametrize(
    ("texts", "args", "said"),
    [
        (["fail"], {}, "step: EXECUTION_ERROR: boom"),
        (["die"], {}, "broke off in a step"),
        ([], {"observation": "colour"}, "has no 'colour'; it has hint, tries"),
    ],
)
def test_what_the_server_does_not_manage_is_its_failure(texts: list[str], args: dict[str, Any], said: str) -> None:
    with pytest.raises(EnvironmentFailure, match=said):
        with_server(Recorded(), lambda url: guess(url, texts, action="guess", **args))


def test_a_server_that_is_not_there_is_a_failure_and_a_recipe_without_a_url_an_error() -> None:
    with pytest.raises(EnvironmentFailure, match="cannot be reached"):
        asyncio.run(guess("http://127.0.0.1:9", []))
    with pytest.raises(QuintetError, match="needs the server's url"):
        check_environment(EnvironmentConfig(kind="openenv"))


@pytest.fixture
def real_server(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen([str(PYTHON), str(SERVER), str(port)], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 120
        while True:
            assert process.poll() is None and time.monotonic() < until, (tmp_path / "server.log").read_text()
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.ConnectError:
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.heavy
@pytest.mark.skipif(not PYTHON.exists(), reason="no environment with openenv-core (QUINTET_OPENENV_PYTHON)")
def test_episodes_on_a_real_openenv_server_run_side_by_side(real_server: str) -> None:
    async def several() -> list[tuple[Any, list[Step]]]:
        texts = (["a", "b"], ["b"], ["a", "c", "b"])
        return await asyncio.gather(*(guess(real_server, t, action="guess", observation="hint") for t in texts))

    for (first, steps), tries in zip(asyncio.run(several()), (2, 1, 3), strict=True):
        assert first == [{"role": "user", "content": "guess a letter (random seed 7)"}]
        assert [s.done for s in steps] == [False] * (tries - 1) + [True]
        assert [s.reward for s in steps] == [0.0] * (tries - 1) + [1.0]
        assert steps[-1].observation == [{"role": "user", "content": f"right after {tries}"}]
