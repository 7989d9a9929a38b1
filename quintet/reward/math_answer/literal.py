"""Literals: numbers as they are written, mixed numbers, numbers in other bases, indices."""

from __future__ import annotations

import re
from fractions import Fraction

from quintet.reward.math_answer.tree import Node, Unreadable

MAX_DIGITS = 4000
BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10} | {
    "twelve": 12,
    "sixteen": 16,
}


def number_literal(literal: str) -> Node:
    """Exactly; `0.1\\overline{6}` is 1/6."""
    match = re.fullmatch(r"([\d.]*)(?:\\(?:overline|dot|bar)\s*\{?(\d+)\}?)?(?:[eE]([+-]?\d+))?", literal)
    if match is None or len(literal) > MAX_DIGITS:
        raise Unreadable(f"number {literal[:20]}")
    fixed, repeat, exponent = match[1], match[2], int(match[3] or 0)
    value = Fraction(fixed if fixed[-1:] != "." else fixed + "0")
    if repeat:
        decimals = len(fixed.partition(".")[2])
        value += Fraction(int(repeat), (10 ** len(repeat) - 1) * 10**decimals)
    return Node("num", text="" if repeat else literal, value=value * Fraction(10) ** exponent)


def mixed(whole: Node, fraction: Node, *, strict: bool) -> Node:
    """`2\\frac{1}{2}` is two and a half. An improper fraction multiplies in TeX and means nothing in plain text."""
    top, bottom = (part.value for part in fraction.args)
    if top is not None and bottom is not None and whole.value is not None and whole.text.isdigit() and 0 < top < bottom:
        return Node("add", (whole, fraction))
    if strict:
        raise Unreadable("a number beside an improper fraction")
    return Node("mul", (whole, fraction))


def flat(node: Node) -> str:
    """An index as text: `n+1`, `12`."""
    if node.value is not None:
        return str(node.value)
    return node.text + "".join(f"{node.kind[0]}{flat(arg)}" for arg in node.args)
