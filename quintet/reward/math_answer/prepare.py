"""What an answer says, freed from how it says it: plus-minus written out, names taken off, rational parts evaluated."""

from __future__ import annotations

from dataclasses import replace

from quintet.reward.math_answer.tree import ONE, ZERO, Node, Unreadable, names, negate, number
from quintet.reward.math_answer.value import degrees_to_radians, fold

_KEEP_DIGITS = names("num list set tuple neg unit ratio matrix row")
_FUNCTION_NAMES = names("f g h F G P Q S V C L p T")
COUNTER = "an integer"
_INTEGERS = names("Z N")


def prepare(node: Node, *, chain: bool = False) -> Node:
    """`chain`: the other side is no relation, so that `\\sin x = 1/2` may state the value after its equals sign."""
    return _fold(_unlabel(_plus_minus(_whole(degrees_to_radians(node))), chain))


def _fold(node: Node) -> Node:
    """`fold`, but a decimal literal that is the whole answer keeps its digits."""
    return node.map_args(_fold) if node.kind in _KEEP_DIGITS else fold(node)


def _whole(node: Node) -> Node:
    """Products with a matrix multiplied out, determinants written out, `\\mathbb{R} - \\{0\\}` a difference of sets."""
    if not any(part.kind in ("matrix", "reals") for part in node.walk()):
        return node
    node = node.map_args(_whole)
    if node.kind == "matrix" and node.text == "det":
        return _determinant([row.args for row in node.args])
    if node.kind == "add" and node.args[0].kind == "reals" and node.args[1].kind == "neg":
        return Node("minus", (node.args[0], node.args[1].args[0]))
    if node.kind == "neg" and node.args[0].kind == "matrix":
        return _scaled(number(-1), node.args[0])
    if node.kind == "mul" and [arg.kind for arg in node.args].count("matrix") == 1:
        first, second = node.args
        return _scaled(first, second) if second.kind == "matrix" else _scaled(second, first)
    if node.kind == "div" and node.args[0].kind == "matrix":
        return _scaled(Node("div", (ONE, node.args[1])), node.args[0])
    return node


def _scaled(factor: Node, matrix: Node) -> Node:
    rows = (replace(row, args=tuple(Node("mul", (factor, cell)) for cell in row.args)) for row in matrix.args)
    return replace(matrix, args=tuple(rows))


def _determinant(rows: list[tuple[Node, ...]]) -> Node:
    """By expansion along the first row. Raises Unreadable above four rows or for what is not square."""
    if len(rows) > 4 or any(len(row) != len(rows) for row in rows):
        raise Unreadable("a determinant of more than four rows, or not square")
    if len(rows) == 1:
        return rows[0][0]
    total = ZERO
    for column, cell in enumerate(rows[0]):
        minor = _determinant([(*row[:column], *row[column + 1 :]) for row in rows[1:]])
        term = Node("mul", (cell, minor))
        total = Node("add", (total, negate(term) if column % 2 else term))
    return total


# ---- plus-minus


def _plus_minus(node: Node) -> Node:
    if node.kind in ("list", "set"):
        spread = [_plus_minus(arg) for arg in node.args]
        flat = [x for arg in spread for x in (arg.args if arg.kind == "list" else (arg,))]
        return replace(node, args=tuple(flat))
    if not any(part.kind == "pm" for part in node.walk()):
        return node
    return Node("list", (_choose(node, upper=True), _choose(node, upper=False)), "and")


def _choose(node: Node, *, upper: bool) -> Node:
    node = node.map_args(lambda arg: _choose(arg, upper=upper))
    if node.kind != "pm":
        return node
    plus = (node.text == "+") == upper
    return Node("add", (node.args[0], node.args[1] if plus else negate(node.args[1])))


# ---- names and chains


