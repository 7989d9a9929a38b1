"""What the judge makes of a run: did the test pass, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quintet.reward.code_tests.cases import AssertCase, CallCase, PrintedCase
from quintet.reward.code_tests.compare import holds, printed_equal, values_equal
from quintet.sandbox.protocol import Limits, Outcome, RunResult, Value


@dataclass(frozen=True)
class Result:
    """How one test went; `total` is more than 1 for test code with several asserts."""

    passed: int
    total: int = 1
    reason: str = ""


def padded(result: RunResult, wanted: int, limits: Limits) -> list[Value]:
    """The values of a run; those that it did not come to are errors that say how it ended."""
    missing = wanted - len(result.values)
    return [*result.values[:wanted], *[Value(error=ending(result, limits))] * missing]


def judge_call(case: CallCase, value: Value) -> Result:
    shown = f"{case.call.function}({', '.join(_shown(a, 40) for a in case.call.args)})"
    if case.raises is not None:
        kind = (value.error or "").partition(":")[0]
        fine = kind.rpartition(".")[2] == case.raises
        return Result(fine, reason="" if fine else f"{shown}: {value.error or 'no error'}, expected {case.raises}")
    if value.error is not None:
        return Result(0, reason=f"{shown}: {value.error}")
    fine = _equal(case.expected, value.value)
    if not fine and case.unwrap and isinstance(case.expected, list) and len(case.expected) == 1:
        fine = _equal(case.expected[0], value.value)
    return Result(fine, reason="" if fine else f"{shown} is {_shown(value.value)}, expected {_shown(case.expected)}")


def _equal(expected: Any, got: Any) -> bool:
    try:
        return values_equal(expected, got)
    except RecursionError:
        return False


def judge_assert(case: AssertCase, value: Value, other: Any) -> Result:
    if value.error is not None:
        return Result(0, reason=f"`{case.text[:80]}`: {value.error}")
    fine = holds(value.value, case.op, other) is not case.negated
    return Result(fine, reason="" if fine else f"`{case.text[:80]}`: it is {_shown(value.value)}")


def judge_printed(case: PrintedCase, result: RunResult, limits: Limits) -> Result:
    """A program may end with `exit()`: what it printed decides. With nothing to print it must come to its end."""
    ended = result.outcome is Outcome.FINISHED or (
        result.outcome is Outcome.EXITED and result.exit_code == 0 and bool(case.expected.strip())
    )
    shown = f"input {_shown(case.stdin[:40], 40)}"
    if not ended:
        return Result(0, reason=f"{shown}: {ending(result, limits)}")
    fine = printed_equal(case.expected, result.stdout)
    return Result(
        fine,
        reason="" if fine else f"{shown}: printed {_shown(result.stdout[:60])}, expected {_shown(case.expected[:60])}",
    )


def ending(result: RunResult, limits: Limits) -> str:
    match result.outcome:
        case Outcome.FINISHED:
            return "ended without a result"
        case Outcome.ERROR:
            lines = result.stderr.strip().splitlines()
            return f"raised {lines[-1][:160]}" if lines else f"exit status {result.exit_code}"
        case Outcome.EXITED:
            return f"exited by itself (status {result.exit_code})"
        case Outcome.WALL_TIME:
            return f"did not end within {limits.wall_s:g} s"
        case Outcome.CPU_TIME:
            return f"used more than {limits.cpu_s:g} s of processor time"
        case Outcome.MEMORY:
            return f"used more than {limits.memory_mb} MB of memory"
        case Outcome.OUTPUT:
            return f"printed more than {limits.output_bytes} bytes"
        case Outcome.CRASHED:
            return "crashed"


def _shown(value: Any, chars: int = 60) -> str:
    try:
        return repr(value)[:chars]
    except ValueError:  # an integer with more digits than Python writes
        return "a number too long to be shown"
