"""What an answer says, freed from how it says it: plus-minus written out, names taken off, rational parts evaluated."""

from __future__ import annotations

from dataclasses import replace

from quintet.reward.math_answer.tree import Node, names, negate
from quintet.reward.math_answer.value import degrees_to_radians, fold

_KEEP_DIGITS = names("num list set tuple neg unit ratio matrix row")
_FUNCTION_NAMES = names("f g h F G P Q S V C L p T")
COUNTER = "an integer"
_INTEGERS = names("Z N")


def prepare(node: Node, *, chain: bool = False) -> Node:
    """`chain`: the other side is no relation, so that `\\sin x = 1/2` may state the value after its equals sign."""
    return _fold(_unlabel(_plus_minus(degrees_to_radians(node)), chain))


def _fold(node: Node) -> Node:
    """`fold`, but a decimal literal that is the whole answer keeps its digits."""
    return node.map_args(_fold) if node.kind in _KEEP_DIGITS else fold(node)


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
        function = first.kind == "sym" and first.text.rstrip("'") in _FUNCTION_NAMES and second.kind == "num"
        return function or (is_label(first) and is_label(second))
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
    parts = {part.kind for part in first.walk()}
    allowed = {"sym", "add", "mul", "fn", "div", "neg", "pi"} if chain else {"sym", "add", "mul"}
    return parts <= allowed and fold(last).value != 0


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


def rename(node: Node, name: str) -> Node:
    """The symbol `name` becomes `COUNTER`."""
    if node.kind == "sym" and node.text == name:
        return Node("sym", text=COUNTER)
    return node.map_args(lambda arg: rename(arg, name))
