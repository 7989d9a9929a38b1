"""Tool calls as models write them: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen ...).

A call that does not parse is the policy's own doing: it is told apart with its reason and never run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Malformed:
    """What stood between the marks, and why it is no call."""

    text: str
    reason: str


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall | Malformed]]:
    """The text outside of the marks, and the calls in order."""
    outside, calls = [], []
    rest = text
    while OPEN in rest:
        before, _, rest = rest.partition(OPEN)
        outside.append(before)
        inside, closed, rest = rest.partition(CLOSE)
        calls.append(parse_call(inside) if closed else Malformed(inside, f"{OPEN} without {CLOSE}"))
    return "".join([*outside, rest]).strip() if calls else text, calls


def parse_call(text: str) -> ToolCall | Malformed:
    """One call from its JSON object."""
    try:
        found = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        return Malformed(text, f"no JSON: {error}")
    if not isinstance(found, dict):
        return Malformed(text, f"valid JSON, but a {type(found).__name__} and no object")
    name, arguments = found.get("name"), found.get("arguments", {})
    if not isinstance(name, str) or not name:
        return Malformed(text, "it has no name")
    if not isinstance(arguments, dict):
        return Malformed(text, f"arguments is a {type(arguments).__name__} and no object")
    return ToolCall(name, arguments)
