"""Groups -> experiences, and what a step's samples say about the run. Pure functions."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from statistics import correlation, fmean, pstdev

from quintet.algorithms.filters import shape_samples
from quintet.algorithms.presets import Algorithm
from quintet.types import Experience, ExperienceBatch, FinishReason, Group, Rollout, Score, expand_versions


def to_batch(groups: list[Group], *, step: int, version: int) -> ExperienceBatch:
    """All rollouts of a step in order of admission, then of sample index. Unscored ones keep `reward` None."""
    experiences = [
        to_experience(group, rollout, score)
        for group in groups
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
    ]
    return ExperienceBatch(step=step, version=version, experiences=experiences)


def step_batch(
    algorithm: Algorithm, groups: list[Group], *, step: int, version: int, max_tokens: int
) -> ExperienceBatch:
    """What a step trains on: `to_batch`, shaped by the algorithm's sample filters, with greedy answers as baselines.
    Training and replay share it."""
    batch = to_batch(groups, step=step, version=version)
    shaped = shape_samples(algorithm, batch.experiences, max_tokens)
    batch.experiences = with_baselines(groups, shaped)
    return batch


def with_baselines(groups: list[Group], experiences: list[Experience]) -> list[Experience]:
    """The samples of `to_batch`, each knowing the reward of its group's greedy answer, which leaves the batch.

    Samples whose greedy answer could not be scored count as unscored: there is nothing to compare them with.
    """
    rollouts = [r for g in groups for r in g.rollouts]
    greedy = {e.group_id: e.reward for e, r in zip(experiences, rollouts, strict=True) if r.greedy}
    samples = [e for e, r in zip(experiences, rollouts, strict=True) if not r.greedy]
    for e in samples:
        if e.group_id in greedy:
            e.baseline = greedy[e.group_id]
            e.reward = None if e.baseline is None else e.reward
    return samples


def to_experience(group: Group, rollout: Rollout, score: Score) -> Experience:
    oldest = rollout.min_version
    return Experience(
        group_id=group.group_id,
        sample_index=rollout.sample_index,
        prompt_ids=rollout.prompt_ids,
        response_ids=rollout.response_ids,
        logprobs=rollout.logprobs,
        loss_mask=list(rollout.loss_mask),
        reward=score.reward,
        weight_version=-1 if oldest is None else oldest,
        weight_versions=rollout.weight_versions,
        truncated=rollout.finish_reason is FinishReason.LENGTH,
        metadata={"parts": score.parts},
    )


def sample_metrics(groups: list[Group], version: int) -> dict[str, float]:
    """`reward/*`, `rollout/*`, `buffer/staleness_*` and `failures/*` of one step's samples."""
    rollouts = [r for g in groups for r in g.samples]
    scores = [s for g in groups for s in g.sample_scores]
    out = _reward_metrics(groups, scores)
    greedy = [s.reward for g in groups for r, s in zip(g.rollouts, g.scores, strict=True) if r.greedy]
    if known := [reward for reward in greedy if reward is not None]:
        out["reward/greedy_mean"] = fmean(known)
    lengths = [sum(r.loss_mask) for r in rollouts]
    out["rollout/response_length_mean"] = fmean(lengths)
    out["rollout/response_length_max"] = float(max(lengths))
    busy_s = max(r.timing.get("end_s", 0.0) for r in rollouts) - min(r.timing.get("start_s", 0.0) for r in rollouts)
    if busy_s > 0:
        out["rollout/tokens_per_s"] = sum(lengths) / busy_s
    out["rollout/truncated_frac"] = fmean(r.finish_reason is FinishReason.LENGTH for r in rollouts)
    staleness = [version - v for r in rollouts for v in expand_versions(r.weight_versions)]
    out["buffer/staleness_max"] = float(max(staleness, default=0))
    out["buffer/staleness_mean"] = fmean(staleness) if staleness else 0.0
    out |= _episode_metrics(rollouts)
    failures = Counter(s.failure.kind.value for s in scores if s.failure is not None)
    out |= {f"failures/{kind}": float(n) for kind, n in failures.items()}
    return out


def _episode_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """`environment/*`: turns and calls per episode, and the share of each outcome."""
    played = [(r.turns, r.episode) for r in rollouts if r.episode is not None and r.failure is None]
    if not played:
        return {}
    shares = Counter(episode.outcome for _, episode in played)
    return {
        "environment/turns_mean": fmean(turns for turns, _ in played),
        "environment/tool_calls_mean": fmean(episode.tool_calls for _, episode in played),
        "environment/malformed_calls_mean": fmean(episode.malformed_calls for _, episode in played),
    } | {f"environment/{outcome}_frac": n / len(played) for outcome, n in shares.items()}


def _reward_metrics(groups: list[Group], scores: list[Score]) -> dict[str, float]:
    rewards = [s.reward for s in scores if s.reward is not None]
    out = {"reward/unscored_frac": 1.0 - len(rewards) / len(scores)}
    if rewards:
        out |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
        out |= {"reward/min": min(rewards), "reward/max": max(rewards)}
    names = sorted({name for s in scores for name in s.parts})
    for name in names:
        values = [v for s in scores if (v := s.parts.get(name)) is not None]
        if values:
            out[f"reward/{name}/mean"] = fmean(values)
    for a, b in combinations(names, 2):
        out |= _agreement(a, b, scores)
    out |= _usage(scores)
    spreads = [{s.reward for s in g.sample_scores if s.reward is not None} for g in groups]
    out["reward/zero_std_frac"] = fmean(len(values) <= 1 for values in spreads)
    return out


def _agreement(a: str, b: str, scores: list[Score]) -> dict[str, float]:
    """Pearson correlation of two parts over the step's samples that have both; nothing where one does not vary."""
    both = [(x, y) for s in scores if (x := s.parts.get(a)) is not None and (y := s.parts.get(b)) is not None]
    if len({x for x, _ in both}) < 2 or len({y for _, y in both}) < 2:
        return {}
    return {f"reward/agreement/{a}~{b}": correlation(*zip(*both, strict=True))}


def _usage(scores: list[Score]) -> dict[str, float]:
    """What graders spent on the step: the numbers under `usage` in a part's info, summed over the samples."""
    out: Counter[str] = Counter()
    for score in scores:
        for name, info in score.info.items():
            usage = info.get("usage") if isinstance(info, dict) else None
            for what, amount in usage.items() if isinstance(usage, dict) else ():
                out[f"reward/{name}/{what}"] += amount
    return {name: float(amount) for name, amount in out.items()}
