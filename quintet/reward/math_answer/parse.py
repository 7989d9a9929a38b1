"""Recursive descent from tokens to a `Node`.

Precedence, loosest first: list · relation · set operation · ratio · sum · product · sign · power · postfix.
Nothing is evaluated here, and nothing is ever executed: an answer is data.
"""

from __future__ import annotations

from dataclasses import replace

from quintet.reward.math_answer.literal import BASES, flat, mixed, number_literal
from quintet.reward.math_answer.text import Token, tokenise
from quintet.reward.math_answer.tree import ZERO, Node, Unreadable, names, negate, number
from quintet.reward.math_answer.units import CURRENCIES, SINGLE_LETTERS, canonical_unit

MAX_DEPTH = 40
_END = Token("end", "")
_RELATIONS = {"=": "=", "<": "<", ">": ">", "le": "le", "ge": "ge", "ne": "ne", "in": "in", "approx": "approx"}
_SETS = {"cup": "cup", "cap": "cap", "setminus": "minus"}
_CONSTANTS = {"pi": "pi", "infty": "inf", "reals": "reals"}
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_NEGATIONS = names("not no never neither cannot isn't except without")
_MATRICES = names("matrix pmatrix bmatrix Bmatrix vmatrix Vmatrix smallmatrix array")


def parse(text: str) -> Node:
    """The answer in `text` (already normalised). Raises Unreadable."""
    parser = _Parser(tokenise(text))
    node = parser.answer()
    if parser.peek.kind != "end":
        raise Unreadable(f"unexpected {parser.peek.text!r}")
    return node


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._bars = 0  # open absolute values

    @property
    def peek(self) -> Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _END

    def ahead(self, offset: int) -> Token:
        return self._tokens[self._at + offset] if self._at + offset < len(self._tokens) else _END

    def take(self) -> Token:
        token = self.peek
        self._at += 1
        return token

    def accept(self, *texts: str) -> Token | None:
        return self.take() if self.peek.kind in ("op", "cmd", "sep") and self.peek.text in texts else None

    def expect(self, *texts: str) -> Token:
        token = self.accept(*texts)
        if token is None:
            raise Unreadable(f"expected {' or '.join(texts)}, found {self.peek.text!r}")
        return token

    # ---- lists and relations

    def answer(self) -> Node:
        """A list, or the one thing that stands there. Guards the recursion."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise Unreadable("nested too deeply")
        items = [self.relation()]
        if infix := self.accept("over", "choose", "atop"):  # plain TeX: everything before, everything after
            pair = (items[0], self.relation())
            items = [Node("div", pair) if infix.text == "over" else Node("fn", pair, "binom")]
        joint = ","
        while self._separator():
            while (separator := self._separator()) is not None:
                joint = separator if separator != "," else joint
                self.take()
            if self.peek.kind == "end" or self.peek.text in (")", "]", "}"):
                break
            items.append(self.relation())
        self._depth -= 1
        return items[0] if len(items) == 1 else Node("list", tuple(items), joint)

    def _separator(self) -> str | None:
        token = self.peek
        if token.kind == "sep":
            return token.text
        return "," if token.kind == "op" and token.text in ",;" else None

    def relation(self) -> Node:
        self.accept("approx", "=")
        if self.peek.kind == "text" and self.peek.text not in CURRENCIES and self._starts_factor(self.ahead(1)):
            words = self.take().text.lower().split()  # before the answer, such as `the answer is`
            if _NEGATIONS & set(words):
                raise Unreadable("a negation")
        operands, relations = [self.set_expression()], []
        while self.peek.kind in ("op", "cmd") and self.peek.text in _RELATIONS:
            relations.append(_RELATIONS[self.take().text])
            if self.peek.kind == "end":
                raise Unreadable("nothing after a relation")
            operands.append(self.set_expression())
        return Node("rel", tuple(operands), " ".join(relations)) if relations else operands[0]

    def set_expression(self) -> Node:
        left = self.ratio()
        while self.peek.kind == "cmd" and self.peek.text in _SETS:
            left = Node(_SETS[self.take().text], (left, self.ratio()))
        return left

    def ratio(self) -> Node:
        parts = [self.sum()]
        while self.peek == Token("op", ":", self.peek.glued):
            self.take()
            parts.append(self.sum())
        if len(parts) == 1:
            return parts[0]
        last = parts[-1]
        if last.kind == "unit":  # 8:30 p.m.
            return Node("unit", (Node("ratio", (*parts[:-1], last.args[0])),), last.text)
        return Node("ratio", tuple(parts))

    # ---- arithmetic

    def sum(self) -> Node:
        if sign := self.accept("+", "-", "pm", "mp"):
            first = self.product()
            node = {"+": first, "-": negate(first)}.get(sign.text) or Node("pm", (ZERO, first), _direction(sign))
        else:
            node = self.product()
        while sign := self.accept("+", "-", "pm", "mp"):
            term = self.product()
            if sign.text in "+-":
                node = Node("add", (node, term if sign.text == "+" else negate(term)))
            else:
                node = Node("pm", (node, term), _direction(sign))
        return node

    def product(self) -> Node:
        if self.peek.kind == "text" and self.peek.text in CURRENCIES and self._starts_number(1):
            currency = self.take().text
            return Node("unit", (self.product(),), currency)
        node = self.signed()
        while True:
            if self.accept("*", "cdot", "times"):
                node = Node("mul", (node, self.signed()))
            elif self.peek.text == "/" and self.ahead(1).kind == "text":
                return self._unit(node)
            elif self.accept("/", "div"):
                node = Node("div", (node, self.signed()))
            elif self.peek.kind == "text":
                return self._compound(self._unit(node))
            elif node.kind == "unit" and self.peek.kind == "num":
                return self._compound(node)
            elif self.accept("mod"):
                return Node("unit", (node,), f"mod {flat(self.argument(whole_number=True))}")
            elif self._starts_factor(self.peek):
                node = self._juxtaposed(node)
            else:
                return node

    def _starts_number(self, offset: int) -> bool:
        token = self.ahead(offset)
        return token.kind == "num" or (token.text in ("-", "+") and self.ahead(offset + 1).kind == "num")

    def _juxtaposed(self, node: Node) -> Node:
        """A number beside a proper fraction is a mixed number, beside another number nothing; else a product."""
        if node.kind == "num" and self.peek.kind == "num":
            whole, fraction = node, self.power()
            if self.accept("/") is None:
                raise Unreadable("two numbers side by side")
            return mixed(whole, Node("div", (fraction, self.power())), strict=True)
        letter = self.peek
        factor = self.power()
        if node.kind == "num" and factor.kind == "div":
            return mixed(node, factor, strict=False)
        if node.kind == "num" and factor.text == "percent" and factor.args[0].kind == "div":
            return replace(factor, args=(mixed(node, factor.args[0], strict=False),))
        perhaps_unit = node.kind == "num" and letter.text in SINGLE_LETTERS and not letter.glued
        return Node("mul", (node, factor), letter.text if perhaps_unit and self.peek.kind == "end" else "")

    def signed(self) -> Node:
        if sign := self.accept("-", "+"):
            return negate(self.signed()) if sign.text == "-" else self.signed()
        return self.power()

    def power(self) -> Node:
        node = self.postfix(self.primary())
        if self.peek.text == "^" and self.peek.kind == "op":
            self.take()
            if self.accept("circ"):
                return self._degrees(node)
            exponent = self.argument(whole_number=True)
            if exponent == Node("cmd_circ"):
                return self._degrees(node)
            node = self.postfix(Node("pow", (node, exponent)))
        return node

    def _degrees(self, node: Node) -> Node:
        scale = self.peek.text if self.peek.kind == "sym" and self.peek.text in ("C", "F") else ""
        if scale:
            self.take()
        return Node("unit", (node,), {"C": "celsius degree", "F": "degree fahrenheit"}.get(scale, "degree"))

    def postfix(self, node: Node) -> Node:
        while True:
            if self.accept("!"):
                node = Node("fn", (node,), "fact")
            elif self.accept("%"):
                node = Node("fn", (node,), "percent")
            elif self.peek.text == "_" and self.peek.kind == "op":
                self.take()
                node = self._subscript(node)
            elif self.peek.text == "'" and node.kind == "sym":
                self.take()
                node = Node("sym", text=node.text + "'")
            else:
                return node

    def _subscript(self, node: Node) -> Node:
        index = self._index()
        if node.kind == "sym":
            return Node("sym", text=f"{node.text}_{flat(index)}")
        if node.kind == "num" and node.text.isdigit() and index.kind == "num" and index.value is not None:
            base = int(index.value)
            if not 2 <= base <= 36 or any(int(digit) >= base for digit in node.text):
                raise Unreadable(f"{node.text} in base {base}")
            return number(int(node.text, base))
        raise Unreadable("subscript")

    def _index(self) -> Node:
        """`x_{\\max}` and `x_{n+1}` are names, `101_{\\text{two}}` a base."""
        inside = self.ahead(1) if self.peek.text == "{" else self.peek
        if inside.kind == "fn":
            self._at += 1 if inside is self.peek else 3
            return Node("text", text=inside.text)
        index = self.argument(whole_number=True)
        return number(BASES[index.text]) if index.kind == "text" and index.text in BASES else index

    def _starts_factor(self, token: Token) -> bool:
        if token.kind in ("num", "sym", "fn"):
            return True
        if token.kind == "op":
            return token.text in "([{" or (token.text == "|" and not self._bars)
        return token.kind == "cmd" and token.text in (
            "frac",
            "sqrt",
            "binom",
            "lfloor",
            "lceil",
            "begin",
            "ldots",
            "hex",
            "{",
            *_CONSTANTS,
        )

    def _unit(self, node: Node) -> Node:
        words: list[str] = []
        while self.peek.kind == "text" or (self.peek.text == "/" and self.ahead(1).kind == "text"):
            words.append(self.take().text)
            if self.peek.text == "^" and self.peek.kind == "op":
                self.take()
                words.append(f"^{flat(self.argument(whole_number=True))}")
        unit = canonical_unit(" ".join(words).replace(" ^", "^"))
        return Node("fn", (node,), "percent") if unit == "percent" else Node("unit", (node,), unit)

    def _compound(self, first: Node) -> Node:
        """`2 hours 30 minutes`, `12^\\circ 30'`: several measures that together are one."""
        parts = [first]
        while self.peek.kind == "num" and parts[-1].kind == "unit":
            value = self.power()
            minutes = 0
            while self.accept("'"):
                minutes += 1
            if minutes:
                parts.append(Node("unit", (value,), {1: "arcminute", 2: "arcsecond"}.get(minutes, "")))
            elif self.peek.kind == "text":
                parts.append(self._unit(value))
            else:
                raise Unreadable("a number after a unit")
        return parts[0] if len(parts) == 1 else Node("compound", tuple(parts))

    # ---- primaries

    def argument(self, whole_number: bool = False) -> Node:
        """A TeX argument: a braced group or one token; a number without braces gives its first digit only."""
        if self.accept("{"):
            if self.peek.text == "circ" and self.ahead(1).text == "}":
                self._at += 2
                return Node("cmd_circ")
            node = self.answer()
            self.expect("}")
            return node
        if self.peek.kind == "num" and not whole_number and len(self.peek.text) > 1 and self.peek.text[0].isdigit():
            digit, rest = self.peek.text[0], self.peek.text[1:]
            self._tokens[self._at] = Token("num", rest)
            return number_literal(digit)
        if whole_number and (sign := self.accept("-", "+")):
            return negate(self.primary()) if sign.text == "-" else self.primary()
        return self.primary()

    def primary(self) -> Node:
        token = self.take()
        match token.kind:
            case "num":
                return number_literal(token.text)
            case "sym":
                return {"e": Node("euler"), "i": Node("imag")}.get(token.text, Node("sym", text=token.text))
            case "fn":
                return self._function(token.text)
            case "text":
                return self._words(token.text)
            case "op" if token.text in "([{":
                return self._group(token.text)
            case "op" if token.text == "|":
                return self._absolute()
            case "cmd":
                return self._command(token.text)
        raise Unreadable(f"unexpected {token.text!r}")

    def _words(self, first: str) -> Node:
        words = [first]
        while self.peek.kind == "text":
            words.append(self.take().text)
        return Node("text", text=" ".join(words).lower())

    def _group(self, opening: str) -> Node:
        if opening == "{" and self.accept("}"):
            raise Unreadable("an empty group")
        bars, self._bars = self._bars, 0
        node = self.answer()
        closing = self.expect("}") if opening == "{" else self.expect(")", "]")
        self._bars = bars
        if node.kind != "list":
            return node
        if opening == "{":
            return Node("set", node.args)
        if len(node.args) == 2 and opening + closing.text != "()":
            return Node("interval", node.args, opening + closing.text)
        return Node("tuple", node.args)

    def _absolute(self) -> Node:
        self._bars += 1
        node = self.sum()
        self._bars -= 1
        self.expect("|")
        return Node("fn", (node,), "abs")

    def _command(self, name: str) -> Node:
        if name in _CONSTANTS:
            return Node(_CONSTANTS[name])
        match name:
            case "frac":
                return Node("div", (self.argument(), self.argument()))
            case "binom":
                return Node("fn", (self.argument(), self.argument()), "binom")
            case "sqrt":
                return self._root()
            case "{":
                return self._set()
            case "emptyset":
                return Node("set")
            case "ldots":
                return Node("sym", text="...")
            case "lfloor" | "lceil":
                node = self.sum()
                self.expect("rfloor" if name == "lfloor" else "rceil")
                return Node("fn", (node,), name[1:])
            case "begin":
                return self._matrix()
            case "hex":
                return self._hexadecimal()
        raise Unreadable(f"unknown command \\{name}")

    def _root(self) -> Node:
        degree = number(2)
        if self.accept("["):
            degree = self.sum()
            self.expect("]")
        return Node("root", (self.argument(), degree))

    def _hexadecimal(self) -> Node:
        self.expect("{")
        digits = ""
        while not self.accept("}"):
            digits += self.take().text
        self.expect("_")
        self.argument(whole_number=True)
        return number(int(digits, 16))

    def _set(self) -> Node:
        if self.accept("}"):
            return Node("set")
        bar = 3 if self.ahead(1).text == "in" else 1
        if self.peek.kind == "sym" and self.ahead(bar).text in ("|", ":"):
            self._at += bar + 1  # {x | condition}: the condition describes the set
            node = self.answer()
            self.expect("}")
            return node
        node = self.answer()
        self.expect("}")
        return Node("set", node.args if node.kind == "list" else (node,))

    def _function(self, name: str) -> Node:
        if name in ("min", "max", "gcd", "lcm") and self.accept("{"):
            chosen = self._set()
            return Node("fn", chosen.args, name)
        base: Node | None = None
        exponent: Node | None = None
        while self.peek.kind == "op" and self.peek.text in "_^":
            if self.take().text == "_":
                base = self.argument(whole_number=True)
            else:
                exponent = self.argument(whole_number=True)
        if exponent is not None and name in _INVERSE and exponent.kind == "neg" and exponent.args[0].value == 1:
            name, exponent = _INVERSE[name], None
        argument = self._function_argument()
        arguments = argument.args if argument.kind in ("tuple", "list") else (argument,)
        if name == "sqrt":
            return Node("root", (argument, number(2)))
        node = Node("fn", (*arguments, base) if base is not None else arguments, name)
        return node if exponent is None else Node("pow", (node, exponent))

    def _function_argument(self) -> Node:
        """A group, or the product of plain factors up to the next function, sign or bracket (`\\sin 2x`)."""
        if self.peek.text in ("(", "[", "{") and self.peek.kind == "op":
            return self._group(self.take().text)
        node = self.power()
        while self.peek.kind in ("num", "sym") or self.peek.text in ("frac", "sqrt", "pi"):
            node = self._juxtaposed(node)
        return node

    def _matrix(self) -> Node:
        name = self._environment()
        if name not in _MATRICES:
            raise Unreadable(f"environment {name}")
        if name == "array" and self.accept("{"):
            while not self.accept("}"):
                if self.take().kind == "end":
                    raise Unreadable("unclosed array")
        rows: list[Node] = []
        cells: list[Node] = []
        while True:
            if self.peek.kind == "row" or self.peek.text == "end":
                if cells:
                    rows.append(Node("row", tuple(cells)))
                cells = []
                if self.take().text == "end":
                    break
            elif not self.accept("&"):
                cells.append(self.answer())
        self._environment()
        return Node("matrix", tuple(rows), "det" if name == "vmatrix" else "")

    def _environment(self) -> str:
        self.expect("{")
        letters = []
        while not self.accept("}"):
            token = self.take()
            if token.kind == "end":
                raise Unreadable("unclosed environment name")
            letters.append(token.text)
        return "".join(letters)


def _direction(sign: Token) -> str:
    return "+" if sign.text == "pm" else "-"
