"""What the OpenAI-shaped services share beyond `quintet.serving`: their errors, keys, clients that leave.

Needs the extra `serve` (FastAPI and uvicorn).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from quintet.rollout.openai_api import ERROR_RESPONSES, ApiError
from quintet.serving import BodyLimit
from quintet.types import QuintetError

T = TypeVar("T")
_log = logging.getLogger(__name__)
MAX_BODY_BYTES = 32 * 2**20
bearer = HTTPBearer(auto_error=False, description="the key that the server printed when it started")


def make_app(
    title: str, lifespan: Callable[[FastAPI], Any] | None = None, *, unlimited: Collection[str] = ()
) -> FastAPI:
    """An app whose every error is OpenAI's error object. `unlimited`: paths whose routes bound their bodies."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None, responses=ERROR_RESPONSES, lifespan=lifespan)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(QuintetError, _refused)
    app.add_exception_handler(Exception, _internal)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES, unlimited=unlimited)
    _describe_only_400(app)
    return app


def _respond(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error.body, error.status, headers=headers)


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _respond(error, {"WWW-Authenticate": "Bearer"} if error.status == 401 else None)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return _respond(ApiError(400, f"the body is not JSON: {first['ctx']['error']}", code="invalid_json"))
    where = ".".join(place) or "body"
    return _respond(ApiError(400, f"{where}: {first['msg']}", param=where))


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _respond(ApiError(error.status_code, str(error.detail)), dict(error.headers or {}))


async def _refused(_: Request, error: Exception) -> Response:
    return _respond(ApiError(400, str(error)))


async def _internal(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _respond(ApiError(500, "the server made a mistake; its log says which"))


def _describe_only_400(app: FastAPI) -> None:
    """The OpenAPI document names the statuses that are really given: wrong input is 400 here, never 422."""
    generate = app.openapi

    def described() -> dict[str, Any]:
        document = generate()
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = described  # type: ignore[method-assign]


def streamed_as(media_type: str) -> dict[int | str, dict[str, Any]]:
    """What a route documents that answers with JSON, or streams."""
    return {200: {"description": "the answer, whole or streamed", "content": {"application/json": {}, media_type: {}}}}


def document_model(app: FastAPI, model: str) -> None:
    """The OpenAPI document says which model there is."""
    generate = app.openapi

    def described() -> dict[str, Any]:
        document = generate()
        for name in ("ChatRequest", "CompletionRequest"):
            document["components"]["schemas"][name]["properties"]["model"]["enum"] = [model]
        return document

    app.openapi = described  # type: ignore[method-assign]


def key_of(credentials: HTTPAuthorizationCredentials | None) -> str:
    """The key that a caller shows. Raises ApiError 401 without one."""
    if credentials is None:
        raise ApiError(401, "no API key: send the header `Authorization: Bearer KEY`", code="invalid_api_key")
    return credentials.credentials


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """`work`, cancelled when the client closes its connection. The request's body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection")
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.wait([task, gone])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event_stream(events: AsyncIterator[str], media_type: str = "text/event-stream") -> StreamingResponse:
    """A streamed body. When the client leaves, the generator is closed and with it what it was waiting for."""
    return StreamingResponse(events, media_type=media_type, headers={"Cache-Control": "no-cache"})
