"""Which groups are worth training, and how rewards and masks of samples are shaped. Torch-free."""

from __future__ import annotations

from statistics import fmean, pstdev

import msgspec

from quintet.algorithms.presets import Algorithm, Cell
from quintet.types import Experience, Group, QuintetError


def group_verdict(algorithm: Algorithm, group: Group) -> str | None:
    """Why the whole group should be replaced before training, or None. Unscored samples are left aside."""
    rewards = [score.reward for score in group.sample_scores if score.reward is not None]
    dynamic, mean_range = algorithm.find_filter("dynamic_sampling"), algorithm.find_filter("mean_range")
    if (dynamic is not None or mean_range is not None) and not rewards:
        return "unscored"
    if dynamic is not None and pstdev(rewards) <= dynamic.params["min_std"]:
        return "equal_rewards"
    if mean_range is not None and not mean_range.params["low"] < fmean(rewards) < mean_range.params["high"]:
        return "mean_out_of_range"
    return None


def refill_bound(algorithm: Algorithm) -> int | None:
    """Groups that a step may drop by `group_verdict`, in multiples of its own; None where no filter drops any."""
    bounds = [cell.params["max_refill"] for cell in algorithm.filters if "max_refill" in cell.params]
    return min(bounds, default=None)


def shape_samples(algorithm: Algorithm, experiences: list[Experience], max_tokens: int) -> list[Experience]:
    """New experiences with the row's sample filters applied in their order.

    `max_tokens`: the rollout's limit of new tokens. A length is the number of loss tokens: tool output is not the
    policy's. Raises `QuintetError` when the penalty's buffer is longer than `max_tokens`.
    """
    check_overlong_buffer(algorithm, max_tokens)
    return [_shape(algorithm.filters, e, max_tokens) for e in experiences]


def check_overlong_buffer(algorithm: Algorithm, max_tokens: int) -> None:
    """Raises `QuintetError` when the overlong penalty would start before the first token."""
    cell = algorithm.find_filter("overlong_penalty")
    if cell is not None and (cell.params["buffer"] or 0) > max_tokens:
        raise QuintetError(
            f"algorithm.filters overlong_penalty: buffer {cell.params['buffer']} is longer than rollout.max_tokens "
            f"{max_tokens}\nUse a buffer of at most {max_tokens} tokens"
        )


def _shape(filters: tuple[Cell, ...], e: Experience, max_tokens: int) -> Experience:
    length, reward, mask = sum(e.loss_mask), e.reward, e.loss_mask
    for cell in filters:
        if cell.name == "overlong_penalty" and reward is not None:
            reward += overlong_penalty(length, max_tokens, **cell.params)
        elif cell.name == "reward_clip" and reward is not None:
            reward = min(max(reward, cell.params["low"]), cell.params["high"])
        elif cell.name == "overlong_mask" and e.truncated:
            mask = [0] * len(mask)
    return msgspec.structs.replace(e, reward=reward, loss_mask=mask)


def overlong_penalty(length: int, max_tokens: int, *, buffer: int | None, factor: float = 1.0) -> float:
    """DAPO's soft punishment (arXiv:2503.14476, eq. 13): 0 up to max_tokens - buffer tokens, then linear to -factor.

    `buffer` None is a fifth of `max_tokens`, the paper's proportion.
    """
    width = max(1, max_tokens // 5) if buffer is None else buffer
    excess = length - (max_tokens - width)
    return -factor * min(max(excess / width, 0.0), 1.0)
