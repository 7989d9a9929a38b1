"""Held-out evaluation through the same rollout worker and reward service that training uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from quintet.controller.scoring import score_group
from quintet.protocols import RewardService, RolloutWorker
from quintet.types import Group, GroupId, Prompt, QuintetError, SamplingParams, Score

_EVAL_EPOCH = -1  # evaluation draws its random numbers under ids that training never uses


async def evaluate(
    rollout: RolloutWorker,
    reward: RewardService,
    prompts: list[Prompt],
    sampling: SamplingParams,
    version: int,
    *,
    rules: Sequence[str] = (),
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[str, float], list[Group]]:
    """`accuracy` (mean over prompts of the share of right samples), `pass_at_n`, `reward`, `length`, `n`, `unscored`,
    and `PART/mean` of every part where there are several.

    A sample is right when each of the parts `rules` (the verifiable ones) that has a value for it gives at least 1;
    where none has one, when its reward is at least 1. Samples that could not be scored leave numerator and
    denominator. Raises QuintetError when none could be scored.
    """
    groups = [Group(GroupId(p.id, _EVAL_EPOCH), p) for p in prompts]
    running = [asyncio.ensure_future(_run(rollout, reward, group, sampling, version)) for group in groups]
    try:
        for done, task in enumerate(asyncio.as_completed(running), start=1):
            await task
            on_progress(done, len(groups))
    finally:
        for unfinished in running:
            unfinished.cancel()
    verdicts = [v for g in groups if (v := _verdicts(g.scores, rules))]
    if not verdicts:
        failure = next((s.failure for g in groups for s in g.scores if s.failure is not None), None)
        raise QuintetError(f"no sample of the evaluation could be scored: {failure}")
    scores = [s for g in groups for s in g.scores]
    values = {
        "n": float(len(verdicts)),
        "accuracy": fmean(fmean(v) for v in verdicts),
        "reward": fmean(s.reward for s in scores if s.reward is not None),
        "length": fmean(sum(r.loss_mask) for g in groups for r in g.rollouts),
        "unscored": float(sum(s.reward is None for s in scores)),
    }
    if sampling.n > 1:
        values[f"pass_at_{sampling.n}"] = fmean(max(v) for v in verdicts)
    return values | _part_means(scores), groups


async def _run(
    rollout: RolloutWorker, reward: RewardService, group: Group, sampling: SamplingParams, version: int
) -> None:
    group.rollouts = await rollout.generate([group], sampling, version)
    group.scores = await score_group(reward, group)


def _verdicts(scores: list[Score], rules: Sequence[str]) -> list[float]:
    return [_is_right(s.reward, s.parts, rules) for s in scores if s.reward is not None]


def _is_right(reward: float, parts: Mapping[str, float | None], rules: Sequence[str]) -> float:
    said = [value for rule in rules if (value := parts.get(rule)) is not None]
    return float(min(said, default=reward) >= 1.0)


def _part_means(scores: list[Score]) -> dict[str, float]:
    names = sorted({name for score in scores for name in score.parts})
    values = {name: [v for s in scores if (v := s.parts.get(name)) is not None] for name in names}
    return {f"{name}/mean": fmean(v) for name, v in values.items() if v} if len(names) > 1 else {}
