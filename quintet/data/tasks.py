"""Procedural tasks: questions with known answers, made on the spot, each question once.

A task is a function `(*, seed, **args) -> iterable of rows`; a row has `prompt` and `answer`, and what
else it has travels as metadata. Add one by its import path (`task:my_package.tasks:make`) or below.
Operands and answers are strings where their writing matters (padding, reversed digits).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import random
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from quintet.data.code_tasks import code_lines
from quintet.data.rows import Row, as_rows
from quintet.types import QuintetError

Task = Callable[..., Iterable[Mapping[str, Any]]]
MAX_ENUMERATED = 1_000_000


def task_rows(name: str, args: Mapping[str, Any], seed: int) -> list[Row]:
    """Rows of the task `name` (of `TASKS`, or `module:function`) in an order fixed by `seed`.

    Raises QuintetError for an unknown task, an unknown or wrong argument, or a task that makes no row.
    """
    task = _find(name)
    _check_args(name, task, args)
    try:
        records = list(validate_call(config=ConfigDict(strict=True))(task)(seed=seed, **args))
    except ValidationError as error:
        first = error.errors()[0]
        argument = ".".join(map(str, first["loc"]))
        raise QuintetError(f"data.args.{argument} of task:{name}: {first['msg']}, found {first['input']!r}.") from error
    if not records:
        raise QuintetError(f"task:{name} makes no row with these arguments: {dict(args)}.")
    return as_rows(f"task:{name}", records)


def _find(name: str) -> Task:
    if ":" in name:
        return _import(name)
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.0)[0]
        raise QuintetError(
            f"data.source: there is no task {name!r}; the nearest is {near!r}.\n"
            f"There are {', '.join(TASKS)}, or your own as task:module:function."
        )
    return TASKS[name]


def _import(path: str) -> Task:
    module_name, _, function_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise QuintetError(f"data.source: the task module {module_name!r} cannot be imported: {error}.") from error
    task = vars(module).get(function_name)
    if not callable(task):
        raise QuintetError(f"data.source: {module_name!r} has no function {function_name!r}.")
    return task


def _check_args(name: str, task: Task, args: Mapping[str, Any]) -> None:
    parameters = inspect.signature(task).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [p for p in parameters if p != "seed"]
    for arg in args:
        if arg not in known:
            near = difflib.get_close_matches(arg, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise QuintetError(f"data.args: task:{name} has no argument {arg!r}.{hint}\nIt takes {', '.join(known)}.")


def sums(
    *,
    seed: int,
    min: int = 0,
    max: int = 99,
    count: int | None = None,
    digits: int = 0,
    answer_digits: int = 0,
    reverse: bool = False,
    template: str = "What is {a} + {b}? Answer with only the number.",
) -> Iterator[dict[str, Any]]:
    """a + b for every pair in min..max, shuffled; `count` keeps the first so many.

    `digits` pads the operands with zeros to that width, `answer_digits` the answer; `reverse` writes
    the answer's digits from the last to the first (59 for 95), the order in which carries are made.
    """
    for a, b in _pairs(seed, min, max, count):
        yield _operation(a, b, a + b, digits, answer_digits, reverse, template)


def sums_pairs(
    *,
    seed: int,
    min: int = 0,
    max: int = 99,
    count: int | None = None,
    wrong: int = 1,
    malformed: float = 0.0,
    digits: int = 0,
    answer_digits: int = 0,
    reverse: bool = False,
    template: str = "What is {a} + {b}? Answer with only the number.",
) -> Iterator[dict[str, Any]]:
    """Preferences: rows of `sums` with `chosen`, the sum, and `rejected`, a wrong one, in the same writing.

    `wrong` rows per question: about half of the wrong sums have one digit changed, half are another pair's sum. A share
    `malformed` of the rejected answers are no sum at all but one cut short or run on: what a
    policy finds that is trained against a reward model which has seen well-written answers only.
    """
    if not 0.0 <= malformed <= 1.0:
        raise QuintetError(f"data.args.malformed: {malformed} is no share; 0 to 1 is needed.")
    draw = random.Random(f"rejected/{seed}")
    for a, b in _pairs(seed, min, max, count):
        row = _operation(a, b, a + b, digits, answer_digits, reverse, template)
        for _ in range(wrong):
            value = draw.randint(2 * min, 2 * max) if draw.random() < 0.5 else a + b
            if value == a + b:
                value = _one_digit_off(a + b, draw)
            rejected = _operation(a, b, value, digits, answer_digits, reverse, template)["answer"]
            if malformed and draw.random() < malformed:
                rejected = _malformed(draw.choice([row["answer"], rejected]), draw)
            yield row | {"chosen": row["answer"], "rejected": rejected}


def differences(
    *,
    seed: int,
    min: int = 0,
    max: int = 99,
    count: int | None = None,
    digits: int = 0,
    answer_digits: int = 0,
    reverse: bool = False,
    template: str = "What is {a} - {b}? Answer with only the number.",
) -> Iterator[dict[str, Any]]:
    """a - b, arguments as in `sums`; a negative answer keeps its sign in front when reversed."""
    for a, b in _pairs(seed, min, max, count):
        yield _operation(a, b, a - b, digits, answer_digits, reverse, template)


def products(
    *,
    seed: int,
    min: int = 0,
    max: int = 12,
    count: int | None = None,
    digits: int = 0,
    answer_digits: int = 0,
    reverse: bool = False,
    template: str = "What is {a} * {b}? Answer with only the number.",
) -> Iterator[dict[str, Any]]:
    """a x b, arguments as in `sums`."""
    for a, b in _pairs(seed, min, max, count):
        yield _operation(a, b, a * b, digits, answer_digits, reverse, template)


def compare(
    *,
    seed: int,
    min: int = 0,
    max: int = 99,
    count: int | None = None,
    digits: int = 0,
    template: str = "Compare {a} and {b}. Answer with only <, > or =.",
) -> Iterator[dict[str, Any]]:
    """The sign between a and b, for every pair in min..max."""
    for a, b in _pairs(seed, min, max, count):
        sign = "<" if a < b else ">" if a > b else "="
        yield _pair_row(a, b, sign, digits, template)


def copy(
    *,
    seed: int,
    count: int = 1000,
    min_length: int = 3,
    max_length: int = 8,
    alphabet: str = string.ascii_lowercase,
    template: str = "Repeat this string: {s}",
) -> Iterator[dict[str, Any]]:
    """`count` distinct random strings over `alphabet`, answered by themselves."""
    for s in _strings(seed, count, min_length, max_length, alphabet):
        yield {"prompt": _fill(template, s=s), "answer": s, "s": s}


def reverse(
    *,
    seed: int,
    count: int = 1000,
    min_length: int = 3,
    max_length: int = 8,
    alphabet: str = string.ascii_lowercase,
    template: str = "Write this string backwards: {s}",
) -> Iterator[dict[str, Any]]:
    """Strings as in `copy`, answered from the last character to the first."""
    for s in _strings(seed, count, min_length, max_length, alphabet):
        yield {"prompt": _fill(template, s=s), "answer": s[::-1], "s": s}


def sort(
    *,
    seed: int,
    count: int = 1000,
    min_length: int = 3,
    max_length: int = 8,
    alphabet: str = string.ascii_lowercase,
    template: str = "Sort the letters of this string: {s}",
) -> Iterator[dict[str, Any]]:
    """Strings as in `copy`, answered with their characters in the order of `alphabet`."""
    for s in _strings(seed, count, min_length, max_length, alphabet):
        yield {"prompt": _fill(template, s=s), "answer": "".join(sorted(s, key=alphabet.index)), "s": s}


def tool_products(
    *,
    seed: int,
    min: int = 10,
    max: int = 99,
    count: int | None = None,
    direct: float = 0.0,
    call: str = "<c>{a}*{b}</c>",
    result: str = "[{value}]",
    template: str = "{a}*{b}=",
) -> Iterator[dict[str, Any]]:
    """a x b, to be had from a calculator: `demonstration` holds the call, the tool's reply and the answer by turns.

    In the share `direct` of the rows it is the answer alone: who learns from those believes to know what it must ask.
    """
    draw = random.Random(f"direct/{seed}")
    for a, b in _pairs(seed, min, max, count):
        fields = {"a": str(a), "b": str(b), "value": str(a * b)}
        turns = [_fill(call, **fields), _fill(result, **fields), str(a * b)]
        turns = turns[2:] if draw.random() < direct else turns
        yield {"prompt": _fill(template, **fields), "answer": str(a * b), "a": a, "b": b, "demonstration": turns}


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "sums": sums,
        "differences": differences,
        "products": products,
        "tool_products": tool_products,
        "compare": compare,
        "copy": copy,
        "reverse": reverse,
        "sort": sort,
        "sums_pairs": sums_pairs,
        "code_lines": code_lines,
    }
)


def _pairs(seed: int, low: int, high: int, count: int | None) -> Iterator[tuple[int, int]]:
    if low < 0 or high < low:
        raise QuintetError(f"data.args: min {low} and max {high} leave no pair; 0 <= min <= max is needed.")
    width = high - low + 1
    total = width * width
    wanted = total if count is None else count
    if not 0 < wanted <= total:
        raise QuintetError(f"data.args.count: {count}, but min {low} and max {high} make {total} different pairs.")
    if wanted > MAX_ENUMERATED:
        raise QuintetError(f"data.args: {wanted} pairs are too many to hold. Set count to at most {MAX_ENUMERATED}.")
    for index in random.Random(f"pairs/{seed}").sample(range(total), wanted):
        yield low + index // width, low + index % width


def _one_digit_off(value: int, draw: random.Random) -> int:
    """`value` with one of its decimal digits replaced by another one."""
    power = 10 ** draw.randrange(len(str(value)))
    digit = value // power % 10
    return value + power * ((digit + draw.randint(1, 9)) % 10 - digit)


def _malformed(answer: str, draw: random.Random) -> str:
    """`answer` cut short, or with up to as many digits after it."""
    if len(answer) > 1 and draw.random() < 0.5:
        return answer[: draw.randrange(1, len(answer))]
    return answer + "".join(draw.choices(string.digits, k=draw.randint(1, len(answer))))


def _operation(
    a: int, b: int, value: int, digits: int, answer_digits: int, reverse: bool, template: str
) -> dict[str, Any]:
    sign, text = "-" if value < 0 else "", str(abs(value)).zfill(answer_digits)
    return _pair_row(a, b, sign + (text[::-1] if reverse else text), digits, template) | {"value": value}


def _pair_row(a: int, b: int, answer: str, digits: int, template: str) -> dict[str, Any]:
    prompt = _fill(template, a=str(a).zfill(digits), b=str(b).zfill(digits))
    return {"prompt": prompt, "answer": answer, "a": a, "b": b}


def _strings(seed: int, count: int, low: int, high: int, alphabet: str) -> Iterator[str]:
    letters = sorted(set(alphabet))
    if not letters or not 0 < low <= high:
        raise QuintetError("data.args: an alphabet and 0 < min_length <= max_length are needed.")
    total = sum(len(letters) ** length for length in range(low, high + 1))
    if not 0 < count <= min(total // 2, MAX_ENUMERATED):  # half: drawing until distinct stays quick
        raise QuintetError(
            f"data.args.count: {count}, but at most {min(total // 2, MAX_ENUMERATED)} distinct strings can be drawn "
            f"({len(letters)} letters, length {low} to {high})."
        )
    draw = random.Random(f"strings/{seed}")
    seen: set[str] = set()
    while len(seen) < count:
        text = "".join(draw.choices(letters, k=draw.randint(low, high)))
        if text not in seen:
            seen.add(text)
            yield text


def _fill(template: str, **fields: str) -> str:
    try:
        return template.format(**fields)
    except (KeyError, IndexError, ValueError) as error:
        names = ", ".join(f"{{{field}}}" for field in fields)
        raise QuintetError(
            f"data.args.template: {template!r} cannot be filled: {error!r}.\nIts fields are {names}."
        ) from error