def is_label(node: Node) -> bool:
    """A name for the answer: `x`, `f(x)`, `f(2)`, `\\text{Area}`, `(a, b)`, `dy/dx`."""
    if node.kind in ("sym", "text"):
        return True
    if node.kind == "mul":
        first, second = node.args
        if first.kind == "pow" and first.args[1] == number(-1):  # an inverse function
            first = first.args[0]
        function = first.kind == "sym" and first.text.rstrip("'").partition("_")[0] in _FUNCTION_NAMES
        return (function and second.kind in ("num", "neg", "rel", "div")) or (is_label(first) and is_label(second))
    if node.kind == "div":
        return all(part.kind == "mul" and part.args[0].text == "d" for part in node.args)
    return node.kind in ("tuple", "row") and all(arg.kind == "sym" for arg in node.args)


def _unlabel(node: Node, chain: bool) -> Node:
    if node.kind == "list":
        return _unlabel_list(node, chain)
    if node.kind != "rel":
        return node
    relations = node.text.split()
    if relations == ["in"] and is_label(node.args[0]):
        return node.args[1]
    if relations[-1] == "approx" and not node.args[-2].symbols:  # `1/3 = 0.333...` nearly: what was meant stands before
        node = Node("rel", node.args[:-1], " ".join(relations[:-1]))
        return _unlabel(node, chain) if len(node.args) > 1 else node.args[0]
    if not set(relations) <= {"=", "approx"}:
        return node
    node = replace(node, text=node.text.replace("approx", "="))
    if len(node.args) == 2 and node.args[1].kind == "sym" and not node.args[0].symbols:  # 12 = x
        node = replace(node, args=node.args[::-1])
    return node.args[-1] if _states_a_value(node, chain) else node


def _states_a_value(node: Node, chain: bool) -> bool:
    """Whether what follows the last equals sign is the answer: `x = 5`, `m+n = 256+37 = 293`, `2+3 = 5`.

    `2x+4y = 3` is a line, `2x-6 = 0` an equation: an expression with coefficients states no value.
    """
    first, last = node.args[0], node.args[-1]
    if len(node.args) > 2:
        return not last.symbols or is_label(first)
    if last.symbols:
        return False
    if is_label(first) or not first.symbols:
        return True
    parts = {part.kind for part in _opaque(first).walk()}
    allowed = {"sym", "add", "mul", "fn", "div", "neg", "pi"} if chain else {"sym", "add", "mul"}
    return parts <= allowed and fold(last).value != 0


def _opaque(node: Node) -> Node:
    """Names such as `f(1)` as one symbol each."""
    return Node("sym", text=str(node)) if is_label(node) else node.map_args(_opaque)


def _unlabel_list(node: Node, chain: bool) -> Node:
    """`n = 2, 3, 4` and `a = 1 or a = -2` lose the name; `x = 1, y = 2` is read as an ordered tuple, by name."""
    node = _without_integers(node)
    if node.kind != "list":
        return _unlabel(node, chain)
    labels = [item.args[0] for item in node.args if item.kind == "rel" and item.text == "=" and is_label(item.args[0])]
    items = tuple(_unlabel(item, chain) for item in node.args)
    if len(labels) == len(items) == len(set(labels)) and all(item.kind != "rel" for item in items):
        by_name = sorted(zip(map(str, labels), items, strict=True), key=lambda pair: pair[0])
        return Node("tuple", tuple(item for _, item in by_name))
    return replace(node, args=items)


def _without_integers(node: Node) -> Node:
    """`2k\\pi, k \\in \\mathbb{Z}`: the membership goes, and its name with it: any letter for an integer will do."""
    counters = {
        item.args[0].text
        for item in node.args
        if item.kind == "rel" and item.text == "in" and item.args[1].text.removeprefix("mathbb ") in _INTEGERS
    }
    if len(counters) != 1:
        return node
    (name,) = counters
    items = tuple(rename(item, name) for item in node.args if not (item.kind == "rel" and item.text == "in"))
    return items[0] if len(items) == 1 else replace(node, args=items)


def rename(node: Node, name: str, new: str = COUNTER) -> Node:
    """The symbol `name` becomes `new`."""
    if node.kind == "sym" and node.text == name:
        return Node("sym", text=new)
    return node.map_args(lambda arg: rename(arg, name, new))
