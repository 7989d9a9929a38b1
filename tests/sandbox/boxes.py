"""A sandbox as the tests use it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest

from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.factory import make_sandbox
from quintet.sandbox.protocol import Limits, Program, RunResult, Sandbox
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
