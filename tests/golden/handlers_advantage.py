"""advantages.json and gae.json."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quintet.algorithms import estimators as est
from quintet.algorithms.advantage import at_last_token

from .runner import Handler, NotOfferedError, choose, tensor

STD = {None: "none", 0: "population", 1: "sample"}
SINGLETON = {"formula": "zero", "zero": "zero", "mean_std1": "zero", "mean0_std1": "raw", "mean0": "raw", "raw": "raw"}


def _groups(i: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return tensor(i["rewards"]), torch.tensor(i["group_index"])


def _singleton(p: dict[str, Any], group: Tensor) -> str:
    name = p["singleton"]
    single = bool((torch.bincount(group) == 1).any())
    if single and (name == "nan" or (name == "formula" and p.get("ddof") == 1)):
        raise NotOfferedError("NaN for a group of one: quintet gives 0")
    return choose(SINGLETON, name, "a group of one:") if single else "zero"


def _grpo(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, group = _groups(i)
    std, singleton = choose(STD, p["ddof"], "ddof"), _singleton(p, group)
    return {"advantages": est.group_normalised(rewards, group, std=std, eps=p["eps"], singleton=singleton)}


def _grpo_varfloor(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    if p["floor"]:
        raise NotOfferedError("a floor under the variance (a bug fixed in verl)")
    rewards, group = _groups(i)
    return {"advantages": est.group_normalised(rewards, group, std=STD[p["ddof"]], eps=p["eps"])}


def _scored(i: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards and groups without the unscored (NaN) samples, and where they were."""
    rewards, group = _groups(i)
    given = ~rewards.isnan()
    return rewards[given], group[given], given


def _spread(values: Tensor, given: Tensor) -> Tensor:
    out = torch.zeros(len(given), dtype=values.dtype)
    out[given] = values
    return out


def _grpo_trl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, group, given = _scored(i)
    how = {"std": "none"} if p["scale"] == "none" else {"std": "sample", "scale": p["scale"], "eps": p["eps"]}
    return {"advantages": _spread(est.group_normalised(rewards, group, **how), given)}


def _rloo(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, group = _groups(i)
    return {"advantages": est.leave_one_out(rewards, group, singleton=_singleton(p, group))}


def _rloo_trl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, group, given = _scored(i)
    values = est.leave_one_out(rewards, group, normalise=bool(p["normalize"]), eps=p["eps"])
    return {"advantages": _spread(values, given)}


def _opo(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, group = _groups(i)
    lengths = tensor(i["mask"]).sum(dim=1)
    return {"advantages": est.length_weighted(rewards, group, lengths, singleton=_singleton(p, group))}


def _gpg(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, group = _groups(i)
    return {"advantages": est.gpg(rewards, group, singleton=_singleton(p, group))}


def _passk(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, group = _groups(i)
    advantage = est.pass_at_k(rewards, group)
    return {"sum_abs_by_group": [advantage[group == g].abs().sum() for g in group.unique()]}


def _batch_centre(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    return {"advantages": est.batch_centred(tensor(i["rewards"]))}


def _whitening(p: dict[str, Any]) -> dict[str, Any]:
    std = "sample" if p["var"] == "unbiased" else "population"
    return {"std": std, "eps": p["eps"], "eps_mode": "floor" if p["eps_mode"] == "clamp" else "add"}


def _rpp_baseline(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, group = _groups(i)
    mask = tensor(i["mask"])
    # verl takes 0 as the mean of a group of one
    singleton = "raw" if i["_framework"].startswith("verl") else "zero"
    centred = est.group_centred(rewards, group, singleton=singleton)
    return {"advantages": est.whiten(centred[:, None] * mask, mask, **_whitening(p))}


def has_hole(mask: Tensor) -> bool:
    """A masked position between two unmasked ones."""
    return bool(((mask[:, 1:] > mask[:, :-1]) & (mask.cumsum(1)[:, :-1] > 0)).any())


def _rpp(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    mask = tensor(i["mask"])
    if p["hole"] != "skip" and has_hole(mask):
        raise NotOfferedError("a tool span resets the return (a bug fixed in verl)")
    returns = est.returns_to_go(tensor(i["token_rewards"]), mask, gamma=p["gamma"])
    return {"returns_masked": returns, "advantages": est.whiten(returns, mask, **_whitening(p))}


def _rpp_openrlhf(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    rewards, mask = tensor(i["rewards"]), tensor(i["mask"])
    if "clip" in p:
        rewards = rewards.clamp(*p["clip"])
    token_rewards = at_last_token(rewards, mask) - p["kl_coef"] * tensor(i["kl"]) * mask
    returns = est.returns_to_go(token_rewards, mask, gamma=p["gamma"])
    advantages = est.whiten(returns, mask, std="population", eps=p["eps"], eps_mode="floor")
    return {"returns_masked": returns, "advantages_masked": advantages}


def _parts(p: dict[str, Any], i: dict[str, Any]) -> Tensor:
    group = torch.tensor(i["group_index"])
    return est.decoupled_parts(tensor(i["rewards"]), group, tensor(p["weights"]), eps=p["eps"])


def _gdpo_trl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    return {"advantages": est.standardise(_parts(p, i), eps=p["eps"])}


def _gdpo_verl(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    mask = tensor(i["mask"])
    return {"advantages": est.whiten(_parts(p, i)[:, None] * mask, mask)}


def _remax(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    token_rewards, mask = tensor(i["token_rewards"]), tensor(i["mask"])
    returns = est.returns_to_go(token_rewards, mask)
    return {"advantages": est.remax(token_rewards, tensor(i["baseline"]), mask), "returns": returns}


def _gae(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    mask = tensor(i["mask"])
    if p["hole"] == "zero" and has_hole(mask):
        raise NotOfferedError("tool tokens discount and count as value 0 (OpenRLHF)")
    adv, returns = est.gae(tensor(i["token_rewards"]), tensor(i["values"]), mask, gamma=p["gamma"], lam=p["lam"])
    return {"adv_raw_masked": adv, "returns_masked": returns, "adv_whitened_masked": est.whiten(adv, mask)}


def _gae_boot(p: dict[str, Any], i: dict[str, Any]) -> dict[str, Any]:
    adv, returns = est.gae(
        tensor(i["token_rewards"]),
        tensor(i["values"]),
        tensor(i["mask"]),
        gamma=p["gamma"],
        lam=p["lam"],
        bootstrap_N=tensor(i["bootstrap_value"]),
    )
    return {"adv_raw_masked": adv, "returns_masked": returns}


ADVANTAGE_HANDLERS: dict[str, Handler] = {
    "grpo": _grpo,
    "grpo_varfloor": _grpo_varfloor,
    "grpo_trl": _grpo_trl,
    "rloo": _rloo,
    "rloo_trl": _rloo_trl,
    "opo": _opo,
    "gpg": _gpg,
    "passk": _passk,
    "batch_center": _batch_centre,
    "rpp_baseline": _rpp_baseline,
    "rpp": _rpp,
    "rpp_openrlhf": _rpp_openrlhf,
    "gdpo_trl": _gdpo_trl,
    "gdpo_verl": _gdpo_verl,
    "remax": _remax,
    "gae": _gae,
    "gae_boot": _gae_boot,
}
