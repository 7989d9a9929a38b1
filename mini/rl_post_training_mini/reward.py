"""Scores: a rule that checks the answer, a reward model, or a mixture of both.

Stands for: answer checkers, unit tests in a sandbox, a reward-model server. Grown-up version: quintet/reward/.

Here `alpha` weighs the *reward model*: reward = (1 − alpha)·rule + alpha·model. In the main package's mixture α
weighs the verifiable rule instead (α·verifiable + β·model + …): the same letter, the other term.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .clock import Clock, FakeClock
from .model import COUNTING, EOS, TinyReward
from .rollout import Rollout

SCORE_S = 0.001  # one response

Rule = Callable[[Sequence[int], Sequence[int]], float]


class Score(NamedTuple):
    reward: float
    rule: float
    model: float


class RewardModel(Protocol):
    def score(self, prompt: Sequence[int], response: Sequence[int]) -> float: ...


def right_answer(prompt: Sequence[int]) -> list[int]:
    """Counts on from the prompt's last digit: after 6 come 7, 8, 9 and the end token."""
    answer = [COUNTING[prompt[-1]]]
    while answer[-1] != EOS:
        answer.append(COUNTING[answer[-1]])
    return answer


def counting_rule(prompt: Sequence[int], response: Sequence[int]) -> float:
    """Share of right steps, 0 to 1; only the right answer itself gets 1 (too short or too long costs as well)."""
    right = sum(COUNTING.get(p) == t for p, t in zip((prompt[-1], *response), response, strict=False))
    return right / max(len(response), len(right_answer(prompt)))


@dataclass
class RewardService:
    alpha: float = 0.0  # 0: the rule alone, 1: the reward model alone
    model: RewardModel = field(default_factory=TinyReward)
    rule: Rule = counting_rule
    clock: Clock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        if not 0.0 <= self.alpha <= 1.0:
            raise ValueError(f"alpha must lie between 0 and 1, got {self.alpha}")

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        with self.clock.span("reward", f"score {len(rollouts)}"):
            self.clock.sleep(SCORE_S * len(rollouts))
            return [self._score(rollout) for rollout in rollouts]

    def _score(self, rollout: Rollout) -> Score:
        rule = self.rule(rollout.prompt, rollout.response)
        model = self.model.score(rollout.prompt, rollout.response)
        return Score((1.0 - self.alpha) * rule + self.alpha * model, rule, model)
