"""A rollout engine as an HTTP server: OpenAI's routes, token-in-token-out `/generate`, and control of the weights.

Every route but `/health` wants the server's key. `/update_weights` reads only below one folder;
`/update_weights/stream` takes the weights in its body. `/generate` is what `http.py` speaks; with `stream` it answers
in lines of JSON, one a token and the rollouts last.
"""

from __future__ import annotations

import hmac
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from quintet.models.tokenizer import Tokenizer
from quintet.rollout.config import Role
from quintet.rollout.engine.handoff import Prefilled, PrefillFailed
from quintet.rollout.engine.worker import EngineWorker, PauseMode
from quintet.rollout.http import PREFILL_FAILED
from quintet.rollout.http_app import document_model, event_stream, key_of, make_app, streamed_as, unless_gone
from quintet.rollout.openai_api import ApiError, ChatRequest, CompletionRequest, plain_message
from quintet.rollout.openai_routes import Credentials, Job, openai_router
from quintet.rollout.streaming import Generator, stream, with_signs_of_life
from quintet.rollout.transfer import SIGN_OF_LIFE_S, PrefillClient, SplitDecoder, prefill_answer
from quintet.rollout.weight_stream import WeightReceiver
from quintet.types import Group, GroupId, Prompt, QuintetError, Rollout, SampledToken, SamplingParams, WeightRef

GROUP_ID = r"^[^\n]+/e-?[0-9]{1,18}\.o-?[0-9]{1,18}\.a-?[0-9]{1,18}$"
NDJSON = "application/x-ndjson"
OCTETS = "application/octet-stream"
STREAM_PATH = "/update_weights/stream"
_BINARY_BODY = {
    "requestBody": {
        "required": True,
        "content": {OCTETS: {"schema": {"type": "string", "format": "binary"}}},
    }
}


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class GeneratePrompt(_Body):
    group_id: str = Field(max_length=1000, pattern=GROUP_ID, description="keys the randomness: PROMPT/e0.o0.a0")
    token_ids: list[int] = Field(min_length=1)


class GenerateSampling(_Body):
    n: int = Field(1, ge=1, le=4096)
    temperature: float = Field(1.0, ge=0.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0, le=2**31)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    max_tokens: int = Field(256, ge=1)
    stop: list[str] = []
    stop_token_ids: list[int] = []
    seed: int = 0
    first_sample: int = Field(0, ge=0)
    first_position: int = Field(0, ge=0, lt=2**31)


class GenerateRequest(_Body):
    """Token in, token out: `n` rollouts per prompt, in order."""

    prompts: list[GeneratePrompt] = Field(min_length=1)
    sampling: GenerateSampling = Field(default_factory=GenerateSampling)
    weight_version: int = Field(-1, description="an engine with older weights answers 409")
    stream: bool = Field(False, description="for one prompt: a line of JSON per token, then the rollouts")
    prefill_url: str | None = Field(None, description="of a decode server: which prefill server computes the prompts")


class PrefillRequest(_Body):
    """A prompt whose keys and values a decode server wants, and its samples' first tokens."""

    prompt: GeneratePrompt
    sampling: GenerateSampling = Field(default_factory=GenerateSampling)
    weight_version: int = Field(-1, description="an engine with older weights answers 409")
    machine: str = Field("", description="where the reader runs, for shared memory; empty: over this connection")


class UpdateWeightsRequest(_Body):
    """A version that `FileStore` published: a folder below the server's weights root."""

    version: int = Field(ge=0)
    digest: str
    path: str


Version = Annotated[int, Query(ge=0)]
Digest = Annotated[str, Query(pattern="^[0-9a-f]{64}$", description="sha256 over names, dtypes, shapes and bytes")]


class PauseRequest(_Body):
    mode: Literal["abort", "wait", "keep"] = "abort"


class AbortRequest(_Body):
    group_ids: list[str]


