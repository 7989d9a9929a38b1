"""What an expression is worth: exactly where it is rational, else to many digits.

All work is bounded: a power, factorial or product that would exceed `MAX_BITS` is left standing as it is
(`fold`) or raises TooBig (`numeric`). Every call makes its own mpmath context, so that threads do not meet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from mpmath.ctx_mp import MPContext  # type: ignore[import-untyped]

from quintet.reward.math_answer.tree import Node, TooBig, Unreadable, names, number

MAX_BITS = 1 << 15
MAX_FACTORIAL = 2000
MAX_EXPONENT = 1e5  # of e, in numeric evaluation
_OPERATIONS = names("add mul div neg pow root fn")


def fold(node: Node) -> Node:
    """Every rational part replaced by its value. Division by zero stays as it is."""
    if node.value is not None:
        return number(node.value)
    node = node.map_args(fold)
    if node.kind not in _OPERATIONS or any(arg.value is None for arg in node.args):
        return node
    try:
        value = _exact(node, [arg.value for arg in node.args if arg.value is not None])
    except TooBig:
        return node
    return node if value is None else number(value)


def _exact(node: Node, values: list[Fraction]) -> Fraction | None:
    match node.kind:
        case "add":
            return _bounded(sum, values)
        case "mul":
            return _bounded(math.prod, values)
        case "neg":
            return -values[0]
        case "div":
            return None if values[1] == 0 else _bounded(lambda v: v[0] / v[1], values)
        case "pow":
            return _power(*values)
        case "root":
            return _root(values[0], values[1])
        case _:
            return _function(node.text, values)


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _bounded(operation: Callable[[list[Fraction]], Any], values: list[Fraction]) -> Fraction:
    if sum(map(_bits, values)) > 4 * MAX_BITS:
        raise TooBig
    return Fraction(operation(values))


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if base == 0:
        return Fraction(0) if exponent > 0 else None
    if exponent.denominator != 1:
        if exponent.denominator > 64:
            return None
        root = _root(base, Fraction(exponent.denominator)) if base > 0 else None
        return None if root is None else _power(root, Fraction(exponent.numerator))
    if abs(base) != 1 and abs(exponent.numerator) * _bits(base) > MAX_BITS:
        raise TooBig
    if abs(base) == 1:
        return base if exponent.numerator % 2 else Fraction(1)
    return base**exponent.numerator


def _root(radicand: Fraction, degree: Fraction) -> Fraction | None:
    """Exact when the radicand is a perfect power; None otherwise."""
    n = degree.numerator
    if degree.denominator != 1 or not 2 <= n <= 64 or _bits(radicand) > MAX_BITS:
        return None
    if radicand < 0:
        positive = _root(-radicand, degree) if n % 2 else None
        return None if positive is None else -positive
    top, bottom = _integer_root(radicand.numerator, n), _integer_root(radicand.denominator, n)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _integer_root(value: int, n: int) -> int | None:
    """By Newton's method on integers from above: exact at any size."""
    if value < 2:
        return value
    root = 1 << (value.bit_length() // n + 1)
    while (smaller := ((n - 1) * root + value // root ** (n - 1)) // n) < root:
        root = smaller
    return root if root**n == value else None


def _function(name: str, values: list[Fraction]) -> Fraction | None:
    integers = [value.numerator for value in values if value.denominator == 1]
    match name, len(values):
        case "abs", 1:
            return abs(values[0])
        case "percent", 1:
            return values[0] / 100
        case "floor", 1:
            return Fraction(math.floor(values[0]))
        case "ceil", 1:
            return Fraction(math.ceil(values[0]))
        case (("min" | "max"), _) if values:
            return min(values) if name == "min" else max(values)
    if len(integers) != len(values):
        return None
    match name, len(values):
        case "fact", 1:
            return Fraction(math.factorial(_small(integers[0])))
        case "binom", 2:
            return Fraction(math.comb(_small(integers[0]), _small(integers[1])))
        case "gcd", _ if values:
            return Fraction(math.gcd(*integers))
        case "lcm", _ if values:
            return Fraction(math.lcm(*integers))
    return None


def _small(value: int) -> int:
    if not 0 <= value <= MAX_FACTORIAL:
        raise TooBig
    return value


def context(digits: int) -> Any:
    """An mpmath context of its own."""
    mp = MPContext()
    mp.dps = digits
    return mp


def numeric(node: Node, mp: Any, symbols: Mapping[str, Any]) -> Any:
    """Value as an mpmath number. Raises TooBig, Unreadable for what is no number, ZeroDivisionError, ValueError."""
    if node.value is not None:
        return mp.mpf(node.value.numerator) / node.value.denominator
    match node.kind:
        case "sym":
            return symbols[node.text]
        case "pi":
            return +mp.pi
        case "euler":
            return +mp.e
        case "imag":
            return mp.mpc(0, 1)
        case "inf":
            return mp.inf
    if node.kind not in _OPERATIONS:
        raise Unreadable(f"a {node.kind} is no number")
    values = [numeric(arg, mp, symbols) for arg in node.args]
    match node.kind:
        case "add":
            return mp.fsum(values)
        case "mul":
            return mp.fprod(values)
        case "neg":
            return -values[0]
        case "div":
            return values[0] / values[1]
        case "pow":
            return _numeric_power(mp, values[0], values[1])
        case "root":
            return _numeric_root(mp, values[0], values[1])
        case _:
            return _numeric_function(mp, node.text, values)


def _numeric_power(mp: Any, base: Any, exponent: Any) -> Any:
    if base != 0 and not mp.isinf(base) and abs(exponent) * abs(mp.log(abs(base))) > MAX_EXPONENT:
        raise TooBig
    return mp.power(base, exponent)


def _numeric_root(mp: Any, radicand: Any, degree: Any) -> Any:
    """The real root of a negative number where the degree is odd, else the principal one."""
    if mp.im(radicand) == 0 and mp.re(radicand) < 0 and mp.isint(degree) and int(degree) % 2:
        return -_numeric_power(mp, -radicand, 1 / degree)
    return _numeric_power(mp, radicand, 1 / degree)


def _numeric_function(mp: Any, name: str, values: list[Any]) -> Any:
    if any(abs(value) > MAX_EXPONENT and not mp.isinf(value) for value in values) and name not in (
        "ln",
        "log",
        "lg",
        "abs",
    ):
        raise TooBig
    first = values[0]
    match name, len(values):
        case "log", 2:
            return mp.log(first) / mp.log(values[1])
        case "percent", 1:
            return first / 100
        case "fact", 1:
            return mp.gamma(first + 1)
        case "binom", 2:
            return mp.binomial(first, values[1])
        case "floor", 1:
            return mp.floor(first)
        case "ceil", 1:
            return mp.ceil(first)
    functions: dict[str, Callable[[Any], Any]] = {
        **{"sin": mp.sin, "cos": mp.cos, "tan": mp.tan, "cot": mp.cot, "sec": mp.sec, "csc": mp.csc},
        **{"arcsin": mp.asin, "arccos": mp.acos, "arctan": mp.atan, "asin": mp.asin, "acos": mp.acos, "atan": mp.atan},
        **{"sinh": mp.sinh, "cosh": mp.cosh, "tanh": mp.tanh, "exp": mp.exp, "abs": abs},
        **{"ln": mp.log, "log": mp.log, "lg": mp.log10},
    }
    if name not in functions or len(values) != 1:
        raise Unreadable(f"function {name} of {len(values)} arguments")
    return functions[name](first)


def degrees_to_radians(node: Node, inside: bool = False) -> Node:
    """`\\sin 30^\\circ` is the sine of pi/6; elsewhere a degree stays a unit."""
    if node.kind == "unit" and node.text == "degree" and inside:
        return Node("div", (Node("mul", (node.args[0], Node("pi"))), number(180)))
    inside = inside or node.kind == "fn"
    return node.map_args(lambda arg: degrees_to_radians(arg, inside))
