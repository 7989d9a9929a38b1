"""policy_losses.json, aggregation.json, flashreinforce.json, kl.json and end_to_end.json."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quintet.algorithms import policy_loss as pl
from quintet.algorithms.advantage import at_last_token
from quintet.algorithms.aggregate import Counts, aggregate, count
from quintet.algorithms.estimators import batch_centred, group_normalised
from quintet.algorithms.kl import full_kl, kl_estimate
from quintet.algorithms.logprobs import token_logprobs
from quintet.algorithms.policy_loss import LossInput, LossTerms, bounded_log_ratio, sequence_mean

from .runner import Handler, NotOfferedError, choose, tensor

AGGREGATIONS = {
    "token-mean": "token-mean",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "seq-mean": "seq-mean-token-mean",  # of losses that are the same for all tokens of a row
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-sum": "seq-mean-token-sum",  # of losses that are the same for all tokens of a row
    "seq-mean-token-sum-norm": "seq-mean-token-sum-norm",
    "sum-over-BL": "seq-mean-token-sum-norm",
    "token-sum": "token-sum",
}


def aggregation(p: dict[str, Any]) -> dict[str, Any]:
    mode = choose(AGGREGATIONS, p["agg"], "aggregation")
    extra = {"length_eps": p.get("len_eps", 0.0)} if mode == "seq-mean-token-mean" else {}
    return {"mode": mode, **extra}


def step_counts(p: dict[str, Any], mask: Tensor) -> Counts:
    counts = count(mask, p.get("L"))
    rows = float(mask.shape[0]) if p.get("count_rows") == "all" else counts.sequences
    return Counts(p.get("global_tokens", counts.tokens), p.get("global_seqs", rows), counts.max_length)


def loss_input(i: dict[str, Any], bound: float = pl.LOG_RATIO_BOUND) -> LossInput:
    mask, new = tensor(i["mask"]), tensor(i["logp_new"]).requires_grad_()
    old = tensor(i["logp_old"])
    return LossInput(
        logprobs_BT=new,
        old_logprobs_BT=old,
        sampler_logprobs_BT=old,
        advantages_BT=tensor(i["advantages"]),
        mask_BT=mask,
        log_ratio_BT=bounded_log_ratio(new, old, mask, bound),
        rewards_B=tensor(i["scores"]) if "scores" in i else None,
    )


def terms_of(p: dict[str, Any], x: LossInput) -> LossTerms:
    kind = p["kind"]
    bounds = {k: p[k] for k in ("eps_low", "eps_high") if k in p}
    if kind == "ppo":
        return pl.ppo(x, **bounds, dual_clip=p.get("dual_c"))
    if kind in ("gspo", "luspo"):
        return pl.gspo(x, **bounds)
    if kind == "gspo_token":
        return pl.gspo_token(x, **bounds)
    if kind == "cispo":
        return pl.cispo(x, eps_low=1 - p["lo"], eps_high=p["hi"] - 1)
    if kind == "gmpo":
        return pl.gmpo(x, **bounds)
    if kind == "sapo":
        return pl.sapo(x, tau_pos=p["tau_pos"], tau_neg=p["tau_neg"])
    if kind in ("topr_seq", "topr_token"):
        return pl.topr(x, level="sequence" if kind == "topr_seq" else "token")
    if kind in ("dppo_tv", "dppo_kl"):
        deltas = {"delta_low": p["d_low"], "delta_high": p["d_high"]}
        return pl.dppo(x, divergence=kind.removeprefix("dppo_"), cap=p["c"], **deltas)
    if kind == "vespo":
        return pl.vespo(x, k_pos=2.0, lambda_pos=3.0, k_neg=3.0, lambda_neg=2.0)
    if kind == "dro":
        return pl.dro(x, beta=p["beta"])
    if kind == "reinforce":
        return pl.reinforce(x)
    raise NotOfferedError(f"policy loss {kind}")


def with_gradient(loss: Tensor, leaf: Tensor) -> dict[str, Any]:
    loss.backward()
    assert leaf.grad is not None
    return {"loss": loss.detach(), "grad": leaf.grad}


def _policy(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    x = loss_input(i)
    how = aggregation(p)
    loss_BT = terms_of(p, x).loss_BT
    if "is_weights" in i:
        loss_BT = loss_BT * tensor(i["is_weights"])
    return with_gradient(aggregate(loss_BT, x.mask_BT, step_counts(p, x.mask_BT), **how), x.logprobs_BT)


def _agg(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    how = aggregation(p)
    loss, mask = tensor(i["loss_mat"]).requires_grad_(), tensor(i["mask"])
    return with_gradient(aggregate(loss, mask, step_counts(p, mask), **how), loss)


def _micro(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    how = aggregation(p)
    loss, mask = tensor(i["loss_mat"]).requires_grad_(), tensor(i["mask"])
    counts = step_counts(p, mask)
    shares = [aggregate(loss[rows], mask[rows], counts, **how) for rows in p["splits"]]
    total = torch.stack(shares).sum()
    both = with_gradient(total, loss)
    whole = aggregate(loss.detach(), mask, counts, **how)
    return {
        "global_loss": whole,
        "global_grad": both["grad"],
        "sum_micro": both["loss"],
        "micro_losses": [float(s.detach()) for s in shares],
    }


def _dp(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    how = aggregation(p)
    loss, mask = tensor(i["loss_mat"]), tensor(i["mask"])
    counts = step_counts(p, mask)
    ranks = [p["dp"] * float(aggregate(loss[rows], mask[rows], counts, **how)) for rows in p["splits"]]
    whole = aggregate(loss, mask, counts, **how)
    return {"rank_losses": ranks, "mean_over_ranks": sum(ranks) / len(ranks), "global_loss": whole}


def _trl_accumulation(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    if p["loss_type"] not in ("dapo", "cispo"):
        raise NotOfferedError("a mean of micro-batch means")
    x = loss_input(i)
    if p["loss_type"] == "dapo":
        loss_BT = pl.ppo(x, eps_low=p["eps_low"], eps_high=p["eps_high"]).loss_BT
    else:  # TRL's epsilon_high is the cap itself
        loss_BT = pl.cispo(x, eps_low=None, eps_high=p["eps_high"] - 1).loss_BT
    counts = count(x.mask_BT)
    shares = [aggregate(loss_BT[rows], x.mask_BT[rows], counts, "token-mean") for rows in p["splits"]]
    return with_gradient(torch.stack(shares).sum(), x.logprobs_BT)


def _flash(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    mask, new, rewards = tensor(i["mask"]), tensor(i["logp_new"]).requires_grad_(), tensor(i["rewards"])
    advantages = batch_centred(rewards)
    behaviour = tensor(i["logp_behavior"])
    x = LossInput(
        logprobs_BT=new,
        old_logprobs_BT=behaviour,
        sampler_logprobs_BT=behaviour,
        advantages_BT=advantages[:, None].expand_as(mask),
        mask_BT=mask,
        log_ratio_BT=bounded_log_ratio(new, behaviour, mask),
        entropy_BT=tensor(i["entropies"]),
        rewards_B=-tensor(i["failures"]) + 0.5,  # failed: not above 0
    )
    terms = pl.flash_reinforce(x, delta=p["delta"], entropy_keep=p["q"])
    out = with_gradient(aggregate(terms.loss_BT, mask, count(mask), "seq-mean-token-mean"), new)
    distance = sequence_mean(pl.bernoulli_kl(behaviour, new.detach()), mask)[:, 0]
    return out | {"advantages": advantages, "seq_kl": distance, "admitted": distance <= p["delta"]}


CLAMPS: dict[str | None, dict[str, Any]] = {
    None: {},
    "verl": {"bound": 20.0, "clamp": 10.0},
    "out10": {"clamp": 10.0},
}
ESTIMATORS = {name: name for name in ("k1", "k2", "k3", "abs")}
KL_NAMES = {"low_var_kl": "k3", "kl": "k1", "mse": "k2"}


def _kl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    logp, ref = tensor(i["logp"]).requires_grad_(), tensor(i["ref_logp"])
    kind, clamps = choose(ESTIMATORS, p["kind"], "KL estimator"), choose(CLAMPS, p["clamp"], "KL clamp")
    value = kl_estimate(kind, logp, ref, **clamps, gradient=p.get("st") or "own")
    value.sum().backward()
    return {"kl": value, "grad": logp.grad}


def _kl_unbiased(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    logp, ref = tensor(i["logp"]).requires_grad_(), tensor(i["ref_logp"])
    value = kl_estimate("k3", logp, ref, log_ratio=logp - tensor(i["logp_old"]))
    value.sum().backward()
    return {"kl": value, "grad": logp.grad}


def _ppo_with_kl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    x = loss_input(i)
    log_ratio = x.log_ratio_BT if p["bias_corr"] else None
    kl_BT = kl_estimate("k3", x.logprobs_BT, tensor(i["ref_logp"]), log_ratio=log_ratio)
    loss_BT = pl.ppo(x, eps_low=p["eps_low"], eps_high=p["eps_high"]).loss_BT + p["beta"] * kl_BT
    return with_gradient(aggregate(loss_BT, x.mask_BT, count(x.mask_BT), **aggregation(p)), x.logprobs_BT)


def _kl_loss(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    logp, ref, mask = tensor(i["logp"]).requires_grad_(), tensor(i["ref_logp"]), tensor(i["mask"])
    kind = p["kind"].removesuffix("+")
    name = choose(ESTIMATORS | KL_NAMES, kind, "KL estimator")
    gradient = "k2" if p["kind"].endswith("+") else "own"
    clamps = CLAMPS["verl"] if name == "k3" else {}
    value = kl_estimate(name, logp, ref, gradient=gradient, **clamps)
    return with_gradient(p["coef"] * aggregate(value, mask, count(mask), **aggregation(p)), logp)


def _kl_reward(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, mask = tensor(i["rewards"]), tensor(i["mask"])
    return {"token_rewards_masked": at_last_token(rewards, mask) - p["beta"] * tensor(i["kl"]) * mask}


def _kl_reward_logp(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, mask = tensor(i["rewards"]), tensor(i["mask"])
    kl_BT = kl_estimate("k1", tensor(i["logp"]), tensor(i["ref_logp"])) * mask
    return {
        "token_rewards_masked": at_last_token(rewards, mask) - p["beta"] * kl_BT,
        "mean_kl": sequence_mean(kl_BT, mask).mean(),
    }


def _kl_reward_sequence(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    kl_BT = kl_estimate("k1", tensor(i["logp"]), tensor(i["ref_logp"])) * tensor(i["mask"])
    return {"rewards": tensor(i["rewards"]) - p["beta"] * kl_BT.sum(dim=1)}


def _kl_full(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    logits = tensor(i["logits"]).requires_grad_()
    value = full_kl(logits, tensor(i["ref_logits"]), p["direction"])
    value.sum().backward()
    return {"kl": value, "grad_logits": logits.grad}


def _end_to_end(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    logits, mask, old = tensor(i["logits"]).requires_grad_(), tensor(i["mask"]), tensor(i["logp_old"])
    new = token_logprobs(logits, torch.tensor(i["tokens"]), temperature=p["temperature"])
    advantages = group_normalised(tensor(i["rewards"]), torch.tensor(i["group_index"]), eps=p["adv_eps"])
    x = LossInput(
        logprobs_BT=new,
        old_logprobs_BT=old,
        sampler_logprobs_BT=old,
        advantages_BT=advantages[:, None].expand_as(mask),
        mask_BT=mask,
        log_ratio_BT=bounded_log_ratio(new, old, mask),
    )
    loss_BT = pl.ppo(x, eps_low=p["eps_low"], eps_high=p["eps_high"]).loss_BT
    if p["beta"]:
        loss_BT = loss_BT + p["beta"] * kl_estimate("k3", new, tensor(i["ref_logp"]))
    out = with_gradient(aggregate(loss_BT, mask, count(mask), **aggregation(p)), logits)
    return {"advantages": advantages, "logprobs": new, "loss": out["loss"], "grad_logits": out["grad"]}


LOSS_HANDLERS: dict[str, Handler] = {
    "policy": _policy,
    "agg": _agg,
    "micro": _micro,
    "dp": _dp,
    "trl_accum": _trl_accumulation,
    "flash": _flash,
    "kl": _kl,
    "kl_unbiased": _kl_unbiased,
    "ppo_kl_loss": _ppo_with_kl,
    "kl_loss": _kl_loss,
    "kl_reward": _kl_reward,
    "kl_reward_logp": _kl_reward_logp,
    "kl_reward_seq": _kl_reward_sequence,
    "kl_full": _kl_full,
    "e2e": _end_to_end,
}
