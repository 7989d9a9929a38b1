"""`quintet serve rollout` before anything is served: mistakes are refused with exit code 2. No model is loaded here."""

from __future__ import annotations

import socket

import pytest
from typer.testing import CliRunner

from quintet.cli.main import app
from quintet.types import QuintetError

runner = CliRunner()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "builtin:tiny", "--set", "rollout.engine=json:Engine"], "embedded or transformers"),
        (["--model", "builtin:tiny", "--set", "rollout.max_runing=3"], "rollout.max_running"),
        (["--model", "builtin:tiny", "--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
        (["--model", "builtin:tiny", "--role", "decode"], "--role decode needs a --prefill-url"),
        (
            ["--model", "builtin:tiny", "--role", "prefill", "--prefill-url", "http://x"],
            "no effect with --role prefill",
        ),
        (
            ["--model", "builtin:tiny", "--role", "prefill", "--set", "rollout.numerics=reproducible"],
            "--role prefill and --prefill-url need rollout.engine: embedded with rollout.numerics: fast",
        ),
    ],
)
def test_a_mistake_is_refused_before_the_model_loads(options: list[str], said: str) -> None:
    result = runner.invoke(app, ["serve", "rollout", *options, "--port", "0"])
    assert isinstance(result.exception, QuintetError) and said in str(result.exception)


def test_a_gateway_wants_a_model_with_a_chat_template() -> None:
    result = runner.invoke(app, ["serve", "gateway", "--model", "builtin:tiny", "--port", "0"])
    assert isinstance(result.exception, QuintetError) and "no chat template" in str(result.exception)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = runner.invoke(app, ["serve", "rollout", "--model", "builtin:tiny", "--port", port])
    assert f"cannot listen on 127.0.0.1:{port}" in str(result.exception)
