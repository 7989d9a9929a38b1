"""Streamed `/v1/completions` with token ids in and out, as vLLM and TensorRT-LLM serve it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from quintet.rollout.engine.sequence import Sequence
from quintet.rollout.served import Broken, Chunk
from quintet.types import FinishReason


class CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class CompletionChoice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class CompletionEvent(msgspec.Struct):
    choices: list[CompletionChoice] = []
    error: dict[str, Any] | None = None


def completion_request(sequence: Sequence) -> dict[str, Any]:
    """What both servers are asked for in the same words."""
    params, done = sequence.params, len(sequence.output_ids)
    return {
        "prompt": sequence.tokens_from(0),
        "max_tokens": sequence.max_new - done,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        # a continuation, or a later turn, must not repeat the draws of its beginning
        "seed": (sequence.key + params.first_position + done) % 2**63,
        "stop_token_ids": sorted(sequence.stop_ids),
        "detokenize": False,
        "stream": True,
    }


def completion_chunks(data: bytes, ended: Mapping[str, FinishReason]) -> Iterator[Chunk]:
    """What one event says of the only choice. `ended`: the server's words for how a sample can end.

    Raises Broken for an error sent in the stream, for ids and log-probabilities that do not pair and for another end.
    """
    event = msgspec.json.decode(data, type=CompletionEvent)
    if event.error is not None:
        raise Broken(str(event.error.get("message", event.error)))
    for choice in event.choices[:1]:
        yield _chunk(choice, ended)


def _chunk(choice: CompletionChoice, ended: Mapping[str, FinishReason]) -> Chunk:
    ids = choice.token_ids or []
    logprobs = choice.logprobs.token_logprobs if choice.logprobs is not None else []
    if len(ids) != len(logprobs):
        raise Broken(f"{len(ids)} token ids came with {len(logprobs)} log-probabilities")
    reason = None
    if choice.finish_reason is not None:
        reason = ended.get(choice.finish_reason)
        if reason is None:
            raise Broken(f"the sample ended for the reason {choice.finish_reason!r}")
    return Chunk([(i, float("nan") if p is None else p) for i, p in zip(ids, logprobs, strict=True)], reason)
