"""Test code taken apart, so that no expected value is ever in the candidate's process.

`assert add(1, 2) == 3` is split here: the side that begins with a name that only the candidate can define is evaluated
beside the candidate and comes back as plain data; the other side is a literal, or is computed in a run without the
candidate; they are compared by the judge. Comparisons, `in`, `is None`, `not` and `and` are split in this way, in a
list of asserts, in a HumanEval `check(candidate)` and in `test_` functions.

Test code with anything else in it (loops, helpers, `math.isclose`, `pytest.raises`, comprehensions) becomes one
`ApartCase`: it runs as it is, in a sandbox without the candidate, whose functions are answered from outside with plain
data (apart.py). That leaves what is refused: tests of which data alone does not decide, such as an argument changed in
place or a function given as an argument.
"""

from __future__ import annotations

import ast
import builtins
import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from quintet.reward.code_tests.cases import ApartCase, AssertCase, Op, Tests, UnusableTests
from quintet.reward.code_tests.extract import last_block

ENTRY = "quintet_entry"  # stands for an entry point that is no plain name, such as `Solution().two_sum`

_BUILTINS = frozenset(dir(builtins))
# A wrapper of one argument by which tests make data of a generator or an iterator
_WRAPPERS = frozenset({"list", "tuple", "set", "sorted", "dict", "len", "str", "repr", "sum", "next", "float", "int"})
_OPS: dict[type[ast.cmpop], Op] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
    ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
_MIRRORED: dict[Op, Op] = {
    "==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<=",
    "is": "is", "is not": "is not", "in": "contains", "not in": "not contains",
}  # fmt: skip


def add_asserts(tests: Tests, source: str, entry_point: str | None, prompt: str) -> None:
    """The cases in one piece of test code. Raises UnusableTests for what cannot be separated from the candidate.

    `prompt`: HumanEval's defines helpers that tests call; they run with the test code, where they are as they were.
    """
    body = _parse(source)
    _refuse_forms(body)
    entry = _prepare_entry(tests, body, entry_point)
    body = [*_forgotten_imports(body), *_helpers(prompt, _free_names(body) - entry), *body]
    names = _free_names(body) | entry
    if not any(_mentions(statement, names) for statement in body):
        raise UnusableTests("the test code calls no function of the candidate")
    if entry and names - entry:
        raise UnusableTests(
            f"it calls `{min(names - entry)}`, which is not the function under test, nor defined with it"
        )
    code = _TestCode(names)
    try:
        for statement in body:
            code.add(statement)
    except _NotStatic:
        _refuse_inseparable(body, names)
        tests.apart.append(ApartCase(ast.unparse(ast.Module(body, [])), tuple(sorted(names))))
        return
    tests.asserts += code.cases
    tests.imports += [text for text in code.imports.values() if text not in tests.imports]
    tests.prelude += [text for text in code.needed_imports() if text not in tests.prelude]


def _parse(source: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnusableTests(f"the test code is no Python: {error}") from error


def _prepare_entry(tests: Tests, body: list[ast.stmt], entry_point: str | None) -> set[str]:
    """Append the calls that a test harness would make: `check(<entry point>)` and `test_...()`. Returns the name by
    which test code calls the entry point; none where it is not known."""
    defined = {s.name: s for s in body if isinstance(s, ast.FunctionDef)}
    called = {n.func.id for s in body for n in _outside_functions(s) if _is_named_call(n)}  # type: ignore[attr-defined]
    for name, function in defined.items():
        if name.startswith("test_") and name not in called and not _parameters(function):
            body.append(_statement(f"{name}()"))
    if "check" not in defined or "check" in called:
        return {entry_point} if entry_point is not None and entry_point.isidentifier() else set()
    if entry_point is None:
        raise UnusableTests("`check(candidate)` needs the name of the function (a column entry_point)")
    name = entry_point if entry_point.isidentifier() else ENTRY
    if name == ENTRY:
        adaptor = f"def {ENTRY}(*args, **kwargs):\n    return ({entry_point})(*args, **kwargs)"
        _parse(adaptor)
        tests.prelude += [adaptor] if adaptor not in tests.prelude else []
    body.append(_statement(f"check({name})"))
    return {name}


def _statement(source: str) -> ast.stmt:
    return ast.parse(source).body[0]


def _is_named_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _outside_functions(statement: ast.stmt) -> Iterator[ast.AST]:
    return iter(()) if isinstance(statement, ast.FunctionDef) else ast.walk(statement)


def _parameters(function: ast.FunctionDef) -> list[str]:
    a = function.args
    return [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg)))]


