"""Experiences in, experiences with advantages out: grouping, KL in the reward, and the estimator of the row.

All maths in float64. Grouping is by `group_id`, never by prompt: the same prompt drawn twice is two groups.
Unscored samples (`reward` None) are in no statistic, get 0, and lose their loss mask, so that they leave numerator
and denominator of the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from quintet.algorithms import estimators
from quintet.algorithms.correction import second_moment_mask
from quintet.algorithms.kl import kl_estimate
from quintet.algorithms.plugins import load_custom
from quintet.algorithms.presets import Algorithm, Cell
from quintet.types import Experience, ExperienceBatch, GroupId, QuintetError


@dataclass(frozen=True)
class AdvantageInput:
    """What an estimator sees: the N scored samples of a step, padded to T response tokens, float64.

    `token_rewards_NT` holds the reward at the last loss token and, where the row says so, the KL penalty of each
    token; `rewards_N` is its total (of a sample without loss tokens: its reward). `parts` are the unweighted values
    of the reward functions, None where one abstained.
    """

    rewards_N: Tensor
    group_N: Tensor  # int64, 0-based in order of first appearance
    mask_NT: Tensor
    token_rewards_NT: Tensor
    parts: list[dict[str, float | None]]
    values_NT: Tensor | None = None  # the critic's, where the row has one; 0 on masked tokens
    bootstrap_N: Tensor | None = None  # the critic's value after the last token of a truncated response, else 0
    greedy_rewards_N: Tensor | None = None  # of the group's greedy answer, where the row asks for one


Estimator = Callable[..., Tensor]


def compute_advantages(algorithm: Algorithm, batch: ExperienceBatch) -> ExperienceBatch:
    """A new batch with `advantage` and `advantages` filled and `advantage/*`, `reward/zero_std_frac` in its metrics.

    A custom estimator is `fn(x: AdvantageInput, **params) -> Tensor` of shape [N] (given to every loss token) or
    [N, T]. Raises `QuintetError` when that shape is wrong or `train.old` does not give what the row needs.
    """
    algorithm = algorithm.with_kl_coef(batch.kl_coef)
    scored = [e for e in batch.experiences if e.reward is not None]
    metrics = batch.metrics | {"reward/zero_std_frac": _zero_std_frac(batch.experiences)}
    filled: list[Experience] = []
    if scored:
        x, kl_NT = _input(algorithm, scored)
        advantages_NT, per_sample_N = _run(algorithm.advantage, x)
        if algorithm.correction is not None and algorithm.correction.name == "m2po":
            advantages_NT = advantages_NT * _m2po(algorithm.correction, scored, x.mask_NT)
        metrics |= _metrics(x, advantages_NT, kl_NT)
        for e, row_T, value in zip(scored, advantages_NT, per_sample_N.tolist(), strict=True):
            advantages = row_T[: len(e.response_ids)].tolist()
            filled.append(msgspec.structs.replace(e, advantage=value, advantages=advantages))
        if algorithm.needs_values:
            filled = _with_returns(filled, value_targets(x, **algorithm.advantage.params))
    done = iter(filled)
    experiences = [_unscored(e) if e.reward is None else next(done) for e in batch.experiences]
    return msgspec.structs.replace(batch, experiences=experiences, metrics=metrics)


def _unscored(e: Experience) -> Experience:
    n = len(e.response_ids)
    return msgspec.structs.replace(e, advantage=0.0, advantages=[0.0] * n, loss_mask=[0] * n)


def _with_returns(experiences: list[Experience], returns_NT: Tensor) -> list[Experience]:
    rows = zip(experiences, returns_NT.tolist(), strict=True)
    return [msgspec.structs.replace(e, returns=row[: len(e.response_ids)]) for e, row in rows]


def _pad(rows: list[list[float]] | list[list[int]], width: int) -> Tensor:
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)


def _double(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _input(algorithm: Algorithm, scored: list[Experience]) -> tuple[AdvantageInput, Tensor | None]:
    groups = {g: i for i, g in enumerate(dict.fromkeys(e.group_id for e in scored))}
    width = max(1, max(len(e.response_ids) for e in scored))
    mask_NT = _pad([e.loss_mask for e in scored], width)
    rewards_N = _double([e.reward for e in scored])
    if not rewards_N.isfinite().all():
        raise ValueError("a reward is not finite: the reward service must turn it into a failure")
    token_rewards_NT = at_last_token(rewards_N, mask_NT)
    kl_NT = None
    if algorithm.kl is not None and algorithm.kl.params["placement"] == "reward":
        kl_NT = _kl_in_reward(algorithm.kl, scored, mask_NT)
        token_rewards_NT = token_rewards_NT - algorithm.kl.params["coef"] * kl_NT
        rewards_N = rewards_N - algorithm.kl.params["coef"] * kl_NT.sum(dim=1)
    has_values = algorithm.needs_values
    if has_values and any(e.values is None for e in scored):
        raise ValueError("this advantage needs values: TrainWorker.prepare must fill them")
    if algorithm.needs_greedy and any(e.baseline is None for e in scored):
        raise ValueError("this advantage needs the reward of a greedy answer: the controller must fill `baseline`")
    x = AdvantageInput(
        rewards_N=rewards_N,
        group_N=torch.tensor([groups[e.group_id] for e in scored]),
        mask_NT=mask_NT,
        token_rewards_NT=token_rewards_NT,
        parts=[e.metadata.get("parts", {}) for e in scored],
        values_NT=_pad([e.values or [] for e in scored], width) if has_values else None,
        bootstrap_N=_double([e.bootstrap_value for e in scored]) if has_values else None,
        greedy_rewards_N=_double([e.baseline for e in scored]) if algorithm.needs_greedy else None,
    )
    return x, kl_NT


def at_last_token(rewards_N: Tensor, mask_NT: Tensor) -> Tensor:
    """The outcome reward at each row's last unmasked token, 0 elsewhere, [N, T]."""
    position_T = torch.arange(1, mask_NT.shape[1] + 1, dtype=mask_NT.dtype)
    last_N = (mask_NT * position_T).argmax(dim=1)
    out = torch.zeros_like(mask_NT)
    out[torch.arange(len(rewards_N)), last_N] = rewards_N
    return out * mask_NT


