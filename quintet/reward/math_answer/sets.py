"""Sets of real numbers as sorted, disjoint intervals: unions, differences, and the solutions of an inequality."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from quintet.reward.math_answer.tree import Node, TooBig, Unreadable, negate, subtract
from quintet.reward.math_answer.value import context, fold, numeric

DIGITS = 50
_EPSILON_DIGITS = 40


@dataclass(frozen=True)
class Interval:
    """`low` to `high` (mpmath numbers, possibly infinite); a point has both ends closed and equal."""

    low: Any
    high: Any
    low_closed: bool
    high_closed: bool


class RealLine:
    """Set algebra at one precision; ends closer than 40 digits are the same."""

    def __init__(self) -> None:
        self.mp = context(DIGITS)
        self._epsilon = self.mp.mpf(10) ** -_EPSILON_DIGITS

    def read(self, node: Node) -> list[Interval]:
        """Raises Unreadable for what is no set of reals with known ends."""
        inf = self.mp.inf
        match node.kind:
            case "reals":
                return [Interval(-inf, inf, False, False)]
            case "set" | "list":
                points = [self._end(arg) for arg in node.args]
                return self.union([Interval(point, point, True, True) for point in points])
            case "interval":
                return self._interval(node, node.text)
            case "tuple" if len(node.args) == 2:
                return self._interval(node, "()")
            case "cup":
                return self.union([*self.read(node.args[0]), *self.read(node.args[1])])
            case "cap":
                return self.intersect(*map(self.read, node.args))
            case "minus":
                return self._minus(*map(self.read, node.args))
            case "rel":
                return self.solve(node)
        raise Unreadable(f"a {node.kind} is no set")

    def _end(self, node: Node) -> Any:
        try:
            value = numeric(node, self.mp, {})
        except (KeyError, TooBig, ZeroDivisionError, ValueError, OverflowError) as error:
            raise Unreadable("an end that is no number") from error
        if self.mp.im(value) != 0 or self.mp.isnan(value):
            raise Unreadable("an end that is not real")
        return self.mp.re(value)

    def _interval(self, node: Node, brackets: str) -> list[Interval]:
        low, high = map(self._end, node.args)
        low_closed = brackets[0] == "[" and not self.mp.isinf(low)
        high_closed = brackets[1] == "]" and not self.mp.isinf(high)
        if low > high or (low == high and not (low_closed and high_closed)):
            raise Unreadable("an interval that runs backwards")
        return [Interval(low, high, low_closed, high_closed)]

    def same(self, a: Any, b: Any) -> bool:
        if self.mp.isinf(a) or self.mp.isinf(b):
            return bool(a == b)
        return bool(abs(a - b) <= self._epsilon * max(abs(a), abs(b)))

    def union(self, parts: list[Interval]) -> list[Interval]:
        result: list[Interval] = []
        for part in sorted(parts, key=lambda p: (p.low, not p.low_closed)):
            last = result[-1] if result else None
            touches = last is not None and self.same(last.high, part.low) and (last.high_closed or part.low_closed)
            if last is not None and (part.low < last.high or touches):
                result[-1] = self._join(last, part)
            else:
                result.append(part)
        return result

    def _join(self, a: Interval, b: Interval) -> Interval:
        low_closed = a.low_closed or (b.low_closed and self.same(a.low, b.low))
        if self.same(a.high, b.high):
            return Interval(a.low, a.high, low_closed, a.high_closed or b.high_closed)
        top = a if a.high > b.high else b
        return Interval(a.low, top.high, low_closed, top.high_closed)

    def intersect(self, a: list[Interval], b: list[Interval]) -> list[Interval]:
        return self._minus(a, self._minus(a, b))

    def _minus(self, a: list[Interval], b: list[Interval]) -> list[Interval]:
        for cut in b:
            a = [piece for part in a for piece in self._cut(part, cut)]
        return a

    def _cut(self, part: Interval, cut: Interval) -> list[Interval]:
        """`part` without `cut`: at most a piece on either side."""
        left = replace(part, high=cut.low, high_closed=not cut.low_closed)
        if part.high < cut.low or (self.same(part.high, cut.low) and not (part.high_closed and cut.low_closed)):
            left = part
        right = replace(part, low=cut.high, low_closed=not cut.high_closed)
        if part.low > cut.high or (self.same(part.low, cut.high) and not (part.low_closed and cut.high_closed)):
            right = part
        if left == part or right == part:
            return [part]
        return [piece for piece in (left, right) if self._holds_something(piece)]

    def _holds_something(self, piece: Interval) -> bool:
        if self.same(piece.low, piece.high):
            return piece.low_closed and piece.high_closed
        return bool(piece.low < piece.high)

    def equal(self, a: list[Interval], b: list[Interval]) -> bool:
        return len(a) == len(b) and all(
            self.same(x.low, y.low)
            and self.same(x.high, y.high)
            and (x.low_closed, x.high_closed) == (y.low_closed, y.high_closed)
            for x, y in zip(a, b, strict=True)
        )

    def solve(self, node: Node) -> list[Interval]:
        """Solutions of a chain of inequalities (or an equation, or a membership) in one unknown."""
        relations = node.text.split()
        if relations == ["in"] and node.args[0].kind == "sym":
            return self.read(node.args[1])
        names = sorted(node.symbols)
        if len(names) != 1:
            raise Unreadable("not one unknown")
        result = [Interval(-self.mp.inf, self.mp.inf, False, False)]
        for relation, left, right in zip(relations, node.args, node.args[1:], strict=False):
            result = self.intersect(result, self._solve_any(left, relation, right, names[0]))
        return result

    def _solve_any(self, left: Node, relation: str, right: Node, name: str) -> list[Interval]:
        """`|f| < c` is f < c and f > -c; everything else is a sign of left - right."""
        if _infinite(left) or _infinite(right):  # -oo < x says nothing
            return [Interval(-self.mp.inf, self.mp.inf, False, False)]
        if right.kind == "fn" and right.text == "abs" and not left.symbols:
            turned = {"<": ">", ">": "<", "le": "ge", "ge": "le"}
            return self._solve_any(right, turned.get(relation, relation), left, name)
        if left.kind != "fn" or left.text != "abs" or right.symbols:
            return self._solve_one(fold(subtract(left, right)), relation, name)
        above = self._solve_one(fold(subtract(left.args[0], right)), relation, name)
        below = self._solve_one(fold(subtract(negate(left.args[0]), right)), relation, name)
        return self.intersect(above, below) if relation in ("<", "le") else self.union([*above, *below])

    def _solve_one(self, difference: Node, relation: str, name: str) -> list[Interval]:
        """`difference` relation 0, for polynomials of degree one or two: signs between the roots."""

        def at(x: Any) -> Any:
            try:
                return self.mp.re(numeric(difference, self.mp, {name: self.mp.mpf(x)}))
            except (ZeroDivisionError, ValueError, OverflowError, TooBig) as error:
                raise Unreadable("not a polynomial") from error

        roots = self._roots(at)
        ends = [-self.mp.inf, *roots, self.mp.inf]
        parts = [Interval(root, root, True, True) for root in roots if relation in ("le", "ge", "=")]
        for low, high in itertools.pairwise(ends):
            if low != high and self._holds(relation, at(self._between(low, high))):
                parts.append(Interval(low, high, False, False))
        return self.union(parts)

    def _between(self, low: Any, high: Any) -> Any:
        if self.mp.isinf(low):
            return self.mp.mpf(0) if self.mp.isinf(high) else high - 1 - abs(high)
        return low + 1 + abs(low) if self.mp.isinf(high) else (low + high) / 2

    @staticmethod
    def _holds(relation: str, value: Any) -> bool:
        tests: dict[str, bool] = {"<": value < 0, "le": value <= 0, ">": value > 0, "ge": value >= 0, "ne": value != 0}
        return bool(tests.get(relation, False))

    def _roots(self, at: Callable[[Any], Any]) -> list[Any]:
        """Of a x^2 + b x + c, whose coefficients are read off at three points and checked at two others."""
        c, plus, minus = at(0), at(1), at(-1)
        a, b = (plus + minus) / 2 - c, (plus - minus) / 2
        scale = abs(a) + abs(b) + abs(c)
        for x in (3, self.mp.mpf("-2.5")):
            if abs(a * x * x + b * x + c - at(x)) > self._epsilon * scale * 100:
                raise Unreadable("not a polynomial of degree two")
        if abs(a) <= self._epsilon * scale:
            return [] if abs(b) <= self._epsilon * scale else [-c / b]
        discriminant = b * b - 4 * a * c
        if abs(discriminant) <= self._epsilon * scale * scale:
            return [-b / (2 * a)]
        if discriminant < 0:
            return []
        root = self.mp.sqrt(discriminant)
        return sorted([(-b - root) / (2 * a), (-b + root) / (2 * a)])


def _infinite(node: Node) -> bool:
    return node.kind == "inf" or (node.kind == "neg" and _infinite(node.args[0]))
