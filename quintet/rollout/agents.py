"""Programs of the user's own as rollout workers: each sample is a run of the program against the gateway.

    async def agent(task: AgentTask) -> float | None: ...

A plain function runs in a thread. The reward is what it returns, or what it posted to /rl/reward. What it raises, and
taking too long, are failures of kind environment and time-out; a program that made no call has nothing to train on and
is a failure too. A program that ends because the conversation outgrew the context is the policy's doing: outcome
`context`, worth 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from quintet.models.tokenizer import PromptEncoder, Tokenizer
from quintet.rollout.config import EnvironmentConfig
from quintet.rollout.gateway import Gateway
from quintet.rollout.sessions import Session
from quintet.rollout.streaming import TokenWorker
from quintet.serving import listen
from quintet.types import (
    Episode,
    Failure,
    FailureKind,
    FinishReason,
    Group,
    GroupId,
    Health,
    Rollout,
    SamplingParams,
    WeightRef,
)

_log = logging.getLogger(__name__)
MODEL = "policy"


@dataclass(frozen=True)
class AgentTask:
    """What a program is given: where the model is, and the prompt. `sample` tells the runs of one prompt apart."""

    base_url: str
    api_key: str
    messages: list[dict[str, Any]]
    answer: str | None
    metadata: dict[str, Any]
    sample: int
    model: str = MODEL
    args: dict[str, Any] = field(default_factory=dict)  # environment.args of the recipe


Agent = Callable[[AgentTask], Awaitable[float | None] | float | None]


class _Server(uvicorn.Server):
    """Leaves signals to the program that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class AgentRolloutWorker:
    """`RolloutWorker` whose samples are runs of `agent`; `worker` answers its calls through a gateway on loopback.

    `on_start` is awaited before samples are begun, outside their time limit.
    """

    def __init__(
        self,
        worker: TokenWorker,
        agent: Agent,
        *,
        tokenizer: Tokenizer,
        encoder: PromptEncoder,
        config: EnvironmentConfig,
        context: int,
        template_kwargs: dict[str, Any] | None = None,
        on_start: Callable[[], Awaitable[None]] | None = None,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.worker = worker
        self._agent = agent
        self._encoder = encoder
        self._config = config
        self._on_start = on_start
        self._on_close = on_close
        self._gateway = Gateway(
            worker,
            tokenizer,
            model=MODEL,
            key=secrets.token_urlsafe(24),
            context=context,
            timeout_s=config.timeout_s,
            template_kwargs=template_kwargs,
        )
        self._places = asyncio.Semaphore(config.max_sessions)
        self._threads = ThreadPoolExecutor(config.max_sessions, thread_name_prefix="agent")
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._url = ""

    async def generate(
        self, prompts: list[Group], sampling_params: SamplingParams, weight_version: int
    ) -> list[Rollout]:
        await self._start()
        if self._on_start is not None:
            await self._on_start()
        indices = range(sampling_params.first_sample, sampling_params.first_sample + sampling_params.n)
        runs = [self._run(group, index, sampling_params) for group in prompts for index in indices]
        return list(await asyncio.gather(*runs))

    async def update_weights(self, weight_path: WeightRef, version: int) -> None:
        await self.worker.update_weights(weight_path, version)

    async def health_check(self) -> Health:
        return await self.worker.health_check()

    async def abort(self, group_ids: list[GroupId]) -> None:
        await self.worker.abort(group_ids)

    async def close(self) -> None:
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._on_close is not None:
            await self._on_close()
        await self.worker.close()  # type: ignore[attr-defined]

    async def _start(self) -> None:
        async with self._starting:
            if self._server is not None:
                return
            bound = listen("127.0.0.1", 0)
            self._url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
            options = uvicorn.Config(self._gateway.app(), log_level="warning", timeout_graceful_shutdown=1)
            self._server = _Server(options)
            self._serving = asyncio.ensure_future(self._server.serve(sockets=[bound]))
            while not self._server.started and not self._serving.done():
                await asyncio.sleep(0.005)

    async def _run(self, group: Group, index: int, params: SamplingParams) -> Rollout:
        async with self._places:
            session = self._gateway.open(group.group_id, index, sampling=params)
            try:
                reward = await asyncio.wait_for(self._call(self._task(group, index, session)), self._config.timeout_s)
            except TimeoutError:
                message = f"the agent took longer than {self._config.timeout_s:g} s"
                return self._result(session, group, Failure(FailureKind.TIMEOUT, message, retryable=True))
            except Exception as error:
                if session.out_of_context:
                    return self._outgrown(session, group)
                message = f"the agent raised {type(error).__name__}: {error}"
                _log.warning("%s", message, exc_info=True)
                return self._result(session, group, Failure(FailureKind.ENVIRONMENT, message, retryable=True))
            finally:
                self._gateway.close(session)
            if reward is not None:
                session.record.reward = reward
            return self._result(session, group, None)

    async def _call(self, task: AgentTask) -> float | None:
        agent: Any = self._agent
        if inspect.iscoroutinefunction(agent):
            result = await agent(task)
        else:
            result = await asyncio.get_running_loop().run_in_executor(self._threads, agent, task)
        return None if result is None else float(result)

    def _task(self, group: Group, index: int, session: Session) -> AgentTask:
        prompt = group.prompt
        messages = self._encoder.conversation(prompt.messages, prompt.text)
        return AgentTask(
            self._url, session.key, messages, prompt.answer, prompt.metadata, index, args=self._config.args
        )

    def _outgrown(self, session: Session, group: Group) -> Rollout:
        """The policy talked until the context was full: its own doing, worth 0 unless a reward was posted."""
        rollout = self._result(session, group, None)
        rollout.episode = Episode("context", session.record.reward or 0.0)
        rollout.finish_reason = FinishReason.LENGTH
        return rollout

    def _result(self, session: Session, group: Group, failure: Failure | None) -> Rollout:
        rollout = session.main_rollout()
        if rollout is None:
            failure = failure or Failure(FailureKind.ENVIRONMENT, "the agent made no call", retryable=False)
            return Rollout(
                group.group_id,
                session.record.sample_index,
                group.prompt.token_ids,
                [],
                "",
                [],
                [],
                [],
                FinishReason.FAILED,
                failure=failure,
            )
        rollout.episode = Episode("done", session.record.reward)
        if failure is not None:
            rollout.failure, rollout.finish_reason = failure, FinishReason.FAILED
        return rollout
