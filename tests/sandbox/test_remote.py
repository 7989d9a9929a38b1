"""The remote back end against a scripted service and against our own server, over real sockets."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Response

from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.factory import make_sandbox
from quintet.sandbox.protocol import Call, Limits, Outcome, Program, RunResult, SandboxFailure
from quintet.sandbox.remote import RemoteSandbox
from quintet.sandbox.server import SandboxService
from quintet.serving import ThreadedServer
from quintet.types import QuintetError

LIMITS = Limits(wall_s=5.0, cpu_s=5.0)
KEY = "a-key"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Our server over the `process` back end: what is tested here is what crosses."""
    sandbox = make_sandbox(SandboxConfig(backend="process", workers=1))
    service = SandboxService(sandbox, key=KEY, limits=Limits(wall_s=1.0, cpu_s=1.0), max_requests=32)
    with ThreadedServer(service.app()) as server:
        yield server.url


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX_KEY", KEY)


def remote(url: str, *, key: bool = True) -> RemoteSandbox:
    config = SandboxConfig(backend="remote", url=url, api_key_env="SANDBOX_KEY" if key else None)
    return RemoteSandbox(config, first_pause_s=0.01)


def run(url: str, *programs: Program, limits: Limits = LIMITS, key: bool = True) -> list[RunResult]:
    async def go() -> list[RunResult]:
        sandbox = remote(url, key=key)
        try:
            return list(await asyncio.gather(*(sandbox.run(p, limits) for p in programs)))
        finally:
            await sandbox.close()

    return asyncio.run(go())


@pytest.mark.usefixtures("key")
def test_a_program_reads_prints_and_is_told_apart_from_one_that_exits(url: str) -> None:
    reads = Program("print(int(input()) + 1)\nif __name__ == '__main__':\n    print('main')", stdin="41\n")
    leaves = Program("print('x')\nraise SystemExit(0)")
    hard = Program("import os\nprint('x', flush=True)\nos._exit(0)")
    raises = Program("1 / 0")
    results = run(url, reads, leaves, hard, raises)
    assert [r.outcome for r in results] == [Outcome.FINISHED, Outcome.EXITED, Outcome.EXITED, Outcome.ERROR]
    assert [r.stdout for r in results] == ["42\nmain\n", "x\n", "x\n", ""]
    assert [r.exit_code for r in results] == [0, 0, 0, 1]
    assert results[3].stderr.strip().endswith("ZeroDivisionError: division by zero")


@pytest.mark.usefixtures("key")
def test_values_of_calls_and_expressions_come_back_as_they_were(url: str) -> None:
    value = ({"a": [1, -2.5, None, True]}, (b"\x00\xff", "ß\n"), {3, 4}, 10**30, float("inf"))
    program = Program(
        "print('noise')\ndef same(x, *, twice=False):\n    return (x, x) if twice else x\n"
        "def bad():\n    raise KeyError('k')",
        calls=(Call("same", (value,)), Call("same", (1,), {"twice": True}), Call("bad")),
        expressions=("[same(i) for i in range(3)]", "same", "float('nan')"),
        name="candidate",
    )
    (result,) = run(url, program)
    assert result.outcome is Outcome.FINISHED and result.stdout == "noise\n"
    assert [v.value for v in result.values[:5]] == [value, (1, 1), None, [0, 1, 2], None]
    assert [v.error for v in result.values[:5]] == [
        None, None, "KeyError: 'k'", None, "not data: function is not plain data",
    ]  # fmt: skip
    assert math.isnan(result.values[5].value)


@pytest.mark.usefixtures("key")
def test_files_are_there_before_the_program_starts(url: str) -> None:
    (result,) = run(url, Program("print(open('in.txt').read())", files={"in.txt": b"hello"}))
    assert result.stdout == "hello\n"


