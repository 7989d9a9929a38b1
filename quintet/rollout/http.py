"""A rollout worker behind HTTP: the client of `server.py`, and of anything that speaks its `/generate`.

Tokens are read as they are sampled, so that a broken connection leaves what was sampled so far: it comes back as a
failed rollout of kind `transport`, retryable, which the router goes on with elsewhere.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any

import httpx
import msgspec

from quintet.rollout.engine.handoff import PrefillFailed
from quintet.rollout.engine.sequence import OnToken, check_params
from quintet.rollout.streaming import OutdatedWeights
from quintet.types import (
    Failure,
    FailureKind,
    FinishReason,
    Group,
    GroupId,
    Health,
    QuintetError,
    Rollout,
    SampledToken,
    SamplingParams,
    WeightRef,
    run_length,
)
from quintet.weights import open_weights
from quintet.weights.file import file_bytes

_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "seed", "first_sample",
    "first_position", "min_p",
)  # fmt: skip
PREFILL_FAILED = "prefill_failed"  # code of the error that becomes PrefillFailed


class TransportError(Exception):
    """The server could not be reached, broke off, or had a fault of its own."""


class HttpRolloutWorker:
    """`RolloutWorker` over one server.

    Raises QuintetError when the server refuses the key, has older weights than asked for, or refuses new ones;
    every other fault comes back as failed rollouts. `silence_s`: how long a server may say nothing at all (it sends
    a sign of life every few seconds).
    """

    def __init__(self, url: str, *, key: str, silence_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(silence_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )

    async def generate(
        self,
        prompts: list[Group],
        sampling_params: SamplingParams,
        weight_version: int,
        *,
        on_token: OnToken | None = None,
        prefill_url: str | None = None,
    ) -> list[Rollout]:
        """`prefill_url`: the prefill server of which this server, a decode server, gets the prompts; raises
        PrefillFailed when that fails."""
        check_params(sampling_params)
        made = await asyncio.gather(
            *(self._group(group, sampling_params, weight_version, on_token, prefill_url) for group in prompts)
        )
        return [rollout for rollouts in made for rollout in rollouts]

    async def update_weights(self, weight_path: WeightRef, version: int) -> None:
        """The server reads the version from a folder that both sides reach; one in memory travels in the request.

        Raises TransportError, QuintetError."""
        if not weight_path.location.startswith("memory:"):
            body = {"version": version, "digest": weight_path.digest, "path": weight_path.location}
            await self._post("/update_weights", json=body)
            return
        tensors = await asyncio.to_thread(open_weights, weight_path)
        content = await asyncio.to_thread(file_bytes, tensors)
        params = {"version": version, "digest": weight_path.digest}
        headers = {"Content-Type": "application/octet-stream"}
        await self._post("/update_weights/stream", content=content, params=params, headers=headers)

    async def health_check(self) -> Health:
        try:
            reply = await self._client.get("/health", timeout=10.0)
            return msgspec.json.decode(reply.content, type=Health)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            return Health(False, message=f"{self.url}: {_said(error)}")

    async def abort(self, group_ids: list[GroupId]) -> None:
        await self._post("/abort", json={"group_ids": [str(group_id) for group_id in group_ids]})

    async def pause(self, mode: str) -> None:
        """`abort`, `wait` or `keep`, see `EngineWorker.pause`."""
        await self._post("/pause", json={"mode": mode})

    async def resume(self) -> None:
        await self._post("/resume")

    async def close(self) -> None:
        await self._client.aclose()

    async def _group(
        self,
        group: Group,
        params: SamplingParams,
        version: int,
        on_token: OnToken | None,
        prefill_url: str | None,
    ) -> list[Rollout]:
        so_far: dict[int, list[SampledToken]] = {params.first_sample + i: [] for i in range(params.n)}
        try:
            async for line in self._lines(group, params, version, prefill_url):
                if "rollouts" in line:
                    return msgspec.convert(line["rollouts"], list[Rollout])
                if "error" in line:
                    if line["error"]["code"] == PREFILL_FAILED:
                        raise PrefillFailed(line["error"]["message"])
                    raise TransportError(line["error"]["message"])
                token = msgspec.convert(line["token"], SampledToken)
                so_far[token.sample_index].append(token)
                if on_token is not None:
                    on_token(token)
            raise TransportError("the answer ended before its rollouts")
        except (httpx.HTTPError, TransportError, msgspec.MsgspecError) as error:
            failure = Failure(FailureKind.TRANSPORT, f"{self.url}: {_said(error)}", retryable=True)
        except RequestRefused as error:
            failure = Failure(FailureKind.ENGINE, f"{self.url}: {error}")
        return [_broken(group, index, tokens, failure) for index, tokens in so_far.items()]

    async def _lines(self, group: Group, params: SamplingParams, version: int, prefill_url: str | None) -> Any:
        """The answer's JSON objects as they arrive."""
        prompt, sampling = request_body(group, params)
        body = {"prompts": [prompt], "sampling": sampling, "weight_version": version, "stream": True}
        if prefill_url is not None:
            body["prefill_url"] = prefill_url
        async with self._client.stream("POST", "/generate", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                self._check(reply)
            async for line in reply.aiter_lines():
                if line:  # an empty one is a sign of life
                    yield json.loads(line)

    async def _post(self, path: str, **body: Any) -> None:
        try:
            self._check(await self._client.post(path, timeout=600.0, **body))
        except httpx.HTTPError as error:
            raise TransportError(f"{self.url}{path}: {_said(error)}") from error

    def _check(self, reply: httpx.Response) -> None:
        """Raises QuintetError for a refusal that concerns the run, RequestRefused for one that concerns a request."""
        if reply.status_code == 200:
            return
        try:
            said = str(reply.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            said = reply.text[:200]
        if reply.status_code >= 500:
            raise TransportError(f"status {reply.status_code}: {said}")
        if reply.status_code == 409:
            raise OutdatedWeights(f"rollout server {self.url}: {said}")
        if reply.status_code in (401, 403):
            raise QuintetError(f"rollout server {self.url}: {said}")
        raise RequestRefused(said)


def request_body(group: Group, params: SamplingParams) -> tuple[dict[str, Any], dict[str, Any]]:
    """A prompt, and how to sample, as `/generate` and `/prefill` take them."""
    sampling = {name: getattr(params, name) for name in _SAMPLING}
    return {"group_id": str(group.group_id), "token_ids": group.prompt.token_ids}, sampling


class RequestRefused(Exception):
    """The server cannot serve this request, and no other server could."""


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _broken(group: Group, index: int, tokens: Collection[SampledToken], failure: Failure) -> Rollout:
    """The tokens so far as a failed rollout."""
    return Rollout(
        group.group_id,
        index,
        group.prompt.token_ids,
        [t.token_id for t in tokens],
        "",
        [t.logprob for t in tokens],
        [1] * len(tokens),
        run_length(t.version for t in tokens),
        FinishReason.FAILED,
        failure=failure,
    )
