"""vLLM in a process of its own environment, driven by lines of JSON, stopped while others are measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

_CHILD = """
import json, sys, time
from vllm import LLM, SamplingParams

settings = json.loads(sys.argv[1])
llm = LLM(**settings)
print("\\nREADY", flush=True)
for line in sys.stdin:
    work = json.loads(line)
    prompts = [{"prompt_token_ids": ids} for ids in work["prompts"] for _ in range(work["samples"])]
    params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0) for n in work["lengths"]]
    llm.reset_prefix_cache()
    began = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert [len(d.outputs[0].token_ids) for d in done] == work["lengths"]
    print("\\nDONE", seconds, flush=True)
"""


class VllmChild:
    """Started when made (a minute); raises RuntimeError with the end of its output if it dies."""

    def __init__(self, python: Path, model: Path, *, dtype: torch.dtype, device: str, running: int) -> None:
        settings = {
            "model": str(model),
            "dtype": str(dtype).removeprefix("torch."),
            "max_num_seqs": running,
            "max_model_len": 1024,
            "enable_prefix_caching": True,
            "enforce_eager": False,
        } | ({"block_size": 32} if device == "cpu" else {})
        self._log = Path(tempfile.mkdtemp(prefix="quintet-vllm-")) / "vllm.log"
        self._process = subprocess.Popen(
            [str(python), "-c", _CHILD, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log.open("w"),
            text=True,
            env=_environment(python),
            start_new_session=True,
        )
        self._wait("READY")
        self._signal(signal.SIGSTOP)

    def run(self, prompts: list[list[int]], lengths: list[int], samples: int) -> float:
        """Seconds that one workload took, prompts and log-probabilities included; its prefix cache is empty before."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "lengths": lengths, "samples": samples}), file=self._process.stdin)
        self._process.stdin.flush()
        seconds = float(self._wait("DONE").split()[1])
        self._signal(signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _wait(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line
        raise RuntimeError(f"vLLM ended; see {self._log}:\n{self._log.read_text()[-2000:]}")

    def _signal(self, sent: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, sent)


def _environment(python: Path) -> dict[str, str]:
    """Half of vLLM's speed on a CPU: both cores, a better allocator, Intel's OpenMP."""
    preload = [
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
        *python.parent.parent.glob("lib/libiomp5.so"),
        *python.parent.parent.glob("lib/python3*/site-packages/**/libiomp5.so"),
    ]
    print("vllm: preloaded", ", ".join(path.name for path in preload) or "nothing", file=sys.stderr)
    return os.environ | {
        "LD_PRELOAD": ":".join(map(str, preload)),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
