"""Test cases as they stand in data, read into four kinds. What cannot be read is refused when data is loaded.

{"input": "1 2\n", "output": "3\n"}                     standard input and output
{"inputs": [...], "outputs": [...]}                     many of them (TACO, APPS)
... with "fn_name": "add"                               arguments and result instead: a list of arguments, or one
                                                        JSON value a line (LiveCodeBench)
{"function": "add", "args": [1, 2], "expected": 3}      a call; "kwargs" too; "raises": "ValueError" for an error
{"assert": "assert add(1, 2) == 3"}                     Python: asserts, a HumanEval `check(candidate)`, `test_`
                                                        functions, see asserts.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from quintet.reward.code_tests.asserts import add_asserts
from quintet.reward.code_tests.cases import CallCase, PrintedCase, Tests, UnusableTests
from quintet.sandbox.protocol import Call


def read_tests(rows: Iterable[Mapping[str, Any]], entry_point: str | None = None, prompt: str = "") -> Tests:
    """Raises UnusableTests naming the test, counted from 1. `entry_point`: what `check(candidate)` is called with, and
    the function of tests that name none. `prompt`: may define helpers that test code calls."""
    tests = Tests()
    for number, row in enumerate(rows, start=1):
        try:
            if "assert" in row:
                add_asserts(tests, _text(row, "assert"), entry_point, prompt)
            elif "function" in row:
                tests.calls.append(_call(row))
            elif "inputs" in row and "outputs" in row:
                _add_many(tests, row, entry_point)
            elif "input" in row and "output" in row:
                _add_one(tests, row["input"], row["output"], _function(row, entry_point))
            else:
                keys = ", ".join(map(str, row)) or "none"
                raise UnusableTests(f"neither input and output nor function nor assert is there; keys: {keys}")
        except UnusableTests as error:
            raise UnusableTests(f"test {number}: {error}") from error
    if not len(tests):
        raise UnusableTests("there is no test")
    return tests


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise UnusableTests(f"{key} is {type(value).__name__}, not a string")
    return value


def _call(row: Mapping[str, Any]) -> CallCase:
    args, kwargs = row.get("args", []), row.get("kwargs", {})
    if not isinstance(args, list | tuple) or not isinstance(kwargs, dict):
        raise UnusableTests("args must be a list and kwargs an object")
    call = Call(_dotted(_text(row, "function")), tuple(args), dict(kwargs))
    if ("expected" in row) == ("raises" in row):
        raise UnusableTests("a call needs either expected or raises")
    return CallCase(call, raises=_text(row, "raises")) if "raises" in row else CallCase(call, row["expected"])


def _dotted(name: str) -> str:
    if not all(part.isidentifier() for part in name.split(".")):
        raise UnusableTests(f"{name!r} is no name of a function")
    return name


def _function(row: Mapping[str, Any], entry_point: str | None) -> str | None:
    """The function that is called instead of reading standard input; None where there is none."""
    if row.get("fn_name"):
        return _dotted(_text(row, "fn_name"))
    if row.get("testtype") != "functional":
        return None
    if entry_point is None:
        raise UnusableTests("it is functional, but no function is named (fn_name)")
    return _dotted(entry_point)


def _add_many(tests: Tests, row: Mapping[str, Any], entry_point: str | None) -> None:
    inputs, outputs = row["inputs"], row["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise UnusableTests("inputs and outputs must be lists of one length")
    for given, expected in zip(inputs, outputs, strict=True):
        _add_one(tests, given, expected, _function(row, entry_point))


def _add_one(tests: Tests, given: Any, expected: Any, function: str | None) -> None:
    if function is None:
        tests.printed.append(PrintedCase(_lines(given), _lines(expected)))
        return
    unwrap = not isinstance(expected, str)
    if isinstance(given, str):
        given = [_json(line) for line in given.split("\n") if line.strip()]
    if not isinstance(given, list):
        raise UnusableTests(f"the arguments of {function} are {type(given).__name__}, not a list")
    if isinstance(expected, str) and (decoded := _maybe_json(expected)) is not None:
        expected = decoded[0]
    _add_prelude(tests, function)
    tests.calls.append(CallCase(Call(function, tuple(given)), expected, unwrap=unwrap))


def _add_prelude(tests: Tests, function: str) -> None:
    """A method of `class Solution` stands for the function where the program has no such function."""
    if "." in function:
        return
    adaptor = (
        f"if {function!r} not in globals() and 'Solution' in globals():\n"
        f"    def {function}(*args, **kwargs):\n        return Solution().{function}(*args, **kwargs)"
    )
    if adaptor not in tests.prelude:
        tests.prelude.append(adaptor)


def _lines(value: Any) -> str:
    """Text as it is; a list is one line per entry."""
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise UnusableTests(f"input and output must be text, not {type(value).__name__}")


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise UnusableTests(f"an argument is not JSON: {line[:60]!r}") from None


def _maybe_json(text: str) -> tuple[Any] | None:
    """The value in a tuple; None where the text is not JSON and so is meant as it is."""
    try:
        return (json.loads(text),)
    except (ValueError, RecursionError):
        return None
