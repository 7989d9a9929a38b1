"""The agent gateway: any program that speaks OpenAI's API trains without a change.

It gets a base URL and a session's key. Every call is recorded with ids, log-probabilities and weight versions; ids that
were sampled are spliced into later prompts and never encoded again. The reward comes by `POST /rl/reward` with the same
key, or from whoever started the session.

    POST /rl/sessions            open a session (admin key): {id, api_key, base_url}; with `restore` from an export
    GET  /rl/sessions            all of them
    GET  /rl/sessions/{id}       one; .../export with every token, and the segments for training; DELETE forgets it
    POST /rl/sessions/{id}/resume    an expired one is open again
    POST /rl/reward              {"reward": 1.0} with the session's key: the session is finished
"""

from __future__ import annotations

import asyncio
import hmac
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.security import HTTPAuthorizationCredentials
from pydantic import BaseModel, ConfigDict, Field

from quintet.clock import Clock, RealClock
from quintet.models.tokenizer import Tokenizer
from quintet.rollout.http_app import document_model, key_of, make_app
from quintet.rollout.openai_api import MAX_N, ApiError, ChatRequest, CompletionRequest
from quintet.rollout.openai_routes import Credentials, Job, openai_router
from quintet.rollout.server import room
from quintet.rollout.sessions import Match, Session, SessionRecord, SessionState, restore
from quintet.rollout.streaming import TokenWorker
from quintet.types import Group, GroupId, Prompt, Rollout, SamplingParams


class OpenSession(BaseModel):
    model_config = ConfigDict(extra="forbid")

    group_id: str | None = Field(None, description="PROMPT/e0.o0.a0; none: one of its own")
    sample_index: int = Field(0, ge=0)
    restore: dict[str, Any] | None = Field(None, description="`record` of an export")


class Reward(BaseModel):
    model_config = ConfigDict(extra="forbid")

    reward: float = Field(allow_inf_nan=False)


@dataclass
class _RecordedJob(Job):
    """A job that goes into a session's record when it is answered."""

    session: Session
    match: Match
    on_close: Callable[[], None] = field(default=lambda: None)

    def finish(self, rollouts: list[Rollout], messages: Sequence[dict[str, Any]]) -> None:
        for rollout, message in zip(rollouts, messages, strict=True):
            self.session.add(self.match, rollout, message, self.params.temperature)

    def close(self) -> None:
        self.on_close()


