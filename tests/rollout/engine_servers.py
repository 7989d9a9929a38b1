"""Small servers that take exactly the requests of SGLang, TensorRT-LLM and vLLM which the adapters send: unknown fields
and wrong types are refused, answers have the engines' shapes. The model is a table of logits: row = the last token.

The schemas are those that `quintet/rollout/{sglang,tensorrt_llm,vllm}.py` name, written anew.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import pickle
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file

EOS = 1
CONTROL_KEY = "control-secret"
SERVER_KEY = "server-secret"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


@dataclass
class TableEngine:
    """What the servers have in common. `die_after`: tokens until the connection of one sample breaks, once. `hold`:
    tokens after which samples wait, until it is None again."""

    table: torch.Tensor
    label: str = "default"
    raw: bool = False  # log-probabilities before temperature
    incremental: bool = True
    delay_s: float = 0.0
    die_after: int | None = None
    hold: int | None = None
    refuse_weights: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    running: dict[str, bool] = field(default_factory=dict)  # request -> told to end
    paused: bool = False
    asleep: bool = False
    sleepless: bool = False
    cached: bool = False  # holds a prefix cache of the present weights

    def draw(self, ids: list[int], temperature: float, seed: int) -> tuple[int, float]:
        logits = self.table[ids[-1]]
        if temperature == 0.0:
            token, scaled = int(logits.argmax()), logits
        else:
            scaled = logits / temperature
            noise = np.random.default_rng([seed % 2**32, len(ids)]).gumbel(size=len(logits))
            token = int((scaled + torch.from_numpy(noise).float()).argmax())
        shown = logits if self.raw else scaled
        return token, float(shown.log_softmax(-1)[token])

    async def sample(
        self, request: str, prompt: list[int], limit: int, temperature: float, seed: int, stops: set[int]
    ) -> AsyncIterator[tuple[int, float, str | None]]:
        """Tokens, log-probabilities and the end: stop, length or abort (then with the token -1)."""
        while self.paused:
            await asyncio.sleep(0.005)
        assert not self.asleep
        self.prompts.append(prompt)
        self.running[request] = False
        ids = list(prompt)
        try:
            while True:
                await asyncio.sleep(self.delay_s)
                while self.hold is not None and len(ids) - len(prompt) >= self.hold and not self.running[request]:
                    await asyncio.sleep(0.002)
                if self.running[request]:
                    yield -1, 0.0, "abort"
                    return
                token, logprob = self.draw(ids, temperature, seed)
                ids.append(token)
                made = len(ids) - len(prompt)
                end = "stop" if token in stops else "length" if made >= limit else None
                yield token, logprob, end
                if end:
                    return
                if self.die_after is not None and made >= self.die_after:
                    self.die_after = None
                    raise ConnectionResetError("this connection breaks here")
        finally:
            del self.running[request]

    async def end_all(self) -> None:
        while self.running:
            for request in self.running:
                self.running[request] = True
            await asyncio.sleep(0.002)

    def load(self, folder: str) -> None:
        assert (Path(folder) / "config.json").exists() and (Path(folder) / "tokenizer.json").exists()
        self.table = load_file(Path(folder) / "model.safetensors")["table"]
        self.loads.append(folder)


def events(parts: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    async def lines() -> AsyncIterator[str]:
        async for part in parts:
            yield f"data: {json.dumps(part)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


def base_app(key: str | None = None) -> FastAPI:
    """FastAPI's 422 is 400 with these engines; with a key every route but /health wants it."""
    from fastapi.exceptions import RequestValidationError

    app = FastAPI()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: Exception) -> Response:
        return JSONResponse({"object": "error", "message": str(error), "code": 400}, 400)

    @app.middleware("http")
    async def keyed(request: Request, go_on: Callable[[Request], Any]) -> Response:
        if key and request.url.path != "/health" and request.headers.get("authorization") != f"Bearer {key}":
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await go_on(request)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200)

    return app


# -- SGLang --------------------------------------------------------------------------------------------


class SglangSampling(Strict):
    max_new_tokens: int = 128
    stop_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 1 << 30
    min_p: float = 0.0
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None


class SglangGenerate(Strict):
    rid: str | None = None
    input_ids: list[int]
    sampling_params: SglangSampling
    return_logprob: bool = False
    logprob_start_len: int = -1
    stream: bool = False


class SglangAbort(Strict):
    rid: str = ""
    abort_all: bool = False


