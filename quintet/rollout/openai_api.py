"""The part of OpenAI's HTTP API that quintet serves: requests, what of them is refused, and the shape of answers.

Parameters that would change the answer and that the engine cannot honour are refused by name. Parameters that never
change it (`user`, `metadata`, `store` ...) are let through; so are unknown ones, as clients grow new ones all the time.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quintet.types import SamplingParams

MAX_N = 64
MAX_STOPS = 16


class ApiError(Exception):
    """An answer with an HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": what}
    for status, what in {
        400: "the request is wrong",
        401: "no key, or a wrong one",
        403: "not allowed here",
        404: "unknown model, or no such thing",
        405: "unknown method",
        409: "not in this state",
        413: "the body is too large",
        503: "the engine cannot answer now",
    }.items()
}


class StreamOptions(BaseModel):
    include_usage: bool = False


class _Sampled(BaseModel):
    """What chat and plain completions have in common."""

    model_config = ConfigDict(extra="ignore")

    model: str
    n: int | None = Field(1, ge=1, le=MAX_N)
    temperature: float | None = Field(1.0, ge=0.0, le=2.0)
    top_p: float | None = Field(1.0, gt=0.0, le=1.0)
    top_k: int | None = Field(0, ge=0, le=2**31, description="not OpenAI's; 0: no limit")
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = 0.0
    presence_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    return_token_ids: bool | None = Field(False, description="vLLM's: ids of prompt and answer beside the text")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def refuse_common(self) -> None:
        if self.frequency_penalty or self.presence_penalty:
            raise ApiError(400, "frequency_penalty and presence_penalty are not served", param="frequency_penalty")
        if self.logit_bias:
            raise ApiError(400, "logit_bias is not served", param="logit_bias")
        if len(self.stops) > MAX_STOPS or "" in self.stops:
            raise ApiError(400, f"stop: at most {MAX_STOPS} strings, none of them empty", param="stop")

    def sampling(self, max_tokens: int) -> SamplingParams:
        return SamplingParams(
            n=self.n or 1,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            max_tokens=max_tokens,
            stop=self.stops,
            seed=self.seed or 0,
        )


class ChatRequest(_Sampled):
    """`POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        return None if self.tool_choice == "none" else self.tools or None

    def refuse_unserved(self) -> None:
        """Raises ApiError 400 for what the engine would not honour."""
        self.refuse_common()
        if self.top_logprobs:
            raise ApiError(400, "top_logprobs is not served: only the sampled token's own", param="top_logprobs")
        if isinstance(self.tool_choice, dict) or self.tool_choice == "required":
            raise ApiError(400, "tool_choice can be none or auto: no call can be forced", param="tool_choice")
        if self.response_format and self.response_format.get("type") != "text":
            raise ApiError(400, "response_format can only be text", param="response_format")
        check_unicode(self.messages, "messages")
        check_unicode(self.tools, "tools")
        for index, message in enumerate(self.messages):
            check_message(message, f"messages[{index}]")
        for index, tool in enumerate(self.tools or ()):
            check_tool(tool, f"tools[{index}]")


class CompletionRequest(_Sampled):
    """`POST /v1/completions`; `prompt` as text or as token ids, one or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt):
            return [[int(part) for part in self.prompt]] if self.prompt else []  # type: ignore[arg-type]
        return list(self.prompt)  # type: ignore[arg-type]

    def refuse_unserved(self) -> None:
        """Raises ApiError 400 for what the engine would not honour."""
        self.refuse_common()
        if self.logprobs:
            raise ApiError(400, "logprobs can be 0: only the sampled token's own is known", param="logprobs")
        if self.echo or self.suffix or (self.best_of or 1) > (self.n or 1):
            raise ApiError(400, "echo, suffix and best_of are not served", param="echo")
        if not 1 <= len(self.prompts) <= MAX_N:
            raise ApiError(400, f"prompt: one to {MAX_N} prompts", param="prompt")


def check_unicode(value: Any, where: str) -> None:
    """Raises ApiError 400 for half a surrogate pair, which JSON can write and no tokenizer reads."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, f"{where}: there is half of a surrogate pair in the text", param=where) from None


def check_message(message: dict[str, Any], where: str) -> None:
    """Raises ApiError 400 for a message that no template could render."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ApiError(400, f"{where} has no role", param=where)
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise ApiError(400, f"{where}: only parts of type text are served", param=where)
    elif content is not None and not isinstance(content, str):
        raise ApiError(400, f"{where}: content must be a string or a list of parts", param=where)
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
        raise ApiError(400, f"{where}: tool_calls must be a list of function calls", param=where)


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def check_tool(tool: dict[str, Any], where: str) -> None:
    """Raises ApiError 400 for anything but a function with a name."""
    function = tool.get("function")
    named = isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]
    if tool.get("type") != "function" or not named:
        raise ApiError(400, f"{where} must be of type function with a name", param=where)


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as chat templates take it: content as text, arguments of tool calls as objects, nothing null."""
    out = {k: v for k, v in message.items() if v is not None and k not in ("refusal", "annotations", "audio")}
    out["content"] = text_of(message)
    if message.get("tool_calls"):
        out["tool_calls"] = [
            {"id": call.get("id"), "type": "function", "function": _plain_function(call["function"])}
            for call in message["tool_calls"]
        ]
    else:
        out.pop("tool_calls", None)
    return out


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _plain_function(function: dict[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": parsed_arguments(function.get("arguments"))}


def parsed_arguments(arguments: Any) -> Any:
    """The object in a JSON text, or what there is when it is none."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return arguments
