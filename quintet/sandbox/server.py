"""`quintet serve sandbox`: SandboxFusion's `POST /run_code` over one of our own back ends, for Python.

The answer is SandboxFusion's, with one field more: `outcome`, our own and finer word for how the run ended. What this
server cannot do is refused with 400 (other languages, `fetch_files`, `args`), never left out in silence. Limits that a
request asks for are cut to the server's. More requests than it holds are answered 429; while it closes, 503.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Literal

from fastapi import FastAPI, HTTPException
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel, Field

from quintet.sandbox.protocol import Limits, Outcome, Program, RunResult, Sandbox, SandboxFailure
from quintet.serving import Admission, make_app, wants

MAX_BODY_BYTES = 96 << 20
DEFAULT_TIMEOUT_S = 10.0  # SandboxFusion's


class RunCodeRequest(BaseModel):
    """SandboxFusion's fields."""

    code: str
    language: str
    stdin: str | None = None
    run_timeout: float = Field(DEFAULT_TIMEOUT_S, gt=0, allow_inf_nan=False, description="seconds")
    compile_timeout: float = Field(DEFAULT_TIMEOUT_S, description="Python is not compiled: no effect")
    memory_limit_MB: int = Field(-1, description="-1: the server's limit")
    files: dict[str, str | None] = Field(default_factory=dict, description="path -> content in base64")
    fetch_files: list[str] = Field(default_factory=list)
    args: list[str] = Field(default_factory=list)


class RunResultBody(BaseModel):
    status: Literal["Finished", "TimeLimitExceeded"]
    execution_time: float
    return_code: int | None
    stdout: str
    stderr: str


class RunCodeResponse(BaseModel):
    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: None = None
    run_result: RunResultBody | None = None
    executor_pod_name: None = None
    files: dict[str, str] = Field(default_factory=dict)
    outcome: Outcome | None = None


class SandboxService:
    """`limits` is the most that a request may use; `max_requests`: in flight and waiting together."""

    def __init__(self, sandbox: Sandbox, *, key: str, limits: Limits, max_requests: int) -> None:
        self._sandbox = sandbox
        self._key = key
        self._limits = limits
        self._registry = CollectorRegistry()
        self._admission = Admission("quintet_sandbox", max_requests, self._registry)
        self._outcomes = Counter(
            "quintet_sandbox_runs", "Runs by how they ended.", ["outcome"], registry=self._registry
        )
        self._closing = False

    def app(self) -> FastAPI:
        app = make_app(
            "quintet sandbox",
            key=self._key,
            registry=self._registry,
            health=self._health,
            max_body_bytes=MAX_BODY_BYTES,
            lifespan=self._lifespan,
        )
        app.post("/run_code", response_model=RunCodeResponse, dependencies=[wants(self._key)])(self.run_code)
        return app

    async def run_code(self, request: RunCodeRequest) -> RunCodeResponse:
        if self._closing:
            raise HTTPException(503, "the server is closing")
        program, limits = _program(request), self._limits_of(request)
        async with self._admission.admit():
            try:
                result = await self._sandbox.run(program, limits)
            except SandboxFailure as error:
                self._outcomes.labels("fault").inc()
                return RunCodeResponse(status="SandboxError", message=str(error))
        self._outcomes.labels(result.outcome.value).inc()
        return _response(result)

    async def _health(self) -> dict[str, object]:
        """`ok` when a program really runs."""
        start = time.perf_counter()
        try:
            probe = await self._sandbox.run(Program("print(6 * 7)"), self._limits)
        except SandboxFailure as error:
            raise HTTPException(503, str(error)) from error
        if probe.stdout != "42\n":
            raise HTTPException(503, f"a probe ended with {probe.outcome}: {probe.stderr[-200:]}")
        return {"ok": True, "in_flight": self._admission.in_flight, "probe_s": round(time.perf_counter() - start, 4)}

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        yield
        self._closing = True
        await self._sandbox.close()

    def _limits_of(self, request: RunCodeRequest) -> Limits:
        wall_s = min(request.run_timeout, self._limits.wall_s)
        memory_mb = self._limits.memory_mb
        if request.memory_limit_MB > 0:
            memory_mb = min(request.memory_limit_MB, memory_mb)
        return replace(self._limits, wall_s=wall_s, cpu_s=min(wall_s, self._limits.cpu_s), memory_mb=memory_mb)


def _program(request: RunCodeRequest) -> Program:
    """Raises HTTPException 400 for what the server cannot do."""
    if request.language != "python":
        raise HTTPException(400, f"language {request.language!r}: this server runs python only")
    if request.fetch_files or request.args:
        raise HTTPException(400, "fetch_files and args are not supported by this server")
    try:
        files = {name: base64.b64decode(text or "", validate=True) for name, text in request.files.items()}
    except binascii.Error as error:
        raise HTTPException(400, f"files: not base64: {error}") from error
    return Program(request.code, stdin=request.stdin or "", files=files)


def _response(result: RunResult) -> RunCodeResponse:
    timed_out = result.outcome in (Outcome.WALL_TIME, Outcome.CPU_TIME)
    code = None if timed_out else _return_code(result)
    body = RunResultBody(
        status="TimeLimitExceeded" if timed_out else "Finished",
        execution_time=result.wall_s,
        return_code=code,
        stdout=result.stdout,
        stderr=result.stderr,
    )
    return RunCodeResponse(status="Success" if code == 0 else "Failed", run_result=body, outcome=result.outcome)


def _return_code(result: RunResult) -> int:
    """What a shell would have seen: SandboxFusion's clients look at it."""
    if result.outcome in (Outcome.FINISHED, Outcome.EXITED):
        return result.exit_code or 0
    return result.exit_code or (1 if result.outcome is Outcome.ERROR else 137)
