"""The tests run on the folder they lie in, whether the package is installed or not."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from rl_post_training_mini import Controller, FakeClock, TrainConfig
from rl_post_training_mini.stage import Stage, new_run


@pytest.fixture
def stage() -> Stage:
    return Stage(write=lambda line: None)


@pytest.fixture
def make_run() -> Callable[..., Controller]:
    """A small run of the counting task on its own virtual clock."""

    def make(seed: int = 0, learning_rate: float = 8.0, **options: object) -> Controller:
        options = {"prompts_per_step": 4, "group_size": 4, **options}
        return new_run(FakeClock(), seed, TrainConfig(learning_rate, seed=seed), **options)

    return make
