"""Whether what a program printed, or what a function returned, is what the test expects.

Printed text: line by line; blanks at a line's end and empty lines at the end do not count. A number that the expected
text writes with a decimal point or an exponent may differ by 1e-6, absolute or relative; an integer is compared as it
is written, like everything else.

Values: a float may differ by 1e-6, absolute or relative, an integer not at all; a boolean is not a number. Expected
values come from JSON, which knows neither tuples nor integer keys: a list stands for a tuple too, "1" for the key 1.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from quintet.reward.code_tests.cases import Op

TOLERANCE = 1e-6
_MAX_NUMBER_CHARS = 400  # longer ones are compared as text

# Possessive: a line of a million digits is read once, not a million times
_NUMBER = re.compile(r"(?<![\w.])([-+]?(?>\d+(?:\.\d*)?|\.\d+)(?>[eE][-+]?\d+)?+)(?![\w.])")


def printed_equal(expected: str, got: str) -> bool:
    """Linear in the length of both texts."""
    if expected == got:
        return True
    wanted_lines, lines = _lines(expected), _lines(got)
    return len(wanted_lines) == len(lines) and all(map(_line_equal, wanted_lines, lines))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _line_equal(expected: str, got: str) -> bool:
    if expected == got or not set(".eE") & set(expected):
        return expected == got
    wanted_parts, parts = _NUMBER.split(expected), _NUMBER.split(got)  # text, number, text, number, ... text
    return len(wanted_parts) == len(parts) and all(
        map(_part_equal, wanted_parts, parts, itertools.cycle((False, True)))
    )


def _part_equal(expected: str, got: str, is_number: bool) -> bool:
    if expected == got:
        return True
    if not is_number or not set(".eE") & set(expected) or max(len(expected), len(got)) > _MAX_NUMBER_CHARS:
        return False
    wanted, value = float(expected), float(got)
    return math.isfinite(wanted) and close(wanted, value)


def close(expected: float, got: float) -> bool:
    """Within 1e-6, absolute or relative; infinities and NaN equal themselves."""
    if math.isnan(expected) or math.isnan(got):
        return math.isnan(expected) and math.isnan(got)
    return math.isclose(expected, got, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def values_equal(expected: Any, got: Any) -> bool:
    """`expected` is JSON data, `got` plain data. Raises RecursionError for values nested beyond the interpreter's."""
    if isinstance(expected, bool) or isinstance(got, bool):
        return isinstance(expected, bool) and isinstance(got, bool) and expected == got
    if isinstance(expected, float) and isinstance(got, int | float):
        return _float_equal(expected, got)
    if isinstance(expected, int) and isinstance(got, int | float):
        return expected == got
    if isinstance(expected, list | tuple):
        if not isinstance(got, list | tuple) or len(expected) != len(got):
            return False
        return all(map(values_equal, expected, got))
    if isinstance(expected, dict):
        return isinstance(got, dict) and _dicts_equal(expected, got)
    return type(expected) is type(got) and bool(expected == got)


def _float_equal(expected: float, got: int | float) -> bool:
    try:
        return close(expected, float(got))
    except OverflowError:  # an integer beyond every float
        return False


def _dicts_equal(expected: dict[Any, Any], got: dict[Any, Any]) -> bool:
    if len(expected) != len(got):
        return False
    found = {str(key) if type(key) is int else key: value for key, value in got.items()}
    keys = {str(key) if type(key) is int else key: value for key, value in expected.items()}
    return keys.keys() == found.keys() and all(values_equal(value, found[key]) for key, value in keys.items())


def holds(value: Any, op: Op, other: Any) -> bool:
    """Python's own `value op other` on plain data; `contains` is `other in value`, `true` the truth of the value.

    What Python cannot compare does not hold.
    """
    try:
        match op:
            case "true":
                return bool(value)
            case "contains":
                return bool(other in value)
            case "not contains":
                return bool(other not in value)
            case _:
                return bool(_COMPARE[op](value, other))
    except (TypeError, RecursionError):
        return False


_COMPARE: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType({
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "is": operator.is_, "is not": operator.is_not,
    "in": lambda value, other: value in other, "not in": lambda value, other: value not in other,
})  # fmt: skip
