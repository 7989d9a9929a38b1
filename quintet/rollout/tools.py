"""Tools: Python functions with a JSON schema made from their signature, and the built-in ones.

A call with wrong arguments, or a `ToolError`, is answered with an error text that the policy reads. Any other exception
and a time-out are failures of the tool's host.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import operator
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from quintet.rollout.environment import EnvironmentFailure
from quintet.rollout.search import Corpus
from quintet.sandbox.protocol import Limits, Outcome, Program, Sandbox, SandboxFailure
from quintet.types import FailureKind, QuintetError


class ToolError(Exception):
    """The policy used the tool wrongly: it is told why."""


@dataclass(frozen=True)
class Tool:
    """`arguments` checks a call's arguments and gives the schema; `function` takes them as keywords, async or not."""

    name: str
    description: str
    arguments: type[BaseModel]
    function: Callable[..., Any]
    close: Callable[[], Any] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, function: Callable[..., Any], name: str | None = None) -> Tool:
        """Raises QuintetError for a parameter that has no type, as its schema would say nothing."""
        name = name or function.__name__
        fields: dict[str, Any] = {}
        hints = inspect.get_annotations(function, eval_str=True)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise QuintetError(
                    f"tool {name}: the parameter {parameter.name!r} needs a type, and no *args or **kwargs"
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints[parameter.name], default)
        arguments = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **fields)
        return cls(name, inspect.getdoc(function) or "", arguments, function)

    @property
    def schema(self) -> dict[str, Any]:
        """OpenAI's form."""
        parameters = {k: v for k, v in self.arguments.model_json_schema().items() if k != "title"}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }

    @property
    def only_parameter(self) -> str:
        """The parameter that a call in tags fills. Raises QuintetError unless there is exactly one required."""
        required = [name for name, info in self.arguments.model_fields.items() if info.is_required()]
        if len(required) != 1:
            raise QuintetError(
                f"tool {self.name}: a call in tags has one argument, it takes {', '.join(required) or 'none'}"
            )
        return required[0]

    async def call(self, arguments: dict[str, Any], timeout_s: float) -> str:
        """The result as text. Raises ToolError for the policy's mistakes, EnvironmentFailure for all others.

        A function that is not async runs in a thread, which a time-out gives up but cannot end.
        """
        try:
            checked = self.arguments(**arguments)
        except ValidationError as error:
            first = error.errors()[0]
            raise ToolError(f"{'.'.join(map(str, first['loc'])) or 'arguments'}: {first['msg']}") from None
        given = {name: getattr(checked, name) for name in self.arguments.model_fields}
        try:
            if inspect.iscoroutinefunction(self.function):
                result = await asyncio.wait_for(self.function(**given), timeout_s)
            else:
                result = await asyncio.wait_for(asyncio.to_thread(self.function, **given), timeout_s)
        except (ToolError, EnvironmentFailure):
            raise
        except TimeoutError:
            raise EnvironmentFailure(
                f"tool {self.name} took longer than {timeout_s:g} s", kind=FailureKind.TIMEOUT
            ) from None
        except Exception as error:
            raise EnvironmentFailure(f"tool {self.name} raised {type(error).__name__}: {error}") from error
        return result if isinstance(result, str) else str(result)


# -- built-in tools ----------------------------------------------------------------------------------

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_MAX_EXPRESSION = 200  # characters
_MAX_BITS = 4096  # of any number on the way


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression of numbers, + - * / // % ** and parentheses."""
    if len(expression) > _MAX_EXPRESSION:
        raise ToolError(f"the expression is longer than {_MAX_EXPRESSION} characters")
    try:
        tree = ast.parse(_without_leading_zeros(expression.strip()), mode="eval")
        return str(_value(tree.body))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ToolError(f"not an expression: {error}") from None
    except (ZeroDivisionError, OverflowError) as error:
        raise ToolError(str(error)) from None


def _without_leading_zeros(expression: str) -> str:
    """`07` is no number in Python."""
    out: list[str] = []
    for i, character in enumerate(expression):
        begins = i == 0 or not (expression[i - 1].isdigit() or expression[i - 1] in "._")
        kept = "".join(out)
        after_zero = bool(kept) and kept[-1] == "0" and (len(kept) == 1 or not (kept[-2].isdigit() or kept[-2] == "."))
        if character.isdigit() and not begins and after_zero:
            out.pop()
        out.append(character)
    return "".join(out)


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(node.op, _value(node.left), _value(node.right))
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def _bounded(op: ast.AST, left: int | float, right: int | float) -> int | float:
    """The operation, refused before it makes a number that would take long."""
    bits = [abs(n).bit_length() if isinstance(n, int) else 64 for n in (left, right)]
    if isinstance(op, ast.Pow) and abs(right) * max(bits[0], 1) > _MAX_BITS:
        raise OverflowError("the result is too large")
    value = _OPERATORS[type(op)](left, right)
    if isinstance(value, complex):
        raise ValueError("the result is not real")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise OverflowError("the result is too large")
    return value


def search_tool(corpus: Corpus, *, name: str = "search", results: int = 3) -> Tool:
    """BM25 over a local corpus."""

    def search(query: str) -> str:
        """Search the corpus; the best passages."""
        found = corpus.search(query, results)
        return "\n\n".join(found) if found else "nothing found"

    return Tool.of(search, name)


def python_tool(started: Callable[[], Awaitable[Sandbox]], limits: Limits, *, name: str = "python") -> Tool:
    """Python in a sandbox session that lives as long as the episode; variables stay between calls.

    `started` gives the sandbox, started; it is asked at the first call.
    """
    session: list[str] = []

    async def python(code: str) -> str:
        """Run Python code; what it prints."""
        try:
            sandbox = await started()
            if not session:
                session.append(await sandbox.create())
            result = await sandbox.run(Program(code), limits, session[0])
        except SandboxFailure as error:
            raise EnvironmentFailure(str(error), kind=FailureKind.SANDBOX, retryable=error.retryable) from error
        if result.outcome is Outcome.FINISHED:
            return result.stdout
        return f"{result.stdout}{result.stderr}[{result.outcome}]"

    async def close() -> None:
        for one in session:
            await (await started()).destroy(one)

    made = Tool.of(python, name)
    return Tool(made.name, made.description, made.arguments, made.function, close)


def load_tool(spec: str, name: str) -> Tool:
    """A function of the user's own, as `module:function`. Raises QuintetError."""
    module, colon, attribute = spec.partition(":")
    try:
        found = vars(importlib.import_module(module)).get(attribute) if colon else None
    except ImportError as error:
        raise QuintetError(f"environment.tools: {module!r} cannot be imported: {error}.") from error
    if not callable(found):
        raise QuintetError(f"environment.tools: {spec!r} is neither calculator, search, python nor a module:function.")
    return Tool.of(found, name)