def _refuse_forms(body: list[ast.stmt]) -> None:
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.ClassDef):
            raise UnusableTests("classes in test code (unittest) are not supported")
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            raise UnusableTests(f"`{ast.unparse(node)}`: name what is imported")
        if isinstance(node, ast.AsyncFunctionDef | ast.Await):
            raise UnusableTests("asynchronous test code is not supported")


def _free_names(body: list[ast.stmt]) -> set[str]:
    """Names that test code reads and nowhere binds, builtins aside: only the candidate can define them."""
    read: set[str] = set()
    bound: set[str] = set()
    for node in (n for s in body for n in ast.walk(s)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                bound.add(name)
            case ast.alias(name=name, asname=asname):
                bound.add(asname or name.partition(".")[0])
            case ast.ExceptHandler(name=str(name)):
                bound.add(name)
    return read - bound - _BUILTINS


def _forgotten_imports(body: list[ast.stmt]) -> list[ast.stmt]:
    """`math.isclose(...)` without `import math`, as in MBPP: the module is meant, not a name of the candidate."""
    free = _free_names(body)
    nodes = [n for s in body for n in ast.walk(s)]
    bases = {n.value.id for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)}
    called = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    return [_statement(f"import {name}") for name in sorted((free & bases & sys.stdlib_module_names) - called)]


def _helpers(prompt: str, wanted: set[str]) -> list[ast.stmt]:
    """The imports, functions and constants of a prompt that is Python, where it defines a wanted name."""
    if not wanted:
        return []
    try:
        body = ast.parse(last_block(prompt) or prompt).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    functions = {s.name: s for s in body if isinstance(s, ast.FunctionDef)}
    if not wanted & functions.keys():
        return []
    others = [s for s in body if isinstance(s, ast.Import | ast.ImportFrom | ast.Assign)]
    return [*others, *(f for name, f in functions.items() if name in wanted)]


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))


class _NotStatic(Exception):
    """The test code must run to be understood."""


class _TestCode:
    """Statements that are asserts, imports and constants, and nothing else; `add` raises _NotStatic for others.

    Constants are put in where they are read, so that an expected one does not come near the candidate.
    """

    def __init__(self, names: set[str]) -> None:
        self.cases: list[AssertCase] = []
        self.imports: dict[str, str] = {}  # name -> statement
        self._names = names
        self._constants: dict[str, ast.expr] = {}
        self._functions: dict[str, ast.FunctionDef] = {}

    def add(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Expr(value=ast.Constant()) | ast.Pass():
                return
            case ast.Import() | ast.ImportFrom() if "pytest" not in ast.unparse(statement):  # the harness has its own
                text = ast.unparse(statement)
                self.imports |= {a.asname or a.name.partition(".")[0]: text for a in statement.names}
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._add_constant(name, value)
            case ast.FunctionDef(decorator_list=[]) if _parameters(statement) in ([], ["candidate"]):
                self._functions[statement.name] = statement
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=args, keywords=[])) if name in self._functions:
                self._add_function(self._functions.pop(name), args)
            case ast.Assert(test=test):
                self._add_test(_Filled(self._constants).visit(copy.deepcopy(test)), ast.unparse(test))
            case _:
                raise _NotStatic

    def _add_constant(self, name: str, value: ast.expr) -> None:
        calls = [n for n in ast.walk(value) if isinstance(n, ast.Call)]
        pure = all(isinstance(call.func, ast.Name) and call.func.id in _BUILTINS for call in calls)
        if name in self._constants or _mentions(value, self._names) or not pure:
            raise _NotStatic  # its value depends on when it is computed
        self._constants[name] = _Filled(self._constants).visit(copy.deepcopy(value))

    def _add_function(self, function: ast.FunctionDef, args: list[ast.expr]) -> None:
        """Its body, the parameter `candidate` replaced by the argument."""
        match _parameters(function), args:
            case [], []:
                filled = _Filled({})
            case ["candidate"], [ast.Name(id=name) as entry] if name in self._names:
                filled = _Filled({"candidate": entry})
            case _:
                raise _NotStatic
        for statement in function.body:
            self.add(filled.visit(copy.deepcopy(statement)))

    def _add_test(self, test: ast.expr, text: str) -> None:
        match test:
            case ast.Constant(value=value) if value:
                return  # HumanEval's `assert True`
            case ast.BoolOp(op=ast.And(), values=values):
                for part in values:
                    self._add_test(part, ast.unparse(part))
            case ast.UnaryOp(op=ast.Not(), operand=operand) if self._is_candidates(operand):
                self.cases.append(AssertCase(text, ast.unparse(operand), "true", negated=True))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                self._add_compare(text, left, _OPS[type(op)], right)
            case _ if self._is_candidates(test):
                self.cases.append(AssertCase(text, ast.unparse(test), "true"))
            case _:
                raise _NotStatic

    def _add_compare(self, text: str, left: ast.expr, op: Op, right: ast.expr) -> None:
        if not self._is_candidates(left):
            left, op, right = right, _MIRRORED[op], left
        if not self._is_candidates(left) or _mentions(right, self._names):
            raise _NotStatic
        if op in ("is", "is not") and not (isinstance(right, ast.Constant) and right.value in (None, True, False)):
            raise _NotStatic
        literal = _literal(right)
        if literal is not None:
            self.cases.append(AssertCase(text, ast.unparse(left), op, other=literal[0]))
        else:
            self.cases.append(AssertCase(text, ast.unparse(left), op, other_source=ast.unparse(right)))

    def _is_candidates(self, node: ast.expr) -> bool:
        """Calls, attributes and items that begin with a name of the candidate, perhaps in wrappers."""
        match node:
            case ast.Call(func=ast.Name(id=wrapper), args=[inner], keywords=[]) if wrapper in _WRAPPERS - self._names:
                return self._is_candidates(inner)
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                return (isinstance(inner, ast.Name) and inner.id in self._names) or self._is_candidates(inner)
            case _:
                return False

    def needed_imports(self) -> list[str]:
        """Those that the candidate's sides read."""
        wanted = {name for case in self.cases for name in _reads(ast.parse(case.expression, mode="eval"))}
        return [text for name, text in self.imports.items() if name in wanted]