def _kl_in_reward(kl: Cell, scored: list[Experience], mask_NT: Tensor) -> Tensor:
    """Per-token estimate between the policy that is updated (proximal, else the sampler) and the reference, [N, T];
    of `full` the exact divergence of the policy as it is."""
    if kl.name == "full":
        if any(e.full_kl is None and any(e.loss_mask) for e in scored):
            raise ValueError("kl full with placement reward needs full_kl: TrainWorker.prepare must fill it")
        return _pad([e.full_kl or [] for e in scored], mask_NT.shape[1]) * mask_NT
    if any(e.ref_logprobs is None and any(e.loss_mask) for e in scored):
        raise ValueError("kl with placement reward needs ref_logprobs: TrainWorker.prepare must fill them")
    width = mask_NT.shape[1]
    ref_NT = _pad([e.ref_logprobs or [] for e in scored], width)
    logprobs_NT = _pad([e.logprobs if e.proximal_logprobs is None else e.proximal_logprobs for e in scored], width)
    valid = mask_NT > 0
    kl_NT = kl_estimate(
        kl.name,
        torch.where(valid, logprobs_NT, 0.0),
        torch.where(valid, ref_NT, 0.0),
        bound=kl.params["bound"],
        clamp=kl.params["clamp"],
    )
    return kl_NT * mask_NT


def _run(cell: Cell, x: AdvantageInput) -> tuple[Tensor, Tensor]:
    """Advantages [N, T], 0 where masked, and one number per sample [N]."""
    estimator = load_custom(cell.name, "advantage") if cell.custom else ESTIMATORS[cell.name]
    result = estimator(x, **cell.params)
    if result.shape == x.rewards_N.shape:
        return result[:, None] * x.mask_NT, result
    if result.shape != x.mask_NT.shape:
        raise QuintetError(
            f"algorithm.advantage {cell.name} returned shape {tuple(result.shape)}; it must be "
            f"{tuple(x.rewards_N.shape)} (one per sample) or {tuple(x.mask_NT.shape)} (one per token)"
        )
    advantages_NT = torch.where(x.mask_NT > 0, result, 0.0)
    return advantages_NT, advantages_NT.sum(dim=1) / x.mask_NT.sum(dim=1).clamp(min=1.0)


def _m2po(cell: Cell, scored: list[Experience], mask_NT: Tensor) -> Tensor:
    if any(e.proximal_logprobs is None and any(e.loss_mask) for e in scored):
        raise QuintetError(
            "algorithm.correction m2po compares old policy and sampler before the update: set train.old trainer"
        )
    width = mask_NT.shape[1]
    old_NT = _pad([e.proximal_logprobs or [] for e in scored], width)
    sampler_NT = _pad([e.logprobs for e in scored], width)
    return second_moment_mask(old_NT - sampler_NT, mask_NT, **cell.params)


def _zero_std_frac(experiences: list[Experience]) -> float:
    """Share of groups whose scored rewards are all equal: they teach nothing through the advantage."""
    rewards: dict[GroupId, set[float]] = {}
    for e in experiences:
        rewards.setdefault(e.group_id, set()).update(() if e.reward is None else (e.reward,))
    return sum(len(values) <= 1 for values in rewards.values()) / max(len(rewards), 1)


