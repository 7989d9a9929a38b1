"""`quintet serve sandbox`: a SandboxFusion-compatible service over the namespace sandbox."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import ValidationError

from quintet.recipe import Recipe, with_overrides
from quintet.sandbox.config import SandboxConfig
from quintet.types import QuintetError

KEY_VARIABLE = "QUINTET_SANDBOX_KEY"


def serve_sandbox(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8080,
    host: Annotated[str, typer.Option("--host", help="127.0.0.1 is reached from this machine only.")] = "127.0.0.1",
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="Running and waiting together; more are answered 429.")
    ] = 512,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the sandbox, as in args.sandbox of a recipe."),
    ] = None,
) -> None:
    """Serve POST /run_code (Python), /health and /metrics. Requests may not exceed the limits.* set here.

    The key of this run is printed as `key: ...`; QUINTET_SANDBOX_KEY gives it instead.
    """
    config = _config(set_ or [])
    try:
        from quintet.sandbox.server import SandboxService
        from quintet.serving import key_from, listen, make_server, url_of
    except ImportError as error:
        raise QuintetError(f"quintet serve needs the package `{error.name}`: pip install 'quintet[serve]'") from error
    from quintet.sandbox.factory import make_sandbox
    from quintet.sandbox.protocol import limits_of

    sandbox, bound, key = make_sandbox(config), listen(host, port), key_from(KEY_VARIABLE)
    service = SandboxService(sandbox, key=key, limits=limits_of(config.limits), max_requests=max_requests)
    typer.echo(f"url: {url_of(bound)}\nkey: {key}")
    make_server(service.app()).run(sockets=[bound])


def _config(overrides: list[str]) -> SandboxConfig:
    try:
        config = SandboxConfig.model_validate(with_overrides(Recipe({}), overrides).data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        reason = first["msg"].removeprefix("Value error, ")
        raise QuintetError(f"--set {where}: {reason}" if where else f"--set: {reason}") from error
    if config.backend == "remote":
        raise QuintetError("quintet serve sandbox runs programs itself: backend can be namespace or process")
    return config
