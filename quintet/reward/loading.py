"""From a name to a reward function: `number`, `package.module:function`, `path/to/file.py:function`, or a callable.

`FunctionSource` is the picklable recipe by which a pool worker loads a function for itself, so that the
main process need not import what only the function needs.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pickle
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from quintet.reward.adapters import RubricLike
from quintet.reward.background import AsyncGrader
from quintet.reward.calling import GradingFunction
from quintet.reward.model import MODEL, ModelGrader
from quintet.reward.rules import IMPORTS, RULES, make_rule, needs_pool
from quintet.types import QuintetError

# name -> class, made with (name, args, timeout_s); imported only where a recipe names one
ASYNC_GRADERS: Mapping[str, str] = {
    "code": "quintet.reward.code:CodeGrader",
    "judge": "quintet.reward.judge:Judge",
    "remote_model": "quintet.reward.remote_model:RemoteModel",
}

MEND = "a reward function is a built-in name, `package.module:function` or `path/to/file.py:function`"


@dataclass(frozen=True)
class FunctionSource:
    """One of `spec` and `pickled` is set. Raises QuintetError from `load` for whatever does not load."""

    name: str
    spec: str | None = None
    pickled: bytes | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pooled(self) -> bool:
        """Whether a call may take long, and so belongs into the process pool."""
        return not self.is_model and (self.spec not in RULES or needs_pool(self.spec, self.args))

    @property
    def is_model(self) -> bool:
        """A trained reward model: it lives in this process, on a thread of its own."""
        return self.spec == MODEL

    def load(self) -> GradingFunction:
        if self.spec in RULES:
            _import_rule(self.spec)
            return GradingFunction(self.name, make_rule(self.spec), self.args, rule=True)
        if self.is_model:
            return ModelGrader(self.name, self.args)
        if self.spec is not None:
            return GradingFunction(self.name, load_function(self.spec), self.args)
        try:
            function = pickle.loads(self.pickled or b"")
        except Exception as error:
            raise QuintetError(
                f"reward function `{self.name}` does not load in a worker: {_last_lines(error)}"
            ) from error
        return GradingFunction(self.name, function, self.args)


def make_async_grader(name: str, spec: str, args: Mapping[str, Any], timeout_s: float) -> AsyncGrader:
    """One of `ASYNC_GRADERS`, not started. Raises QuintetError for a wrong option."""
    module, _, cls = ASYNC_GRADERS[spec].partition(":")
    grader: AsyncGrader = getattr(importlib.import_module(module), cls)(name, args, timeout_s)
    return grader


def _import_rule(rule: str) -> None:
    if rule not in IMPORTS:
        return
    try:
        importlib.import_module(IMPORTS[rule])
    except ImportError as error:
        extra = rule.replace("_", "-")
        raise QuintetError(
            f"reward function `{rule}` needs the package `{error.name}`: pip install 'quintet[{extra}]'"
        ) from error


def load_function(spec: str) -> Callable[..., Any]:
    """The callable behind `spec`. Raises QuintetError naming what is missing, with the import's own error."""
    if spec in RULES:
        return RULES[spec]
    place, colon, name = spec.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(spec, RULES, n=1)
        hint = (
            f"did you mean `{near[0]}`? " if near else f"built-in are: {', '.join((*RULES, MODEL, *ASYNC_GRADERS))}; "
        )
        raise QuintetError(f"unknown reward function `{spec}`: {hint}{MEND}")
    module = _load_module(place, spec)
    function = getattr(module, name, None)
    if function is None:
        near = difflib.get_close_matches(name, vars(module), n=1)
        raise QuintetError(
            f"`{place}` has no `{name}` (reward.functions)" + (f"; did you mean `{near[0]}`?" if near else "")
        )
    if not callable(function) and not isinstance(function, RubricLike):
        raise QuintetError(f"`{spec}` (reward.functions) is a {type(function).__name__}, not a function")
    return function


def _load_module(place: str, spec: str) -> ModuleType:
    try:
        return _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError as error:
        raise QuintetError(f"reward function `{spec}`: there is no file {error.filename}; {MEND}") from error
    except (Exception, SystemExit) as error:
        raise QuintetError(f"reward function `{spec}` does not import: {_last_lines(error)}") from error


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name of its own; files beside it can be imported from it."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    name = f"quintet_reward_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module


def check_rule_args(rule: str, args: Mapping[str, Any]) -> None:
    """Types and names of a built-in's options. Raises QuintetError with the nearest valid name."""
    from pydantic import ConfigDict, ValidationError, create_model  # not needed in a worker, where it costs start-up

    function = RULES[rule]
    hints = get_type_hints(function, include_extras=True)
    options = [p for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]
    unknown = [key for key in args if key not in {p.name for p in options}]
    if unknown:
        names = [p.name for p in options]
        near = difflib.get_close_matches(unknown[0], names, n=1)
        mend = f"did you mean `{near[0]}`?" if near else f"it has: {', '.join(names) or 'none'}"
        raise QuintetError(f"reward function `{rule}` has no option `{unknown[0]}`; {mend}")
    fields: dict[str, Any] = {p.name: (hints[p.name], ... if p.default is p.empty else p.default) for p in options}
    try:
        create_model("Options", __config__=ConfigDict(extra="forbid"), **fields)(**args)
        re.compile(args.get("pattern") or "")
    except re.error as error:
        raise QuintetError(f"reward function `{rule}`, option `pattern`: no regular expression: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise QuintetError(
            f"reward function `{rule}`, option `{'.'.join(map(str, first['loc']))}`: {first['msg']}"
        ) from error


def _last_lines(error: BaseException) -> str:
    """`Type: message`, and the deepest line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
