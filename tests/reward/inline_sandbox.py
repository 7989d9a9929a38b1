"""A stand-in for a sandbox: programs of these tests run right here, results cross as pickled data."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import traceback
from typing import Any

from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.protocol import Limits, Outcome, Program, RunResult, Sandbox, SandboxFailure, Value

PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, dict, set, frozenset)


class InlineSandbox(Sandbox):
    """`seen` is every text that the process of a run could read. `faults`: raised by the next runs, in order."""

    def __init__(self, faults: list[SandboxFailure] | None = None) -> None:
        self.seen: list[str] = []
        self.faults = faults or []
        self.runs = 0

    async def run(self, program: Program, limits: Limits, session: str | None = None) -> RunResult:
        self.runs += 1
        self.seen.append(repr(program))
        if self.faults:
            raise self.faults.pop(0)
        out, err = io.StringIO(), io.StringIO()
        namespace: dict[str, Any] = {"__name__": program.name}
        values: list[Value] = []
        stdin, sys.stdin = sys.stdin, io.StringIO(program.stdin)
        outcome, status = Outcome.FINISHED, 0
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                exec(compile(program.code, "<program>", "exec"), namespace)
                for call in program.calls:
                    values.append(_value(lambda c=call: eval(c.function, namespace)(*_copy(c.args), **_copy(c.kwargs))))
                for expression in program.expressions:
                    values.append(_value(lambda e=expression: eval(e, namespace)))
        except SystemExit as error:
            outcome, status = Outcome.EXITED, int(error.code or 0)
        except BaseException:
            outcome, status = Outcome.ERROR, 1
            err.write(traceback.format_exc())
        finally:
            sys.stdin = stdin
        return RunResult(outcome, out.getvalue(), err.getvalue(), tuple(values), status)

    async def close(self) -> None: ...

    async def create(self) -> str:
        raise NotImplementedError("this stand-in has no sessions")

    async def snapshot(self, session: str) -> bytes:
        raise NotImplementedError

    async def restore(self, snapshot: bytes) -> str:
        raise NotImplementedError

    async def fork(self, session: str, n: int) -> list[str]:
        raise NotImplementedError

    async def destroy(self, session: str) -> None:
        raise NotImplementedError


class LosesEveryThirdRun(InlineSandbox):
    """As a back end of a recipe: `backend: tests.reward.inline_sandbox:LosesEveryThirdRun`."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__()
        self.config = config

    async def run(self, program: Program, limits: Limits, session: str | None = None) -> RunResult:
        if self.runs % 3 == 2:
            self.faults.append(SandboxFailure("a worker was lost"))
        return await super().run(program, limits, session)


class LosesEveryRun(LosesEveryThirdRun):
    """All but the first, which `start` makes."""

    async def run(self, program: Program, limits: Limits, session: str | None = None) -> RunResult:
        if self.runs > 0:
            self.faults.append(SandboxFailure("a worker was lost"))
        return await InlineSandbox.run(self, program, limits, session)


def _copy(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _value(compute: Any) -> Value:
    try:
        value = compute()
    except Exception as error:
        return Value(error=f"{type(error).__name__}: {error}")
    if not _is_plain(value):
        return Value(error=f"{type(value).__name__} is not plain data")
    return Value(_copy(value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)
