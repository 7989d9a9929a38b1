"""A procedural code task: one line of Python from a sentence, with tests made on the spot.

    prompt      add 3 times 2:
    answer      (x+3)*2          one right program; any that passes the tests is as good
    test_cases  [{"function": "f", "args": [5], "expected": 16}, ...]

The response is what follows `return` in a function `f` of one integer x:

    reward:
      functions: [{fn: code, args: {extract: whole, template: "def f(x):\\n    return {code}"}}]
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from quintet.types import QuintetError

MAX_ENUMERATED = 1_000_000
_INPUTS = (-4, 0, 1, 7, 10)


def code_lines(
    *, seed: int, operations: int = 2, largest: int = 9, count: int | None = None
) -> Iterator[dict[str, Any]]:
    """Every sequence of `operations` steps (add, minus and times with a number up to `largest`, negate, square), in an
    order fixed by `seed`; `count` keeps the first so many."""
    steps = [f"{verb} {n}" for verb in ("add", "minus", "times") for n in range(1 + (verb == "times"), largest + 1)]
    steps += ["negate", "square"]
    total = len(steps) ** operations if 1 <= operations <= 4 and largest >= 2 else 0
    wanted = total if count is None else count
    if not 0 < wanted <= total:
        raise QuintetError(
            f"data.args: operations {operations} and largest {largest} make {total} sentences, not {wanted}; "
            "1 <= operations <= 4 and largest >= 2 are needed."
        )
    if wanted > MAX_ENUMERATED:
        raise QuintetError(f"data.args: {wanted} sentences are too many to hold. Set count to {MAX_ENUMERATED}.")
    for index in random.Random(f"code_lines/{seed}").sample(range(total), wanted):
        chosen = [steps[index // len(steps) ** place % len(steps)] for place in range(operations)]
        yield _row(chosen)


def _row(steps: list[str]) -> dict[str, Any]:
    expression, values, is_sum = "x", list(_INPUTS), False
    for step in steps:
        verb, _, number = step.partition(" ")
        inner = f"({expression})" if is_sum else expression
        n = int(number or 0)
        match verb:
            case "add":
                expression, values, is_sum = f"{expression}+{n}", [v + n for v in values], True
            case "minus":
                expression, values, is_sum = f"{expression}-{n}", [v - n for v in values], True
            case "times":
                expression, values, is_sum = f"{inner}*{n}", [v * n for v in values], False
            case "negate":
                expression, values, is_sum = f"-{inner}", [-v for v in values], True
            case "square":
                expression, values, is_sum = f"{inner}*{inner}", [v * v for v in values], False
    tests = [{"function": "f", "args": [x], "expected": v} for x, v in zip(_INPUTS, values, strict=True)]
    return {"prompt": f"{' '.join(steps)}: ", "answer": expression, "test_cases": tests}
