"""What quintet's HTTP services share: where they listen, keys, back-pressure, metrics.

Needs the extra `serve` (FastAPI, uvicorn, prometheus-client); imported by servers only.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.params import Depends as DependsOn
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quintet.types import QuintetError

RETRY_AFTER_S = 1


def key_from(variable: str) -> str:
    """The key that the environment variable holds, or a new one."""
    return os.environ.get(variable) or secrets.token_urlsafe(24)


def listen(host: str, port: int) -> socket.socket:
    """A socket on which connections wait until a server takes them; port 0 takes a free one.

    Raises QuintetError when the address cannot be had.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(512)  # so that who reads the printed address is not refused while the server starts
    except OSError as error:
        bound.close()
        raise QuintetError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port"
        ) from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_server(app: FastAPI, *, patience_s: int = 5) -> uvicorn.Server:
    """`patience_s`: how long requests in progress may go on once the server is told to end."""
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=patience_s))


class Admission:
    """Back-pressure: at most `limit` requests at once, the others are told to come again (429).

    Its metrics: `{name}_requests_total` by outcome, `{name}_in_flight`, `{name}_seconds`.
    """

    def __init__(self, name: str, limit: int, registry: CollectorRegistry) -> None:
        self._limit = limit
        self._in_flight = 0
        self._requests = Counter(f"{name}_requests", "Requests by how they ended.", ["outcome"], registry=registry)
        self._gauge = Gauge(f"{name}_in_flight", "Requests being served.", registry=registry)
        self._seconds = Histogram(f"{name}_seconds", "Time from admission to answer.", registry=registry)

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @contextlib.asynccontextmanager
    async def admit(self) -> AsyncIterator[None]:
        """Raises HTTPException 429."""
        if self._in_flight >= self._limit:
            self._requests.labels("refused").inc()
            raise HTTPException(
                429, f"{self._in_flight} requests are in flight, the limit", {"Retry-After": str(RETRY_AFTER_S)}
            )
        self._in_flight += 1
        self._gauge.set(self._in_flight)
        start, outcome = time.perf_counter(), "failed"
        try:
            yield
            outcome = "served"
        finally:
            self._in_flight -= 1
            self._gauge.set(self._in_flight)
            self._requests.labels(outcome).inc()
            self._seconds.observe(time.perf_counter() - start)


def make_app(
    title: str,
    *,
    key: str,
    registry: CollectorRegistry,
    health: Callable[[], Awaitable[dict[str, object]]],
    max_body_bytes: int,
    lifespan: Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]],
) -> FastAPI:
    """An app with `/health` (open to all), `/metrics` and a limit of the body; every other route wants the key."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)

    @app.get("/health")
    async def _health() -> dict[str, object]:
        return await health()

    @app.get("/metrics", dependencies=[wants(key)])
    async def _metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


def wants(key: str) -> DependsOn:
    """A dependency that answers 401 without the header `Authorization: Bearer KEY`."""

    async def check(request: Request) -> None:
        shown: HTTPAuthorizationCredentials | None = await HTTPBearer(auto_error=False)(request)
        if shown is None or not hmac.compare_digest(shown.credentials.encode(), key.encode()):
            raise HTTPException(401, "send the header Authorization: Bearer KEY", {"WWW-Authenticate": "Bearer"})

    dependency: DependsOn = Depends(check)
    return dependency


class BodyLimit:
    """Ends the reading of a body that is too large; FastAPI makes a 400 of it. `unlimited`: paths of routes that see to
    it themselves."""

    def __init__(self, app: ASGIApp, max_bytes: int, unlimited: Collection[str] = ()) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._unlimited = frozenset(unlimited)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        taken = 0

        async def limited() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise ValueError(f"the body is larger than {self._max_bytes} bytes")
            return message

        bounded = scope["type"] == "http" and scope["path"] not in self._unlimited
        await self._app(scope, limited if bounded else receive, send)


class ThreadedServer:
    """An app served from a thread of its own, for callers that have an event loop to themselves; also as a context."""

    def __init__(self, app: FastAPI, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = listen(host, port)
        self.url = url_of(self._socket)
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

    def __enter__(self) -> ThreadedServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))
