"""Audits rows of programs and tests with the reward `code`: what `quintet grade code` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from quintet.data.prompts import test_cases_of
from quintet.data.rows import Row
from quintet.reward.background import BackgroundLoop
from quintet.reward.code import CodeGrader, parse_options
from quintet.reward.errors import FunctionFailed
from quintet.reward.math import Graded
from quintet.reward.sample import Sample, Verdict
from quintet.sandbox.factory import make_sandbox
from quintet.types import FailureKind, QuintetError

AHEAD = 64  # rows in flight


def grade_rows(rows: Sequence[Row], args: Mapping[str, Any], timeout_s: float) -> Iterator[Graded]:
    """Grade rows of `code` (a program) or `response` (a text with a program in it), `tests` (in any form that
    `data.columns.test_cases` takes), optional `entry_point` and optional `expect`; results in their order.

    Raises QuintetError, naming the row, for one that is not of this form, and for a sandbox that does not work. Tests
    that cannot be run are wrong, with the reason.
    """
    samples = [_sample(row) for row in rows]
    sandbox = make_sandbox(parse_options("code", args).sandbox)
    graders = {kind: CodeGrader("code", {**args, **_EXTRACT[kind]}, timeout_s, sandbox) for kind in _EXTRACT}
    loop = BackgroundLoop()
    try:
        loop.run(graders["code"].start())
        flying: deque[tuple[Row, Future[Verdict]]] = deque()
        for row, (kind, sample) in zip(rows, samples, strict=True):
            flying.append((row, loop.submit(graders[kind].grade(sample))))
            if len(flying) >= AHEAD:
                yield _landed(*flying.popleft())
        while flying:
            yield _landed(*flying.popleft())
    finally:
        loop.run(sandbox.close())
        loop.close()


_EXTRACT: Mapping[str, Mapping[str, str]] = {"code": {"extract": "whole"}, "response": {}}


def _sample(row: Row) -> tuple[str, Sample]:
    values = row.values
    kinds = [kind for kind in _EXTRACT if kind in values]
    if len(kinds) != 1 or not isinstance(values[kinds[0]], str):
        raise QuintetError(f"{row.where}: it needs a text in `code` (a program) or in `response`")
    if "tests" not in values:
        raise QuintetError(f"{row.where}: it needs `tests`")
    if not isinstance(values.get("expect", True), bool):
        raise QuintetError(f"{row.where}: `expect` is {values['expect']!r}, expected true or false")
    return kinds[0], Sample(
        prompt_id=row.where,
        text=values[kinds[0]],
        response_ids=[],
        truncated=False,
        test_cases=test_cases_of(row, "tests"),
        metadata={k: v for k, v in values.items() if k not in ("code", "response", "tests", "expect")},
        prompt_text=str(values.get("prompt", "")),
    )


def _landed(row: Row, flight: Future[Verdict]) -> Graded:
    expect = row.values.get("expect")
    try:
        verdict = flight.result()
    except FunctionFailed as error:
        if error.kind is FailureKind.SANDBOX:
            raise QuintetError(f"{row.where}: {error.message}") from error
        return Graded(False, error.message, expect)
    reason = verdict.info.get("reason") or f"{verdict.info['passed']} of {verdict.info['tests']} tests"
    return Graded(verdict.value == 1.0, str(reason), expect)