@dataclass
class RolloutServer:
    """One engine, what it serves and who may ask. `context` is the model's, in tokens; `prefill_urls` are the prefill
    servers that a decode server may be told to ask, with its own key. `stream_limit`: bytes of a weight version in a
    request's body; None: it takes none so."""

    worker: EngineWorker
    tokenizer: Tokenizer
    model: str
    key: str
    context: int
    weights_root: Path | None = None
    stream_limit: int | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    role: Role = Role.BOTH
    prefill_urls: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.metrics = _Metrics()
        urls = [url.rstrip("/") for url in self.prefill_urls]
        self._splits = {url: SplitDecoder(self.worker, PrefillClient(url, key=self.key)) for url in urls}
        self._receiver = None if self.stream_limit is None else WeightReceiver(self.stream_limit)

    def app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            for split in self._splits.values():
                await split.close()
            await self.worker.close()

        app = make_app("quintet rollout", lifespan, unlimited=(STREAM_PATH,))
        if self.role is Role.BOTH:
            app.include_router(openai_router(self))
            document_model(app, self.model)
        _control_routes(app, self)
        return app

    def generator(self, prefill_url: str | None) -> Generator:
        """Who answers `/generate`. Raises ApiError where this server's role, or its prefill servers, forbid it."""
        if self.role is Role.PREFILL:
            raise ApiError(403, "this server only prefills (--role prefill)", code="wrong_role")
        if prefill_url is None:
            if self.role is Role.DECODE:
                raise ApiError(403, "this server only decodes (--role decode): say prefill_url", code="wrong_role")
            return self.worker
        split = self._splits.get(prefill_url.rstrip("/"))
        if split is None:
            raise ApiError(403, "prefill_url: not one of this server's --prefill-url", param="prefill_url")
        return split

    async def abort(self, group_ids: list[GroupId]) -> None:
        for split in self._splits.values():
            split.abort(group_ids)
        await self.worker.abort(group_ids)

    # -- Host ------------------------------------------------------------------------------------

    def check_key(self, credentials: HTTPAuthorizationCredentials | None) -> str:
        key = key_of(credentials)
        if not hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self.key.encode()):
            raise ApiError(401, "wrong API key", code="invalid_api_key")
        return key

    async def chat_job(self, key: str, request: ChatRequest) -> Job:
        messages = [plain_message(m) for m in request.messages]
        ids = self.tokenizer.encode_chat(messages, tools=request.offered_tools, **self.template_kwargs)
        limit = request.max_completion_tokens or request.max_tokens
        return self._job([ids], request.sampling(room(len(ids), limit, self.context)), request.seed)

    async def text_job(self, key: str, request: CompletionRequest) -> Job:
        prompts = [self.tokenizer.encode_plain(p) if isinstance(p, str) else p for p in request.prompts]
        limit = min(room(len(ids), request.max_tokens, self.context) for ids in prompts)
        return self._job(prompts, request.sampling(limit), request.seed)

    def note(self, route: str, rollouts: Sequence[Rollout]) -> None:
        self.metrics.note(route, rollouts)

    def _job(self, prompts: list[list[int]], params: SamplingParams, seed: int | None) -> Job:
        """Equal requests with one seed give equal answers; without a seed no two requests share their draws."""
        name = f"request-{uuid.uuid4().hex}" if seed is None else "seeded"
        groups = [Group(GroupId(name, occurrence=i), Prompt(name, ids)) for i, ids in enumerate(prompts)]
        return Job(groups, params)

    # -- control ---------------------------------------------------------------------------------

    def weights_at(self, path: str) -> Path:
        """The folder of a version. Raises ApiError 403 outside of the root, links followed."""
        if self.weights_root is None:
            raise ApiError(403, "this server takes no weights: it was started without --weights-root")
        try:
            found = Path(path).resolve()
        except (OSError, ValueError) as error:
            raise ApiError(400, f"path: {error}", param="path") from None
        if not found.is_relative_to(self.weights_root.resolve()):
            raise ApiError(403, "path: it is not below this server's weights root", param="path", code="outside_root")
        return found

    async def update_weights(self, request: UpdateWeightsRequest) -> None:
        folder = self.weights_at(request.path)
        await self.worker.update_weights(WeightRef(request.version, str(folder), request.digest), request.version)

    async def receive_weights(self, request: Request, version: int, digest: str) -> None:
        if self._receiver is None:
            raise ApiError(403, "this server takes no weights in a request: it was started without --weights-stream")
        async with self._receiver.received(request, version, digest) as ref:
            await self.worker.update_weights(ref, version)


