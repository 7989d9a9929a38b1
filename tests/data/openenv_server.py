"""A guessing game behind OpenEnv's own server: `python openenv_server.py PORT`, where openenv-core is installed."""

import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str


class Letters(Environment[Guess, Hint, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, secret="b") -> Hint:
        self._secret, self._tries = secret, 0
        return Hint(hint=f"guess a letter (random seed {seed})")

    def step(self, action: Guess, timeout_s=None) -> Hint:
        self._tries += 1
        right = action.guess == self._secret
        text = f"right after {self._tries}" if right else "no"
        return Hint(hint=text, reward=float(right), done=right)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Letters, Guess, Hint, max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
