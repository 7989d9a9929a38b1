"""Whether two parsed answers are the same answer. The conventions are listed in `quintet.reward.math`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from quintet.reward.math_answer.prepare import COUNTER, is_label, prepare, rename
from quintet.reward.math_answer.sets import RealLine
from quintet.reward.math_answer.tree import Node, TooBig, Unreadable, names, subtract
from quintet.reward.math_answer.units import canonical_unit
from quintet.reward.math_answer.value import context, fold, numeric

LONG_DECIMAL_DIGITS = 12
MAX_ITEMS = 30
_LOW, _HIGH = 40, 90  # digits of the two evaluations of a zero test
_SETS = names("set interval cup cap minus reals")
_INEQUALITIES = frozenset(("<", ">", "le", "ge", "ne", "in"))
_ARITHMETIC_ERRORS = (ZeroDivisionError, ValueError, OverflowError, ArithmeticError)


def equal(gold: Node, answer: Node) -> bool:
    """Raises Unreadable when one of the two makes no sense."""
    if max(len(gold.args), len(answer.args)) > MAX_ITEMS:
        raise Unreadable(f"more than {MAX_ITEMS} items")
    if gold.kind == "rel" == answer.kind and gold.text == "=" == answer.text and _equal_equations(gold, answer):
        return True
    gold, answer = prepare(gold, chain=answer.kind != "rel"), prepare(answer, chain=gold.kind != "rel")
    gold, answer = _with_constant(gold, answer), _with_constant(answer, gold)
    return _equal(_with_counter(gold, answer), _with_counter(answer, gold))


def _with_constant(node: Node, other: Node) -> Node:
    """A constant of integration may be `c` on one side and `C` on the other."""
    swapped = node.kind == "add" and "c" in node.symbols - other.symbols and "C" in other.symbols - node.symbols
    return rename(node, "c", "C") if swapped else node


def _with_counter(node: Node, other: Node) -> Node:
    """The other side says which letter is any integer; here it is the letter that the other side does not have."""
    own = sorted(node.symbols - other.symbols)
    return rename(node, own[0]) if COUNTER in other.symbols - node.symbols and len(own) == 1 else node


# ---- kinds


def _equal(gold: Node, answer: Node) -> bool:
    if gold == answer:
        return True
    kinds = {gold.kind, answer.kind}
    if "unit" in kinds or _maybe_unit(gold, answer) or _maybe_unit(answer, gold):
        return _equal_units(_as_unit(gold), _as_unit(answer))
    if "text" in kinds:
        return _words(gold) == _words(answer)
    if "rel" in kinds or _is_inequality_list(gold) or _is_inequality_list(answer):
        return _equal_relations(gold, answer)
    if gold.kind == answer.kind == "ratio":
        return _equal_ratios(gold, answer)
    if _is_named_tuple(gold) or _is_named_tuple(answer):
        return _equal_named(gold, answer)
    if kinds == {"matrix", "tuple"}:
        return _equal(*map(_as_vector, (gold, answer)))
    if kinds & {"ratio", "matrix", "row", "compound"}:
        return gold.kind == answer.kind and _elementwise(gold.args, answer.args)
    if gold.kind == answer.kind == "interval" and (gold.symbols or answer.symbols):
        return gold.text == answer.text and _elementwise(gold.args, answer.args)
    if kinds & _SETS:
        return _equal_sets(gold, answer)
    if (unpacked := [_one_value(node) for node in (gold, answer)]) != [gold, answer]:
        return _equal(*unpacked)
    if kinds == {"list"}:
        return _unordered(gold.args, answer.args)
    if kinds <= {"tuple", "list"}:
        return _elementwise(gold.args, answer.args)
    if kinds & {"tuple", "list"}:
        return False
    return equal_numbers(gold, answer)


def _equal_units(gold: Node, answer: Node) -> bool:
    """A unit may be missing on one side; two different ones never match."""
    if gold.kind == answer.kind == "unit":
        if gold.text != answer.text:
            return False
        modulus = re.fullmatch(r"mod (\d{1,9})", gold.text)
        a, b = gold.args[0].value, answer.args[0].value
        if modulus and a is not None and b is not None and int(modulus[1]) > 0:
            return (a - b) % int(modulus[1]) == 0
        return _equal(gold.args[0], answer.args[0])
    if {"compound", "text"} & {gold.kind, answer.kind}:
        return False
    return _equal(*(node.args[0] if node.kind == "unit" else node for node in (gold, answer)))


def _maybe_unit(node: Node, other: Node) -> bool:
    """`5 m` beside an answer without letters."""
    return node.kind == "mul" and node.text != "" and not other.symbols


def _as_unit(node: Node) -> Node:
    return Node("unit", node.args[:1], canonical_unit(node.text)) if node.kind == "mul" and node.text else node


def _words(node: Node) -> str:
    return re.sub(r"[\W_]+", " ", node.text).strip().lower() or node.kind


def _elementwise(gold: Sequence[Node], answer: Sequence[Node]) -> bool:
    return len(gold) == len(answer) and all(_equal(g, a) for g, a in zip(gold, answer, strict=True))


def _unordered(gold: Sequence[Node], answer: Sequence[Node]) -> bool:
    """Each item of one side finds its own partner on the other."""
    rest = list(answer)
    for item in gold:
        partner = next((i for i, other in enumerate(rest) if _equal(item, other)), None)
        if partner is None:
            return False
        del rest[partner]
    return not rest


def _equal_ratios(gold: Node, answer: Node) -> bool:
    """In proportion; what looks like a time of day (`1:30`) entry by entry."""
    clock = all(len(n.args) == 2 and re.fullmatch(r"[0-5]\d", n.args[1].text) for n in (gold, answer))
    if clock or len(gold.args) != len(answer.args):
        return _elementwise(gold.args, answer.args)
    return all(
        equal_numbers(Node("mul", (g, answer.args[0])), Node("mul", (a, gold.args[0])))
        for g, a in zip(gold.args, answer.args, strict=True)
    )


def _is_named_tuple(node: Node) -> bool:
    """`P(1, 2)`, read as a product of a capital letter and a tuple."""
    return (
        node.kind == "mul"
        and node.args[1].kind == "tuple"
        and node.args[0].kind == "sym"
        and node.args[0].text.isupper()
    )


def _equal_named(gold: Node, answer: Node) -> bool:
    """A point with its name beside a point; `C(7, 3)` beside a number counts combinations."""
    if gold.kind == answer.kind:
        return gold.args[0] == answer.args[0] and _equal(gold.args[1], answer.args[1])
    named, other = (gold, answer) if _is_named_tuple(gold) else (answer, gold)
    inner = named.args[1]
    if other.kind in ("tuple", "matrix", "list"):
        return _equal(inner, other)
    return named.args[0].text == "C" and len(inner.args) == 2 and _equal(Node("fn", inner.args, "binom"), other)


def _as_vector(node: Node) -> Node:
    """A matrix of one column or one row as a tuple."""
    if node.kind != "matrix":
        return node
    rows = [row.args for row in node.args]
    if all(len(row) == 1 for row in rows):
        return Node("tuple", tuple(row[0] for row in rows))
    return Node("tuple", rows[0]) if len(rows) == 1 else Node("row", node.args)


def _equal_sets(gold: Node, answer: Node) -> bool:
    if gold.kind in ("set", "list") and answer.kind in ("set", "list"):
        return _unordered(_distinct(gold.args), _distinct(answer.args))
    line = RealLine()
    try:
        return line.equal(_solutions(line, gold), _solutions(line, answer))
    except Unreadable:
        return gold.kind == answer.kind and gold.text == answer.text and _elementwise(gold.args, answer.args)


def _one_value(node: Node) -> Node:
    """`7/2 or 3.5` says one thing twice."""
    if node.kind != "list" or node.text != "or" or any(item.kind == "rel" for item in node.args):
        return node
    distinct = _distinct(node.args)
    return distinct[0] if len(distinct) == 1 else node


def _distinct(items: Sequence[Node]) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if not any(_equal(item, other) for other in kept):
            kept.append(item)
    return kept


# ---- relations


def _is_inequality_list(node: Node) -> bool:
    return node.kind == "list" and all(
        item.kind == "rel" and _INEQUALITIES & set(item.text.split()) for item in node.args
    )


def _equal_relations(gold: Node, answer: Node) -> bool:
    if gold.kind == "rel" == answer.kind and gold.text == "=" == answer.text:
        return _equal_equations(gold, answer)
    line = RealLine()
    inequalities = [n for n in (gold, answer) if n.kind == "rel" or _is_inequality_list(n)]
    if len({name for n in inequalities for name in n.symbols}) > 1 or any(n.text == "=" for n in inequalities):
        return _equal_shapes(gold, answer)
    try:
        return line.equal(_solutions(line, gold), _solutions(line, answer))
    except Unreadable:
        return _equal_shapes(gold, answer)


def _solutions(line: RealLine, node: Node) -> Any:
    """Of one relation or set; of a list of them the union, or where that is meant the intersection.

    `x > 2, x < 5` means both; `x < 2, x > 5` would then mean nothing, and so means either. Intervals are joined.
    """
    inequalities = _is_inequality_list(node)
    if not inequalities and not (node.kind == "list" and all(_is_interval(item) for item in node.args)):
        return line.read(node)
    parts = [line.read(item) for item in node.args]
    result = parts[0]
    for part in parts[1:]:
        result = line.intersect(result, part)
    if inequalities and node.text != "or" and (result or node.text == "and"):
        return result
    return line.union([interval for part in parts for interval in part])


def _is_interval(node: Node) -> bool:
    return node.kind in ("interval", "cup") or (node.kind == "tuple" and len(node.args) == 2)


def _equal_shapes(gold: Node, answer: Node) -> bool:
    """Inequalities in several unknowns: one difference is a positive multiple of the other. A lone name: its value."""
    for one, other in ((gold, answer), (answer, gold)):
        if one.kind == "rel" and one.text == "=" and other.kind != "rel":
            return is_label(one.args[0]) and _equal(one.args[1], other)
    if gold.kind == answer.kind == "list":
        return _unordered(gold.args, answer.args)
    if gold.kind != "rel" or answer.kind != "rel" or len(gold.args) != len(answer.args):
        return False
    if len(gold.args) > 2:
        gold, answer = _rising(gold), _rising(answer)
        return gold.text == answer.text and _elementwise(gold.args, answer.args)
    turned = {">": "<", "ge": "le"}
    sides = []
    for node in (gold, answer):
        low, high = node.args if node.text not in turned else node.args[::-1]
        sides.append((turned.get(node.text, node.text), fold(subtract(low, high))))
    if sides[0][0] != sides[1][0]:
        return False
    factor = _constant_ratio(sides[0][1], sides[1][1])
    return factor is not None and factor > 0


def _rising(node: Node) -> Node:
    """A chain `c > b > a` from its other end."""
    turned = {">": "<", "ge": "le"}
    relations = node.text.split()
    if not set(relations) <= turned.keys():
        return node
    return Node("rel", node.args[::-1], " ".join(turned[relation] for relation in reversed(relations)))


def _equal_equations(gold: Node, answer: Node) -> bool:
    """The same up to a constant factor; or the same right side under a name of the same thing."""
    if is_label(gold.args[0]) and is_label(answer.args[0]) and gold.args[0] != answer.args[0]:
        named = all(node.args[0].kind == "sym" for node in (gold, answer))
        if not named and _equal(gold.args[1], answer.args[1]):
            return True
    differences = [fold(subtract(*node.args)) for node in (gold, answer)]
    if not all(difference.symbols for difference in differences):
        return False
    return _constant_ratio(*differences) is not None


def _constant_ratio(a: Node, b: Node) -> Any:
    """The factor a / b if it is the same, real and not zero, at every sample point; else None."""
    mp = context(_LOW)
    ratios = []
    for values in sample_points(sorted(a.symbols | b.symbols), mp):
        try:
            top, bottom = numeric(a, mp, values), numeric(b, mp, values)
        except (*_ARITHMETIC_ERRORS, TooBig, Unreadable):
            continue
        if bottom != 0:
            ratios.append(top / bottom)
    if len(ratios) < 3 or ratios[0] == 0 or mp.im(ratios[0]) != 0:
        return None
    tolerance = mp.mpf(10) ** (5 - _LOW // 2)
    return ratios[0] if all(abs(r - ratios[0]) <= tolerance * abs(ratios[0]) for r in ratios) else None


# ---- numbers and expressions


def equal_numbers(gold: Node, answer: Node) -> bool:
    """By exact value where both are rational, else to dozens of digits; functions at sample points."""
    a, b = fold(gold), fold(answer)
    if a.value is not None and b.value is not None:
        return a.value == b.value or _long_decimal(gold, b.value) or _long_decimal(answer, a.value)
    if a == b:
        return True
    names = sorted(a.symbols | b.symbols)
    try:
        return _equal_functions(a, b, names) if names else _is_zero_numerically(a, b)
    except (TooBig, *_ARITHMETIC_ERRORS):
        return False


def _long_decimal(literal: Node, value: Fraction) -> bool:
    """A decimal of at least twelve digits stands for a repeating fraction that it agrees with to its last digit."""
    sign = 1
    while literal.kind == "neg":
        literal, sign = literal.args[0], -sign
    digits = literal.text.replace(".", "", 1).lstrip("0")
    if literal.value is None or "." not in literal.text or not digits.isdigit() or len(digits) < LONG_DECIMAL_DIGITS:
        return False
    if value * sign <= 0 or not _repeats(value):
        return False
    unit = Fraction(10) ** (_exponent(abs(value)) - LONG_DECIMAL_DIGITS + 1)  # of the twelfth digit
    a, b = literal.value / unit, abs(value) / unit
    return int(a) == int(b) or round(a) == round(b)


def _repeats(value: Fraction) -> bool:
    """Whether its decimals go on for ever: the denominator has a prime factor beside 2 and 5."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1


