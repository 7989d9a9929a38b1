"""`quintet serve sandbox`: SandboxFusion's answers, keys, limits, back-pressure, metrics."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from quintet.cli.main import app
from quintet.sandbox.protocol import Limits, Outcome, Program, RunResult, SandboxFailure
from quintet.sandbox.server import SandboxService
from quintet.serving import ThreadedServer
from quintet.types import QuintetError

HEADERS = {"Authorization": "Bearer k"}
LIMITS = Limits(wall_s=2.0, cpu_s=2.0, memory_mb=256)


class Scripted:
    """A sandbox that gives one result for everything and notes what it was asked."""

    def __init__(self, result: RunResult | SandboxFailure) -> None:
        self.result = result
        self.asked: list[tuple[Program, Limits]] = []
        self.release = asyncio.Event()
        self.release.set()
        self.closed = False
        self.loop: asyncio.AbstractEventLoop | None = None

    async def run(self, program: Program, limits: Limits, session: str | None = None) -> RunResult:
        self.loop = asyncio.get_running_loop()
        self.asked.append((program, limits))
        await self.release.wait()
        if isinstance(self.result, SandboxFailure):
            raise self.result
        return self.result

    async def close(self) -> None:
        self.closed = True


def served(sandbox: Any, max_requests: int = 8) -> ThreadedServer:
    return ThreadedServer(SandboxService(sandbox, key="k", limits=LIMITS, max_requests=max_requests).app())


@pytest.fixture
def fine() -> Iterator[tuple[Scripted, str]]:
    sandbox = Scripted(RunResult(Outcome.FINISHED, "42\n", "", (), 0, 0.5))
    with served(sandbox) as server:
        yield sandbox, server.url


def post(url: str, **fields: Any) -> httpx.Response:
    body = {"code": "print(42)", "language": "python"} | fields
    return httpx.post(f"{url}/run_code", json=body, headers=HEADERS)


def test_the_answer_is_sandboxfusions_with_our_outcome_beside_it(fine: tuple[Scripted, str]) -> None:
    sandbox, url = fine
    given = {"stdin": "1", "files": {"a.txt": base64.b64encode(b"x").decode()}}
    answer = post(url, **given).json()
    assert answer == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {"status": "Finished", "execution_time": 0.5, "return_code": 0, "stdout": "42\n", "stderr": ""},
        "executor_pod_name": None,
        "files": {},
        "outcome": "finished",
    }
    assert sandbox.asked[0][0] == Program("print(42)", stdin="1", files={"a.txt": b"x"})


@pytest.mark.parametrize(
    ("result", "status", "run_status", "code"),
    [
        (RunResult(Outcome.ERROR, "", "Traceback", (), 1), "Failed", "Finished", 1),
        (RunResult(Outcome.EXITED, "", "", (), 3), "Failed", "Finished", 3),
        (RunResult(Outcome.WALL_TIME, "", ""), "Failed", "TimeLimitExceeded", None),
        (RunResult(Outcome.MEMORY, "", ""), "Failed", "Finished", 137),
    ],
)
def test_ends_of_runs_in_sandboxfusions_words(
    result: RunResult, status: str, run_status: str, code: int | None
) -> None:
    with served(Scripted(result)) as server:
        answer = post(server.url).json()
    run = answer["run_result"]
    assert (answer["status"], run["status"], run["return_code"]) == (status, run_status, code)


def test_a_fault_of_ours_is_a_sandbox_error() -> None:
    with served(Scripted(SandboxFailure("a worker was lost"))) as server:
        answer = post(server.url).json()
        assert (answer["status"], answer["message"], answer["run_result"]) == (
            "SandboxError",
            "a worker was lost",
            None,
        )
        assert httpx.get(f"{server.url}/health").status_code == 503


def test_limits_are_capped_by_the_server(fine: tuple[Scripted, str]) -> None:
    sandbox, url = fine
    post(url, run_timeout=60, memory_limit_MB=100_000)
    post(url, run_timeout=0.5, memory_limit_MB=64)
    post(url)
    asked = [(limits.wall_s, limits.cpu_s, limits.memory_mb) for _, limits in sandbox.asked]
    assert asked == [(2.0, 2.0, 256), (0.5, 0.5, 64), (2.0, 2.0, 256)]


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"language": "cpp"}, 400, "python only"),
        ({"fetch_files": ["a"]}, 400, "not supported"),
        ({"args": ["-q"]}, 400, "not supported"),
        ({"files": {"a": "%%"}}, 400, "not base64"),
        ({"run_timeout": -1}, 422, "run_timeout"),
        ({"code": None}, 422, "code"),
    ],
)
def test_what_it_cannot_do_is_refused(
    fine: tuple[Scripted, str], fields: dict[str, Any], status: int, said: str
) -> None:
    answer = post(fine[1], **fields)
    assert answer.status_code == status and said in answer.text
    assert fine[0].asked == []


def test_only_health_is_open(fine: tuple[Scripted, str]) -> None:
    _, url = fine
    assert httpx.get(f"{url}/health").json()["ok"] is True
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic k"}):
        assert (
            httpx.post(f"{url}/run_code", json={"code": "", "language": "python"}, headers=headers).status_code == 401
        )
        assert httpx.get(f"{url}/metrics", headers=headers).status_code == 401
    for page in ("/docs", "/redoc"):
        assert httpx.get(url + page).status_code == 404


def test_too_many_requests_are_told_to_come_again_and_counted() -> None:
    async def crowd(url: str, sandbox: Scripted) -> list[int]:
        async with httpx.AsyncClient(headers=HEADERS, timeout=30) as client:
            body = {"code": "", "language": "python"}
            first = [asyncio.create_task(client.post(f"{url}/run_code", json=body)) for _ in range(2)]
            while len(sandbox.asked) < 2:
                await asyncio.sleep(0.01)
            refused = await client.post(f"{url}/run_code", json=body)
            assert refused.headers["Retry-After"] == "1"
            assert sandbox.loop is not None
            sandbox.loop.call_soon_threadsafe(sandbox.release.set)
            served = [response.status_code for response in await asyncio.gather(*first)]
            metrics = (await client.get(f"{url}/metrics")).text
        assert 'quintet_sandbox_requests_total{outcome="refused"} 1.0' in metrics
        assert 'quintet_sandbox_requests_total{outcome="served"} 2.0' in metrics
        assert 'quintet_sandbox_runs_total{outcome="finished"} 2.0' in metrics
        assert "quintet_sandbox_in_flight 0.0" in metrics
        return [*served, refused.status_code]

    sandbox = Scripted(RunResult(Outcome.FINISHED, "", "", (), 0))
    sandbox.release.clear()
    with served(sandbox, max_requests=2) as server:
        assert asyncio.run(crowd(server.url, sandbox)) == [200, 200, 429]
    assert sandbox.closed


def test_the_command_prints_its_address_and_key_serves_and_ends_cleanly() -> None:
    command = [sys.executable, "-m", "quintet.cli.main", "serve", "sandbox", "--port", "0"]
    words = ["--set", "backend=process", "--set", "workers=1", "--set", "limits.wall_s=3"]
    process = subprocess.Popen(
        [*command, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        url, key = (re.fullmatch(rf"{name}: (\S+)\n", process.stdout.readline()) for name in ("url", "key"))
        assert url is not None and key is not None and url[1].startswith("http://127.0.0.1:")
        answer = httpx.post(
            f"{url[1]}/run_code",
            json={"code": "print(6 * 7)", "language": "python"},
            headers={"Authorization": f"Bearer {key[1]}"},
            timeout=60,
        )
        assert answer.json()["run_result"]["stdout"] == "42\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["backend=docker"], "--set: backend: process, namespace, remote or module:Class, not 'docker'"),
        (["limits.wall=3"], "--set limits.wall: Extra inputs are not permitted"),
        (["backend=remote", "url=http://x"], "runs programs itself"),
    ],
)
def test_wrong_options_of_the_command_are_named(words: list[str], said: str) -> None:
    options = [part for word in words for part in ("--set", word)]
    result = CliRunner().invoke(app, ["serve", "sandbox", *options])
    assert isinstance(result.exception, QuintetError) and said in str(result.exception)
