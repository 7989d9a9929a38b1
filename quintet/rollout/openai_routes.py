"""`/v1/models`, `/v1/chat/completions` and `/v1/completions` over whatever turns a request into a prompt.

The rollout server renders messages through the chat template; the gateway splices recorded tokens. Both are a `Host`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPAuthorizationCredentials

from quintet.models.tokenizer import Tokenizer
from quintet.rollout.http_app import bearer, event_stream, streamed_as, unless_gone
from quintet.rollout.openai_api import ApiError, ChatRequest, CompletionRequest
from quintet.rollout.replies import (
    Answer,
    StreamWriter,
    assistant_message,
    chat_reply,
    check_served,
    sse,
    text_reply,
)
from quintet.rollout.streaming import TokenWorker, stream
from quintet.types import Group, QuintetError, Rollout, SampledToken, SamplingParams

Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


@dataclass
class Job:
    """One request as the engine gets it: a prompt per group, `params.n` samples each."""

    groups: list[Group]
    params: SamplingParams

    def finish(self, rollouts: list[Rollout], messages: Sequence[dict[str, Any]]) -> None:
        """Told of the answer before the client gets its end. The gateway records here."""

    def close(self) -> None:
        """The request is over, answered or not."""


class Host(Protocol):
    """What the routes need of the service they belong to."""

    @property
    def worker(self) -> TokenWorker: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def model(self) -> str: ...

    def check_key(self, credentials: HTTPAuthorizationCredentials | None) -> str:
        """The caller's key. Raises ApiError 401."""
        ...

    async def chat_job(self, key: str, request: ChatRequest) -> Job:
        """Raises ApiError for a conversation that cannot be served."""
        ...

    async def text_job(self, key: str, request: CompletionRequest) -> Job: ...

    def note(self, route: str, rollouts: Sequence[Rollout]) -> None:
        """Count what was served."""
        ...


def openai_router(host: Host) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.get("/models")
    async def models(credentials: Credentials) -> dict[str, Any]:
        host.check_key(credentials)
        return {"object": "list", "data": [{"id": host.model, "object": "model", "created": 0, "owned_by": "quintet"}]}

    streamed = streamed_as("text/event-stream")

    @router.post("/chat/completions", response_model=None, responses=streamed)
    async def chat_completions(body: ChatRequest, request: Request, credentials: Credentials) -> Response:
        key = host.check_key(credentials)
        _check_model(host, body.model)
        body.refuse_unserved()
        return await _answer(host, request, body, await host.chat_job(key, body))

    @router.post("/completions", response_model=None, responses=streamed)
    async def completions(body: CompletionRequest, request: Request, credentials: Credentials) -> Response:
        key = host.check_key(credentials)
        _check_model(host, body.model)
        body.refuse_unserved()
        return await _answer(host, request, body, await host.text_job(key, body))

    return router


def _check_model(host: Host, model: str) -> None:
    if model != host.model:
        raise ApiError(
            404, f"there is no model {model!r} here, only {host.model!r}", param="model", code="model_not_found"
        )


async def _answer(host: Host, request: Request, body: ChatRequest | CompletionRequest, job: Job) -> Response:
    chat = isinstance(body, ChatRequest)
    answer = Answer(host.tokenizer, host.model, "chat.completion" if chat else "text_completion")
    if body.stream:
        return event_stream(_events(host, body, job, answer))
    try:
        rollouts = await unless_gone(request, host.worker.generate(job.groups, job.params, 0))
        check_served(rollouts)
        messages = _messages(body, rollouts)
        job.finish(rollouts, messages)
        host.note("chat" if chat else "text", rollouts)
    finally:
        job.close()
    if isinstance(body, ChatRequest):
        return JSONResponse(chat_reply(answer, body, rollouts, messages))
    return JSONResponse(text_reply(answer, body, rollouts))


def _messages(body: ChatRequest | CompletionRequest, rollouts: list[Rollout]) -> list[dict[str, Any]]:
    with_tools = isinstance(body, ChatRequest) and bool(body.offered_tools)
    return [assistant_message(r.text, with_tools) for r in rollouts] if isinstance(body, ChatRequest) else []


async def _events(host: Host, body: ChatRequest | CompletionRequest, job: Job, answer: Answer) -> AsyncIterator[str]:
    """The whole stream of one answer, an error as its last event where there is one."""
    try:
        async with aclosing(_chunks(host, body, job, answer)) as chunks:
            async for chunk in chunks:
                yield sse(chunk)
        yield sse("[DONE]")
    except (ApiError, QuintetError) as error:
        yield sse(error.body if isinstance(error, ApiError) else ApiError(400, str(error)).body)
    finally:
        job.close()


async def _chunks(
    host: Host, body: ChatRequest | CompletionRequest, job: Job, answer: Answer
) -> AsyncGenerator[dict[str, Any], None]:
    """Tokens carry no group, so that several prompts are streamed one after the other."""
    writer = StreamWriter(answer, body, (*host.tokenizer.eos_ids, *job.params.stop_token_ids))
    done: list[Rollout] = []
    for chunk in writer.begin(len(job.groups) * job.params.n):
        yield chunk
    for number, group in enumerate(job.groups):
        async with aclosing(stream(host.worker, [group], job.params, 0)) as events:
            async for event in events:
                if isinstance(event, SampledToken):
                    index = number * job.params.n + event.sample_index - job.params.first_sample
                    for chunk in writer.token(index, event):
                        yield chunk
                else:
                    check_served(event)
                    done += event
    messages = _messages(body, done)
    job.finish(done, messages)
    host.note("chat" if messages else "text", done)
    for index, rollout in enumerate(done):
        for chunk in writer.end(index, rollout, messages[index] if messages else None):
            yield chunk
    for chunk in writer.usage([group.prompt.token_ids for group in job.groups], done):
        yield chunk
