"""The real vLLM behind `RolloutWorker`: a server started by us, or one that runs already.

What is trained is what vLLM sampled: its token ids, and its log-probabilities after temperature and truncation
(`--logprobs-mode processed_logprobs`; its default, raw, would be another policy's. A probe at the start refuses it).

A weight update pauses the server with what is running aborted, has it read the new version from a folder, drops its
prefix cache and resumes; samples that were running go on from the tokens they had, whose cache is computed again, and
their later tokens carry the new version. A server of ours that dies is started again with the newest weights, and
samples go on in the same way.

Left out: sleep and wake (no effect on a CPU, and nothing here has run it on a GPU).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any

import httpx
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.sequence import Decode, Intake, OnToken, Sequence, check_params, engine_failure
from quintet.rollout.metered import MeteredWorker
from quintet.rollout.vllm_server import SERVED_NAME, VllmServer
from quintet.types import FinishReason, Group, GroupId, Health, QuintetError, Rollout, SamplingParams, WeightRef
from quintet.weights import open_weights

log = logging.getLogger(__name__)

_TRIES = 3  # of one sample over broken connections
_PROBE_IDS = [7, 1031, 57, 911]  # a prompt after which nothing is likely


class _Broken(Exception):
    """The connection or the server failed; what was sampled so far is kept."""


class VllmRolloutWorker(MeteredWorker):
    """See the module. `weights` are served as version `version` once `start` (or the first `generate`) has run.

    Raises QuintetError for a server that cannot be reached or started, that reports raw log-probabilities, or that
    does not take new weights.
    """

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
        self.version = version
        self._config = config.vllm
        self._hf_config = hf_config
        self._decode = decode
        text_config = hf_config.get_text_config()
        self._intake = Intake(frozenset(eos_ids), text_config.vocab_size, text_config.max_position_embeddings)
        self._probe_ids = [token % text_config.vocab_size for token in _PROBE_IDS]
        self._folders = _WeightFolders(hf_config, self._config.weights_dir)
        self._served = self._folders.write(weights, version)
        name = str(dtype).removeprefix("torch.")
        self._server = None
        if self._config.url is None:
            self._server = VllmServer(self._config, dtype=name, max_running=config.max_running, device=device.type)
        self._client: httpx.AsyncClient | None = None
        self._model = SERVED_NAME
        self._open = asyncio.Event()  # cleared while weights change
        self._lock = asyncio.Lock()  # start, restart, weight update: one at a time
        self._running: dict[Sequence, asyncio.Task[Rollout]] = {}
        self._restarts = 0
        self._sampled = 0
        self._reported = (0, 0)  # restarts and sampled tokens, at the last call of `metrics`

    async def start(self) -> None:
        """Start or reach the server, give it the weights and check its log-probabilities."""
        async with self._lock:
            if self._client is None:
                await self._connect()

    async def generate(
        self,
        prompts: list[Group],
        sampling_params: SamplingParams,
        weight_version: int,
        *,
        on_token: OnToken | None = None,
    ) -> list[Rollout]:
        check_params(sampling_params)
        await self.start()
        if weight_version > self.version:
            raise QuintetError(f"vLLM has weights of version {self.version}, version {weight_version} was asked for.")
        sequences: list[Sequence] = []
        for group in prompts:
            request = self._intake.take_request()
            sequences += self._intake.sequences(request, group, sampling_params, time.monotonic(), on_token)
        return list(await asyncio.gather(*(self._tracked(sequence) for sequence in sequences)))

    async def update_weights(self, weight_path: WeightRef, version: int) -> None:
        """Whole or not at all: a server of ours that fails half-way is started again with the new version."""
        if weight_path.version != version:
            raise QuintetError(
                f"Weight update to version {version}: {weight_path.location} holds version {weight_path.version}."
            )
        await self.start()
        weights = await asyncio.to_thread(open_weights, weight_path)
        folder = await asyncio.to_thread(self._folders.write, weights, version)
        async with self._lock:
            self._open.clear()
            try:
                await self._load(folder)
            except (_Broken, httpx.HTTPError) as error:
                if self._server is None:
                    raise QuintetError(
                        f"vLLM at {self._config.url} did not take weight version {version}: {error}\n"
                        "Its weights may be a mixture now: restart it before it serves anything."
                    ) from error
                log.warning("vLLM did not take weight version %d (%s): it is started again with it", version, error)
                self._served = folder
                await self._restart()
            self._served, self.version = folder, version
            self._open.set()

    async def health_check(self) -> Health:
        if self._client is None:
            return Health(True, self.version, message="not started")
        try:
            reply = await self._client.get("/health", timeout=10.0)
        except httpx.HTTPError as error:
            return Health(False, self.version, running=len(self._running), message=f"vLLM: {error or type(error)}")
        ok = reply.status_code == 200
        return Health(ok, self.version, running=len(self._running), message="" if ok else f"status {reply.status_code}")

    async def abort(self, group_ids: list[GroupId]) -> None:
        wanted = frozenset(group_ids)
        for sequence, task in list(self._running.items()):
            if sequence.group_id in wanted:
                task.cancel()

    async def close(self) -> None:
        """End the server if it is ours, and remove the weight folders."""
        if self._client is not None:
            await self._client.aclose()
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)
        self._folders.remove()

    def metrics(self) -> dict[str, float]:
        """Since the last call: how often a server of ours was started again, and sampled tokens."""
        restarts, sampled = self._reported
        self._reported = (self._restarts, self._sampled)
        return {
            "engine/restarts": float(self._restarts - restarts),
            "engine/sampled_tokens": float(self._sampled - sampled),
        }

    async def _tracked(self, sequence: Sequence) -> Rollout:
        """The sample in a task of its own, which `abort` can cancel."""
        refusal = self._intake.refusal(sequence.prompt_ids)
        if refusal is not None:
            failure = engine_failure(f"prompt of group {sequence.group_id}: {refusal}")
            return sequence.rollout(FinishReason.FAILED, time.monotonic(), self._decode, failure)
        task = asyncio.create_task(self._sample(sequence))
        self._running[sequence] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `abort`; else it is our caller who gave up
                return sequence.rollout(FinishReason.ABORTED, time.monotonic(), self._decode)
            task.cancel()
            raise
        finally:
            del self._running[sequence]

    async def _sample(self, sequence: Sequence) -> Rollout:
        """Stream tokens until the sample ends; after an interruption go on from the tokens that are there."""
        tries, sequence.started_at = 0, time.monotonic()
        while True:
            await self._open.wait()
            restarts = self._restarts
            try:
                reason = await self._stream(sequence)
            except (_Broken, httpx.HTTPError, json.JSONDecodeError) as error:
                tries += 1
                if tries == _TRIES:
                    failure = engine_failure(f"vLLM: {error or type(error).__name__}", retryable=True)
                    return sequence.rollout(FinishReason.FAILED, time.monotonic(), self._decode, failure)
                await self._revive(restarts)
                continue
            if reason is not None:
                return sequence.rollout(reason, time.monotonic(), self._decode)

    async def _stream(self, sequence: Sequence) -> FinishReason | None:
        """The reason the sample ended for; None when the server let go of it (a weight update)."""
        assert self._client is not None
        version = self.version
        async with self._client.stream("POST", "/v1/completions", json=self._request(sequence)) as reply:
            if reply.status_code != 200:
                said = (await reply.aread()).decode(errors="replace")[:300]
                raise _Broken(f"status {reply.status_code}: {said}")
            async for choice in _choices(reply):
                logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
                for token, logprob in zip(choice.get("token_ids") or [], logprobs, strict=True):
                    self._sampled += 1
                    reason = sequence.append(token, logprob, version, time.monotonic(), self._decode)
                    if reason is not None:
                        return reason
                ended = choice.get("finish_reason")
                if ended is not None:
                    return {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(ended)
        raise _Broken("the stream ended before the sample")

    def _request(self, sequence: Sequence) -> dict[str, Any]:
        params, done = sequence.params, len(sequence.output_ids)
        return {
            "model": self._model,
            "prompt": sequence.tokens_from(0),
            "max_tokens": sequence.max_new - done,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            # a continuation, or a later turn, must not repeat the draws of its beginning
            "seed": (sequence.key + params.first_position + done) % 2**63,
            "stop_token_ids": sorted(sequence.stop_ids),
            "logprobs": 0,
            "return_token_ids": True,
            "detokenize": False,
            "stream": True,
        }

    async def _connect(self) -> None:
        if self._server is not None:
            await self._server.start(self._served)
        url = self._config.url or (self._server.url if self._server else "")
        key = self._server.key if self._server else os.environ.get(self._config.api_key_env, "")
        client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(self._config.silence_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._client = client
        try:
            if self._server is None:
                self._model = (await self._get("/v1/models"))["data"][0]["id"]
                await self._load(self._served)
            await self._check_logprobs()
        except (_Broken, httpx.HTTPError, LookupError) as error:
            self._client = None
            raise QuintetError(f"rollout.vllm: {url} cannot be used: {error or type(error).__name__}") from error
        self._open.set()

    async def _load(self, folder: Path) -> None:
        """Old weights and their cache out, new ones in. Raises _Broken, httpx.HTTPError."""
        await self._post("/pause", params={"mode": "abort"})
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._post("/collective_rpc", json=body)
        await self._post("/reset_prefix_cache")  # else the cache of the old weights is used again
        await self._post("/resume")

    async def _revive(self, seen_restarts: int) -> None:
        """Start a dead server of ours again, once for all samples that noticed."""
        async with self._lock:
            if self._server is None or self._server.alive or self._restarts != seen_restarts:
                await asyncio.sleep(0.2)
                return
            log.warning("vLLM died; it is started again with weight version %d", self.version)
            self._open.clear()
            await self._restart()
            self._open.set()

    async def _restart(self) -> None:
        assert self._server is not None and self._client is not None
        await asyncio.to_thread(self._server.stop)
        await self._server.start(self._served)
        self._client.base_url = httpx.URL(self._server.url)
        self._restarts += 1

    async def _check_logprobs(self) -> None:
        """At temperature 0.02 the chosen token has nearly all of the sampling distribution, but not of the raw one."""
        body = {"model": self._model, "prompt": self._probe_ids, "max_tokens": 1, "temperature": 0.02, "seed": 0}
        body |= {"logprobs": 0, "return_token_ids": True, "detokenize": False}
        choice = (await self._post("/v1/completions", json=body))["choices"][0]
        if "token_ids" not in choice:
            raise _Broken("its answers have no token ids (vLLM before 0.10?)")
        cold = choice["logprobs"]["token_logprobs"][0]
        hot = (await self._post("/v1/completions", json=body | {"temperature": 1.0}))["choices"][0]
        if cold < -0.5 and abs(cold - hot["logprobs"]["token_logprobs"][0]) < 5.0:
            raise _Broken("its log-probabilities are raw: start it with --logprobs-mode processed_logprobs")

    async def _get(self, path: str) -> Any:
        assert self._client is not None
        return _body(await self._client.get(path, timeout=30.0))

    async def _post(self, path: str, **content: Any) -> Any:
        assert self._client is not None
        return _body(await self._client.post(path, timeout=600.0, **content))


async def _choices(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The first choice of each server-sent event. Raises _Broken for an error sent in the stream."""
    async for line in reply.aiter_lines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise _Broken(str(event["error"].get("message", event["error"])))
        if event.get("choices"):
            yield event["choices"][0]


