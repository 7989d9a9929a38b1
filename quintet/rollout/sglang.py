"""SGLang behind `RolloutWorker`: a server started by us, or one that runs already.

Written after the sources and documentation of SGLang as of late 2026 (`srt/managers/io_struct.py`, `tokenizer_manager`,
`layers/sampler.py`, "SGLang for RL Systems") and tested against a server of our own that takes exactly those requests;
not run on the real engine here, which needs a GPU.

SGLang's log-probabilities are those after temperature and before top-k, top-p and min-p, so that truncated sampling is
refused. With `SGLANG_RETURN_ORIGINAL_LOGPROB` they would be those before temperature: a probe at the start refuses it.

A weight update pauses the server with what is running aborted, has it read the new version from a folder, which drops
its cache, and goes on. Every version carries a label, and every answer of SGLang says with which label it was sampled:
a server that was started again, or that someone else updated, is given the newest weights before a token of its is
taken. `--incremental-streaming-output` is what a server should be started with; without it every event repeats all
tokens so far, which is read correctly and costs bandwidth.

Draws are keyed by us only under `--enable-deterministic-inference`, otherwise SGLang draws as it likes.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import torch
from torch import Tensor
from transformers import PretrainedConfig

from quintet.rollout.child_server import ChildServer
from quintet.rollout.config import RolloutConfig, SglangConfig
from quintet.rollout.engine.sequence import Decode, Sequence
from quintet.rollout.served import Broken, Chunk, Refused, ServedRolloutWorker, check_scaled, probe_ids
from quintet.types import FinishReason, SamplingParams

_ENDED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
_SEEDS = 2**31  # SGLang hashes the seed with the position


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _MetaInfo(msgspec.Struct):
    """`output_token_logprobs` are all so far or only the new ones, as the server streams; `..._length` counts all."""

    weight_version: str
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    output_token_logprobs_length: int = 0


class _Event(msgspec.Struct):
    meta_info: _MetaInfo | None = None
    error: dict[str, Any] | None = None


class SglangServer(ChildServer):
    def __init__(self, config: SglangConfig, *, dtype: str, max_running: int, device: str) -> None:
        super().__init__("SGLang", "rollout.sglang", config)
        self._dtype = dtype
        self._max_running = max_running
        self._device = device
        self.label = ""  # of the weights that it is started with

    def command(self, model: Path, port: int) -> list[str]:
        command = [self.python, "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--api-key", self.key, "--device", self._device]
        command += ["--dtype", self._dtype, "--max-running-requests", str(self._max_running)]
        return [*command, "--skip-tokenizer-init", "--incremental-streaming-output", "--weight-version", self.label]


class SglangRolloutWorker(ServedRolloutWorker):
    """See the module and `ServedRolloutWorker`."""

    engine = "SGLang"
    option = "rollout.sglang"

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
        self._run = uuid.uuid4().hex[:8]  # another run's version 3 is not ours
        server = None
        if config.sglang.url is None:
            name = str(dtype).removeprefix("torch.")
            server = SglangServer(config.sglang, dtype=name, max_running=config.max_running, device=device.type)
            server.label = self._label(version)
        self._child = server
        super().__init__(
            hf_config, weights, eos_ids=eos_ids, decode=decode, config=config.sglang, server=server, version=version
        )

    def _refusal(self, params: SamplingParams) -> str | None:
        if params.temperature == 0.0 or (params.top_p == 1.0 and params.top_k == 0 and params.min_p == 0.0):
            return None
        return (
            "SGLang's log-probabilities are those before truncation, which another policy's would be.\n"
            "Set rollout.top_p 1.0, rollout.top_k 0 and rollout.min_p 0."
        )

    async def _stream(self, sequence: Sequence) -> AsyncGenerator[Chunk, None]:
        request_id = uuid.uuid4().hex
        body = {"rid": request_id, "input_ids": sequence.tokens_from(0), "sampling_params": _sampling(sequence)}
        seen, ended = 0, None
        try:
            async with aclosing(self._events("/generate", body | {"return_logprob": True, "stream": True})) as events:
                async for data in events:
                    meta = self._read(data)
                    ended = _ended(meta.finish_reason)
                    first = meta.output_token_logprobs_length - len(meta.output_token_logprobs)
                    if not 0 <= first <= seen:
                        raise Broken(f"the stream went on at token {first} after {seen} tokens")
                    new = meta.output_token_logprobs[seen - first :]
                    seen += len(new)
                    yield Chunk([(i, float("nan") if p is None else p) for p, i, _ in new], ended)
        finally:
            if ended is None:  # we have enough, or were cancelled: a closed connection alone is noticed late
                await self._let_go(request_id)

    async def _let_go(self, request_id: str) -> None:
        assert self._client is not None
        with suppress(httpx.HTTPError):  # of a server that is gone nothing runs any more
            await self._client.post("/abort_request", json={"rid": request_id}, timeout=5.0)

    def _read(self, data: bytes) -> _MetaInfo:
        event = msgspec.json.decode(data, type=_Event)
        if event.error is not None or event.meta_info is None:
            raise Refused(str((event.error or {}).get("message", "its answer has no meta_info")))
        if event.meta_info.weight_version != self._label(self.version):
            raise Broken(f"it samples with the weights {event.meta_info.weight_version!r}, which are not ours")
        return event.meta_info

    async def _greet(self) -> None:
        check_scaled(await self._probe(0.02), await self._probe(1.0), "start it without SGLANG_RETURN_ORIGINAL_LOGPROB")

    async def _probe(self, temperature: float) -> float:
        sampling = {"max_new_tokens": 1, "temperature": temperature}
        body = {"input_ids": probe_ids(self._vocab_size), "sampling_params": sampling, "return_logprob": True}
        meta = msgspec.convert(await self._post("/generate", json=body), _Event).meta_info
        if meta is None or len(meta.output_token_logprobs) != 1 or meta.output_token_logprobs[0][0] is None:
            raise Broken("its answers have no log-probabilities")
        return meta.output_token_logprobs[0][0]

    async def _is_current(self) -> bool:
        try:
            found = await self._get("/get_model_info")
        except (Broken, httpx.HTTPError):
            return True  # nothing is known of a server that does not answer
        return bool(found["weight_version"] == self._label(self.version))

    async def _load(self, folder: Path, version: int) -> None:
        if self._child is not None:
            self._child.label = self._label(version)  # should it have to be started again with them
        await self._post("/pause_generation", json={"mode": "abort"})
        body = {"model_path": str(folder), "weight_version": self._label(version), "flush_cache": True}
        answer = await self._post("/update_weights_from_disk", json=body)
        if not answer["success"]:
            raise Broken(str(answer["message"]))
        await self._post("/continue_generation", json={})

    def _label(self, version: int) -> str:
        return f"quintet-{self._run}-{version}"


def _sampling(sequence: Sequence) -> dict[str, Any]:
    params, done = sequence.params, len(sequence.output_ids)
    return {
        "max_new_tokens": sequence.max_new - done,
        "temperature": params.temperature,
        "stop_token_ids": sorted(sequence.stop_ids),
        "sampling_seed": (sequence.key + params.first_position) % _SEEDS,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def _ended(reason: _FinishReason | None) -> FinishReason | None:
    """Raises Refused, Broken for an end that is a fault."""
    if reason is None:
        return None
    if reason.status_code is not None:
        message = reason.message or f"status {reason.status_code}"
        raise Refused(message) if reason.status_code < 500 else Broken(message)
    if reason.type not in _ENDED:
        raise Broken(f"the sample ended for the reason {reason.type!r}")
    return _ENDED[reason.type]