def room(prompt: int, wanted: int | None, context: int) -> int:
    """How many tokens may be sampled. Raises ApiError 400 when prompt and answer do not fit the context."""
    if prompt + (wanted or 1) > context:
        raise ApiError(
            400,
            # OpenAI's own words, by which clients know what it is
            f"This model's maximum context length is {context} tokens: {prompt} in the prompt and {wanted or 1} to "
            "sample do not fit",
            param="messages",
            code="context_length_exceeded",
        )
    return wanted or context - prompt


def _control_routes(app: FastAPI, server: RolloutServer) -> None:
    worker = server.worker

    @app.post("/generate", response_model=None, responses=streamed_as(NDJSON))
    async def generate(body: GenerateRequest, request: Request, credentials: Credentials) -> Response:
        server.check_key(credentials)
        generator = server.generator(body.prefill_url)
        groups, params = _work(body)
        await _check_version(worker, body.weight_version)
        if body.stream:
            return event_stream(_lines(server, generator, groups, params, body.weight_version), NDJSON)
        try:
            rollouts = await unless_gone(request, generator.generate(groups, params, body.weight_version))
        except PrefillFailed as error:
            raise _prefill_failed(error) from error
        server.note("generate", rollouts)
        return Response(msgspec.json.encode({"rollouts": rollouts}), media_type="application/json")

    @app.post("/prefill", response_class=Response, responses={200: {"content": {OCTETS: {}}}})
    async def prefill(body: PrefillRequest, credentials: Credentials) -> Response:
        server.check_key(credentials)
        if server.role is Role.DECODE:
            raise ApiError(403, "this server only decodes (--role decode)", code="wrong_role")
        group, params = _group(body.prompt), msgspec.convert(body.sampling.model_dump(), SamplingParams)
        await _check_version(worker, body.weight_version)
        answer = prefill_answer(_noted(server, worker.prefill(group, params, body.weight_version)), body.machine)
        return StreamingResponse(answer, media_type=OCTETS)

    @app.post("/abort")
    async def abort(body: AbortRequest, credentials: Credentials) -> dict[str, str]:
        server.check_key(credentials)
        await server.abort([_group_id(text) for text in body.group_ids])
        return {"status": "ok"}

    @app.post("/update_weights")
    async def update_weights(body: UpdateWeightsRequest, credentials: Credentials) -> dict[str, Any]:
        server.check_key(credentials)
        await server.update_weights(body)
        return {"version": body.version}

    @app.post(STREAM_PATH, openapi_extra=_BINARY_BODY)
    async def receive_weights(request: Request, credentials: Credentials, version: Version, digest: Digest) -> Any:
        """The body is a safetensors file; `digest` is `quintet.weights.digest` of its tensors."""
        server.check_key(credentials)
        await server.receive_weights(request, version, digest)
        return {"version": version}

    @app.post("/pause")
    async def pause(body: PauseRequest, credentials: Credentials) -> dict[str, str]:
        server.check_key(credentials)
        await worker.pause(PauseMode(body.mode))
        return {"status": "paused"}

    @app.post("/resume")
    async def resume(credentials: Credentials) -> dict[str, str]:
        server.check_key(credentials)
        await worker.resume()
        return {"status": "running"}

    @app.get("/health", responses={503: {"description": "it cannot serve; `message` says why"}})
    async def health() -> Response:
        found = await worker.health_check()
        return JSONResponse(msgspec.to_builtins(found), 200 if found else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(credentials: Credentials) -> Response:
        server.check_key(credentials)
        return Response(await server.metrics.text(worker), media_type=CONTENT_TYPE_LATEST)


def _work(body: GenerateRequest) -> tuple[list[Group], SamplingParams]:
    if body.stream and len(body.prompts) > 1:
        raise ApiError(400, "stream: only one prompt a request can be streamed", param="stream")
    return [_group(prompt) for prompt in body.prompts], msgspec.convert(body.sampling.model_dump(), SamplingParams)


def _group(prompt: GeneratePrompt) -> Group:
    group_id = _group_id(prompt.group_id)
    return Group(group_id, Prompt(group_id.prompt_id, prompt.token_ids))


async def _check_version(worker: EngineWorker, wanted: int) -> None:
    if wanted > (await worker.health_check()).version:
        raise ApiError(409, f"weight version {wanted} is not loaded yet", code="weights_too_old")


def _prefill_failed(error: PrefillFailed) -> ApiError:
    return ApiError(502, str(error), code=PREFILL_FAILED)


async def _noted(server: RolloutServer, work: Awaitable[Prefilled]) -> Prefilled:
    found = await work
    server.note("prefill", found.rollouts)
    return found


def _group_id(text: str) -> GroupId:
    try:
        return GroupId.parse(text)
    except ValueError:
        raise ApiError(400, f"group_id: {text[:80]!r} is not of the form PROMPT/e0.o0.a0", param="group_id") from None


async def _lines(
    server: RolloutServer, generator: Generator, groups: list[Group], params: SamplingParams, version: int
) -> AsyncIterator[str]:
    try:
        async with aclosing(stream(generator, groups, params, version)) as events:
            async for event in with_signs_of_life(events, SIGN_OF_LIFE_S):
                if event is None:
                    yield "\n"
                elif isinstance(event, SampledToken):
                    yield json.dumps({"token": msgspec.to_builtins(event)}) + "\n"
                else:
                    server.note("generate", event)
                    yield msgspec.json.encode({"rollouts": event}).decode() + "\n"
    except PrefillFailed as error:
        yield json.dumps(_prefill_failed(error).body) + "\n"
    except QuintetError as error:
        yield json.dumps(ApiError(400, str(error)).body) + "\n"


class _Metrics:
    """Prometheus' view: counters of what was served, gauges of the engine."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "quintet_rollout_requests", "requests answered in full", ["route"], registry=self._registry
        )
        self._tokens = Counter(
            "quintet_rollout_sampled_tokens", "tokens in answers", ["route"], registry=self._registry
        )
        self._prompt = Counter("quintet_rollout_prompt_tokens", "tokens in prompts", ["route"], registry=self._registry)
        self._gauges = {
            name: Gauge(f"quintet_rollout_{name}", what, registry=self._registry)
            for name, what in {
                "healthy": "1 when the engine can serve",
                "weight_version": "version of the weights",
                "running": "sequences being decoded",
                "waiting": "sequences that wait for their turn",
                "kv_used": "share of KV pages in use",
                "memory_bytes": "weights and KV pages",
            }.items()
        }

    def note(self, route: str, rollouts: Sequence[Rollout]) -> None:
        self._requests.labels(route).inc()
        self._tokens.labels(route).inc(sum(len(r.response_ids) for r in rollouts))
        self._prompt.labels(route).inc(sum(len(r.prompt_ids) for r in rollouts if r.sample_index == 0))

    async def text(self, worker: EngineWorker) -> bytes:
        health = await worker.health_check()
        values = msgspec.to_builtins(health) | {"healthy": float(health.ok), "weight_version": health.version}
        for name, gauge in self._gauges.items():
            gauge.set(values[name])
        return generate_latest(self._registry)