def _metrics(x: AdvantageInput, advantages_NT: Tensor, kl_NT: Tensor | None) -> dict[str, float]:
    values = advantages_NT[x.mask_NT > 0]
    out: dict[str, float] = {}
    if values.numel():
        out["advantage/mean"] = float(values.mean())
        out["advantage/std"] = float(values.std(correction=0))
        out["advantage/abs_max"] = float(values.abs().max())
        out["advantage/zero_frac"] = float((values == 0).double().mean())
    if kl_NT is not None:
        out["kl/in_reward"] = float(kl_NT.sum() / x.mask_NT.sum().clamp(min=1.0))
    return out


def _grpo(x: AdvantageInput, **params: Any) -> Tensor:
    return estimators.group_normalised(x.rewards_N, x.group_N, **params)


def _rloo(x: AdvantageInput, **params: Any) -> Tensor:
    return estimators.leave_one_out(x.rewards_N, x.group_N, **params)


def _remax(x: AdvantageInput, *, gamma: float) -> Tensor:
    assert x.greedy_rewards_N is not None, "the trait NEEDS_GREEDY fills them"
    return estimators.remax(x.token_rewards_NT, x.greedy_rewards_N, x.mask_NT, gamma=gamma)


def _opo(x: AdvantageInput, **params: Any) -> Tensor:
    return estimators.length_weighted(x.rewards_N, x.group_N, x.mask_NT.sum(dim=1), **params)


def _gpg(x: AdvantageInput, **params: Any) -> Tensor:
    return estimators.gpg(x.rewards_N, x.group_N, **params)


def _pass_at_k(x: AdvantageInput) -> Tensor:
    return estimators.pass_at_k(x.rewards_N, x.group_N)


def _batch_mean(x: AdvantageInput) -> Tensor:
    return estimators.batch_centred(x.rewards_N)


def _returns(x: AdvantageInput, *, gamma: float) -> Tensor:
    return estimators.returns_to_go(x.token_rewards_NT, x.mask_NT, gamma=gamma)


def _reinforce_pp(x: AdvantageInput, *, gamma: float, **whitening: Any) -> Tensor:
    returns_NT = estimators.returns_to_go(x.token_rewards_NT, x.mask_NT, gamma=gamma)
    return estimators.whiten(returns_NT, x.mask_NT, **whitening)


def _reinforce_pp_baseline(x: AdvantageInput, *, singleton: str, **whitening: Any) -> Tensor:
    centred_N = estimators.group_centred(x.rewards_N, x.group_N, singleton=singleton)
    return estimators.whiten(centred_N[:, None] * x.mask_NT, x.mask_NT, **whitening)


def _gdpo(x: AdvantageInput, *, weights: dict[str, float], eps: float, batch: str) -> Tensor:
    names = sorted({name for parts in x.parts for name in parts})
    unknown = sorted(set(weights) - set(names))
    if unknown or not names:
        raise QuintetError(
            f"algorithm.advantage gdpo: weights names {', '.join(unknown) or 'nothing'}, but the reward functions are "
            f"{', '.join(names) or 'none'}"
        )
    table = [[float("nan") if (v := parts.get(n)) is None else v for n in names] for parts in x.parts]
    weights_K = torch.tensor([weights.get(n, 1.0) for n in names], dtype=torch.float64)
    total_N = estimators.decoupled_parts(torch.tensor(table, dtype=torch.float64), x.group_N, weights_K, eps=eps)
    if batch == "token":
        return estimators.whiten(total_N[:, None] * x.mask_NT, x.mask_NT)
    return estimators.standardise(total_N, eps=eps)


def _gae(x: AdvantageInput, *, gamma: float, lam: float, whiten: bool, bootstrap: bool) -> Tensor:
    advantages_NT, _ = _gae_and_targets(x, gamma=gamma, lam=lam, bootstrap=bootstrap)
    return estimators.whiten(advantages_NT, x.mask_NT) if whiten else advantages_NT


def value_targets(x: AdvantageInput, *, gamma: float, lam: float, bootstrap: bool, **_: Any) -> Tensor:
    """What the critic is trained towards: V + GAE before any whitening, [N, T], 0 where masked."""
    return _gae_and_targets(x, gamma=gamma, lam=lam, bootstrap=bootstrap)[1]


def _gae_and_targets(x: AdvantageInput, *, gamma: float, lam: float, bootstrap: bool) -> tuple[Tensor, Tensor]:
    assert x.values_NT is not None, "the trait NEEDS_VALUES fills them"
    last_N = x.bootstrap_N if bootstrap else None
    return estimators.gae(x.token_rewards_NT, x.values_NT, x.mask_NT, gamma=gamma, lam=lam, bootstrap_N=last_N)


ESTIMATORS: dict[str, Estimator] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "remax": _remax,
    "opo": _opo,
    "gpg": _gpg,
    "pass_at_k": _pass_at_k,
    "gdpo": _gdpo,
    "gae": _gae,
    "batch_mean": _batch_mean,
    "returns": _returns,
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
}