class _Filled(ast.NodeTransformer):
    """Names replaced by expressions, in place. Raises _NotStatic where an inner scope binds such a name anew."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in self._values:
            return node
        if not isinstance(node.ctx, ast.Load):
            raise _NotStatic
        return copy.deepcopy(self._values[node.id])

    def visit_arg(self, node: ast.arg) -> ast.AST:
        if node.arg in self._values:
            raise _NotStatic
        return node


def _reads(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def _literal(node: ast.expr) -> tuple[Any] | None:
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


# -- what cannot run apart ------------------------------------------------------------------------


def _refuse_inseparable(body: list[ast.stmt], names: set[str]) -> None:
    """Raises UnusableTests for what plain data from outside cannot decide."""
    nodes = list(ast.walk(ast.Module(body, [])))
    if not any(isinstance(n, ast.Assert | ast.Raise) or _is_raises(n) for n in nodes):
        raise UnusableTests("the test code asserts nothing")
    called = names | _aliases(body)
    functions = called | {s.name for s in body if isinstance(s, ast.FunctionDef)}
    for node in nodes:
        for statement in _plain_statements(node):
            if isinstance(statement, ast.Expr) and _is_call_of(statement.value, called):
                text = ast.unparse(statement)[:60]
                raise UnusableTests(f"`{text}` uses no result; what a call changes in place stays in its sandbox")
        match node:
            case ast.ExceptHandler(type=ast.expr() as kind) if _mentions(kind, names):
                raise UnusableTests(f"`except {ast.unparse(kind)}` names a class of the candidate")
            case ast.Call(args=[kind, *_]) if _is_raises(node) and _mentions(kind, names):
                raise UnusableTests(f"`{ast.unparse(node)}` names a class of the candidate")
            case ast.Call(func=ast.Name(id=name)) if name in called:
                _check_call(node, name, functions)


def _is_raises(node: ast.AST) -> bool:
    """`pytest.raises(...)`"""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "raises"


def _aliases(body: list[ast.stmt]) -> set[str]:
    """The parameter of a `check(candidate)`."""
    functions = (s for s in body if isinstance(s, ast.FunctionDef))
    return {"candidate"} if any("candidate" in _parameters(f) for f in functions) else set()


def _plain_statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements right in a node, those in `try` and `with` aside: there a call may stand for the error it raises."""
    if isinstance(node, ast.Try | ast.With):
        return
    for name in ("body", "orelse"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield from block


def _is_call_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def _check_call(call: ast.Call, name: str, functions: set[str]) -> None:
    text = ast.unparse(call)[:60]
    if name[:1].isupper():
        raise UnusableTests(f"`{text}` makes an object of a class of the candidate, which cannot be sent as data")
    for value in (*call.args, *(k.value for k in call.keywords)):
        if isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions):
            raise UnusableTests(f"`{text}` is given a function, which cannot be sent as data")
