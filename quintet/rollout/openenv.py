"""Environments behind a server of OpenEnv (`openenv serve`, a container, a Space): one WebSocket session per episode.

Spoken is the protocol of its `/ws` route, as of openenv-core 0.3: `reset` and `step` messages, each answered by one of
type `observation` (`observation`, `reward`, `done`) or `error`.
"""

from __future__ import annotations

import json
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from quintet.rollout.environment import Action, EnvironmentFailure, Observation, Step, TextEnvironment
from quintet.types import Prompt

_MESSAGE_BYTES = 1 << 26


class OpenEnvEnvironment(TextEnvironment):
    """`url`: the server's, http(s) or ws(s). `action`: the field of its actions that takes the policy's text.
    `observation`: the field of its observations that the policy reads; None: all of it, as JSON.

    The prompt's metadata go to the environment's `reset` beside `seed`, which takes of them what it knows. The reward
    is the sum over the steps. An error that the server reports is a failure of the environment.
    """

    def __init__(
        self, url: str, *, action: str = "message", observation: str | None = None, limit_reward: float | None = 0.0
    ) -> None:
        super().__init__(limit_reward)
        self._url = "ws" + url.rstrip("/").removeprefix("http").removeprefix("ws") + "/ws"
        self._action = action
        self._observation = observation
        self._connection: ClientConnection | None = None

    async def reset(self, prompt: Prompt, seed: int) -> Observation | None:
        try:
            self._connection = await connect(self._url, max_size=_MESSAGE_BYTES)
        except (OSError, TimeoutError, WebSocketException) as error:
            raise EnvironmentFailure(f"{self._url} cannot be reached: {error or type(error).__name__}") from error
        return self._seen(await self._ask("reset", prompt.metadata | {"seed": seed}))

    async def step(self, action: Action) -> Step:
        answer = await self._ask("step", {self._action: action.text})
        reward = answer["reward"]
        return Step(self._seen(answer), done=answer["done"], reward=None if reward is None else float(reward))

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()  # the server ends the session with it

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        assert self._connection is not None, "reset comes first"
        try:
            await self._connection.send(json.dumps({"type": kind, "data": data}))
            message = json.loads(await self._connection.recv())
        except WebSocketException as error:
            raise EnvironmentFailure(f"{self._url} broke off in a {kind}: {error}") from error
        found: dict[str, Any] = message["data"]
        if message["type"] == "error":
            raise EnvironmentFailure(f"{self._url}: {kind}: {found.get('code')}: {found.get('message')}")
        return found

    def _seen(self, answer: dict[str, Any]) -> Observation:
        seen = answer["observation"]
        if self._observation is None:
            return [{"role": "user", "content": json.dumps(seen, ensure_ascii=False)}]
        if self._observation not in seen:
            raise EnvironmentFailure(
                f"environment.args.observation: {self._url} has no {self._observation!r}; it has {', '.join(seen)}",
                retryable=False,
            )
        return [{"role": "user", "content": str(seen[self._observation])}]
