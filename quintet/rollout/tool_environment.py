"""An environment of tools: the policy calls them until it answers.

Two ways to write a call:

    json   <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, several in a turn; for chat models. The
           replies are messages of role `tool`.
    tags   <add>1+2</add>, which ends the turn; for small models and plain text. The reply is `result` with its text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from quintet.rollout.environment import Action, Message, Observation, Outcome, Step, TextEnvironment
from quintet.rollout.tool_calls import Malformed, ToolCall, parse_tool_calls
from quintet.rollout.tools import Tool, ToolError
from quintet.types import FinishReason, Prompt


class ToolEnvironment(TextEnvironment):
    """One episode. `result` (in tags) and `error` are how replies are written, with `{result}` and `{reason}`.
    `on_malformed`: `reply` tells the policy what was wrong, `end` ends the episode.

    The answer's worth is left to the reward functions; `limit_reward` is what running out is worth (None: they decide
    on that as well), `malformed_reward` what an end by a malformed call is.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        format: Literal["json", "tags"] = "json",
        result: str = "[{result}]",
        error: str = "error: {reason}",
        on_malformed: Literal["reply", "end"] = "reply",
        limit_reward: float | None = None,
        malformed_reward: float | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        super().__init__(limit_reward)
        self._tools = {tool.name: tool for tool in tools}
        self._format = format
        self._result = result
        self._error = error
        self._on_malformed = on_malformed
        self._malformed_reward = malformed_reward
        self._timeout_s = timeout_s
        self.stop = tuple(f"</{name}>" for name in self._tools) if format == "tags" else ()
        self.tools = [tool.schema for tool in tools] if format == "json" else None

    def check(self) -> None:
        """Raises QuintetError for a tool that cannot be called in tags."""
        if self._format == "tags":
            for tool in self._tools.values():
                tool.only_parameter  # noqa: B018 - it refuses

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        return None

    async def step(self, action: Action) -> Step:
        calls = self._calls_in_tags(action.text) if self._format == "tags" else parse_tool_calls(action.text)[1]
        if not calls:
            cut = action.finish_reason is FinishReason.LENGTH
            return Step(done=True, outcome=Outcome.CONTEXT if cut else Outcome.DONE)
        malformed = sum(isinstance(call, Malformed) for call in calls)
        if malformed and self._on_malformed == "end":
            return Step(done=True, outcome=Outcome.MALFORMED, reward=self._malformed_reward, malformed_calls=malformed)
        replies = [await self._reply(call) for call in calls]
        observation = self._observation(calls, replies)
        return Step(observation, tool_calls=len(calls) - malformed, malformed_calls=malformed)

    async def close(self) -> None:
        for tool in self._tools.values():
            if tool.close is not None:
                await tool.close()

    async def _reply(self, call: ToolCall | Malformed) -> str:
        if isinstance(call, Malformed):
            return self._error.format(reason=f"the call does not parse: {call.reason}")
        tool = self._tools.get(call.name)
        if tool is None:
            return self._error.format(reason=f"there is no tool {call.name!r}; there are {', '.join(self._tools)}")
        try:
            return await tool.call(call.arguments, self._timeout_s)
        except ToolError as fault:
            return self._error.format(reason=fault)

    def _observation(self, calls: Sequence[ToolCall | Malformed], replies: Sequence[str]) -> Observation:
        if self._format == "tags":
            return "".join(self._result.format(result=reply) for reply in replies)
        messages: list[Message] = []
        for call, reply in zip(calls, replies, strict=True):
            name: dict[str, Any] = {"name": call.name} if isinstance(call, ToolCall) else {}
            messages.append({"role": "tool", "content": reply} | name)
        return messages

    def _calls_in_tags(self, text: str) -> list[ToolCall | Malformed]:
        """The call that ends the turn. One that was closed and never opened is malformed."""
        for name, tool in self._tools.items():
            close = f"</{name}>"
            if text.endswith(close):
                found = re.search(rf"<{re.escape(name)}>((?:(?!<{re.escape(name)}>).)*)$", text[: -len(close)], re.S)
                if found is None:
                    return [Malformed(text, f"{close} without <{name}>")]
                return [ToolCall(name, {tool.only_parameter: found.group(1)})]
        opened = next((name for name in self._tools if f"<{name}>" in text), None)
        return [Malformed(text, f"<{opened}> without </{opened}>")] if opened is not None else []
