"""From `environment:` of a recipe to environments. Wrong values are refused before anything heavy is loaded."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quintet.data import verifiers
from quintet.rollout.config import EnvironmentConfig, ToolConfig
from quintet.rollout.environment import Environment
from quintet.rollout.search import Corpus
from quintet.rollout.tool_environment import ToolEnvironment
from quintet.rollout.tools import Tool, calculator, load_tool, python_tool, search_tool
from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.factory import make_sandbox
from quintet.sandbox.protocol import limits_of
from quintet.types import QuintetError

TOOLS, REASONING, OPENENV, GYM, AGENT = "tools", "reasoning_gym", "openenv", "gym:", "agent:"
VERIFIERS = verifiers.SOURCE


def is_agent(config: EnvironmentConfig) -> bool:
    """Whether a program plays the episodes, through the gateway: one of the user's own, or a verifiers environment."""
    return config.kind is not None and config.kind.startswith((AGENT, VERIFIERS))


def check_environment(config: EnvironmentConfig) -> None:
    """Raises QuintetError for what does not exist: the kind, a tool, an argument. Imports the user's own modules."""
    if config.kind is None:
        return
    if config.kind.startswith(VERIFIERS):
        verifiers.check_verifiers(config.args, "environment.args")
    elif is_agent(config):
        load(config.kind.removeprefix(AGENT), "environment.kind")
    else:
        EnvironmentFactory(config)


class EnvironmentFactory:
    """Makes the configured environment, one per episode; what they share (corpora, the sandbox) is made once.

    Raises QuintetError for a kind, a tool or an argument that does not exist.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._corpora = {i: _corpus(tool) for i, tool in enumerate(config.tools) if tool.fn == "search"}
        python = any(tool.fn == "python" for tool in config.tools)
        self._sandbox_config = _sandbox_config(config.sandbox)
        self._sandbox = make_sandbox(self._sandbox_config) if python else None
        self._class = None if config.kind == TOOLS else _class_of(config)
        if config.kind == TOOLS:
            self._check_tools()

    def __call__(self) -> Environment:
        config = self._config
        if self._class is not None:
            made: Environment = self._class(**self._arguments())
            return made
        tools = [self._tool(i, tool) for i, tool in enumerate(config.tools)]
        return ToolEnvironment(tools, timeout_s=config.timeout_s, **config.args)

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    def _arguments(self) -> dict[str, Any]:
        kind = self._config.kind or ""
        if kind.startswith(GYM):
            return {"make": load(kind.removeprefix(GYM), "environment.kind")} | self._config.args
        return self._config.args

    def _check_tools(self) -> None:
        """Build one, so that a wrong argument shows now."""
        try:
            environment = self()
        except TypeError as error:
            raise QuintetError(f"environment.args: {error}") from None
        if self._config.args.get("format") not in (None, "json", "tags"):
            raise QuintetError("environment.args.format can be json or tags")
        if self._config.args.get("on_malformed") not in (None, "reply", "end"):
            raise QuintetError("environment.args.on_malformed can be reply or end")
        assert isinstance(environment, ToolEnvironment)
        environment.check()

    def _tool(self, index: int, config: ToolConfig) -> Tool:
        name = config.name or config.fn.rpartition(":")[2]
        if config.fn == "calculator":
            return Tool.of(calculator, name)
        if config.fn == "search":
            return search_tool(self._corpora[index], name=name, results=config.args.get("results", 3))
        if config.fn == "python":
            assert self._sandbox is not None
            return python_tool(self._sandbox, limits_of(self._sandbox_config.limits), name=name)
        return load_tool(config.fn, name)


def load(path: str, option: str) -> Any:
    """What `module:name` names. Raises QuintetError that names the option."""
    module, colon, name = path.partition(":")
    if not colon:
        raise QuintetError(f"{option}: {path!r} is not of the form module:name")
    try:
        found = vars(importlib.import_module(module)).get(name)
    except ImportError as error:
        raise QuintetError(f"{option}: {module!r} cannot be imported: {error}") from error
    if not callable(found):
        raise QuintetError(f"{option}: {module!r} has no {name!r}")
    return found


def _class_of(config: EnvironmentConfig) -> Any:
    kind = config.kind or ""
    if kind == REASONING:
        from quintet.rollout.adapters import ReasoningGymEnvironment

        found: Any = ReasoningGymEnvironment
    elif kind == OPENENV:
        found = _openenv()
    elif kind.startswith(GYM):
        from quintet.rollout.adapters import GymEnvironment

        load(kind.removeprefix(GYM), "environment.kind")
        found = GymEnvironment
    else:
        found = load(kind, "environment.kind")
    known = inspect.signature(found).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
    wrong = [name for name in config.args if name not in known]
    if wrong and not takes_any:
        raise QuintetError(f"environment.args: {kind} takes no {wrong[0]!r}; it takes {', '.join(known)}")
    if kind == OPENENV and "url" not in config.args:
        raise QuintetError("environment.args: openenv needs the server's url, e.g. {url: 'http://127.0.0.1:8000'}")
    return found


def _openenv() -> Any:
    if importlib.util.find_spec("websockets") is None:
        raise QuintetError(
            "environment.kind: openenv talks to its server through websockets.\n"
            "Install with: pip install 'quintet[openenv]'"
        )
    from quintet.rollout.openenv import OpenEnvEnvironment

    return OpenEnvEnvironment


def _sandbox_config(options: dict[str, Any]) -> SandboxConfig:
    try:
        return SandboxConfig(**options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["environment.sandbox", *map(str, first["loc"])])
        raise QuintetError(f"{where}: {first['msg']}") from None


def _corpus(tool: ToolConfig) -> Corpus:
    path = tool.args.get("corpus")
    if not isinstance(path, str):
        raise QuintetError("environment.tools: search needs args: {corpus: FILE}")
    return Corpus.read(Path(path))


def environment_problem(config: EnvironmentConfig) -> tuple[str, str] | None:
    """(option, what is wrong with it): options that contradict each other or would do nothing."""
    python = any(tool.fn == "python" for tool in config.tools)
    if config.kind is None and config != EnvironmentConfig():
        return (
            "environment.kind",
            "environment has options but no kind: set environment.kind, e.g. to tools",
        )
    if config.kind == TOOLS and not config.tools:
        return "environment.tools", "environment.kind is tools, but environment.tools is empty: name at least one"
    if config.kind != TOOLS and config.tools:
        return "environment.tools", "environment.tools has an effect with environment.kind tools only; remove it"
    if config.sandbox and not python:
        return "environment.sandbox", "environment.sandbox has no effect: no tool is python; remove it"
    if is_agent(config) and config.turn_tokens is not None:
        return "environment.turn_tokens", "environment.turn_tokens has no effect with an agent, which asks for itself"
    if is_agent(config) and config.max_turns != EnvironmentConfig().max_turns:
        return (
            "environment.max_turns",
            "environment.max_turns has no effect with an agent, which ends by itself",
        )
    return None
