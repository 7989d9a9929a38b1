"""The parsed form of an answer: one immutable node type.

| kind | args | text |
| --- | --- | --- |
| num | - | the literal as written (`value` holds it exactly) |
| sym, text, unit | - / - / value | name, words, canonical unit |
| inf, imag, euler, pi, reals | - | - |
| add, mul, div, neg, pow, root | operands (root: radicand, degree) | - |
| fn | arguments | name |
| pm | a, b: a plus-minus b | `+` or `-` (minus-plus) |
| list, set, tuple, ratio | items | list: `,`, `or`, `and` |
| interval | low, high | brackets, e.g. `[)` |
| cup, cap, minus | two sets | - |
| matrix | rows, each a `row` of cells | - |
| rel | operands of a chain | relations between them, blank-separated |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction


class Unreadable(Exception):
    """The text is not an answer that the grader understands."""


class TooBig(Exception):
    """A number that is not worth building: a power tower, a factorial of a factorial."""


@dataclass(frozen=True, slots=True)
class Node:
    kind: str
    args: tuple[Node, ...] = ()
    text: str = ""
    value: Fraction | None = None

    def walk(self) -> Iterator[Node]:
        yield self
        for arg in self.args:
            yield from arg.walk()

    def map_args(self, function: Callable[[Node], Node]) -> Node:
        return replace(self, args=tuple(function(arg) for arg in self.args)) if self.args else self

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset(node.text for node in self.walk() if node.kind == "sym")


def names(words: str) -> frozenset[str]:
    """The blank-separated words."""
    return frozenset(words.split())


def number(value: Fraction | int, literal: str = "") -> Node:
    return Node("num", text=literal, value=Fraction(value))


_DESCRIPTIONS = {
    **{"num": "number", "sym": "symbol", "text": "word", "unit": "quantity", "rel": "equation or inequality"},
    **{"inf": "infinity", "list": "list", "set": "set", "tuple": "tuple", "ratio": "ratio", "interval": "interval"},
    **{"cup": "union", "cap": "intersection", "minus": "difference of sets", "matrix": "matrix", "reals": "real line"},
}


def described(node: Node) -> str:
    """What a node is, in a word or two."""
    return _DESCRIPTIONS.get(node.kind, "expression")


ZERO, ONE = number(0), number(1)


def negate(node: Node) -> Node:
    return Node("neg", (node,))


def subtract(a: Node, b: Node) -> Node:
    return Node("add", (a, negate(b)))
