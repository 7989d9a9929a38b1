"""A vLLM server as a child process of ours (`make vllm-env` makes an environment for it)."""

from __future__ import annotations

import os
from pathlib import Path

from quintet.rollout.child_server import ChildServer
from quintet.rollout.config import VllmConfig

SERVED_NAME = "quintet"
_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")  # half of vLLM's speed on a CPU, where they are found


class VllmServer(ChildServer):
    def __init__(self, config: VllmConfig, *, dtype: str, max_running: int, device: str) -> None:
        super().__init__("vLLM", "rollout.vllm", config)
        self._cpu_kv_gb = config.cpu_kv_gb
        self._sleep = config.sleep
        self._dtype = dtype
        self._max_running = max_running
        self._device = device

    def command(self, model: Path, port: int) -> list[str]:
        command = [self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", SERVED_NAME, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--api-key", self.key, "--dtype", self._dtype, "--max-num-seqs", str(self._max_running)]
        command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        command += ["--enable-sleep-mode"] if self._sleep else []
        if self._device == "cpu":
            command += ["--block-size", "32"]  # the default of 128 is longer than short prompts: nothing is shared
        return command

    def environment(self) -> dict[str, str]:
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self._device == "cpu":
            cores = sorted(os.sched_getaffinity(0))
            environment |= {
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),  # by default it keeps a core for itself
                "VLLM_CPU_KVCACHE_SPACE": str(self._cpu_kv_gb),
            }
            preload = _preloads(Path(self.python).parents[1])
            if preload:
                environment["LD_PRELOAD"] = ":".join(preload)
        return environment


def _preloads(environment: Path) -> list[str]:
    """tcmalloc of the system and the OpenMP of the environment, as vLLM's CPU documentation asks for."""
    folders = [Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib/aarch64-linux-gnu"), environment / "lib"]
    found = [folder / name for name in _PRELOADED for folder in folders]
    return [str(path) for path in found if path.exists()]
