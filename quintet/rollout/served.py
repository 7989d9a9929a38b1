"""An engine behind its own HTTP server as a `RolloutWorker`: what vLLM, SGLang and TensorRT-LLM have in common.

What is trained is what the engine sampled: its token ids and its log-probabilities, one request per sample, streamed.
A sample that is interrupted (new weights, a broken connection, a server that died) goes on from the tokens it has:
they become part of the prompt, their cache is computed again, and later tokens carry the weight version that they
were sampled with. Stop strings are looked for here, so that no engine cuts a token off.

A server of ours that dies is started again with the newest weights. An engine gives the few things in which its API
differs by subclassing (`vllm.py`, `sglang.py`, `tensorrt_llm.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import msgspec
from torch import Tensor
from transformers import PretrainedConfig

from quintet.rollout.child_server import ChildServer
from quintet.rollout.config import ServedEngineConfig
from quintet.rollout.engine.sequence import Decode, Intake, OnToken, Sequence, check_params, engine_failure
from quintet.rollout.metered import MeteredWorker
from quintet.rollout.weight_folders import WeightFolders
from quintet.types import FinishReason, Group, GroupId, Health, QuintetError, Rollout, SamplingParams, WeightRef
from quintet.weights import open_weights

log = logging.getLogger(__name__)

TRIES = 3  # of one sample over broken connections
_FAULTY_REQUEST = (400, 404, 413, 422)
_FAULTS = (httpx.HTTPError, msgspec.MsgspecError, json.JSONDecodeError)


class Broken(Exception):
    """The connection or the server failed; what was sampled so far is kept."""


class Refused(Exception):
    """The server will not serve this request, however often it is asked."""


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sample with their log-probabilities. `ended`: why there are no more of this request; ABORTED
    means that the server let go of it."""

    tokens: list[tuple[int, float]]
    ended: FinishReason | None = None


