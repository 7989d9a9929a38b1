"""Where the final answer stands in a response: the last box, the `####` line, the answer tag, the last number.

Everything here is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction

# Longer literals are compared as text only: exact arithmetic on them could be made arbitrarily slow.
MAX_DIGITS = 400

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[{\d\w])")
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.])[-+](?=[\d.])|(?<=[=(:])[-+]\s|(?<=[=(:]\s)[-+]\s)?"
    r"(?P<value>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,3}(?!\d))?"
    r"(?:\s?/\s?(?P<denominator>\d+)(?![\d.]))?"
)
_THINK_TAGS = (
    *(("<think>", "</think>"), ("<thinking>", "</thinking>")),
    *(("<reasoning>", "</reasoning>"), ("◁think▷", "◁/think▷")),
)


def after_thinking(text: str) -> str:
    """What follows the last end tag of a thinking part, and stands before a thinking part that was never closed; the
    whole text when there is none."""
    end = max((text.rfind(close) + len(close) for _, close in _THINK_TAGS if close in text), default=0)
    text = text[end:]
    start = min((text.index(opening) for opening, _ in _THINK_TAGS if opening in text), default=len(text))
    return text[:start]


def boxes(text: str) -> Iterator[str | None]:
    r"""Contents of every outermost `\boxed{...}` or `\fbox{...}`, in order; None for one that is cut off by the end."""
    position = 0
    while (match := _BOX.search(text, position)) is not None:
        start = match.end()
        if text[start] != "{":  # TeX: \boxed 7 boxes one token
            yield text[start]
            position = start + 1
            continue
        end = closing_brace(text, start)
        yield None if end is None else text[start + 1 : end]
        if end is None:
            return
        position = end + 1


def closing_brace(text: str, start: int) -> int | None:
    r"""Index of the brace that closes `text[start]`; escaped braces (`\{`) do not count. None: never closed."""
    depth, position = 0, start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return position
        position += 1
    return None


def last_box(text: str) -> str | None:
    r"""Contents of the last box; None when there is none, or it is cut off."""
    found = None
    for found in boxes(text):  # noqa: B007 - the last one is wanted
        pass
    return found


def after_hashes(text: str) -> str | None:
    """GSM8K's convention: what follows the last `####` on its line."""
    _, mark, tail = text.rpartition("####")
    return tail.strip().split("\n", 1)[0] if mark else None


def answer_tag(text: str) -> str | None:
    """Contents of the last closed `<answer>...</answer>`."""
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[start + len("<answer>") : end].strip() if start >= 0 else None


def numbers(text: str) -> list[Fraction | str]:
    """All numbers in reading order, exactly; a literal of more than `MAX_DIGITS` digits stays a string.

    Understands signs (U+2212 too), grouping commas, decimals, exponents of up to three digits and a/b.
    A minus sign after a digit, a letter or a closing bracket is a subtraction, one before a blank a sign only after
    `=`, `(` or `:`.
    """
    return [_value(match) for match in _NUMBER.finditer(text.replace("\u2212", "-").replace(r"\$", "$"))]


def _value(match: re.Match[str]) -> Fraction | str:
    literal = match["value"].replace(",", "")
    if len(literal) > MAX_DIGITS or len(match["denominator"] or "") > MAX_DIGITS:
        return match[0].replace(",", "").lstrip("+").replace(" ", "")
    value = Fraction(literal + (match["exponent"] or ""))
    if match["denominator"] and int(match["denominator"]) != 0:
        value /= int(match["denominator"])
    return -value if (match["sign"] or "").startswith("-") else value


def single_number(text: str) -> Fraction | str | None:
    """The one number that `text` is about (`$1,234.00`, `**31**`, `x = 5`, `12 apples`), else None.

    Two numbers are none: `3 or 4` is not an answer.
    """
    found = numbers(text.rpartition("=")[2])
    return found[0] if len(found) == 1 else None