@pytest.mark.usefixtures("key")
def test_limits_end_a_run_with_their_outcome(url: str) -> None:
    sleeps, floods = Program("import time\ntime.sleep(30)"), Program("print('x' * 3_000_000)")
    start = time.monotonic()
    outcomes = [r.outcome for r in run(url, sleeps, floods)]
    assert outcomes == [Outcome.WALL_TIME, Outcome.OUTPUT]
    assert time.monotonic() - start < 5  # the server's limit of 1 s, not the 5 s asked for


def test_a_wrong_key_is_refused_at_once(url: str) -> None:
    with pytest.raises(SandboxFailure, match="answered 401") as caught:
        run(url, Program("print(1)"), key=False)
    assert not caught.value.retryable


def scripted(*answers: Response | dict[str, Any]) -> tuple[FastAPI, list[float]]:
    """A service that gives these answers one after the other, and when it was asked."""
    app, asked = FastAPI(), []
    script = iter(answers)

    @app.post("/run_code", response_model=None)
    async def run_code() -> Response | dict[str, Any]:
        asked.append(time.monotonic())
        return next(script)

    return app, asked


SUCCESS = {
    "status": "Success",
    "message": "",
    "run_result": {"status": "Finished", "execution_time": 0.25, "return_code": 0, "stdout": "3\n", "stderr": ""},
}


def test_what_may_pass_is_tried_again_after_the_pause_that_is_asked_for() -> None:
    busy = Response("busy", 429, headers={"Retry-After": "1"})
    app, asked = scripted(busy, Response("", 503), {"status": "SandboxError", "message": "lost"}, SUCCESS)
    with ThreadedServer(app) as server:
        (result,) = run(server.url, Program("print(3)"), key=False)
    assert (result.stdout, result.wall_s, len(asked)) == ("3\n", 0.25, 4)
    assert asked[1] - asked[0] >= 1.0


def test_what_does_not_pass_is_a_failure_that_may_be_retried_later() -> None:
    app, asked = scripted(*[Response("down", 503)] * 9)
    with (
        ThreadedServer(app) as server,
        pytest.raises(SandboxFailure, match=r"answered 503: down \(attempt 5 of 5\)") as e,
    ):
        run(server.url, Program("print(3)"), key=False)
    assert e.value.retryable and len(asked) == 5
    with pytest.raises(SandboxFailure, match="ConnectError") as e:
        run("http://127.0.0.1:9", Program("print(3)"), key=False)
    assert e.value.retryable


@pytest.mark.parametrize("answer", [Response("<html>", 200), {"detail": "what?"}, Response("no such route", 404)])
def test_another_kind_of_service_is_named_and_not_asked_again(answer: Response | dict[str, Any]) -> None:
    app, asked = scripted(answer, SUCCESS)
    with ThreadedServer(app) as server, pytest.raises(SandboxFailure) as caught:
        run(server.url, Program("print(3)"), key=False)
    assert not caught.value.retryable and len(asked) == 1


def test_the_words_of_sandboxfusion_become_outcomes() -> None:
    timed_out = SUCCESS | {"status": "Failed", "run_result": {"status": "TimeLimitExceeded", "stdout": None}}
    killed = SUCCESS | {"status": "Failed", "run_result": {"status": "Finished", "return_code": -9, "stdout": ""}}
    app, _ = scripted(timed_out, killed)
    with ThreadedServer(app) as server:
        outcomes = [run(server.url, Program("print(3)"), key=False)[0].outcome for _ in range(2)]
    assert outcomes == [Outcome.WALL_TIME, Outcome.CRASHED]


def test_sessions_and_missing_keys_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxFailure, match="no sessions"):
        asyncio.run(remote("http://127.0.0.1:9", key=False).create())
    monkeypatch.delenv("SANDBOX_KEY", raising=False)
    with pytest.raises(QuintetError, match="environment variable SANDBOX_KEY is not set"):
        make_sandbox(SandboxConfig(backend="remote", url="http://127.0.0.1:9", api_key_env="SANDBOX_KEY"))
