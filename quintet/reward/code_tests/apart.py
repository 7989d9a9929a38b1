"""Test code that runs in a sandbox of its own, the candidate in another; calls and answers pass between them as data.

Neither sees the other: the candidate is asked for `add(1, 2)` and never learns what is expected; the test code is given
what was returned, as plain data, so that no object of the candidate comes near it. Each round runs the test code once
and the candidate once. Calls that do not depend on each other are gathered into one round, which is nearly always
the only one; the calls of the first round do not depend on the candidate and are found once per prompt.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.reward.code_tests.cases import ApartCase, UnusableTests
from quintet.sandbox.protocol import Call, Outcome, Program, RunResult, Value

MAX_ROUNDS = 20

Run = Callable[[Program], Awaitable[RunResult]]
Answers = dict[str, list[tuple[Any, str | None]]]


@dataclass(frozen=True)
class Decided:
    """How the asserts of one piece of test code went; `reason` is set when not all of them hold."""

    passed: int
    failed: int
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """One run of the test code: calls that it wants answered (key, name, args, kwargs), or its decision."""

    wanted: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]]
    passed: int
    failed: int
    first: str
    broken: str | None


class TestsStopped(Exception):
    """The test code did not come to its end on the candidate's values."""


@dataclass
class ApartTest:
    """One `ApartCase`, ready to run."""

    source: str  # instrumented
    names: tuple[str, ...]
    first: Report | None = None  # what it wants before anything is answered

    @classmethod
    def of(cls, case: ApartCase) -> ApartTest:
        return cls(instrument(case.source), case.names)

    async def open(self, run: Run) -> None:
        """Find the first round's calls. Raises UnusableTests for test code that fails by itself or asks nothing."""
        if self.first is not None:
            return
        try:
            first = await self._run(run, {})
        except TestsStopped as error:
            raise UnusableTests(f"the test code did not end: {error}") from error
        if first.broken is not None:
            raise UnusableTests(f"the test code fails by itself: {first.broken}")
        if not first.wanted:
            raise UnusableTests("the test code asks nothing of the candidate")
        self.first = first

    async def decide(self, run: Run, ask: Callable[[tuple[Call, ...]], Awaitable[tuple[Value, ...]]]) -> Decided:
        """`ask` has calls answered by the candidate. After `open`.

        Raises UnusableTests when the test code never comes to a decision.
        """
        assert self.first is not None, "open() comes first"
        report, answers = self.first, Answers()
        for _ in range(MAX_ROUNDS):
            values = await ask(tuple(Call(name, tuple(args), dict(kwargs)) for _, name, args, kwargs in report.wanted))
            for (key, *_), value in zip(report.wanted, values, strict=True):
                answers.setdefault(key, []).append((value.value, value.error))
            try:
                report = await self._run(run, answers)
            except TestsStopped as error:
                return Decided(0, 1, f"the tests did not end on what was returned: {error}")
            if not report.wanted:
                return _decision(report)
        raise UnusableTests(f"the test code asks the candidate anew after {MAX_ROUNDS} rounds of answers")

    async def _run(self, run: Run, answers: Answers) -> Report:
        call = Call("quintet_check", (self.source, self.names, answers))
        result = await run(Program(_harness(), calls=(call,), name="quintet_harness"))
        if result.outcome is not Outcome.FINISHED or not result.values:
            raise TestsStopped(str(result.outcome))
        if result.values[0].error is not None:
            raise TestsStopped(result.values[0].error)
        return Report(**result.values[0].value)


@functools.cache
def _harness() -> str:
    return Path(__file__).with_name("harness.py").read_text(encoding="utf-8")


def _decision(report: Report) -> Decided:
    if report.passed + report.failed == 0:  # an `assert False` that was not reached: the error came as wanted
        return Decided(1, 0)
    return Decided(report.passed, report.failed, report.first)


def instrument(source: str) -> str:
    """Every assert and every expression statement in a `try` that notes what became of it, and goes on."""
    tree = ast.parse(source)
    _Instrumented().visit(tree)
    return ast.unparse(ast.fix_missing_locations(tree))


class _Instrumented(ast.NodeTransformer):
    def __init__(self) -> None:
        self._depth = 0  # of enclosing try and with statements

    def visit_Try(self, node: ast.Try) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return _guarded(node, [_statement("_quintet.passes()")], decides=self._depth == 0)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else _guarded(node, [], decides=False)


def _guarded(node: ast.stmt, after: list[ast.stmt], *, decides: bool) -> ast.Try:
    text = ast.unparse(node)[:120]
    note = _statement(f"_quintet.note(_quintet_error, {text!r}, {decides})")
    handler = ast.ExceptHandler(ast.Name("BaseException", ast.Load()), "_quintet_error", [note])
    return ast.Try([node, *after], [handler], [], [])


def _statement(source: str) -> ast.stmt:
    return ast.parse(source).body[0]
