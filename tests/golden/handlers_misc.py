"""logprobs.json, metrics.json, preference.json, shaping.json and value_loss.json."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quintet.algorithms import preference as pref
from quintet.algorithms.aggregate import aggregate, count
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.filters import group_verdict, overlong_penalty
from quintet.algorithms.kl import kl_estimate
from quintet.algorithms.logprobs import entropy, kept_tokens, token_logprobs
from quintet.algorithms.policy_loss import ppo, sequence_mean
from quintet.algorithms.presets import resolve
from quintet.algorithms.value import explained_variance, value_loss
from quintet.types import Group, GroupId, Prompt, Score

from .handlers_loss import loss_input, with_gradient
from .runner import Handler, NotOfferedError, tensor


def _gradient(value: Tensor, leaf: Tensor) -> Tensor:
    """Of the sum of the finite values."""
    finite = value[value.isfinite()].sum()
    return torch.autograd.grad(finite, leaf, retain_graph=True)[0]


def _logprob(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    logits, tokens = tensor(i["logits"]).requires_grad_(), torch.tensor(i["tokens"])
    out: dict[str, Any] = {}
    kept = None
    if p["filter"] is not None:
        f = p["filter"]
        limits = {"top_k": f["k"], "top_p": f["p"], "min_p": f["min_p"]}
        kept = out["keep"] = kept_tokens(logits.detach(), temperature=p["temperature"], **limits)
    logp = out["logprobs"] = token_logprobs(logits, tokens, temperature=p["temperature"], kept_V=kept)
    ent = out["entropy"] = entropy(logits, temperature=p["temperature"], kept_V=kept)
    return out | {"grad_logprob": _gradient(logp, logits), "grad_entropy": _gradient(ent, logits)}


def _ties(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    return {"keep": kept_tokens(tensor(i["logits"]), top_k=p["k"])}


def _explained_variance(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    values, returns, mask = tensor(i["values"]), tensor(i["returns"]), tensor(i["mask"])
    return {"ev": explained_variance(values, returns, mask, ddof=p["ddof"], eps=p["eps"])}


def _mean(value: Tensor, mask: Tensor) -> Tensor:
    return (value.detach() * mask).sum() / mask.sum()


def _clip_fraction(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    x = loss_input(i)
    terms = ppo(x, eps_low=p["eps_low"], eps_high=p["eps_high"], dual_clip=p.get("c"))
    share = {k: _mean(v, x.mask_BT) for k, v in terms.indicators.items()}
    dual = share.get("clip_frac_dual")
    return {
        "clipfrac": share["clip_frac"],
        "clipfrac_lower": dual,
        "clipfrac_dual": dual,
        "approx_kl": _mean(-x.log_ratio_BT, x.mask_BT),
        "low": share["clip_frac_low"],
        "high": share["clip_frac_high"],
        "region": share["clip_frac_low"] + share["clip_frac_high"],
    }


def _clip_fraction_torchrl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    raise NotOfferedError("a clip fraction over padding")


def _approx_kl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    old, new, mask = tensor(i["logp_old"]), tensor(i["logp_new"]), tensor(i["mask"])
    return {name: _mean(kl_estimate(name, old, new), mask) for name in ("k1", "k2", "k3")}


def _entropy_mean(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    value, mask = tensor(i["entropy"]), tensor(i["mask"])
    token_mean = aggregate(value, mask, count(mask), "token-mean")
    return {"token_mean": token_mean, "trl": token_mean, "seq_mean": sequence_mean(value, mask).mean()}


def _pair(i: dict[str, Any]) -> list[Tensor]:
    return [tensor(i[k]).requires_grad_() for k in ("policy_chosen", "policy_rejected")]


def _pair_result(losses: Tensor, chosen: Tensor, rejected: Tensor) -> dict[str, Any]:
    losses.mean().backward()
    return {"losses": losses, "loss": losses.mean(), "grad_chosen": chosen.grad, "grad_rejected": rejected.grad}


def _dpo(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    chosen, rejected = _pair(i)
    if p["kind"] == "orpo":  # recorded with the sign it has inside TRL, where it is subtracted
        return _pair_result(-pref.orpo_odds(chosen, rejected, beta=p["beta"]), chosen, rejected)
    if p["kind"] == "simpo":
        averages = [_average(chosen, i.get("len_chosen")), _average(rejected, i.get("len_rejected"))]
        return _pair_result(
            pref.simpo(*averages, beta=p["beta"], gamma=p["gamma"] if "gamma" in p else p["simpo_gamma"]),
            chosen,
            rejected,
        )
    kind = {"ipo_avg": "ipo", "cdpo": "sigmoid"}.get(p["kind"], p["kind"])
    if kind not in ("sigmoid", "hinge", "ipo", "robust"):
        raise NotOfferedError(f"preference loss {kind}")
    ref_chosen, ref_rejected = tensor(i["ref_chosen"]), tensor(i["ref_rejected"])
    lengths = {}
    if p["kind"] == "ipo_avg":
        lengths = {"lengths_chosen": tensor(i["len_chosen"]), "lengths_rejected": tensor(i["len_rejected"])}
    losses = pref.dpo(
        chosen, rejected, ref_chosen, ref_rejected, kind=kind, beta=p["beta"], label_smoothing=p["ls"], **lengths
    )
    rewards = {
        "chosen_rewards": p["beta"] * (chosen - ref_chosen).detach(),
        "rejected_rewards": p["beta"] * (rejected - ref_rejected).detach(),
    }
    return _pair_result(losses, chosen, rejected) | rewards


def _average(total: Tensor, lengths: list[float] | None) -> Tensor:
    return total if lengths is None else total / tensor(lengths)


def _kto(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    chosen, rejected = _pair(i)
    baseline = pref.kto_baseline(tensor(i["kl_policy"]), tensor(i["kl_ref"]))
    desirable = torch.tensor([True] * len(chosen) + [False] * len(rejected))
    losses = pref.kto(
        torch.cat([chosen, rejected]),
        torch.cat([tensor(i["ref_chosen"]), tensor(i["ref_rejected"])]),
        desirable,
        baseline,
        beta=p["beta"],
        weight_desirable=p["w_d"],
        weight_undesirable=p["w_u"],
    )
    return _pair_result(losses, chosen, rejected) | {"z0": baseline}


def _bradley_terry(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    chosen, rejected = tensor(i["chosen"]).requires_grad_(), tensor(i["rejected"]).requires_grad_()
    margin = tensor(i["margin"]) if i.get("margin") is not None else None
    return _pair_result(pref.bradley_terry(chosen, rejected, margin, centre=p["center"]), chosen, rejected)


def _overlong(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    if not p["cap"] and max(i["lengths"]) > p["L_max"]:
        raise NotOfferedError("a penalty without a floor beyond the limit")
    limits = {"max_tokens": p["L_max"], "buffer": p["L_cache"], "factor": p["factor"]}
    return {"penalty": [overlong_penalty(length, **limits) for length in i["lengths"]]}


def _filter(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    cell: dict[str, Any] = {"name": "mean_range", "low": p.get("lo"), "high": p.get("hi")}
    if p["mode"] not in ("std", "range"):
        raise NotOfferedError(f"group filter {p['mode']}")
    if p["mode"] == "std":
        cell = {"name": "dynamic_sampling", "min_std": p["thr"]}
    algorithm = resolve(AlgorithmConfig(filters=[cell]))
    return {"keep": [group_verdict(algorithm, _group(rewards)) is None for rewards in i["groups"]]}


def _group(rewards: list[float]) -> Group:
    return Group(GroupId("p"), Prompt("p", []), scores=[Score(float(r)) for r in rewards])


def _value(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    mask, values = tensor(i["mask"]), tensor(i["values_new"]).requires_grad_()
    loss, clipped = value_loss(
        values, tensor(i["values_old"]), tensor(i["returns"]), clip=p["eps"], huber=p.get("delta")
    )
    factor = 1.0 if p.get("half", 1) else 2.0
    out = with_gradient(factor * aggregate(loss, mask, count(mask), p.get("agg", "token-mean")), values)
    return out | {"clipfrac": _mean(clipped, mask)}


MISC_HANDLERS: dict[str, Handler] = {
    "logprob": _logprob,
    "topk_ties": _ties,
    "ev": _explained_variance,
    "clipfrac": _clip_fraction,
    "clipfrac_trl": _clip_fraction,
    "clipfrac_torchrl": _clip_fraction_torchrl,
    "approx_kl": _approx_kl,
    "entropy_mean": _entropy_mean,
    "dpo": _dpo,
    "kto": _kto,
    "bt": _bradley_terry,
    "overlong": _overlong,
    "filter": _filter,
    "value": _value,
    "value_huber": _value,
}
