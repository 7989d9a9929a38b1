"""`quintet serve rollout` and `quintet serve gateway`: a model behind HTTP, for training and for agents."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quintet.cli.common import SetOption
from quintet.config import RunConfig, load_config
from quintet.rollout.config import Role
from quintet.rollout.factory import KEY_VARIABLE
from quintet.types import QuintetError

if TYPE_CHECKING:
    from quintet.rollout.gateway import Gateway
    from quintet.rollout.server import RolloutServer

ModelOption = Annotated[str, typer.Option("--model", metavar="NAME", help="As model.name of a recipe.")]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")]
HostOption = Annotated[str, typer.Option("--host", help="127.0.0.1 is reached from this machine only.")]


def serve_rollout(
    model: ModelOption,
    port: PortOption = 8000,
    host: HostOption = "127.0.0.1",
    weights_root: Annotated[
        Path | None,
        typer.Option("--weights-root", metavar="DIR", help="/update_weights reads below it; none: weights stay."),
    ] = None,
    weights_stream: Annotated[
        bool, typer.Option("--weights-stream", help="/update_weights/stream takes weights in the request's body.")
    ] = False,
    role: Annotated[
        Role, typer.Option("--role", help="prefill: prompts, for decode servers; decode: what follows them; both: all.")
    ] = Role.BOTH,
    prefill_url: Annotated[
        list[str] | None,
        typer.Option("--prefill-url", metavar="URL", help="A prefill server to get prompts from; may be repeated."),
    ] = None,
    set_: SetOption = None,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /generate, /update_weights, /pause, /resume, /metrics.

    The key of this run is printed as `key: ...`; QUINTET_ROLLOUT_KEY gives it instead, so that several servers share
    one, as prefill and decode servers must. Options of the model and the engine are set as in a recipe, e.g. --set
    rollout.max_running=64.
    """
    config = _config(model, set_)
    _serve(host, port, lambda key: _rollout_server(config, key, weights_root, weights_stream, role, prefill_url or []))


def serve_gateway(
    model: ModelOption, port: PortOption = 8000, host: HostOption = "127.0.0.1", set_: SetOption = None
) -> None:
    """Serve a model to agents and record every call with token ids and log-probabilities.

    POST /rl/sessions with the printed key opens a session, whose own key an agent uses with /v1/chat/completions;
    /rl/reward ends it, /rl/sessions/ID/export gives what was sampled.
    """
    config = _config(model, set_)
    _serve(host, port, lambda key: _gateway(config, key))


def _config(model: str, overrides: list[str] | None) -> RunConfig:
    config = load_config({"model": {"name": model}}, overrides or [], training=False)
    if config.rollout.engine not in ("embedded", "transformers"):
        raise QuintetError("quintet serve: rollout.engine can be embedded or transformers")
    return config


def _rollout_server(
    config: RunConfig,
    key: str,
    weights_root: Path | None,
    weights_stream: bool,
    role: Role,
    prefill_urls: list[str],
) -> RolloutServer:
    from quintet.cluster.serving import rollout_server

    return rollout_server(
        config,
        key=key,
        weights_root=weights_root,
        weights_stream=weights_stream,
        role=role,
        prefill_urls=prefill_urls,
    )


def _gateway(config: RunConfig, key: str) -> Gateway:
    from quintet.cluster.serving import gateway

    return gateway(config, key=key)


def _serve(host: str, port: int, make: Callable[[str], RolloutServer | Gateway]) -> None:
    """Listen at once, then load what `make` serves under the run's key."""
    try:
        from quintet.serving import listen, make_server
    except ImportError as error:
        raise QuintetError(f"quintet serve needs the package `{error.name}`: pip install 'quintet[serve]'") from error
    key = os.environ.get(KEY_VARIABLE) or secrets.token_urlsafe(24)
    bound = listen(host, port)
    served = make(key)
    typer.echo(f"model: {served.model}\nurl: http://{host}:{bound.getsockname()[1]}\nkey: {key}")
    make_server(served.app()).run(sockets=[bound])