class ServedRolloutWorker(MeteredWorker):
    """See the module. `weights` are served as version `version` once `start` (or the first `generate`) has run.

    `server`: one of ours, or None for the one at `config.url`. Raises QuintetError for a server that cannot be reached
    or started, that reports other log-probabilities than those of the sampling distribution, or that does not take new
    weights.
    """

    engine: ClassVar[str]
    option: ClassVar[str]  # where its configuration stands

    def __init__(
        self,
        hf_config: PretrainedConfig,
        weights: Mapping[str, Tensor],
        *,
        eos_ids: Collection[int],
        decode: Decode,
        config: ServedEngineConfig,
        server: ChildServer | None,
        version: int,
        untie: bool = False,
    ) -> None:
        self.version = version
        self._config = config
        self._decode = decode
        text_config = hf_config.get_text_config()
        self._vocab_size: int = text_config.vocab_size
        self._intake = Intake(frozenset(eos_ids), text_config.vocab_size, text_config.max_position_embeddings)
        self._folders = WeightFolders(hf_config, config.weights_dir, untie=untie)
        self._served = self._folders.write(weights, version)
        self._server = server
        self._client: httpx.AsyncClient | None = None
        self._open = asyncio.Event()  # cleared while weights change
        self._lock = asyncio.Lock()  # start, restart, weight update: one at a time
        self._running: dict[Sequence, asyncio.Task[Rollout]] = {}
        self._streams: set[asyncio.Task[FinishReason | None]] = set()
        self._updates = 0  # begun; a sample that the server lets go of meanwhile has done nothing wrong
        self._restarts = 0
        self._sampled = 0
        self._reported = (0, 0)  # restarts and sampled tokens, at the last call of `metrics`

    # -- what an engine gives ----------------------------------------------------------------------

    @abstractmethod
    def _stream(self, sequence: Sequence) -> AsyncGenerator[Chunk, None]:
        """Sample on from the tokens that `sequence` has. Raises Broken, Refused, or a fault of the connection."""

    @abstractmethod
    async def _load(self, folder: Path, version: int) -> None:
        """Old weights and their cache out, those of `folder` in; what was running is let go of. Raises Broken."""

    @abstractmethod
    async def _greet(self) -> None:
        """After the connection stands: check what is assumed of the server. Raises Broken."""

    def _refusal(self, params: SamplingParams) -> str | None:
        """Why the log-probabilities of such samples cannot be had, if so."""
        return None

    async def _is_current(self) -> bool:
        """Whether a server that is not ours still has the newest weights (it may have been started again)."""
        return True

    # -- RolloutWorker -----------------------------------------------------------------------------

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
        refusal = self._refusal(sampling_params)
        if refusal is not None:
            raise QuintetError(f"rollout.engine: {self.option.rpartition('.')[2]}: {refusal}")
        await self.start()
        if weight_version > self.version:
            raise QuintetError(
                f"{self.engine} has weights of version {self.version}, version {weight_version} was asked for."
            )
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
            self._updates += 1
            try:
                await self._load(folder, version)
            except (Broken, *_FAULTS) as error:
                if self._server is None:
                    raise QuintetError(
                        f"{self.engine} at {self._config.url} did not take weight version {version}: {said(error)}\n"
                        "Its weights may be a mixture now: restart it before it serves anything."
                    ) from error
                log.warning("%s did not take version %d (%s): it is started again", self.engine, version, said(error))
                await self._restart(folder)
            self._served, self.version = folder, version
            self._open.set()

    async def health_check(self) -> Health:
        if self._client is None:
            return Health(True, self.version, message="not started")
        running = len(self._running)
        try:
            reply = await self._client.get("/health", timeout=10.0)
        except httpx.HTTPError as error:
            return Health(False, self.version, running=running, message=f"{self.engine}: {said(error)}")
        ok = reply.status_code == 200
        return Health(ok, self.version, running=running, message="" if ok else f"status {reply.status_code}")

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

    # -- samples -----------------------------------------------------------------------------------

    async def _tracked(self, sequence: Sequence) -> Rollout:
        """The sample in a task of its own, which `abort` can cancel."""
        refusal = self._intake.refusal(sequence.prompt_ids)
        if refusal is not None:
            return self._failed(sequence, f"prompt of group {sequence.group_id}: {refusal}", retryable=False)
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
            restarts, updates = self._restarts, self._updates
            try:
                reason = await self._streamed(sequence)
                if reason is None and updates == self._updates:
                    raise Broken("it let go of the sample")
            except Refused as error:
                return self._failed(sequence, f"{self.engine}: {error}", retryable=False)
            except (Broken, *_FAULTS) as error:
                if updates != self._updates:
                    continue
                tries += 1
                if tries == TRIES:
                    return self._failed(sequence, f"{self.engine}: {said(error)}", retryable=True)
                await self._revive(restarts)
                continue
            if reason is not None:
                return sequence.rollout(reason, time.monotonic(), self._decode)

    async def _streamed(self, sequence: Sequence) -> FinishReason | None:
        """`_taken`, unless the weights change: None, as when the server lets go of the sample itself."""
        stream = asyncio.ensure_future(self._taken(sequence))
        self._streams.add(stream)
        try:
            return await stream
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return None  # by `_drop_streams`
        finally:
            self._streams.discard(stream)

    async def _taken(self, sequence: Sequence) -> FinishReason | None:
        """The reason the sample ended for; None when the server let go of it."""
        version = self.version
        async with aclosing(self._stream(sequence)) as chunks:
            async for chunk in chunks:
                for token, logprob in chunk.tokens:
                    self._check_token(token, logprob)
                    self._sampled += 1
                    reason = sequence.append(token, logprob, version, time.monotonic(), self._decode)
                    if reason is not None:
                        return reason
                if chunk.ended is not None:
                    return None if chunk.ended is FinishReason.ABORTED else chunk.ended
        raise Broken("the stream ended before the sample")

    def _check_token(self, token: int, logprob: float) -> None:
        if not 0 <= token < self._vocab_size:
            raise Broken(f"token id {token} is outside of the vocabulary of {self._vocab_size}")
        if not math.isfinite(logprob):
            raise Broken(f"token {token} came with the log-probability {logprob}")

    def _drop_streams(self) -> None:
        """Close the connections of all running samples; they go on when the weights have changed."""
        for stream in self._streams:
            stream.cancel()

    def _failed(self, sequence: Sequence, message: str, *, retryable: bool) -> Rollout:
        failure = engine_failure(message, retryable=retryable)
        return sequence.rollout(FinishReason.FAILED, time.monotonic(), self._decode, failure)

    # -- the server --------------------------------------------------------------------------------

    async def _connect(self) -> None:
        if self._server is not None:
            await self._server.start(self._served)
        url = self._config.url or (self._server.url if self._server else "")
        key = self._server.key if self._server else os.environ.get(self._config.api_key_env, "")
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self._config.silence_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        try:
            if self._server is None:
                await self._load(self._served, self.version)
            await self._greet()
        except (Broken, Refused, LookupError, *_FAULTS) as error:
            await self._client.aclose()
            self._client = None
            raise QuintetError(f"{self.option}: {url} cannot be used: {said(error)}") from error
        self._open.set()

    async def _revive(self, seen_restarts: int) -> None:
        """Start a dead server of ours again, once for all samples that noticed; give one that is not ours the newest
        weights when it has lost them."""
        async with self._lock:
            if self._server is not None and not self._server.alive and self._restarts == seen_restarts:
                log.warning("%s died; it is started again with weight version %d", self.engine, self.version)
                self._open.clear()
                await self._restart(self._served)
                self._open.set()
            elif self._server is None and not await self._is_current():
                log.warning("%s has lost weight version %d; it is given it again", self.engine, self.version)
                self._open.clear()
                self._updates += 1
                try:
                    await self._load(self._served, self.version)
                except (Broken, *_FAULTS) as error:  # the samples try again, and fail if it stays so
                    log.warning("%s did not take it: %s", self.engine, said(error))
                self._open.set()
            else:
                await asyncio.sleep(0.2)

    async def _restart(self, folder: Path) -> None:
        assert self._server is not None and self._client is not None
        await asyncio.to_thread(self._server.stop)
        await self._server.start(folder)
        self._client.base_url = httpx.URL(self._server.url)
        self._restarts += 1

    # -- requests ----------------------------------------------------------------------------------

    async def _events(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """The data of server-sent events, without the last one, which says that it is done."""
        assert self._client is not None
        async with self._client.stream("POST", path, json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                raise _fault(reply)
            async for line in reply.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield line.removeprefix("data: ").encode()

    async def _get(self, path: str) -> Any:
        assert self._client is not None
        return _body(await self._client.get(path, timeout=30.0))

    async def _post(self, path: str, **content: Any) -> Any:
        assert self._client is not None
        return _body(await self._client.post(path, timeout=600.0, **content))


def _fault(reply: httpx.Response) -> Broken | Refused:
    text = f"{reply.url.path}: status {reply.status_code}: {reply.text[:300]}"
    return Refused(text) if reply.status_code in _FAULTY_REQUEST else Broken(text)


def _body(reply: httpx.Response) -> Any:
    """The JSON of an answer, where it is JSON. Raises Broken: of a control call nothing is worth asking twice."""
    if reply.status_code != 200:
        raise Broken(f"{reply.url.path}: status {reply.status_code}: {reply.text[:300]}")
    return reply.json() if reply.headers.get("content-type", "").startswith("application/json") else None


def said(error: Exception) -> str:
    return str(error) or type(error).__name__


def check_scaled(cold: float, hot: float, mend: str) -> None:
    """Raises Broken for log-probabilities that know nothing of the temperature.

    `cold` and `hot` are those of a token sampled at temperature 0.02 and 1 after a prompt that makes nothing likely:
    at 0.02 the chosen token has nearly all of the sampling distribution, but not of the model's own.
    """
    if cold < -0.5 and abs(cold - hot) < 5.0:
        raise Broken(f"its log-probabilities are raw, before temperature: {mend}")


PROBE_IDS = (7, 1031, 57, 911)  # after which nothing is likely


def probe_ids(vocab_size: int) -> list[int]:
    return [token % vocab_size for token in PROBE_IDS]
