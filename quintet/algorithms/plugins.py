"""Functions and rows of a user's own, named in a recipe as `package.module:name`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from quintet.types import QuintetError


def load_custom(name: str, column: str) -> Callable[..., Any]:
    """Import `package.module:function`. Raises `QuintetError` naming the missing part."""
    function = import_named(name, column)
    if not callable(function):
        raise QuintetError(f"algorithm.{column}: {name!r} is a {type(function).__name__}, not a function")
    return function


def import_named(name: str, column: str) -> Any:
    """What `package.module:name` names. Raises `QuintetError` naming the missing part."""
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise QuintetError(
            f"algorithm.{column}: cannot import {module_name!r} of {name!r}: {error}\n"
            "The module must be installed or lie in the working directory (PYTHONPATH)"
        ) from error
    if attribute not in vars(module):
        what = "row" if column == "preset" else "function"
        raise QuintetError(f"algorithm.{column}: {module_name!r} has no {what} {attribute!r}")
    return vars(module)[attribute]