class Gateway:
    """Sessions over one worker; a `Host` of OpenAI's routes. `timeout_s`: idle seconds until a session expires."""

    def __init__(
        self,
        worker: TokenWorker,
        tokenizer: Tokenizer,
        *,
        model: str,
        key: str,
        context: int,
        timeout_s: float = 600.0,
        template_kwargs: dict[str, Any] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.worker = worker
        self.tokenizer = tokenizer
        self.model = model
        self._key = key
        self._context = context
        self._timeout_s = timeout_s
        self._template_kwargs = template_kwargs or {}
        self._clock = clock or RealClock()
        self._sessions: dict[str, Session] = {}  # by id
        self._by_key: dict[str, Session] = {}
        self._ended: dict[str, asyncio.Event] = {}

    # -- sessions --------------------------------------------------------------------------------

    def open(
        self,
        group_id: GroupId | None = None,
        sample_index: int = 0,
        *,
        sampling: SamplingParams | None = None,
        record: SessionRecord | None = None,
    ) -> Session:
        """A new session, or one taken up from its record."""
        id_ = uuid.uuid4().hex
        record = record or SessionRecord(id_, group_id or GroupId(f"session-{id_}"), sample_index)
        if record.id in self._sessions:
            raise ApiError(409, f"there is a session {record.id} already")
        session = Session(record, used_at=self._clock.now(), sampling=sampling)
        self._sessions[record.id] = session
        self._by_key[session.key] = session
        self._ended[record.id] = asyncio.Event()
        if record.state is not SessionState.OPEN:
            self._ended[record.id].set()
        return session

    def find(self, id_: str) -> Session:
        self.expire()
        if id_ not in self._sessions:
            raise ApiError(404, f"there is no session {id_!r}", code="session_not_found")
        return self._sessions[id_]

    def all(self) -> list[Session]:
        self.expire()
        return list(self._sessions.values())

    def close(self, session: Session) -> None:
        """Forget a session; its key is worth nothing from then on."""
        self._end(session, session.record.state)
        del self._sessions[session.record.id], self._by_key[session.key], self._ended[session.record.id]

    def finish(self, session: Session, reward: float) -> None:
        """Raises ApiError 409 when it had its reward, or has expired."""
        if session.record.state is not SessionState.OPEN:
            raise ApiError(409, f"the session is {session.record.state}", code="session_not_open")
        session.record.reward = reward
        self._end(session, SessionState.FINISHED)

    def resume(self, session: Session) -> None:
        """An expired session takes calls again, with all it had."""
        if session.record.state is SessionState.FINISHED:
            raise ApiError(409, "the session is finished", code="session_not_open")
        session.record.state = SessionState.OPEN
        session.used_at = self._clock.now()
        self._ended[session.record.id] = asyncio.Event()

    def expire(self) -> None:
        """Close what has been idle for too long. A session with a call in progress is not idle."""
        for session in self._sessions.values():
            idle = self._clock.now() - session.used_at
            if session.record.state is SessionState.OPEN and not session.open_calls and idle > self._timeout_s:
                self._end(session, SessionState.EXPIRED)

    async def wait(self, session: Session) -> SessionState:
        """Until the session has its reward or has expired."""
        ended = self._ended[session.record.id]
        while not ended.is_set():
            left = session.used_at + self._timeout_s - self._clock.now()
            timer = asyncio.ensure_future(self._clock.sleep(max(left, 0.0) + 0.01))
            waiting = asyncio.ensure_future(ended.wait())
            await asyncio.wait([timer, waiting], return_when=asyncio.FIRST_COMPLETED)
            timer.cancel(), waiting.cancel()
            self.expire()
        return session.record.state

    def _end(self, session: Session, state: SessionState) -> None:
        session.record.state = state
        self._ended[session.record.id].set()

    # -- Host ------------------------------------------------------------------------------------

    def check_key(self, credentials: HTTPAuthorizationCredentials | None) -> str:
        return self._session(key_of(credentials)).key

    async def chat_job(self, key: str, request: ChatRequest) -> Job:
        session = self._session(key)
        if session.record.state is not SessionState.OPEN:
            raise ApiError(409, f"the session is {session.record.state}", code="session_not_open")
        match = session.match(self.tokenizer, request.messages, request.offered_tools, **self._template_kwargs)
        limit = request.max_completion_tokens or request.max_tokens
        params = _governed(request.sampling(self._room(session, match, limit)), session.sampling)
        params = msgspec.structs.replace(
            params,
            first_position=session.reserve(params.max_tokens),
            first_sample=session.record.sample_index * MAX_N,  # so that a group's sessions share no draw
        )
        group = Group(session.record.group_id, Prompt(session.record.group_id.prompt_id, match.prompt_ids))
        session.open_calls += 1
        return _RecordedJob([group], params, session, match, on_close=lambda: self._closed(session))

    def _room(self, session: Session, match: Match, limit: int | None) -> int:
        try:
            return room(len(match.prompt_ids), limit, self._context)
        except ApiError:
            session.out_of_context = match.turn is not None
            raise

    async def text_job(self, key: str, request: CompletionRequest) -> Job:
        raise ApiError(400, "the gateway serves chat completions only: there are no messages to match in plain text")

    def note(self, route: str, rollouts: Sequence[Rollout]) -> None:
        return

    def check_admin(self, credentials: HTTPAuthorizationCredentials | None) -> None:
        if not hmac.compare_digest(key_of(credentials).encode("utf-8", "surrogateescape"), self._key.encode()):
            raise ApiError(401, "wrong API key", code="invalid_api_key")

    def session_of(self, credentials: HTTPAuthorizationCredentials | None) -> Session:
        return self._session(key_of(credentials))

    def _session(self, key: str) -> Session:
        self.expire()
        session = self._by_key.get(key)
        if session is None:
            raise ApiError(401, "this key belongs to no session", code="invalid_api_key")
        session.used_at = self._clock.now()
        return session

    def _closed(self, session: Session) -> None:
        session.open_calls -= 1
        session.used_at = self._clock.now()

    def app(self) -> FastAPI:
        app = make_app("quintet gateway")
        app.include_router(openai_router(self))
        _session_routes(app, self)
        document_model(app, self.model)
        return app


def _governed(params: SamplingParams, run: SamplingParams | None) -> SamplingParams:
    """What the client asks for, within what the run samples with: the trainer computes log-probabilities under the
    run's temperature, so that a client's own would be trained wrongly."""
    if run is None:
        return params
    return msgspec.structs.replace(
        params,
        temperature=run.temperature,
        top_p=run.top_p,
        top_k=run.top_k,
        seed=run.seed,
        max_tokens=min(params.max_tokens, run.max_tokens),
    )


def _session_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/rl/sessions")
    async def open_session(body: OpenSession, request: Request, credentials: Credentials) -> dict[str, Any]:
        gateway.check_admin(credentials)
        record = None if body.restore is None else restore(body.restore)
        session = gateway.open(_group_id(body.group_id), body.sample_index, record=record)
        base_url = f"{request.base_url}v1"
        return {"id": session.record.id, "api_key": session.key, "base_url": base_url}

    @app.get("/rl/sessions")
    async def list_sessions(credentials: Credentials) -> dict[str, Any]:
        gateway.check_admin(credentials)
        return {"sessions": [_summary(session) for session in gateway.all()]}

    @app.get("/rl/sessions/{session_id}")
    async def show_session(session_id: str, credentials: Credentials) -> dict[str, Any]:
        gateway.check_admin(credentials)
        return _summary(gateway.find(session_id))

    @app.get("/rl/sessions/{session_id}/export")
    async def export_session(session_id: str, credentials: Credentials) -> dict[str, Any]:
        gateway.check_admin(credentials)
        session = gateway.find(session_id)
        return {
            "record": msgspec.to_builtins(session.record),
            "segments": [msgspec.to_builtins(segment) for segment in session.segments()],
        }

    @app.post("/rl/sessions/{session_id}/resume")
    async def resume_session(session_id: str, credentials: Credentials) -> dict[str, Any]:
        gateway.check_admin(credentials)
        session = gateway.find(session_id)
        gateway.resume(session)
        return _summary(session)

    @app.delete("/rl/sessions/{session_id}")
    async def delete_session(session_id: str, credentials: Credentials) -> dict[str, Any]:
        gateway.check_admin(credentials)
        session = gateway.find(session_id)
        gateway.close(session)
        return _summary(session)

    @app.post("/rl/reward")
    async def reward(body: Reward, credentials: Credentials) -> dict[str, Any]:
        session = gateway.session_of(credentials)
        gateway.finish(session, body.reward)
        return _summary(session)


def _summary(session: Session) -> dict[str, Any]:
    record = session.record
    return {
        "id": record.id,
        "group_id": str(record.group_id),
        "sample_index": record.sample_index,
        "state": str(record.state),
        "reward": record.reward,
        "turns": len(record.turns),
        "sampled_tokens": sum(len(turn.ids) for turn in record.turns),
    }


def _group_id(text: str | None) -> GroupId | None:
    if text is None:
        return None
    try:
        return GroupId.parse(text)
    except ValueError:
        raise ApiError(400, f"group_id: {text[:80]!r} is not of the form PROMPT/e0.o0.a0", param="group_id") from None
