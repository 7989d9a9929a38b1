"""How a group is scored: training and evaluation ask the reward service in the same way."""

from __future__ import annotations

from quintet.protocols import RewardService
from quintet.types import Group, Score


async def score_group(reward: RewardService, group: Group) -> list[Score]:
    """One score per rollout. A failed rollout carries its failure and is never shown to a grader."""
    healthy = [r for r in group.rollouts if r.failure is None]
    seen = Group(group_id=group.group_id, prompt=group.prompt, rollouts=healthy)
    scores = iter((await reward.score([seen]))[0])
    return [next(scores) if r.failure is None else Score(None, failure=r.failure) for r in group.rollouts]
