"""What a sandbox is: programs go in, what they printed and how they ended comes out; it never knows a right answer.

A *session* is a Python interpreter and a scratch folder that live on between runs. `run` without a session is one
program in a fresh one that is destroyed afterwards. The caller compares results; a program cannot report a verdict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from quintet.sandbox.config import LimitsConfig
from quintet.types import QuintetError


@dataclass(frozen=True)
class Limits:
    """What one run may use. Exceeding one ends the run with the matching `Outcome`. Raises QuintetError for a limit
    that is not positive and finite."""

    wall_s: float = 5.0  # time spent waiting for a busy processor is not charged
    cpu_s: float = 5.0
    memory_mb: int = 512  # address space beyond the idle interpreter's
    output_bytes: int = 1_000_000  # standard output and error together; the values returned, too
    scratch_mb: int = 16  # files written
    processes: int = 1  # 1: no child process, no thread; n: so many of both together

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < value < math.inf:
                raise QuintetError(f"limits.{name}: {value} is not a positive number")


def limits_of(options: LimitsConfig) -> Limits:
    return Limits(**options.model_dump())


@dataclass(frozen=True)
class Call:
    """One call in the program's namespace after its code has run, `function(*args, **kwargs)`.

    `function` names the callable: `f`, `module.f` or `Solution().f`. Arguments are JSON-like values (and tuples, sets,
    bytes) sent as data; every call gets its own copy.
    """

    function: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """Python source to run, then `calls` and `expressions` in its namespace, in this order.

    A program that raises or ends early has no values. With calls, `name` is best something else than `__main__`, so
    that a script's `if __name__ == "__main__":` does not start reading its input.
    """

    code: str
    stdin: str = ""
    calls: tuple[Call, ...] = ()
    expressions: tuple[str, ...] = ()
    files: dict[str, bytes] = field(default_factory=dict)  # name -> content, in the scratch folder before it starts
    name: str = "__main__"  # of the module; a session's is always `__main__`


class Outcome(StrEnum):
    """How a run ended. FINISHED is no verdict: a candidate can forge it. Only its output and values can be right."""

    FINISHED = "finished"  # ran to its end
    ERROR = "error"  # an exception that the program did not catch
    EXITED = "exited"  # ended the interpreter itself before its end was reached (any status, `sys.exit()` too)
    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    OUTPUT = "output"
    CRASHED = "crashed"  # a signal that is none of the above


@dataclass(frozen=True)
class Value:
    """Result of one call or expression: `value` as plain data, or `error` (an exception, or a type that is not data).

    Plain data: None, bool, int, float, str, bytes, list, tuple, dict, set, frozenset of exactly these types. What is
    an instance of a subclass (a Counter, a named tuple, a str with its own `__eq__`) arrives as the plain type.
    """

    value: Any = None
    error: str | None = None
    stdout: str = ""


@dataclass(frozen=True)
class RunResult:
    outcome: Outcome
    stdout: str
    stderr: str
    values: tuple[Value, ...] = ()  # calls, then expressions; shorter when the run ended early
    exit_code: int | None = None  # of the interpreter; None where a signal ended it
    wall_s: float = 0.0


class Sandbox(Protocol):
    """Back ends: `process`, `namespace`, `remote`, or `module:Class`, made by `factory.make_sandbox`, which raises
    QuintetError where the isolation asked for is not available. Nothing is started before the first use.

    Methods raise SandboxFailure for a fault of the sandbox itself, never for what a program does. All calls come from
    one event loop.
    """

    async def create(self) -> str:
        """A new session's id."""
        ...

    async def run(self, program: Program, limits: Limits, session: str | None = None) -> RunResult:
        """One program in a fresh interpreter, or the next one of a session.

        A session lives on after FINISHED, ERROR and `sys.exit()`; any other end is its end too, and the next call
        that names it raises SandboxFailure (not retryable).
        """
        ...

    async def snapshot(self, session: str) -> bytes:
        """Variables that can be pickled, functions, classes, files; `restore` works in another process and on another
        machine with the same Python version. `snapshot.describe` lists what was left out."""
        ...

    async def restore(self, snapshot: bytes) -> str:
        """A new session's id. The bytes are unpickled inside the sandbox only."""
        ...

    async def fork(self, session: str, n: int) -> list[str]:
        """`n` new sessions that go on from here, each on its own; the old one stays."""
        ...

    async def destroy(self, session: str) -> None: ...

    async def close(self) -> None:
        """Ends everything it started. Harmless when called twice."""
        ...


class SandboxFailure(QuintetError):
    """A fault of ours: the sandbox could not run the program. `retryable` as in `Failure`."""

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable
