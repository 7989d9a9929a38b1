"""`quintet serve reward`: the reward functions of a recipe, or some by name, as an HTTP service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from quintet.cli.common import SetOption
from quintet.config import load_config
from quintet.recipe import Recipe, with_overrides
from quintet.reward.config import RewardConfig
from quintet.types import QuintetError

KEY_VARIABLE = "QUINTET_REWARD_KEY"


def serve_reward(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="[RECIPE]", help="A YAML file, whose `reward` section is served.")
    ] = None,
    fn: Annotated[
        list[str] | None,
        typer.Option("--fn", metavar="NAME", help="Instead of a recipe: a reward function. May be repeated."),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8090,
    host: Annotated[str, typer.Option("--host", help="127.0.0.1 is reached from this machine only.")] = "127.0.0.1",
    max_requests: Annotated[
        int, typer.Option("--max-requests", min=1, help="Running and waiting together; more are answered 429.")
    ] = 256,
    max_samples: Annotated[
        int, typer.Option("--max-samples", min=1, help="Being graded and waiting together; more are answered 429.")
    ] = 4096,
    set_: SetOption = None,
) -> None:
    """Serve POST /score and /references, GET /health and /metrics. A run uses it with reward.url.

    The key of this run is printed as `key: ...`; QUINTET_REWARD_KEY gives it instead.
    """
    config = _config(recipe, fn, set_ or [])
    try:
        from quintet.reward.server import RewardServer
        from quintet.serving import key_from, listen, make_server, url_of
    except ImportError as error:
        raise QuintetError(f"quintet serve needs the package `{error.name}`: pip install 'quintet[serve]'") from error
    from quintet.reward.service import LocalRewardService

    service = LocalRewardService(config)
    try:
        service.start()  # a function that does not load is said before the port is taken
        bound, key = listen(host, port), key_from(KEY_VARIABLE)
        server = RewardServer(service, key=key, max_requests=max_requests, max_samples=max_samples)
        typer.echo(f"url: {url_of(bound)}\nkey: {key}")
        make_server(server.app()).run(sockets=[bound])
    finally:
        service.close()


def _config(recipe: Path | None, functions: list[str] | None, overrides: list[str]) -> RewardConfig:
    """The options of the service; a server reports failures and never stops over them."""
    if (recipe is None) == (functions is None):
        raise QuintetError("quintet serve reward needs a recipe or --fn, e.g. quintet serve reward --fn math")
    config = _named(functions or [], overrides) if recipe is None else load_config(recipe, overrides).reward
    if config.url is not None:
        raise QuintetError("reward.url is set: that service can be used as it is")
    return config.model_copy(update={"on_failure": "exclude", "max_failure_frac": 1.0})


def _named(functions: list[str], overrides: list[str]) -> RewardConfig:
    given: dict[str, Any] = {"reward": {"functions": [{"fn": name} for name in functions]}}
    data = with_overrides(Recipe(given), overrides).data
    if unknown := [key for key in data if key != "reward"]:
        raise QuintetError(f"--set {unknown[0]}: with --fn only reward.* can be set")
    try:
        return RewardConfig.model_validate(data["reward"])
    except ValidationError as error:
        first = error.errors()[0]
        raise QuintetError(f"reward.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