def _exponent(value: Fraction) -> int:
    """Of ten, in scientific notation; `value` is positive."""
    guess = len(str(value.numerator)) - len(str(value.denominator))
    return guess if value >= Fraction(10) ** guess else guess - 1


def _is_zero_numerically(a: Node, b: Node) -> bool:
    """a - b is rounding, not a difference: small beside a and b, or (0 on one side) shrinking with the precision."""
    logs = []
    for digits in (_LOW, _HIGH):
        mp = context(digits)
        left, right = numeric(a, mp, {}), numeric(b, mp, {})
        if left == right or mp.isinf(left) or mp.isinf(right):
            return bool(left == right)
        logs.append(mp.log10(abs(left - right)))
        scale = mp.log10(max(abs(left), abs(right)))
        if logs[0] > max(-15, scale - _LOW // 2):
            return False  # far apart: the second evaluation can be spared
    shrinks = logs[1] < -_HIGH // 2 and logs[1] < logs[0] - (_HIGH - _LOW) // 2
    return bool(logs[1] < scale - (_HIGH - 10) or shrinks)


def _equal_functions(a: Node, b: Node, names: list[str]) -> bool:
    """Equal at every sample point where both are real (where `i` occurs or none is: as complex numbers)."""
    mp = context(_LOW)
    pairs: list[tuple[Any, Any]] = []
    for values in sample_points(names, mp):
        try:
            pairs.append((numeric(a, mp, values), numeric(b, mp, values)))
        except _ARITHMETIC_ERRORS:
            continue
    real = [(x, y) for x, y in pairs if mp.im(x) == 0 and mp.im(y) == 0]
    pairs = real if len(real) >= 3 else pairs
    tolerance = mp.mpf(10) ** (5 - _LOW // 2)
    return len(pairs) >= 3 and all(abs(x - y) <= tolerance * max(abs(x), abs(y)) for x, y in pairs)


def sample_points(names: Sequence[str], mp: Any) -> list[dict[str, Any]]:
    """Ten fixed points of irrational coordinates between 0.2 and 3: five positive, five of mixed signs."""
    primes = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
    points: list[dict[str, Any]] = []
    for k in range(10):
        point = {}
        for j, name in enumerate(names):
            size = mp.sqrt(primes[(3 * k + 7 * j) % len(primes)]) / (2 + (k + j) % 3) + mp.mpf(k + 1) / 97
            point[name] = -size if k >= 5 and (k + j) % 2 else size
        points.append(point)
    return points
