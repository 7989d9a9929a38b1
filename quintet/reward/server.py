"""`quintet serve reward`: a reward service over HTTP, for runs elsewhere and for other programs. See `wire.py`.

Back-pressure: more samples than it holds are answered 429 with `Retry-After`. Faults of a grader come back in the
scores, as they do within a process; whether they stop a run is decided by the run, not here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter as Tally
from collections.abc import AsyncIterator, Iterator
from typing import TypeVar

import msgspec
from fastapi import FastAPI, HTTPException, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram

from quintet.reward.errors import RewardError
from quintet.reward.service import LocalRewardService
from quintet.reward.wire import ReferenceRequest, ReferenceResponse, ScoreRequest, ScoreResponse
from quintet.serving import RETRY_AFTER_S, Admission, make_app, wants
from quintet.types import Score

MAX_BODY_BYTES = 64 << 20

Body = TypeVar("Body")


class RewardServer:
    """`service` is started and closed with the app. `max_samples`: being graded and waiting, together."""

    def __init__(self, service: LocalRewardService, *, key: str, max_requests: int, max_samples: int) -> None:
        self._service = service
        self._key = key
        self._max_samples = max_samples
        self._samples = 0
        self._registry = CollectorRegistry()
        self._admission = Admission("quintet_reward", max_requests, self._registry)
        self._outcomes = Counter(
            "quintet_reward_samples", "Samples by what became of them.", ["outcome"], registry=self._registry
        )
        buckets = (0.0, 0.25, 0.5, 0.75, 1.0)
        self._rewards = Histogram("quintet_reward_value", "Rewards.", buckets=buckets, registry=self._registry)

    def app(self) -> FastAPI:
        app = make_app(
            "quintet reward",
            key=self._key,
            registry=self._registry,
            health=self._health,
            max_body_bytes=MAX_BODY_BYTES,
            lifespan=self._lifespan,
        )
        app.post("/score", dependencies=[wants(self._key)])(self.score)
        app.post("/references", dependencies=[wants(self._key)])(self.references)
        return app

    async def score(self, request: Request) -> Response:
        async with self._admission.admit():
            body = await _body(request, ScoreRequest)
            groups = [group.group(i) for i, group in enumerate(body.groups)]
            count = sum(len(group.rollouts) for group in groups)
            with self._room_for(count):
                try:
                    scores = await self._service.score(groups)
                except RewardError as error:  # a column that a function requires is missing
                    raise HTTPException(422, str(error)) from error
        self._note([score for group in scores for score in group])
        return _json(ScoreResponse(scores))

    async def references(self, request: Request) -> Response:
        async with self._admission.admit():
            body = await _body(request, ReferenceRequest)
            prompts = [prompt.prompt() for prompt in body.prompts]
            return _json(ReferenceResponse(await asyncio.to_thread(self._service.unusable_references, prompts)))

    async def _health(self) -> dict[str, object]:
        return {"ok": True, "functions": self._service.names, "samples": self._samples}

    @contextlib.contextmanager
    def _room_for(self, count: int) -> Iterator[None]:
        """A request that is larger than the room is taken when nothing else is there: it could never come otherwise."""
        if self._samples > 0 and self._samples + count > self._max_samples:
            message = f"{self._samples} samples are being graded, the limit is {self._max_samples}"
            raise HTTPException(429, message, {"Retry-After": str(RETRY_AFTER_S)})
        self._samples += count
        try:
            yield
        finally:
            self._samples -= count

    def _note(self, scores: list[Score]) -> None:
        for outcome, count in Tally(_outcome(score) for score in scores).items():
            self._outcomes.labels(outcome).inc(count)
        for score in scores:
            if score.reward is not None:
                self._rewards.observe(score.reward)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(self._service.start)
        yield
        await asyncio.to_thread(self._service.close)


def _outcome(score: Score) -> str:
    return "scored" if score.failure is None else score.failure.kind.value


async def _body(request: Request, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise HTTPException(400, str(error)) from error


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
