"""An engine's server as a child process of ours: started from an environment of its own, watched, ended with us.

Engines and this package want different versions of transformers and torch, so that none of them lives in this process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path

import httpx

from quintet.rollout.config import ServedEngineConfig
from quintet.types import QuintetError

log = logging.getLogger(__name__)


class ChildServer(ABC):
    """`url` and `key` once `start` has returned; the output is in `log_path`.

    `option` is where its configuration stands, for messages (`rollout.vllm`).
    """

    def __init__(self, engine: str, option: str, config: ServedEngineConfig) -> None:
        assert config.python is not None  # `check_rollout_config` has seen to it
        self.python = config.python
        self._engine = engine
        self._option = option
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self.key = secrets.token_urlsafe(16)
        self.url = ""
        self.log_path = Path(tempfile.mkdtemp(prefix=f"quintet-{option.rpartition('.')[2]}-")) / "server.log"

    @abstractmethod
    def command(self, model: Path, port: int) -> list[str]:
        """What serves the Hugging Face folder `model` on 127.0.0.1; `args` of the configuration are added."""

    def environment(self) -> dict[str, str]:
        """More environment variables; those of the configuration go over them."""
        return {}

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self, model: Path) -> None:
        """Serve the Hugging Face folder `model`; returns when it answers. Raises QuintetError with the log's end."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                [*self.command(model, port), *self._config.args],
                env=self._whole_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        log.info("%s starts as process %d, its output is in %s", self._engine, self._process.pid, self.log_path)
        try:
            await self._until_ready()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and the engine processes that it made; waits until they are gone."""
        if self._process is None:
            return
        for sig, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self._process.pid, sig)
                self._process.wait(patience_s)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue  # the next signal is one that it cannot ignore
        self._process.wait()
        self._process = None

    def _whole_environment(self) -> dict[str, str]:
        environment = os.environ | {"HF_HUB_OFFLINE": "1"} | self.environment()
        environment.pop("PYTHONPATH", None)  # ours is not for its interpreter
        return environment | self._config.env

    async def _until_ready(self) -> None:
        until = time.monotonic() + self._config.start_timeout_s
        headers = {"Authorization": f"Bearer {self.key}"}
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0, headers=headers) as client:
            while time.monotonic() < until:
                if not self.alive:
                    raise QuintetError(
                        f"{self._engine} ended while it started; {self.log_path} ends with\n{self._log_end()}"
                    )
                try:
                    if (await client.get("/health")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # not listening yet
                await asyncio.sleep(0.5)
        raise QuintetError(
            f"{self._engine} was not ready after {self._option}.start_timeout_s = {self._config.start_timeout_s:g} s; "
            f"{self.log_path} ends with\n{self._log_end()}"
        )

    def _log_end(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(line[:300] for line in lines[-5:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
