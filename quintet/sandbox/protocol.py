"""What a sandbox is: programs go in, what they printed and how they ended comes out; it never knows a right answer.

A *session* is a Python interpreter and a scratch folder that live on between runs. `run` without a session is one
program in a fresh one that is destroyed afterwards. The caller compares results; a program cannot report a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from quintet.types import QuintetError


@dataclass(frozen=True)
class Limits:
    """What one run may use. Exceeding one ends the run with the matching `Outcome`."""

    wall_s: float = 5.0
    cpu_s: float = 5.0
    memory_mb: int = 512
    output_bytes: int = 1_000_000  # standard output and error together
    scratch_mb: int = 16  # files written
    processes: int = 1  # 1: no child process, no thread


@dataclass(frozen=True)
class Call:
    """One expression evaluated in the program's namespace after its code has run, `f(*args, **kwargs)`.

    `function` is a dotted name; arguments are JSON-like values (and tuples, sets, bytes) sent as data.
    """

    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """Python source to run as `__main__`, then `calls` and `expressions` in its namespace, in this order."""

    code: str
    stdin: str = ""
    calls: tuple[Call, ...] = ()
    expressions: tuple[str, ...] = ()
    files: dict[str, bytes] = field(default_factory=dict)  # name -> content, in the scratch folder before it starts


class Outcome(StrEnum):
    FINISHED = "finished"  # ran to its end, exit status 0
    ERROR = "error"  # an exception, or another exit status
    EXITED = "exited"  # ended the interpreter itself before its end was reached (any status)
    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    OUTPUT = "output"
    CRASHED = "crashed"  # a signal that is none of the above


@dataclass(frozen=True)
class Value:
    """Result of one call or expression: `value` as plain data, or `error` (an exception, or a type that is not data)."""

    value: Any = None
    error: str | None = None
    stdout: str = ""


@dataclass(frozen=True)
class RunResult:
    outcome: Outcome
    stdout: str
    stderr: str
    values: tuple[Value, ...] = ()  # calls, then expressions; shorter when the run ended early
    exit_code: int | None = None
    wall_s: float = 0.0


class Sandbox(Protocol):
    """Back ends: `process`, `namespace`, `remote`, or `module:Class`.

    Raises SandboxFailure for a fault of the sandbox itself (never for what a program does), and QuintetError at
    `start` where the isolation asked for is not available.
    """

    async def start(self) -> None: ...

    async def create(self) -> str:
        """A new session's id."""
        ...

    async def run(self, program: Program, limits: Limits, session: str | None = None) -> RunResult: ...

    async def snapshot(self, session: str) -> bytes:
        """Variables that can be pickled, and files; `restore` works in another process and on another machine."""
        ...

    async def restore(self, snapshot: bytes) -> str: ...

    async def fork(self, session: str, n: int) -> list[str]: ...

    async def destroy(self, session: str) -> None: ...

    async def close(self) -> None: ...


class SandboxFailure(QuintetError):
    """A fault of ours: the sandbox could not run the program. `retryable` as in `Failure`."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable
