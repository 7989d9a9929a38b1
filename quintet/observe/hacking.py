"""Reward hacking, seen in the metrics: a learned score that rises while a verifiable one falls.

For every pair of a trained-on learned part (reward model, judge) and a verifiable one (a rule, weighted or only
watched with weight 0), after every step:

- `reward/correlation/MODEL~RULE`: Pearson correlation of the two parts' step means over the last `SHORTEST` steps.
- `reward/hacking_alarm/MODEL~RULE`: 0, or the number of steps over which the score rose and the rule fell, both by a
  one-sided Mann-Kendall test (H. B. Mann, Econometrica 13, 1945) at `ALPHA`. The last 20, 40, ..., 640 steps are
  tried, so that a slow drift is seen too. Two independent trendless series raise a window's alarm with probability
  `ALPHA` squared, one in forty thousand.
- `reward/hacking_alarm`: 1 when any pair's is not 0.

A function of the rows of `metrics.jsonl` alone, so that a resumed run goes on with the same numbers.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from quintet.reward.config import RewardConfig, RewardFunctionConfig, Role

SHORTEST, LONGEST = 20, 640  # steps of a window
ALPHA = 0.005

_MODELS = ("model", "remote_model", "judge")
_RULES = ("number", "exact", "math", "code", "reasoning_gym")

Pair = tuple[str, str]  # learned part, verifiable part


class HackingMonitor:
    """`rows`: what the run has logged so far, one dict per step, ascending."""

    def __init__(self, config: RewardConfig, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._history: dict[Pair, deque[tuple[float, float]]] = {
            pair: deque(maxlen=LONGEST) for pair in watched_pairs(config)
        }
        for row in rows:
            self._remember(row)

    def note(self, values: Mapping[str, float]) -> dict[str, float]:
        """The metrics above for the step whose values these are; nothing where there is no pair to watch."""
        self._remember(values)
        out: dict[str, float] = {}
        for (model, rule), history in self._history.items():
            correlation = _correlation(list(history)[-SHORTEST:])
            if correlation is not None:
                out[f"reward/correlation/{model}~{rule}"] = correlation
            out[f"reward/hacking_alarm/{model}~{rule}"] = float(opposite_trends(history))
        if out:
            out["reward/hacking_alarm"] = float(any(v for k, v in out.items() if "/hacking_alarm/" in k))
        return out

    def _remember(self, values: Mapping[str, Any]) -> None:
        for (model, rule), history in self._history.items():
            both = values.get(f"reward/{model}/mean"), values.get(f"reward/{rule}/mean")
            if both[0] is not None and both[1] is not None:
                history.append((both[0], both[1]))


def watched_pairs(config: RewardConfig) -> list[Pair]:
    """Every learned part that is trained on, with every verifiable one."""
    models = [f.part_name for f in config.functions if role_of(f) == "model" and f.weight > 0]
    return [(model, rule) for model in models for rule in verifiable_parts(config)]


def verifiable_parts(config: RewardConfig) -> list[str]:
    """The parts whose 1 means right."""
    return [f.part_name for f in config.functions if role_of(f) == "rule"]


def role_of(function: RewardFunctionConfig) -> Role:
    """As the recipe says, else by its kind; a user's own function is `other` until the recipe says more."""
    if function.role is not None:
        return function.role
    return "model" if function.fn in _MODELS else "rule" if function.fn in _RULES else "other"


def opposite_trends(history: Sequence[tuple[float, float]]) -> int:
    """The shortest window, in steps, over which the first series rose and the second fell; 0 when there is none."""
    series = np.asarray(history, dtype=np.float64).reshape(-1, 2)
    window = SHORTEST
    while window <= min(len(series), LONGEST):
        recent = series[-window:]
        if mann_kendall(recent[:, 0]) < ALPHA and mann_kendall(-recent[:, 1]) < ALPHA:
            return window
        window *= 2
    return 0


def mann_kendall(values: np.ndarray) -> float:
    """p-value of the one-sided test against a rising trend: normal approximation with ties and continuity correction.

    S = sum over i < j of sign(x_j - x_i); Var S = [n(n-1)(2n+5) - sum over ties t(t-1)(2t+5)] / 18.
    """
    n = len(values)
    s = float(np.sign(values[None, :] - values[:, None])[np.triu_indices(n, 1)].sum())
    ties = np.unique(values, return_counts=True)[1].astype(np.float64)
    variance = (n * (n - 1) * (2 * n + 5) - float((ties * (ties - 1) * (2 * ties + 5)).sum())) / 18
    if s <= 0 or variance <= 0:
        return 1.0
    return 0.5 * math.erfc((s - 1) / math.sqrt(2 * variance))


def _correlation(history: Sequence[tuple[float, float]]) -> float | None:
    """None below three steps, or where one of the two does not move."""
    if len(history) < 3:
        return None
    first, second = zip(*history, strict=True)
    if len(set(first)) == 1 or len(set(second)) == 1:
        return None
    return statistics.correlation(first, second)
