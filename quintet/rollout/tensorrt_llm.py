"""TensorRT-LLM (`trtllm-serve`, PyTorch backend) behind `RolloutWorker`: a server started by us, or one that runs.

Written after the sources of TensorRT-LLM as of late 2026 (`serve/openai_protocol.py`, `serve/postprocess_handlers.py`,
`serve/rl_control_auth.py`, `llmapi/rlhf_utils.py`) and tested against a server of our own that takes exactly those
requests; not run on the real engine here, which needs a GPU.

`/v1/completions` reports log-probabilities of the model's own distribution, before temperature and truncation, and has
no option for others. They are those of the sampling distribution at temperature 1 without truncation: everything else
(but greedy answers, on which nothing is trained) is refused.

New weights reach it in one of two ways, as `trtllm-serve` cannot read a folder while it runs:

- a server of ours is started again with the new version: whole, and as slow as a start;
- one at `url` must have the RL control endpoints (`enable_rl_control_endpoints` of a server over `AsyncLLM`, which
  `trtllm-serve` alone does not have). Its `/update_weights` takes CUDA memory handles: both share one GPU.

In both cases the connections of running samples are closed first; they go on from their tokens with the new weights.
The server says nothing of the version it has, so that one that someone else starts again cannot be told.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import pickle
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PretrainedConfig

from quintet.rollout.child_server import ChildServer
from quintet.rollout.completions import completion_chunks, completion_request
from quintet.rollout.config import RolloutConfig, TensorrtLlmConfig
from quintet.rollout.engine.sequence import Decode, Sequence
from quintet.rollout.served import Broken, Chunk, ServedRolloutWorker, probe_ids
from quintet.rollout.weight_folders import WEIGHTS_NAME
from quintet.types import FinishReason, SamplingParams

_ENDED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "cancelled": FinishReason.ABORTED}
CONTROL_HEADER = "x-trtllm-rl-control-auth"


class TensorrtLlmServer(ChildServer):
    """`trtllm-serve` has no key of its own: it listens on loopback only."""

    def __init__(self, config: TensorrtLlmConfig, *, dtype: str, max_running: int) -> None:
        super().__init__("TensorRT-LLM", "rollout.tensorrt_llm", config)
        self._options = self.log_path.with_name("options.yaml")
        self._options.write_text(json.dumps({"dtype": dtype}))  # JSON is YAML
        self._max_running = max_running

    def command(self, model: Path, port: int) -> list[str]:
        command = [self.python, "-m", "tensorrt_llm.commands.serve", str(model), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--backend", "pytorch", "--max_batch_size", str(self._max_running)]
        return [*command, "--extra_llm_api_options", str(self._options)]


class TensorrtLlmRolloutWorker(ServedRolloutWorker):
    """See the module and `ServedRolloutWorker`."""

    engine = "TensorRT-LLM"
    option = "rollout.tensorrt_llm"

    def __init__(
        self,
        hf_config: PretrainedConfig,
        weights: Mapping[str, Tensor],
        *,
        eos_ids: Collection[int],
        decode: Decode,
        config: RolloutConfig,
        device: torch.device,
        dtype: torch.dtype,
        version: int = 0,
    ) -> None:
        server = None
        if config.tensorrt_llm.url is None:
            name = str(dtype).removeprefix("torch.")
            server = TensorrtLlmServer(config.tensorrt_llm, dtype=name, max_running=config.max_running)
        super().__init__(
            hf_config,
            weights,
            eos_ids=eos_ids,
            decode=decode,
            config=config.tensorrt_llm,
            server=server,
            version=version,
        )
        self._device = device
        self._control_key = os.environ.get(config.tensorrt_llm.control_key_env, "")
        self._model = ""

    def _refusal(self, params: SamplingParams) -> str | None:
        plain = params.temperature == 1.0 and params.top_p == 1.0 and params.top_k == 0 and params.min_p == 0.0
        if plain or params.temperature == 0.0:
            return None
        return (
            "TensorRT-LLM's log-probabilities are those before temperature and truncation.\n"
            "Set rollout.temperature 1.0, rollout.top_p 1.0, rollout.top_k 0 and rollout.min_p 0."
        )

    async def _stream(self, sequence: Sequence) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._events("/v1/completions", self._request(sequence))) as events:
            async for data in events:
                for chunk in completion_chunks(data, _ENDED):
                    yield chunk

    def _request(self, sequence: Sequence) -> dict[str, Any]:
        return completion_request(sequence) | {
            "model": self._model,
            "top_k": sequence.params.top_k,
            "logprobs": 1,  # 0 would ask for none
            "ignore_eos": True,  # which would be cut off; as a stop id it is kept
            "include_stop_str_in_output": True,
        }

    async def _greet(self) -> None:
        self._model = (await self._get("/v1/models"))["data"][0]["id"]
        body = {"model": self._model, "prompt": probe_ids(self._vocab_size), "max_tokens": 1, "logprobs": 1}
        choice = (await self._post("/v1/completions", json=body | {"detokenize": False}))["choices"][0]
        if len(choice["token_ids"] or ()) != 1 or len(choice["logprobs"]["token_logprobs"]) != 1:
            raise Broken("its answers have no token ids or no log-probabilities")

    async def _load(self, folder: Path, version: int) -> None:
        self._drop_streams()
        if self._server is not None:
            await self._restart(folder)
            return
        gpu, tensors = await asyncio.to_thread(self._on_gpu, folder)
        await self._control("/update_weights", {"weights": {gpu: memory_handles(tensors)}})
        await self._control("/update_weights", {"weights": None})  # also drops the cache of the old ones
        del tensors  # until here the server reads from them

    def _on_gpu(self, folder: Path) -> tuple[str, dict[str, Tensor]]:
        """The weights in the memory of the GPU, and that GPU's name."""
        tensors = load_file(folder / WEIGHTS_NAME, device=str(self._device))
        return f"GPU-{torch.cuda.get_device_properties(self._device).uuid}", tensors

    async def _control(self, path: str, body: Any) -> None:
        """The server wants a signature of the very bytes."""
        content = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self._control_key:
            signature = hmac.new(self._control_key.encode(), content, hashlib.sha256).hexdigest()
            headers[CONTROL_HEADER] = f"sha256={signature}"
        answer = await self._post(path, content=content, headers=headers)
        if answer != {"status": "success"}:
            raise Broken(f"{path}: {answer}")


def memory_handles(tensors: Mapping[str, Tensor]) -> str:
    """Tensors as `WorkerExtension.update_weights` reads them: base64 of a pickled list of (name, (function,
    arguments)). They must outlive their use."""
    return base64.b64encode(pickle.dumps([(name, reduce_tensor(t)) for name, t in tensors.items()])).decode()
