"""A sandbox as the tests use it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.factory import make_sandbox
from quintet.sandbox.pool import ZygotePool
from quintet.sandbox.process import ProcessJail
from quintet.sandbox.protocol import Call, Limits, Outcome, Program, RunResult, Sandbox, Value
from quintet.types import QuintetError

T = TypeVar("T")

LIMITS = Limits(wall_s=20.0, cpu_s=10.0)  # generous: the machine may be busy


class Box:
    """A sandbox and its event loop."""

    def __init__(self, backend: str, **options: Any) -> None:
        self.backend = backend
        self._loop = asyncio.new_event_loop()
        self.sandbox: Sandbox = make_sandbox(SandboxConfig(backend=backend, **options))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def run(self, code: str, *, session: str | None = None, limits: Limits = LIMITS, **program: Any) -> RunResult:
        return self.wait(self.sandbox.run(Program(code, **program), limits, session))

    def close(self) -> None:
        self.wait(self.sandbox.close())
        self._loop.close()


@cache
def missing(backend: str) -> str | None:
    """Why the back end cannot be had here."""
    if backend == "namespace":
        try:
            make_sandbox(SandboxConfig(backend="namespace"))
        except QuintetError as error:
            return str(error)
    return None


def make_box(backend: str, **options: Any) -> Box:
    reason = missing(backend)
    if reason is not None:
        pytest.skip(reason)
    return Box(backend, **options)


RIGHT = "def f(x): return x + 1"


def assert_sound(box: Box) -> None:
    """The next sample is graded right."""
    result = box.run(RIGHT, calls=(Call("f", (1,)),))
    assert (result.outcome, result.values) == (Outcome.FINISHED, (Value(2),))


def errors_of(box: Box, *attempts: str, **options: Any) -> list[str]:
    """The name of the exception that each statement raises, or `worked`."""
    code = f"""
for attempt in {attempts!r}:
    try:
        exec(attempt, {{}})
    except BaseException as error:
        print(type(error).__name__)
    else:
        print("worked")
"""
    result = box.run(code, **options)
    assert result.outcome is Outcome.FINISHED, result
    return result.stdout.split()


def assert_nothing_left(box: Box) -> None:
    """No process but the warm ones, no file, and the next sample is graded right. Closes the box."""
    pool = box.sandbox
    assert isinstance(pool, ZygotePool)
    for session in list(pool._sessions):
        box.wait(pool.destroy(session))
    assert_sound(box)
    zygotes = [zygote._process.pid for zygote in pool._zygotes if zygote is not None]
    warm = len(zygotes) if box.backend == "namespace" else 0  # bubblewrap's child is the interpreter
    deadline = time.monotonic() + 10
    while sum(len(descendants(pid)) for pid in zygotes) > warm and time.monotonic() < deadline:
        time.sleep(0.05)
    assert sum(len(descendants(pid)) for pid in zygotes) == warm
    bases = pool._jail._bases if isinstance(pool._jail, ProcessJail) else []
    assert [os.listdir(base) for base in bases] == [[] for _ in bases]
    box.wait(pool.close())
    assert not any(map(os.path.exists, bases))
    assert not any(os.path.exists(f"/proc/{pid}") for pid in zygotes)


def within(**limits: Any) -> Limits:
    return replace(LIMITS, **limits)


def descendants(pid: int) -> dict[int, str]:
    """Process id -> command of everything below `pid`."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found[child] = Path(f"/proc/{child}/comm").read_text().strip()
            found |= descendants(child)
    return found
