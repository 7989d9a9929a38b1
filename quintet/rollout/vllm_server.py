"""A vLLM server as a child process of ours: started from an environment of its own, watched, ended with us.

vLLM and this package want different transformers, so that it never lives in this process (`make vllm-env`).
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
from pathlib import Path

import httpx

from quintet.rollout.config import VllmConfig
from quintet.types import QuintetError

log = logging.getLogger(__name__)

SERVED_NAME = "quintet"
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")  # half of vLLM's speed on a CPU, where they are found


class VllmServer:
    """`url` and `key` once `start` has returned; the output is in `log_path`."""

    def __init__(self, config: VllmConfig, *, dtype: str, max_running: int, device: str) -> None:
        self._config = config
        self._dtype = dtype
        self._max_running = max_running
        self._device = device
        self._process: subprocess.Popen[bytes] | None = None
        self.key = secrets.token_urlsafe(16)
        self.url = ""
        self.log_path = Path(tempfile.mkdtemp(prefix="quintet-vllm-")) / "vllm.log"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    async def start(self, model: Path) -> None:
        """Serve the Hugging Face folder `model`; returns when it answers. Raises QuintetError with the log's end."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                [*self._command(model), "--port", str(port)],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        log.info("vLLM starts as process %d, its output is in %s", self._process.pid, self.log_path)
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

    def _command(self, model: Path) -> list[str]:
        python = self._config.python
        assert python is not None  # `check_rollout_config` has seen to it
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--api-key", self.key]
        command += ["--dtype", self._dtype, "--max-num-seqs", str(self._max_running)]
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        if self._device == "cpu":
            command += ["--block-size", "32"]  # the default of 128 is longer than short prompts: nothing is shared
        return command + self._config.args

    def _environment(self) -> dict[str, str]:
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        environment.pop("PYTHONPATH", None)  # ours is not for its interpreter
        if self._device == "cpu":
            cores = sorted(os.sched_getaffinity(0))
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # by default it keeps a core for itself
                "VLLM_CPU_KVCACHE_SPACE": str(self._config.cpu_kv_gb),
            }
            preload = _preloads(Path(self._config.python or "").parents[1])
            if preload:
                environment["LD_PRELOAD"] = ":".join(preload)
        return environment | self._config.env

    async def _until_ready(self) -> None:
        until = time.monotonic() + self._config.start_timeout_s
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0) as client:
            while time.monotonic() < until:
                if not self.alive:
                    raise QuintetError(f"vLLM ended while it started; {self.log_path} ends with\n{self._log_end()}")
                try:
                    if (await client.get("/health")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass  # not listening yet
                await asyncio.sleep(0.5)
        raise QuintetError(
            f"vLLM was not ready after rollout.vllm.start_timeout_s = {self._config.start_timeout_s:g} s; "
            f"{self.log_path} ends with\n{self._log_end()}"
        )

    def _log_end(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(line[:300] for line in lines[-5:])


def _preloads(environment: Path) -> list[str]:
    """tcmalloc of the system and the OpenMP of the environment, as vLLM's CPU documentation asks for."""
    folders = [Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), environment / "lib"]
    found = [folder / name for name in _PRELOADED for folder in folders]
    return [str(path) for path in found if path.exists()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