class SglangPause(Strict):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class SglangContinue(Strict):
    torch_empty_cache: bool = True


class SglangUpdate(Strict):
    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True


def sglang_app(engine: TableEngine) -> FastAPI:
    app = base_app(SERVER_KEY)

    def answer(entries: list[Any], total: int, end: dict[str, Any] | None) -> dict[str, Any]:
        meta: dict[str, Any] = {"id": "x", "finish_reason": end, "prompt_tokens": 1, "completion_tokens": total}
        meta |= {"weight_version": engine.label, "cached_tokens": 0, "e2e_latency": 0.1}
        if entries or end is None or end["type"] != "abort":
            meta |= {"output_token_logprobs": entries, "output_token_logprobs_length": total}
            meta["input_token_logprobs"] = []
        return {"output_ids": [token for _, token, _ in entries], "meta_info": meta}

    async def parts(body: SglangGenerate) -> AsyncIterator[dict[str, Any]]:
        sampling = body.sampling_params
        stops = {EOS, *(sampling.stop_token_ids or ())}
        entries: list[Any] = []
        async for token, logprob, end in engine.sample(
            body.rid or "probe",
            body.input_ids,
            sampling.max_new_tokens,
            sampling.temperature,
            sampling.sampling_seed or 0,
            stops,
        ):
            if end == "abort":
                yield answer([], len(entries), {"type": "abort", "message": "Aborted"})
                return
            entries.append([logprob, token, None])
            reason = {"stop": {"type": "stop", "matched": token}, "length": {"type": "length", "length": len(entries)}}
            shown = entries[-1:] if engine.incremental and body.stream else list(entries)
            yield answer(shown, len(entries), reason.get(end or ""))

    @app.post("/generate")
    async def generate(body: SglangGenerate) -> Response:
        if len(body.input_ids) > 90:
            engine.prompts.append(body.input_ids)
            return JSONResponse({"error": {"message": "The input is longer than the context"}}, 400)
        if body.stream:
            return events(parts(body))
        last: dict[str, Any] = {}
        async for part in parts(body):
            last = part
        return JSONResponse(last)

    @app.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return {"model_path": "x", "is_generation": True, "weight_version": engine.label}

    @app.post("/abort_request")
    async def abort(body: SglangAbort) -> Response:
        if body.rid in engine.running:
            engine.running[body.rid] = True
        return Response(status_code=200)

    @app.post("/pause_generation")
    async def pause(body: SglangPause) -> dict[str, str]:
        assert body.mode == "abort"
        engine.paused = True
        await engine.end_all()
        return {"message": "Generation paused successfully.", "status": "ok"}

    @app.post("/continue_generation")
    async def go_on(body: SglangContinue) -> dict[str, str]:
        engine.paused = False
        return {"message": "Generation continued successfully.", "status": "ok"}

    @app.post("/update_weights_from_disk")
    async def update(body: SglangUpdate) -> Response:
        if engine.refuse_weights or engine.running or not engine.paused:
            return JSONResponse({"success": False, "message": "no", "num_paused_requests": 0}, 400)
        engine.load(body.model_path)
        engine.label = body.weight_version or engine.label
        return JSONResponse({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    return app


# -- TensorRT-LLM --------------------------------------------------------------------------------------


class TensorrtLlmCompletion(Strict):
    model: str
    prompt: list[int]
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True


class TensorrtLlmUpdate(Strict):
    weights: dict[str, str] | None = None


def tensorrt_llm_app(engine: TableEngine) -> FastAPI:
    app = base_app()
    engine.raw = True
    numbers = iter(range(10**6))
    pending: dict[str, torch.Tensor] = {}

    async def parts(body: TensorrtLlmCompletion) -> AsyncIterator[dict[str, Any]]:
        stops = set(body.stop_token_ids or ()) | (set() if body.ignore_eos else {EOS})
        temperature = 1.0 if body.temperature is None else body.temperature
        request = str(next(numbers))
        async for token, logprob, end in engine.sample(
            request, body.prompt, body.max_tokens or 16, temperature, body.seed or 0, stops
        ):
            cut = end == "stop" and not body.include_stop_str_in_output
            ids = [] if cut or end == "abort" else [token]
            logprobs = {
                "text_offset": [0] * len(ids),
                "token_logprobs": [logprob] * len(ids),
                "tokens": ["x"] * len(ids),
            }
            choice = {
                "index": 0,
                "text": "",
                "token_ids": None if body.detokenize else ids,
                "logprobs": logprobs | {"top_logprobs": []} if body.logprobs else None,
                "finish_reason": "cancelled" if end == "abort" else end,
                "stop_reason": token if end == "stop" else None,
                "avg_decoded_tokens_per_iter": None,
            }
            yield {"id": "cmpl-1", "object": "text_completion", "model": "table", "choices": [choice], "usage": None}

    @app.post("/v1/completions")
    async def completions(body: TensorrtLlmCompletion) -> Response:
        if body.model != "table":
            return JSONResponse({"object": "error", "message": "no such model", "code": 400}, 400)
        if body.stream:
            return events(parts(body))
        async for part in parts(body):
            last = part
        return JSONResponse(last)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "table", "object": "model", "owned_by": "tensorrt_llm"}]}

    @app.post("/update_weights")
    async def update(request: Request, body: TensorrtLlmUpdate) -> dict[str, str]:
        expected = hmac.new(CONTROL_KEY.encode(), await request.body(), hashlib.sha256).hexdigest()
        if request.headers.get("x-trtllm-rl-control-auth") != f"sha256={expected}":
            raise HTTPException(401, "Invalid RL control request authentication")
        if engine.refuse_weights:
            raise HTTPException(500, "no")
        while engine.running:  # all active requests are finished before weights change
            await asyncio.sleep(0.005)
        if body.weights is None:
            engine.table = pending.pop("table")
            engine.loads.append("memory")
            return {"status": "success"}
        handles = pickle.loads(base64.b64decode(body.weights["GPU-of-the-test"]))
        assert isinstance(handles, list)
        pending.update({name: rebuild(*arguments).clone() for name, (rebuild, arguments) in handles})
        return {"status": "success"}

    return app


