"""How the values of several reward functions become one reward per sample.

    reward = sum over the terms of  weight x gate x normalise(value)

- A part that abstains (None) has no term. A sample on which every weighted part abstains is unscored.
- `normalise` is a fixed map of one value, or a statistic of the sample's own group. There are no batch or running
  statistics on purpose: groups are scored as they come, so that those would depend on the order of arrival, and a
  resumed run would give other rewards than the uninterrupted one.
- A gate closes a term (to 0) where another part's value is below its bound. Where that other part abstains, whether
  the condition holds is unknown, and the gated part abstains too. Group statistics are taken over the samples whose
  gate is open: a part that counts only among right answers is compared among right answers.
- A part of weight 0 is watched: its values are kept for metrics, its faults cost no sample.

`Score.parts` always holds the values as the functions gave them, unweighted, ungated and not normalised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from quintet.reward.config import Normalize, RewardFunctionConfig
from quintet.reward.errors import FunctionFailed
from quintet.reward.sample import Verdict
from quintet.types import Failure, FailureKind, Score


@dataclass(frozen=True)
class Fault:
    """A reward function failed on a sample."""

    function: str
    kind: FailureKind
    reason: str
    retryable: bool = False

    @classmethod
    def of(cls, function: str, error: FunctionFailed) -> Fault:
        return cls(function, error.kind, error.message, error.retryable)

    @property
    def failure(self) -> Failure:
        return Failure(self.kind, f"reward function `{self.function}`: {self.reason}", self.retryable)


Outcome = Verdict | Fault


@dataclass(frozen=True)
class Gate:
    """Open where the value of `part` is at least `at_least`. `skip`: the gated function is not called elsewhere."""

    part: str
    at_least: float = 1.0
    skip: bool = False

    def is_open(self, value: float | None) -> bool | None:
        """None: unknown, because the part abstained."""
        return None if value is None else value >= self.at_least


@dataclass(frozen=True)
class Term:
    """One part of the mixture. `task_types` None: prompts of every type."""

    name: str
    weight: float = 1.0
    normalize: Normalize = "none"
    range: tuple[float, float] = (0.0, 1.0)
    gate: Gate | None = None
    task_types: tuple[str, ...] | None = None

    @classmethod
    def of(cls, config: RewardFunctionConfig) -> Term:
        gate = config.gate
        return cls(
            config.part_name,
            config.weight,
            config.normalize,
            config.range or (0.0, 1.0),
            None if gate is None else Gate(gate.part, gate.at_least, gate.closed == "skip"),
            None if config.task_types is None else tuple(config.task_types),
        )

    def takes(self, task_type: str) -> bool:
        return self.task_types is None or task_type in self.task_types


def required(terms: Sequence[Term]) -> frozenset[str]:
    """The parts without whose value a sample has no reward: those with a weight, and what a weighted gate looks at."""
    weighted = [term for term in terms if term.weight != 0.0]
    return frozenset({t.name for t in weighted} | {t.gate.part for t in weighted if t.gate is not None})


def first_fault(terms: Sequence[Term], outcomes: Sequence[Outcome]) -> Fault | None:
    """The first fault of a sample that costs it its reward."""
    faults = [outcome for outcome in outcomes if isinstance(outcome, Fault)]
    return next((fault for fault in faults if fault.function in required(terms)), None)


def combine_group(terms: Sequence[Term], columns: Sequence[Sequence[Outcome]]) -> list[Score]:
    """One score per sample of a group; `columns[k][i]` is the outcome of term k on sample i."""
    rows = list(zip(*columns, strict=True))
    values = [{t.name: o.value for t, o in zip(terms, row, strict=True) if isinstance(o, Verdict)} for row in rows]
    added = [_term_values(term, values) for term in terms]
    return [_score(terms, row, values[i], [column[i] for column in added]) for i, row in enumerate(rows)]


def _score(
    terms: Sequence[Term],
    outcomes: Sequence[Outcome],
    values: dict[str, float | None],
    added: Sequence[float | None],
) -> Score:
    info: dict[str, Any] = {}
    for term, outcome in zip(terms, outcomes, strict=True):
        if isinstance(outcome, Fault):
            info[term.name] = {"failure": f"{outcome.kind.value}: {outcome.reason}"}
        elif outcome.info:
            info[term.name] = outcome.info
    fault = first_fault(terms, outcomes)
    if fault is not None:
        return Score(None, values, fault.failure, {k: v for k, v in info.items() if k != fault.function})
    counted = [t.weight * v for t, v in zip(terms, added, strict=True) if t.weight != 0.0 and v is not None]
    if not counted:
        return Score(None, values, Failure(FailureKind.UNSCORED, "every reward function abstained"), info)
    return Score(sum(counted), values, None, info)


def _term_values(term: Term, values: Sequence[Mapping[str, float | None]]) -> list[float | None]:
    """The term of each sample before its weight: None where it has none, 0 behind a closed gate."""
    gates = [True if term.gate is None else term.gate.is_open(row.get(term.gate.part)) for row in values]
    known = [row.get(term.name) if is_open else None for row, is_open in zip(values, gates, strict=True)]
    return [0.0 if gate is False else v for gate, v in zip(gates, normalise(term, known), strict=True)]


def normalise(term: Term, values: Sequence[float | None]) -> list[float | None]:
    """The values of one group, mapped as `term.normalize` says; None stays None.

    none        v
    range       (v - low) / (high - low), clipped to 0..1
    sigmoid     1 / (1 + exp(-v))
    group_std   (v - mean) / standard deviation (population) of the group's known values; 0 when all are equal
    group_rank  (rank - 1) / (n - 1) among the n known values, ties sharing their mean rank; 0.5 for a single one
    """
    match term.normalize:
        case "none":
            return list(values)
        case "range":
            low, high = term.range
            return [None if v is None else min(max((v - low) / (high - low), 0.0), 1.0) for v in values]
        case "sigmoid":
            return [None if v is None else _sigmoid(v) for v in values]
        case "group_std":
            return _standardised(values)
        case "group_rank":
            return _ranked(values)


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1.0 / (1.0 + math.exp(-value))
    small = math.exp(value)
    return small / (1.0 + small)


def _standardised(values: Sequence[float | None]) -> list[float | None]:
    known = [v for v in values if v is not None]
    if len(set(known)) <= 1:
        return [None if v is None else 0.0 for v in values]
    mean, spread = fmean(known), pstdev(known)
    return [None if v is None else (v - mean) / spread for v in values]


def _ranked(values: Sequence[float | None]) -> list[float | None]:
    known = sorted(v for v in values if v is not None)
    if len(known) == 1:
        return [None if v is None else 0.5 for v in values]
    middle = {v: known.index(v) + (known.count(v) - 1) / 2 for v in set(known)}
    return [None if v is None else middle[v] / (len(known) - 1) for v in values]
