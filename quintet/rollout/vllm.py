"""The real vLLM behind `RolloutWorker`: a server started by us, or one that runs already (read: 0.32).

Its log-probabilities are those after temperature and truncation (`--logprobs-mode processed_logprobs`; its default,
raw, would be another policy's. A probe at the start refuses it).

A weight update pauses the server with what is running aborted, has it read the new version from a folder, drops its
prefix cache and resumes.

With `rollout.vllm.sleep` the server moves its weights to the host and drops its KV cache while the trainer works, and
wakes for the next weights or samples. vLLM has that on GPUs only: with the run on a CPU it is refused, so that it has
been tested against a server of our own (`tests/rollout/test_served_engines.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor
from transformers import PretrainedConfig

from quintet.rollout.completions import completion_chunks, completion_request
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.sequence import Decode, OnToken, Sequence
from quintet.rollout.served import Broken, Chunk, ServedRolloutWorker, check_scaled, probe_ids, said
from quintet.rollout.vllm_server import SERVED_NAME, VllmServer
from quintet.types import FinishReason, Group, QuintetError, Rollout, SamplingParams

_ENDED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


class VllmRolloutWorker(ServedRolloutWorker):
    """See the module and `ServedRolloutWorker`."""

    engine = "vLLM"
    option = "rollout.vllm"

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
        if config.vllm.url is None:
            name = str(dtype).removeprefix("torch.")
            server = VllmServer(config.vllm, dtype=name, max_running=config.max_running, device=device.type)
        super().__init__(
            hf_config,
            weights,
            eos_ids=eos_ids,
            decode=decode,
            config=config.vllm,
            server=server,
            version=version,
            # on a CPU vLLM packs the head's weights, and a reload packs those of a tied head no second time
            untie=server is not None and device.type == "cpu",
        )
        self._model = SERVED_NAME
        self._asleep = False

    async def sleep(self) -> None:
        """Free the GPU. Whatever is asked for next wakes the server; nothing may be running.

        Raises QuintetError when the server does not know how.
        """
        async with self._lock:
            if self._client is None or self._asleep:
                return
            try:
                await self._post("/sleep", params={"level": 1, "mode": "abort"})
            except (Broken, httpx.HTTPError) as error:
                raise QuintetError(f"rollout.vllm.sleep: vLLM does not go to sleep: {said(error)}") from error
            self._asleep = True

    async def generate(
        self,
        prompts: list[Group],
        sampling_params: SamplingParams,
        weight_version: int,
        *,
        on_token: OnToken | None = None,
    ) -> list[Rollout]:
        if self._asleep:
            async with self._lock:
                await self._wake_or_restart()
        return await super().generate(prompts, sampling_params, weight_version, on_token=on_token)

    async def _stream(self, sequence: Sequence) -> AsyncGenerator[Chunk, None]:
        async with aclosing(self._events("/v1/completions", self._request(sequence))) as events:
            async for data in events:
                for chunk in completion_chunks(data, _ENDED):
                    yield chunk

    def _request(self, sequence: Sequence) -> dict[str, Any]:
        params = sequence.params
        return completion_request(sequence) | {
            "model": self._model,
            "top_k": params.top_k or -1,
            "logprobs": 0,
            "return_token_ids": True,
        }

    async def _greet(self) -> None:
        if self._server is None:
            self._model = (await self._get("/v1/models"))["data"][0]["id"]
        body = {"model": self._model, "prompt": probe_ids(self._vocab_size), "max_tokens": 1, "seed": 0}
        body |= {"logprobs": 0, "return_token_ids": True, "detokenize": False}
        cold, hot = [
            (await self._post("/v1/completions", json=body | {"temperature": t}))["choices"][0] for t in (0.02, 1.0)
        ]
        if "token_ids" not in cold:
            raise Broken("its answers have no token ids (vLLM before 0.10?)")
        first, second = (choice["logprobs"]["token_logprobs"][0] for choice in (cold, hot))
        check_scaled(first, second, "start it with --logprobs-mode processed_logprobs")

    async def _wake_or_restart(self) -> None:
        try:
            await self._wake()
        except (Broken, httpx.HTTPError) as error:
            if self._server is None:
                raise QuintetError(f"rollout.vllm.sleep: vLLM does not wake up: {said(error)}") from error
            await self._restart(self._served)

    async def _wake(self) -> None:
        if self._asleep:
            await self._post("/wake_up")
            self._asleep = False

    async def _restart(self, folder: Path) -> None:
        self._asleep = False
        await super()._restart(folder)

    async def _load(self, folder: Path, version: int) -> None:
        await self._wake()
        await self._post("/pause", params={"mode": "abort"})
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._post("/collective_rpc", json=body)
        await self._post("/reset_prefix_cache")  # else the cache of the old weights is used again
        await self._post("/resume")
