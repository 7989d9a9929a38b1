"""The reward `code`: the program in a response, run in a sandbox against the prompt's test cases.

    reward:
      functions:
      - fn: code
        args: {sandbox: {backend: namespace}}

The forms of test cases are listed in code_tests/reading.py, the rules of comparison in code_tests/compare.py. No
expected value enters the candidate's process, and nothing that it says about itself counts: what it printed and what
its functions returned comes back as plain data and is compared here. The reward is 1 when every test passes, or the
share of them with `partial`. A candidate that raises, exits, hangs, crashes or floods has failed that test, and the
reason is in the score's info; only a fault of the sandbox or of the tests themselves is a Failure.

Function calls and asserts of a prompt share one run of the candidate; each standard input is a run of its own.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from quintet.reward.code_tests.apart import ApartTest
from quintet.reward.code_tests.cases import PrintedCase, Tests, UnusableTests
from quintet.reward.code_tests.extract import fill_template, last_block
from quintet.reward.code_tests.judging import Result, ending, judge_assert, judge_call, judge_printed, padded
from quintet.reward.code_tests.reading import read_tests
from quintet.reward.errors import FunctionFailed
from quintet.reward.sample import Sample, Verdict
from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.factory import make_sandbox
from quintet.sandbox.protocol import Call, Program, RunResult, Sandbox, SandboxFailure, Value, limits_of
from quintet.types import FailureKind, Prompt, QuintetError

_REMEMBERED_PROMPTS = 4096
_ENTRY_COLUMNS = ("entry_point", "fn_name", "func_name")


class CodeOptions(BaseModel):
    """`args` of the reward `code`."""

    model_config = ConfigDict(extra="forbid")

    extract: Literal["block", "whole"] = Field(
        "block", description="the last complete fenced block of Python, or the whole response"
    )
    template: str = Field("{code}", description="the program; {code} is what was extracted, {prompt} the prompt's text")
    partial: bool = Field(False, description="the share of tests that pass; false: 1 for all of them, else 0")
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)

    @field_validator("template")
    @classmethod
    def _has_code(cls, template: str) -> str:
        if "{code}" not in template:
            raise ValueError("it must contain {code}")
        return template


@dataclass
class _Known:
    """What is worked out once per prompt. `opened` ends when what runs without the candidate has run."""

    given: tuple[Any, ...]  # what `tests` were read from
    tests: Tests
    apart: list[ApartTest]
    others: dict[str, Any] = field(default_factory=dict)  # source of an assert's other side -> its value
    opened: asyncio.Task[None] | None = None


class CodeGrader:
    """`AsyncGrader` over a sandbox. `timeout_s` is the wall time of one run unless the sandbox's limits say less."""

    def __init__(self, name: str, args: Mapping[str, Any], timeout_s: float, sandbox: Sandbox | None = None) -> None:
        self._name = name
        self._options = parse_options(name, args)
        limits = limits_of(self._options.sandbox.limits)
        self._limits = replace(limits, wall_s=min(limits.wall_s, timeout_s), cpu_s=min(limits.cpu_s, timeout_s))
        self._sandbox = sandbox
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def reference_fault(self, prompt: Prompt) -> str | None:
        try:
            _read(prompt.test_cases, prompt.metadata, _prompt_text(prompt.text, prompt.messages))
        except UnusableTests as error:
            return f"its tests cannot be run: {error}"
        return None

    async def start(self) -> None:
        """Raises QuintetError where the sandbox asked for is not available."""
        if self._sandbox is None:
            self._sandbox = make_sandbox(self._options.sandbox)
        try:
            probe = await self._run(Program("print(6 * 7)"))
        except FunctionFailed as error:
            raise QuintetError(f"reward function `{self._name}`: {error.message}") from error
        if probe.stdout != "42\n":
            raise QuintetError(
                f"reward function `{self._name}`: the sandbox does not run Python: {ending(probe, self._limits)}"
            )

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    async def grade(self, sample: Sample) -> Verdict:
        """Raises FunctionFailed for tests that cannot be run and for faults of the sandbox."""
        code = last_block(sample.text) if self._options.extract == "block" else sample.text
        if code is None or not code.strip():
            return Verdict(0.0, {"reason": "no complete code block" if code is None else "no code"})
        program = fill_template(self._options.template, code, sample.prompt_text)
        try:
            known = self._knowledge(sample)
            await self._open(known)
            results = await self._results(program, known)
        except UnusableTests as error:
            raise FunctionFailed(f"the tests of prompt {sample.prompt_id} cannot be run: {error}") from error
        return self._verdict(results)

    def _verdict(self, results: Sequence[Result]) -> Verdict:
        passed, total = sum(r.passed for r in results), sum(r.total for r in results)
        failed = next((r.reason for r in results if r.passed < r.total), "")
        info = {"passed": passed, "tests": total} | ({"reason": failed} if failed else {})
        if self._options.partial:
            return Verdict(passed / total, info)
        return Verdict(float(passed == total), info)

    # -- once per prompt -------------------------------------------------------------------------

    def _knowledge(self, sample: Sample) -> _Known:
        given = (sample.test_cases, sample.metadata, _prompt_text(sample.prompt_text, sample.messages))
        known = self._known.get(sample.prompt_id)
        if known is None or known.given != given:  # training and held-out data may use the same ids
            tests = _read(*given)
            known = _Known(given, tests, [ApartTest.of(case) for case in tests.apart])
            self._known[sample.prompt_id] = known
            if len(self._known) > _REMEMBERED_PROMPTS:
                self._known.popitem(last=False)
        return known

    async def _open(self, known: _Known) -> None:
        """Shared by all samples of the prompt; tried anew after a failure."""
        if known.opened is None or (known.opened.done() and known.opened.exception() is not None):
            known.opened = asyncio.create_task(self._run_without_candidate(known))
        await asyncio.shield(known.opened)

    async def _run_without_candidate(self, known: _Known) -> None:
        sources = tuple({a.other_source: None for a in known.tests.asserts if a.other_source is not None})
        if sources:
            result = await self._run(Program("\n".join(known.tests.imports), expressions=sources, name="tests"))
            values = padded(result, len(sources), self._limits)
            for source, value in zip(sources, values, strict=True):
                if value.error is not None:
                    raise UnusableTests(f"the expected value `{source[:60]}` cannot be computed: {value.error}")
                known.others[source] = value.value
        for test in known.apart:
            await test.open(self._run)

    # -- running ---------------------------------------------------------------------------------

    async def _results(self, program: str, known: _Known) -> list[Result]:
        """Results in the order of the kinds; without `partial`, what comes after a failure may not be run."""
        tests = known.tests
        with_prelude = "\n".join([program, *tests.prelude])
        stages: list[Callable[[], Awaitable[list[Result]]]] = []
        if tests.calls or tests.asserts:
            stages.append(lambda: self._called(with_prelude, known))
        stages += [lambda test=test: self._apart(with_prelude, test) for test in known.apart]  # type: ignore[misc]
        if tests.printed:
            stages.append(lambda: self._printed(program, tests.printed[:1]))
        if len(tests.printed) > 1:
            stages.append(lambda: self._printed(program, tests.printed[1:]))
        if self._options.partial:
            return [r for results in await asyncio.gather(*(stage() for stage in stages)) for r in results]
        results: list[Result] = []
        for stage in stages:
            results += await stage()
            if any(r.passed < r.total for r in results):
                break
        return results

    async def _called(self, program: str, known: _Known) -> list[Result]:
        """Calls and asserts, in one run."""
        calls, asserts = known.tests.calls, known.tests.asserts
        result = await self._run(
            Program(
                program,
                calls=tuple(case.call for case in calls),
                expressions=tuple(case.expression for case in asserts),
                name="candidate",
            )
        )
        values = padded(result, len(calls) + len(asserts), self._limits)
        results = [judge_call(case, value) for case, value in zip(calls, values, strict=False)]
        for case, value in zip(asserts, values[len(calls) :], strict=True):
            other = case.other if case.other_source is None else known.others[case.other_source]
            results.append(judge_assert(case, value, other))
        return results

    async def _apart(self, program: str, test: ApartTest) -> list[Result]:
        async def ask(calls: tuple[Call, ...]) -> tuple[Value, ...]:
            result = await self._run(Program(program, calls=calls, name="candidate"))
            if len(result.values) < len(calls):
                raise _CandidateStopped(ending(result, self._limits))
            return result.values

        try:
            decided = await test.decide(self._run, ask)
        except _CandidateStopped as stopped:
            return [Result(0, 1, str(stopped))]
        return [Result(decided.passed, decided.passed + decided.failed, decided.reason)]

    async def _printed(self, program: str, cases: Sequence[PrintedCase]) -> list[Result]:
        async def one(case: PrintedCase) -> Result:
            return judge_printed(case, await self._run(Program(program, stdin=case.stdin)), self._limits)

        return list(await asyncio.gather(*(one(case) for case in cases)))

    async def _run(self, program: Program) -> RunResult:
        if self._sandbox is None:
            raise QuintetError(f"reward function `{self._name}` was not started")
        try:
            return await self._sandbox.run(program, self._limits)
        except SandboxFailure as error:
            raise FunctionFailed(f"sandbox: {error}", FailureKind.SANDBOX, retryable=error.retryable) from error


class _CandidateStopped(Exception):
    """The candidate ended before it answered."""


def parse_options(name: str, args: Mapping[str, Any]) -> CodeOptions:
    """Raises QuintetError naming the first wrong option."""
    try:
        return CodeOptions.model_validate(dict(args))
    except ValidationError as error:
        first = error.errors()[0]
        option = ".".join(map(str, first["loc"]))
        raise QuintetError(f"reward function `{name}`, option `{option}`: {first['msg']}") from error


def _prompt_text(text: str | None, messages: list[dict[str, Any]] | None) -> str:
    """Of a conversation the last message."""
    return str(messages[-1]["content"]) if messages else text or ""


def _read(test_cases: list[dict[str, Any]] | None, metadata: Mapping[str, Any], prompt: str) -> Tests:
    if test_cases is None:
        raise UnusableTests("there are none (data.columns.test_cases)")
    entry = next((metadata[column] for column in _ENTRY_COLUMNS if metadata.get(column)), None)
    return read_tests(test_cases, None if entry is None else str(entry), prompt)
