"""The `remote` back end: programs run in a SandboxFusion-compatible service, over HTTP.

`POST /run_code` takes one file of Python and gives back what it printed. Calls and expressions are therefore written
around the program, and what they gave comes back as encoded data at the end of the output. How well programs are kept
apart is the service's affair; `quintet serve sandbox` offers the same API over our own `namespace` back end.

Refusals that may pass (429, 503, other 5xx, a broken connection) are tried again with growing pauses; what is left is a
SandboxFailure. Such a service has no sessions, and counts neither processor time nor the size of files: `limits.cpu_s`,
`scratch_mb` and `processes` are its own.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import random
import secrets
from pathlib import Path
from typing import Any

import httpx

from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.jail.data import NotData, decode, encode
from quintet.sandbox.protocol import Limits, Outcome, Program, RunResult, SandboxFailure, Value
from quintet.types import QuintetError

ATTEMPTS = 5
FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
QUEUE_S = 60.0  # how long a service may let a run wait for its turn
PAYLOAD_BYTES = 64 << 20

_SIGKILL_STATUS = (137, -9)


class RemoteSandbox:
    """Implements `Sandbox`, sessions excepted."""

    def __init__(self, config: SandboxConfig, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        """Raises QuintetError when the key's variable is not set."""
        if config.url is None:
            raise QuintetError("sandbox.backend: remote needs sandbox.url")
        self._url = config.url.rstrip("/")
        self._headers = _headers(config)
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._connections = httpx.Limits(max_connections=config.max_concurrent)
        self._first_pause_s = first_pause_s
        self._client: httpx.AsyncClient | None = None

    async def run(self, program: Program, limits: Limits, session: str | None = None) -> RunResult:
        if session is not None:
            raise _no_sessions()
        mark = f"quintet-{secrets.token_hex(16)}:"
        body = {
            "code": _source(program, limits, mark),
            "language": "python",
            "stdin": program.stdin,
            "compile_timeout": limits.wall_s,
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_mb,
            "files": {name: base64.b64encode(content).decode() for name, content in program.files.items()},
        }
        async with self._places:
            answer = await self._post(body, limits.wall_s + QUEUE_S)
        return _result(answer, mark, limits)

    async def close(self) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def create(self) -> str:
        raise _no_sessions()

    async def snapshot(self, session: str) -> bytes:
        raise _no_sessions()

    async def restore(self, snapshot: bytes) -> str:
        raise _no_sessions()

    async def fork(self, session: str, n: int) -> list[str]:
        raise _no_sessions()

    async def destroy(self, session: str) -> None:
        raise _no_sessions()

    async def _post(self, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._client is None:
            self._client = httpx.AsyncClient(headers=self._headers, limits=self._connections, timeout=None)
        pause_s = self._first_pause_s
        for attempt in range(1, ATTEMPTS + 1):
            fault, asked_s = await self._attempt(self._client, body, timeout_s)
            if isinstance(fault, dict):
                return fault
            if attempt < ATTEMPTS:
                await asyncio.sleep(max(asked_s, pause_s * random.uniform(0.5, 1.0)))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        raise SandboxFailure(f"{fault} (attempt {ATTEMPTS} of {ATTEMPTS})")

    async def _attempt(
        self, client: httpx.AsyncClient, body: dict[str, Any], timeout_s: float
    ) -> tuple[dict[str, Any] | str, float]:
        """The answer, or what went wrong and may pass, with the pause that the service asks for."""
        url = f"{self._url}/run_code"
        try:
            async with asyncio.timeout(timeout_s):
                response = await client.post(url, json=body)
        except TimeoutError:
            return f"{url} did not answer within {timeout_s:g} s", 0.0
        except httpx.TransportError as error:
            return f"{url}: {type(error).__name__}: {error}".rstrip(": "), 0.0
        excerpt = " ".join(response.text.split())[:200]
        if response.status_code == 429 or response.status_code >= 500:
            return f"{url} answered {response.status_code}: {excerpt}", _seconds(response.headers.get("Retry-After"))
        if response.status_code != 200:
            raise SandboxFailure(f"{url} answered {response.status_code}: {excerpt}", retryable=False)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or "status" not in answer:
            raise SandboxFailure(f"{url} is no SandboxFusion service; it answered: {excerpt}", retryable=False)
        if answer["status"] == "SandboxError":
            return f"{url}: {str(answer.get('message'))[:200]}", 0.0
        return answer, 0.0


def _headers(config: SandboxConfig) -> dict[str, str]:
    if config.api_key_env is None:
        return {}
    key = os.environ.get(config.api_key_env)
    if not key:
        raise QuintetError(f"sandbox.api_key_env: the environment variable {config.api_key_env} is not set")
    return {"Authorization": f"Bearer {key}"}


def _no_sessions() -> SandboxFailure:
    return SandboxFailure("sandbox.backend: remote has no sessions; use namespace", retryable=False)


def _seconds(retry_after: str | None) -> float:
    """Of a `Retry-After` in seconds; other forms are left to our own pauses."""
    return min(float(retry_after), LONGEST_PAUSE_S) if retry_after and retry_after.isdigit() else 0.0


@functools.cache
def _frame() -> str:
    folder = Path(__file__).parent
    texts = (folder / "jail" / "data.py", folder / "remote_program.py")
    return "\n".join(path.read_text(encoding="utf-8") for path in texts)


def _source(program: Program, limits: Limits, mark: str) -> str:
    task = {
        "code": program.code,
        "name": program.name,
        "calls": [(c.function, encode((c.args, c.kwargs), PAYLOAD_BYTES)) for c in program.calls],
        "expressions": program.expressions,
        "limit": limits.output_bytes,
        "mark": mark,
    }
    try:
        payload = base64.b64encode(encode(task, PAYLOAD_BYTES)).decode()
    except NotData as error:
        raise QuintetError(f"the program's arguments cannot be sent: {error}") from error
    return f"{_frame()}\n_run({payload!r})\n"


# -- the answer -----------------------------------------------------------------------------------


def _result(answer: dict[str, Any], mark: str, limits: Limits) -> RunResult:
    run = answer.get("run_result") or {}
    stdout, found, record = str(run.get("stdout") or "").rpartition("\n" + mark)
    if not found:
        stdout, record = record, ""
    stderr = str(run.get("stderr") or "")
    end, values = _record(record.strip())
    code = run.get("return_code")
    return RunResult(
        _outcome(answer, run, end, len(stdout) + len(stderr), limits),
        stdout,
        stderr,
        values,
        code if isinstance(code, int) else None,
        float(run.get("execution_time") or 0.0),
    )


def _record(text: str) -> tuple[tuple[str, ...], tuple[Value, ...]]:
    """How the program said it ended, and its values; nothing where it wrote no whole record."""
    try:
        end, values = decode(base64.b64decode(text, validate=True))
        pairs = [(decode(data) if error is None else None, error) for data, error in values]
        return tuple(map(str, end)), tuple(Value(value, None if e is None else str(e)) for value, e in pairs)
    except (NotData, ValueError, TypeError):
        return (), ()


def _outcome(
    answer: dict[str, Any], run: dict[str, Any], end: tuple[str, ...], printed: int, limits: Limits
) -> Outcome:
    told = answer.get("outcome")  # our own server's, finer than SandboxFusion's
    if told in (Outcome.WALL_TIME, Outcome.CPU_TIME, Outcome.MEMORY, Outcome.OUTPUT, Outcome.CRASHED):
        return Outcome(told)
    if run.get("status") == "TimeLimitExceeded":
        return Outcome.WALL_TIME
    if printed > limits.output_bytes:
        return Outcome.OUTPUT
    if end == ("end",):
        return Outcome.FINISHED
    if end[:1] == ("error",):
        return Outcome.MEMORY if end[1:] == ("MemoryError",) else Outcome.ERROR
    code = run.get("return_code")
    if isinstance(code, int) and (code in _SIGKILL_STATUS or code < 0):
        return Outcome.CRASHED
    return Outcome.EXITED
