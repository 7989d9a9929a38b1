"""offpolicy.json."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quintet.algorithms import correction as cor
from quintet.algorithms import policy_loss as pl
from quintet.algorithms.aggregate import aggregate, count
from quintet.algorithms.policy_loss import LossInput, bounded_log_ratio

from .handlers_loss import loss_input, with_gradient
from .runner import Handler, NotOfferedError, tensor


def _mismatch(i: dict[str, Any]) -> tuple[Tensor, Tensor]:
    mask = tensor(i["mask"])
    return bounded_log_ratio(tensor(i["logp_train"]), tensor(i["logp_rollout"]), mask), mask


def _level(p: dict[str, Any]) -> str:
    if p["level"] == "token":
        return "token"
    return "sequence" if p["agg"] == "sum" else "geometric"


def _weights(p: dict[str, Any], i: dict[str, Any]) -> tuple[Tensor, Tensor]:
    log_ratio, mask = _mismatch(i)
    outside = "clip" if p["mode"] == "clip" else "mask"
    weights = cor.importance_weights(log_ratio, mask, level=_level(p), low=p["lo"], high=p["hi"], outside=outside)
    return weights, mask


def _is_weights(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    if p.get("ess") == "verl_jan":
        raise NotOfferedError("ESS of weights clamped from below (a bug fixed in verl)")
    weights, mask = _weights(p, i)
    tokens = weights[mask > 0]
    out = {"mean": tokens.mean(), "ess": cor.effective_sample_size(tokens) / tokens.numel()}
    if p["batch_norm"] and p["level"] == "token":
        weights = cor.batch_normalised(weights, mask)
    elif p["batch_norm"]:  # each sequence counts once
        weights = cor.batch_normalised(weights, (mask.cumsum(1) == 1).to(mask.dtype) * mask)
    return out | {"weights": weights * mask}


def _is_trl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    weights, _ = _weights(p, i)
    return {"weights": weights if p["level"] == "token" else weights[:, :1]}


def _bounds(metric: str, text: str) -> dict[str, Any]:
    """verl's threshold text. Its k1 bounds act on mu / pi, ours on pi / mu: they are mirrored."""
    numbers = [float(v) for v in text.split("_")]
    if metric != "k1":
        return {"metric": metric, "high": numbers[0]}
    low, high = numbers if len(numbers) == 2 else (1 / numbers[0], numbers[0])
    return {"metric": "ratio", "low": 1 / high, "high": 1 / low}


