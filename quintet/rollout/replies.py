"""From rollouts to OpenAI's answers: choices, log-probabilities, usage, and the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quintet.models.tokenizer import Tokenizer
from quintet.rollout.openai_api import ApiError, ChatRequest, CompletionRequest
from quintet.rollout.streaming import TextStream
from quintet.rollout.tool_calls import OPEN, ToolCall, parse_tool_calls
from quintet.types import FailureKind, FinishReason, Rollout, SampledToken


def check_served(rollouts: Sequence[Rollout]) -> None:
    """Raises ApiError when a sample did not come to its own end."""
    for rollout in rollouts:
        if rollout.failure is not None:
            status = 503 if rollout.failure.retryable or rollout.failure.kind is FailureKind.TRANSPORT else 400
            raise ApiError(status, rollout.failure.message, code=str(rollout.failure.kind))
        if rollout.finish_reason is FinishReason.ABORTED:
            raise ApiError(503, "the request was aborted (the engine was paused); send it again", code="aborted")


def assistant_message(text: str, with_tools: bool) -> dict[str, Any]:
    """The message that a client is given; calls that do not parse stay in its content."""
    content, calls = parse_tool_calls(text) if with_tools else (text, [])
    good = [call for call in calls if isinstance(call, ToolCall)]
    if len(good) < len(calls) or not good:
        return {"role": "assistant", "content": text}
    made = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in good
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": made}


def usage(prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout]) -> dict[str, int]:
    prompt, sampled = sum(map(len, prompts)), sum(len(r.response_ids) for r in rollouts)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


@dataclass
class Answer:
    """What all parts of one answer have in common."""

    tokenizer: Tokenizer
    model: str
    object: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str | None = None) -> dict[str, Any]:
        return {"id": self.id, "object": kind or self.object, "created": self.created, "model": self.model}

    def chat_logprobs(self, tokens: Sequence[tuple[int, float]]) -> dict[str, Any]:
        return {"content": [self._chat_token(token, logprob) for token, logprob in tokens], "refusal": None}

    def _chat_token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.tokenizer.decode_all([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}

    def text_logprobs(self, tokens: Sequence[tuple[int, float]], offset: int = 0) -> dict[str, Any]:
        """`offset`: characters of the tokens before these."""
        shown = [self.tokenizer.decode_all([token]) for token, _ in tokens]
        offsets = [offset + sum(map(len, shown[:i])) for i in range(len(shown))]
        return {
            "tokens": shown,
            "token_logprobs": [logprob for _, logprob in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }


def tokens_of(rollout: Rollout) -> list[tuple[int, float]]:
    return list(zip(rollout.response_ids, rollout.logprobs, strict=True))


def chat_reply(answer: Answer, request: ChatRequest, rollouts: list[Rollout], messages: list[dict[str, Any]]) -> Any:
    """The body of a chat completion that is not streamed."""
    choices = []
    for index, (rollout, message) in enumerate(zip(rollouts, messages, strict=True)):
        choice: dict[str, Any] = {
            "index": index,
            "message": message | {"refusal": None},
            "finish_reason": "tool_calls" if message.get("tool_calls") else rollout.finish_reason.value,
            "logprobs": answer.chat_logprobs(tokens_of(rollout)) if request.logprobs else None,
        }
        choices.append(choice | ({"token_ids": rollout.response_ids} if request.return_token_ids else {}))
    body = answer.head() | {"choices": choices, "usage": usage([rollouts[0].prompt_ids], rollouts)}
    return body | ({"prompt_token_ids": rollouts[0].prompt_ids} if request.return_token_ids else {})


def text_reply(answer: Answer, request: CompletionRequest, rollouts: list[Rollout]) -> Any:
    """The body of a plain completion that is not streamed; choices of the first prompt come first."""
    choices = []
    for index, rollout in enumerate(rollouts):
        choice: dict[str, Any] = {
            "index": index,
            "text": rollout.text,
            "finish_reason": rollout.finish_reason.value,
            "logprobs": None if request.logprobs is None else answer.text_logprobs(tokens_of(rollout)),
        }
        ids = {"token_ids": rollout.response_ids, "prompt_token_ids": rollout.prompt_ids}
        choices.append(choice | (ids if request.return_token_ids else {}))
    prompts = [r.prompt_ids for r in rollouts[:: request.n or 1]]
    return answer.head() | {"choices": choices, "usage": usage(prompts, rollouts)}


Events = AsyncIterator[SampledToken | list[Rollout]]


class StreamWriter:
    """Chunks of a streamed answer: text as it can be shown, then each sample's end."""

    def __init__(self, answer: Answer, request: ChatRequest | CompletionRequest, stop_ids: Sequence[int]) -> None:
        self._answer = answer
        self._request = request
        self._chat = isinstance(request, ChatRequest)
        self._tools = isinstance(request, ChatRequest) and bool(request.offered_tools)
        self._barriers = request.stops + ((OPEN,) if self._tools else ())
        self._stop_ids = stop_ids
        self._texts: dict[int, TextStream] = {}
        self._unsent: dict[int, list[tuple[int, float]]] = {}
        self._offsets: dict[int, int] = {}  # characters of the tokens sent so far

    def begin(self, choices: int) -> list[dict[str, Any]]:
        for index in range(choices):
            self._texts[index] = TextStream(
                self._answer.tokenizer.decode, barriers=self._barriers, silent_ids=self._stop_ids
            )
            self._unsent[index], self._offsets[index] = [], 0
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(choices)] if self._chat else []

    def token(self, index: int, token: SampledToken) -> list[dict[str, Any]]:
        self._unsent[index].append((token.token_id, token.logprob))
        text = self._texts[index].push(token.token_id)
        return [self._chunk(index, {"content": text})] if text else []

    def end(self, index: int, rollout: Rollout, message: dict[str, Any] | None) -> list[dict[str, Any]]:
        """What is missing of the sample, and why it ended."""
        calls = (message or {}).get("tool_calls")
        rest = self._texts[index].finish((message or {}).get("content") or "" if calls else rollout.text)
        chunks = [self._chunk(index, {"content": rest})] if rest or self._unsent[index] else []
        if calls:
            numbered = [call | {"index": number} for number, call in enumerate(calls)]
            chunks.append(self._chunk(index, {"tool_calls": numbered}))
        reason = "tool_calls" if calls else rollout.finish_reason.value
        return [*chunks, self._chunk(index, {}, reason)]

    def usage(self, prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return []
        kind = "chat.completion.chunk" if self._chat else None
        return [self._answer.head(kind) | {"choices": [], "usage": usage(prompts, rollouts)}]

    def _chunk(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        tokens, self._unsent[index] = self._unsent[index], []
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": self._logprobs(index, tokens)}
        if self._request.return_token_ids:
            choice["token_ids"] = [token for token, _ in tokens]
        if self._chat:
            return self._answer.head("chat.completion.chunk") | {"choices": [choice | {"delta": delta}]}
        return self._answer.head() | {"choices": [choice | {"text": delta.get("content", "")}]}

    def _logprobs(self, index: int, tokens: Sequence[tuple[int, float]]) -> dict[str, Any] | None:
        if self._request.logprobs is None or self._request.logprobs is False or not tokens:  # 0 asks for them
            return None
        if self._chat:
            return self._answer.chat_logprobs(tokens)
        found = self._answer.text_logprobs(tokens, self._offsets[index])
        self._offsets[index] += sum(map(len, found["tokens"]))
        return found


def sse(data: Any) -> str:
    """One server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
