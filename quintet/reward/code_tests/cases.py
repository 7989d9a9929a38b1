"""The kinds of test cases of code prompts, ready to be run; reading.py makes them from data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from quintet.sandbox.protocol import Call

Op = Literal["==", "!=", "<", "<=", ">", ">=", "is", "is not", "in", "not in", "contains", "not contains", "true"]


class UnusableTests(Exception):
    """No response could be graded by these tests. The message says why."""


@dataclass(frozen=True)
class PrintedCase:
    stdin: str
    expected: str


@dataclass(frozen=True)
class CallCase:
    """`raises`: the name of the exception that is expected instead of a value."""

    call: Call
    expected: Any = None
    raises: str | None = None
    unwrap: bool = False  # APPS wraps results in a list of one


@dataclass(frozen=True)
class AssertCase:
    """`expression` is the candidate's side, evaluated beside it; `other` never is.

    `other_source` set: it is no literal and is computed in a run without the candidate.
    """

    text: str
    expression: str
    op: Op
    negated: bool = False
    other: Any = None
    other_source: str | None = None


@dataclass(frozen=True)
class ApartCase:
    """Test code that runs without the candidate; `names` are answered by runs of the candidate."""

    source: str
    names: tuple[str, ...]


@dataclass
class Tests:
    """All tests of a prompt. `prelude` goes into the candidate's program, after it: adaptors, and what its sides of
    asserts import."""

    printed: list[PrintedCase] = field(default_factory=list)
    calls: list[CallCase] = field(default_factory=list)
    asserts: list[AssertCase] = field(default_factory=list)
    apart: list[ApartCase] = field(default_factory=list)
    prelude: list[str] = field(default_factory=list)
    imports: list[str] = field(default_factory=list)  # of asserts, for the run that computes the other sides

    def __len__(self) -> int:
        return len(self.printed) + len(self.calls) + len(self.asserts) + len(self.apart)