def _reject(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    log_ratio, mask = _mismatch(i)
    keep = mask > 0
    for option, threshold in zip(p["options"].split(","), p["thr"].split(","), strict=True):
        *_, reduce, metric = option.split("_")
        if reduce not in ("token", "mean", "sum", "max") or metric not in ("k1", "k2", "k3"):
            raise NotOfferedError(f"rejection {option}")
        keep &= cor.rejection_mask(log_ratio, mask, reduce=reduce, **_bounds(metric, threshold))
    return {"mask": keep, "masked_fraction": 1 - keep.sum() / mask.sum()}


def _areal_selection(rs: dict[str, Any], log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(kept mask, weights, share filtered) of AReaL's rejection sampling."""
    metric = rs["metric"].removeprefix("kl_")
    sequence = rs["level"] == "sequence"
    level = "geometric" if sequence and metric == "ratio" else "token"
    reduce = rs["agg"] if sequence else "token"
    if rs["action"] == "clamp":
        weights = cor.importance_weights(log_ratio, mask, level=level, low=rs["lo"], high=rs["hi"])
        inside = cor.rejection_mask(log_ratio, mask, metric=metric, reduce=reduce, low=rs["lo"], high=rs["hi"])
        return mask, weights * mask, 1 - inside.sum() / mask.sum()
    keep = cor.rejection_mask(log_ratio, mask, metric=metric, reduce=reduce, low=rs["lo"], high=rs["hi"])
    weights = cor.importance_weights(log_ratio, mask, level=level) * keep
    return keep.to(mask.dtype), weights, 1 - keep.sum() / mask.sum()


def _areal(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    keep, weights, filtered = _areal_selection(p, *_mismatch(i))
    return {"mask": keep, "weights": weights, "filtered": filtered}


def _openrlhf(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    x = loss_input(i)
    log_ratio = bounded_log_ratio(x.old_logprobs_BT, tensor(i["logp_rollout"]), x.mask_BT)
    if p["type"] in ("tis", "icepop"):
        outside = "clip" if p["type"] == "tis" else "mask"
        weights = cor.importance_weights(log_ratio, x.mask_BT, low=p["lo"], high=p["hi"], outside=outside)
    elif p["type"] == "seq-mask-tis":
        keep = cor.rejection_mask(log_ratio, x.mask_BT, reduce="mean", low=p["lo"], high=p["hi"])
        weights = cor.importance_weights(log_ratio, x.mask_BT) * keep
    else:
        raise NotOfferedError(f"correction {p['type']}")
    loss_BT = weights * pl.ppo(x, eps_low=p["eps_low"], eps_high=p["eps_high"]).loss_BT
    return with_gradient(aggregate(loss_BT, x.mask_BT, count(x.mask_BT), "token-mean"), x.logprobs_BT)


def _decoupled(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    mask, new, prox = tensor(i["mask"]), tensor(i["logp_new"]).requires_grad_(), tensor(i["logp_prox"])
    x = LossInput(
        logprobs_BT=new,
        old_logprobs_BT=prox,
        sampler_logprobs_BT=tensor(i["logp_behav"]),
        advantages_BT=tensor(i["advantages"]),
        mask_BT=mask,
        log_ratio_BT=bounded_log_ratio(new, prox, mask),
    )
    log_ratio = bounded_log_ratio(prox, x.sampler_logprobs_BT, mask)
    weights = torch.ones_like(mask)  # AReaL weighs with pi_prox / mu only beside a rejection rule
    if p["rs"] is not None:
        _, weights, _ = _areal_selection(p["rs"], log_ratio, mask)
    loss_BT = weights * pl.ppo(x, eps_low=p["eps_low"], eps_high=p["eps_high"], dual_clip=p.get("dual_c")).loss_BT
    return with_gradient(aggregate(loss_BT, mask, count(mask), "token-mean"), new)


def _m2po(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    log_ratio, mask = _mismatch(i)
    return {"mask": cor.second_moment_mask(log_ratio, mask, threshold=p["thr"])}


def _keep(i: dict[str, Any], advantages_B: Tensor, delta: float) -> Tensor:
    mask = tensor(i["mask"])
    return cor.off_policy_sequence_mask(
        advantages_B[:, None].expand_as(mask), tensor(i["logp_new"]), tensor(i["logp_sampling"]), mask, delta=delta
    )


def _opsm(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    return {"keep": _keep(i, tensor(i["advantages"]), p["thr"])[:, 0]}


def _opsm_loss(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    x = loss_input(i)
    keep = _keep(i, tensor(i["seq_adv"]), p["thr"])
    loss_BT = pl.ppo(x, eps_low=p["eps_low"], eps_high=p["eps_high"]).loss_BT * keep
    return with_gradient(aggregate(loss_BT, x.mask_BT, count(x.mask_BT), "seq-mean-token-mean"), x.logprobs_BT)


def _ess(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    weights = tensor(i["weights"])
    ess = cor.effective_sample_size(weights)
    return {"ess": ess, "ess_fraction": ess / torch.numel(weights)}


OFFPOLICY_HANDLERS: dict[str, Handler] = {
    "is_weights": _is_weights,
    "is_trl": _is_trl,
    "reject": _reject,
    "areal_rs": _areal,
    "openrlhf_is": _openrlhf,
    "decoupled_ppo": _decoupled,
    "m2po": _m2po,
    "opsm": _opsm,
    "opsm_loss": _opsm_loss,
    "ess": _ess,
}
