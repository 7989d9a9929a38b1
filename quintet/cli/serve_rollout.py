"""`quintet serve rollout`: a model behind OpenAI's API, and behind `/generate` for training."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from quintet.cli.common import SetOption
from quintet.config import load_config
from quintet.rollout.factory import KEY_VARIABLE
from quintet.types import QuintetError


def serve_rollout(
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="As model.name of a recipe.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option("--host", help="127.0.0.1 is reached from this machine only.")] = "127.0.0.1",
    weights_root: Annotated[
        Path | None,
        typer.Option("--weights-root", metavar="DIR", help="/update_weights reads below it; none: weights stay."),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /generate, /update_weights, /pause, /resume, /metrics.

    The key of this run is printed as `key: ...`; QUINTET_ROLLOUT_KEY gives it instead, so that several servers share
    one. Options of the model and the engine are set as in a recipe, e.g. --set rollout.max_running=64.
    """
    config = load_config({"model": {"name": model}}, set_ or [], training=False)
    if config.rollout.engine not in ("embedded", "transformers"):
        raise QuintetError("quintet serve rollout: rollout.engine can be embedded or transformers")
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(24)

    try:
        from quintet.rollout.http_app import listen, make_server
    except ImportError as error:
        raise QuintetError(f"quintet serve needs the package `{error.name}`: pip install 'quintet[serve]'") from error
    from quintet.cluster.serving import rollout_server

    bound = listen(host, port)
    server = rollout_server(config, key=key, weights_root=weights_root)
    typer.echo(f"model: {server.model}\nurl: http://{host}:{bound.getsockname()[1]}\nkey: {key}")
    make_server(server.app()).run(sockets=[bound])