def _body(reply: httpx.Response) -> Any:
    if reply.status_code != 200:
        raise _Broken(f"{reply.url.path}: status {reply.status_code}: {reply.text[:300]}")
    return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else None


class _WeightFolders:
    """Hugging Face folders through which weights reach the server, in memory (/dev/shm) where that exists."""

    def __init__(self, hf_config: PretrainedConfig, given: str | None) -> None:
        root = Path(given) if given else Path("/dev/shm")
        self._root = Path(tempfile.mkdtemp(prefix="quintet-vllm-", dir=root if root.is_dir() else None))
        self._hf_config = hf_config
        self._written: list[Path] = []

    def write(self, weights: Mapping[str, Tensor], version: int) -> Path:
        """The newest two stay: the one being served and the one being loaded."""
        folder = self._root / f"v-{version:08d}"
        beside = folder.with_suffix(".partial")
        shutil.rmtree(beside, ignore_errors=True)  # of an attempt that was interrupted
        beside.mkdir()
        self._hf_config.save_pretrained(beside)
        _numbers_as_words(self._hf_config.get_text_config().vocab_size).save_pretrained(beside)
        tensors = {name: t.detach().cpu().contiguous() for name, t in _untied(weights).items()}
        save_file(tensors, beside / "model.safetensors", metadata={"format": "pt"})
        if folder.exists():  # the same version again, after a redone step
            shutil.rmtree(folder)
        beside.rename(folder)
        self._written = [*(f for f in self._written if f != folder), folder]
        for old in self._written[:-2]:
            shutil.rmtree(old)
        self._written = self._written[-2:]
        return folder

    def remove(self) -> None:
        shutil.rmtree(self._root)


def _numbers_as_words(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer for a server that never sees text: its routes refuse to work without one."""
    words = {str(i): i for i in range(vocab_size)}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(WordLevel(words, unk_token="0")))


def _untied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each storage once (safetensors refuses two names for one); a tied head is made from the embedding by vLLM."""
    seen: set[int] = set()
    out: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in seen:
            seen.add(pointer)
            out[name] = tensor
    return out
