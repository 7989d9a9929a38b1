"""What quintet's HTTP services share: OpenAI-shaped errors, keys, clients that leave, and running in a thread.

Needs the extra `serve` (FastAPI and uvicorn).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quintet.rollout.openai_api import ERROR_RESPONSES, ApiError
from quintet.types import QuintetError

T = TypeVar("T")
_log = logging.getLogger(__name__)
MAX_BODY_BYTES = 32 * 2**20
bearer = HTTPBearer(auto_error=False, description="the key that the server printed when it started")


def make_app(title: str, lifespan: Callable[[FastAPI], Any] | None = None) -> FastAPI:
    """An app whose every error is OpenAI's error object."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None, responses=ERROR_RESPONSES, lifespan=lifespan)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(QuintetError, _refused)
    app.add_exception_handler(Exception, _internal)
    app.add_middleware(_BodyLimit)
    _describe_only_400(app)
    return app


class _BodyLimit:
    """Ends the reading of a body that is too large; FastAPI makes a 400 of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > MAX_BODY_BYTES:
                raise ValueError(f"the body is larger than {MAX_BODY_BYTES} bytes")
            return message

        await self._app(scope, limited, send)


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


class HttpService:
    """An app served from a thread of its own, for callers that have an event loop to themselves."""

    def __init__(self, app: FastAPI, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = listen(host, port)
        self.url = f"http://{host}:{self._socket.getsockname()[1]}"
        self._server = make_server(app, patience_s=1)
        self._thread = threading.Thread(target=self._run, name="http-service", daemon=True)

    def start(self) -> None:
        """Returns when the service answers."""
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises QuintetError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise QuintetError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from None
    return bound


def make_server(app: FastAPI, *, patience_s: int = 5) -> uvicorn.Server:
    """`patience_s`: how long requests in progress may go on once the server is told to end."""
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=patience_s))
