"""`quintet serve`: parts of quintet as servers."""

from __future__ import annotations

import typer

from quintet.cli.common import examples
from quintet.cli.serve_reward import serve_reward
from quintet.cli.serve_rollout import serve_gateway, serve_rollout
from quintet.cli.serve_sandbox import serve_sandbox

serve_app = typer.Typer(help="Run a part of quintet as a server.", no_args_is_help=True)
serve_app.command("sandbox", epilog=examples(
    "quintet serve sandbox --port 8080",
    "quintet serve sandbox --port 8080 --set limits.wall_s=2 --set workers=8",
))(serve_sandbox)  # fmt: skip
serve_app.command("reward", epilog=examples(
    "quintet serve reward recipes/sums_tiny.yaml --port 8090",
    "quintet serve reward --fn math --fn length --set reward.workers=4",
))(serve_reward)  # fmt: skip
serve_app.command("rollout", epilog=examples(
    "quintet serve rollout --model builtin:smollm2-135m --port 8000",
    "quintet serve rollout --model runs/first/final --port 8000 --weights-root runs/weights",
    "quintet serve rollout --model NAME --port 8001 --role prefill",
    "quintet serve rollout --model NAME --port 8002 --role decode --prefill-url http://127.0.0.1:8001",
))(serve_rollout)  # fmt: skip
serve_app.command("gateway", epilog=examples(
    "quintet serve gateway --model builtin:smollm2-135m --port 8000",
))(serve_gateway)  # fmt: skip