# -- vLLM ----------------------------------------------------------------------------------------------


class VllmCompletion(Strict):
    model: str
    prompt: list[int]
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    return_token_ids: bool = False
    detokenize: bool = True
    stream: bool = False


class VllmRpc(Strict):
    method: str
    kwargs: dict[str, str]


def vllm_app(engine: TableEngine) -> FastAPI:
    app = base_app(SERVER_KEY)
    numbers = iter(range(10**6))

    async def parts(body: VllmCompletion) -> AsyncIterator[dict[str, Any]]:
        stops = {EOS, *body.stop_token_ids}
        async for token, logprob, end in engine.sample(
            str(next(numbers)), body.prompt, body.max_tokens, body.temperature, body.seed or 0, stops
        ):
            ids = [] if end == "abort" else [token]
            choice = {"index": 0, "text": "", "finish_reason": end, "token_ids": ids if body.return_token_ids else None}
            choice["logprobs"] = None if body.logprobs is None else {"token_logprobs": [logprob] * len(ids)}
            yield {"id": "cmpl-1", "object": "text_completion", "model": "table", "choices": [choice]}

    @app.post("/v1/completions")
    async def completions(body: VllmCompletion) -> Response:
        if body.stream:
            return events(parts(body))
        async for part in parts(body):
            last = part
        return JSONResponse(last)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "table", "object": "model"}]}

    @app.post("/pause")
    async def pause(mode: Literal["abort", "wait", "keep"] = "abort") -> dict[str, str]:
        engine.paused = True
        await engine.end_all()
        return {"status": "paused"}

    @app.post("/sleep")
    async def sleep(
        level: int = Query(1, ge=0, le=2), mode: Literal["abort", "wait", "keep"] = "abort"
    ) -> dict[str, Any]:
        if engine.sleepless or engine.asleep or engine.running:
            raise HTTPException(500, "no")
        engine.asleep = True
        return {"status": "sleeping", "level": level}

    @app.post("/wake_up")
    async def wake_up() -> dict[str, Any]:
        engine.asleep = False
        return {"status": "awake", "tags": None}

    @app.post("/resume")
    async def resume() -> dict[str, str]:
        assert not engine.cached, "the cache of the old weights is still there"
        engine.paused = False
        return {"status": "resumed"}

    @app.post("/reset_prefix_cache")
    async def reset() -> Response:
        engine.cached = False
        return Response(status_code=200)

    @app.post("/collective_rpc")
    async def rpc(body: VllmRpc) -> dict[str, Any]:
        assert body.method == "reload_weights" and engine.paused and not engine.running and not engine.asleep
        if engine.refuse_weights:
            raise HTTPException(500, "no")
        engine.load(body.kwargs["weights_path"])
        engine.cached = True
        return {"results": [None]}

    return app
