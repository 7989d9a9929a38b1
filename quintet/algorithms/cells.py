"""The catalogue of cells: what can stand in each column of a preset, with its parameters. Torch-free.

The functions themselves live in `advantage.py`, `policy_loss.py`, `aggregate.py`, `kl.py`, `correction.py` and
`filters.py` under the same names and with the same parameters; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Trait(StrEnum):
    """What the rest of the program must know about a cell."""

    GROUP_RELATIVE = "group_relative"  # compares the samples of one group: a group of one teaches nothing
    REWARD_PARTS = "reward_parts"  # reads the parts of the score, not its total: a shaped total does nothing
    OWN_WEIGHTS = "own_weights"  # weighs against the sampler itself: a correction would count twice
    NEEDS_PROXIMAL = "needs_proximal"  # needs old log-probabilities of the whole batch before the update
    NEEDS_VALUES = "needs_values"  # needs a critic's value of every token, and trains the critic
    NEEDS_GREEDY = "needs_greedy"  # needs the reward of a greedy answer to each prompt, sampled beside the group
    NEEDS_REF = "needs_ref"  # offline: compares with a frozen reference policy
    NEEDS_PAIRS = "needs_pairs"  # offline: a chosen and a rejected answer in every row
    TRAINS_REWARD = "trains_reward"  # offline: the result is a reward model, not a policy


@dataclass(frozen=True)
class Param:
    """One option of a cell. `only_if` names another parameter and the values of it under which this one acts."""

    default: Any
    kind: type
    doc: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    only_if: tuple[str, tuple[Any, ...]] | None = None

    @property
    def optional(self) -> bool:
        return self.default is None


@dataclass(frozen=True)
class CellSpec:
    """A function that may stand in a column: what it computes, where from, with which parameters."""

    doc: str
    source: str = ""
    params: Mapping[str, Param] = field(default_factory=dict)
    traits: frozenset[Trait] = frozenset()


_GROUP = frozenset({Trait.GROUP_RELATIVE})
_GAMMA = Param(1.0, float, "discount per token of the policy", low=0.0)
_SINGLETON = Param("zero", str, "advantage of a group of one: 0, or its raw reward (as verl)", ("zero", "raw"))
_EPS_LOW = Param(0.2, float, "the ratio is clipped from below at 1 - eps_low", low=0.0, high=1.0)
_EPS_HIGH = Param(0.2, float, "the ratio is clipped from above at 1 + eps_high (clip-higher: above eps_low)", low=0.0)


def _whitening(std: str, eps_mode: str) -> dict[str, Param]:
    return {
        "std": Param(std, str, "variance with n (population) or n - 1 (sample) below", ("population", "sample")),
        "eps": Param(1e-8, float, "keeps the variance off 0", low=0.0),
        "eps_mode": Param(eps_mode, str, "variance + eps, or max(variance, eps)", ("add", "floor")),
    }


ADVANTAGES: Mapping[str, CellSpec] = {
    "grpo": CellSpec(
        "(r - mean of the group) / (its standard deviation + eps); exactly 0 when all rewards of a group are equal",
        "arXiv:2402.03300; std none: arXiv:2503.20783 (Dr. GRPO); scale batch: arXiv:2508.08221",
        {
            "std": Param(
                "population", str, "n (population), n - 1 (sample), or no division", ("population", "sample", "none")
            ),
            "eps": Param(1e-8, float, "added to the deviation", low=0.0, only_if=("std", ("population", "sample"))),
            "scale": Param(
                "group",
                str,
                "deviation of the group or of the whole batch",
                ("group", "batch"),
                only_if=("std", ("population", "sample")),
            ),
            "singleton": _SINGLETON,
        },
        _GROUP,
    ),
    "rloo": CellSpec(
        "r minus the mean reward of the *other* samples of the group",
        "arXiv:2402.14740",
        {
            "normalise": Param(False, bool, "then whiten over the batch (sample deviation)"),
            "eps": Param(1e-4, float, "added to that deviation", low=0.0, only_if=("normalise", (True,))),
            "singleton": _SINGLETON,
        },
        _GROUP,
    ),
    "remax": CellSpec(
        "discounted reward to go minus the reward of the greedy answer to the same prompt (one more rollout a group)",
        "arXiv:2310.10505",
        {"gamma": _GAMMA},
        frozenset({Trait.NEEDS_GREEDY}),
    ),
    "opo": CellSpec(
        "r minus the length-weighted mean reward of the group",
        "arXiv:2505.23585",
        {"singleton": _SINGLETON},
        _GROUP,
    ),
    "gpg": CellSpec(
        "(B / number of rewards that are not 0) x (r - mean of the group)",
        "arXiv:2504.02546",
        {"singleton": _SINGLETON},
        _GROUP,
    ),
    "pass_at_k": CellSpec(
        "the best sample of a group gets its lead over the second best, the others 0",
        "arXiv:2503.19595",
        {},
        _GROUP,
    ),
    "gdpo": CellSpec(
        "each reward function normalised within the group by itself, weighted, summed, then whitened over the batch",
        "arXiv:2601.05242",
        {
            "weights": Param({}, dict, "reward function -> weight in the sum; 1 where it is not named"),
            "eps": Param(1e-4, float, "added to the deviation of a group (sample) ", low=0.0),
            "batch": Param("sequence", str, "whitened over sequences, or over tokens", ("sequence", "token")),
        },
        frozenset({Trait.GROUP_RELATIVE, Trait.REWARD_PARTS}),
    ),
    "gae": CellSpec(
        "sum over later tokens l of (gamma lam)^l (r + gamma V_next - V), V the critic's (options: train.critic)",
        "arXiv:1506.02438",
        {
            "gamma": _GAMMA,
            "lam": Param(0.95, float, "1: reward to go minus V; 0: one step ahead", low=0.0, high=1.0),
            "whiten": Param(True, bool, "then whitened over all tokens of the batch (sample variance)"),
            "bootstrap": Param(
                False,
                bool,
                "a truncated response goes on with the critic's value after its last token; false: its reward is final",
            ),
        },
        frozenset({Trait.NEEDS_VALUES}),
    ),
    "batch_mean": CellSpec(
        "r minus the mean reward of the batch (one sample per prompt is enough)", "FlashREINFORCE (Hu et al., 2026)"
    ),
    "returns": CellSpec("discounted reward to go, no baseline", "Williams 1992", {"gamma": _GAMMA}),
    "reinforce_pp": CellSpec(
        "discounted reward to go, whitened over all tokens of the batch",
        "arXiv:2501.03262",
        {"gamma": _GAMMA, **_whitening("sample", "add")},
    ),
    "reinforce_pp_baseline": CellSpec(
        "r - mean of the group, given to every token, whitened over all tokens of the batch",
        "arXiv:2501.03262",
        {**_whitening("sample", "add"), "singleton": _SINGLETON},
        _GROUP,
    ),
}

POLICY_LOSSES: Mapping[str, CellSpec] = {
    "ppo": CellSpec(
        "-min(ratio A, clip(ratio, 1 - eps_low, 1 + eps_high) A)",
        "arXiv:1707.06347; dual clip arXiv:1912.09729; clip-higher arXiv:2503.14476",
        {
            "eps_low": _EPS_LOW,
            "eps_high": _EPS_HIGH,
            "dual_clip": Param(None, float, "c: where A < 0 the loss is at most -c A; null: no bound", low=1.0),
        },
    ),
    "gspo": CellSpec(
        "ppo on the length-normalised ratio of the whole sequence",
        "arXiv:2507.18071",
        {
            "eps_low": Param(3e-4, float, "as in ppo, on the sequence ratio", low=0.0),
            "eps_high": Param(4e-4, float, "as in ppo, on the sequence ratio", low=0.0),
        },
    ),
    "gspo_token": CellSpec(
        "gspo whose gradient is a token's own: for advantages that differ within a sequence",
        "arXiv:2507.18071",
        {
            "eps_low": Param(3e-4, float, "as in ppo, on the sequence ratio", low=0.0),
            "eps_high": Param(4e-4, float, "as in ppo, on the sequence ratio", low=0.0),
        },
    ),
    "cispo": CellSpec(
        "-sg[clip(ratio, 1 - eps_low, 1 + eps_high)] A log pi: a clipped token keeps its gradient",
        "arXiv:2506.13585; eps 0.2 on both sides is the two-sided TIS of the seed",
        {
            "eps_low": Param(None, float, "lower bound 1 - eps_low; null: none", low=0.0),
            "eps_high": Param(0.28, float, "upper bound 1 + eps_high", low=0.0),
        },
    ),
    "gmpo": CellSpec(
        "-A exp(mean over the sequence of the clipped log ratios)",
        "arXiv:2507.20673",
        {
            "eps_low": Param(0.4, float, "clip of the log ratio from below", low=0.0),
            "eps_high": Param(0.4, float, "clip of the log ratio from above", low=0.0),
        },
    ),
    "sapo": CellSpec(
        "-(4 / tau) sigmoid(tau (ratio - 1)) A: a soft gate in place of the clip",
        "arXiv:2511.20347",
        {
            "tau_pos": Param(1.0, float, "temperature where A > 0", low=1e-6),
            "tau_neg": Param(1.05, float, "temperature where A <= 0", low=1e-6),
        },
    ),
    "topr": CellSpec(
        "-w A log pi with w = 1 where the reward is above 0, else min(1, ratio), detached",
        "arXiv:2503.14286",
        {"level": Param("sequence", str, "ratio of the sequence (paper) or of the token", ("sequence", "token"))},
    ),
    "dppo": CellSpec(
        "-sg[min(ratio, cap)] A log pi, without tokens that moved too far from the old policy in A's direction",
        "arXiv:2602.04879",
        {
            "divergence": Param("tv", str, "difference of the token's probability, or its Bernoulli KL", ("tv", "kl")),
            "delta_low": Param(0.1, float, "bound where A <= 0", low=0.0),
            "delta_high": Param(0.1, float, "bound where A > 0", low=0.0),
            "cap": Param(20.0, float, "upper bound of the ratio", low=0.0),
        },
    ),
    "vespo": CellSpec(
        "-sg[e^lambda W^k e^(-lambda W)] A log pi, W the sequence's ratio (product)",
        "arXiv:2602.10693",
        {
            "k_pos": Param(2.0, float, "k where A >= 0", low=0.0),
            "lambda_pos": Param(3.0, float, "lambda where A >= 0", low=0.0),
            "k_neg": Param(3.0, float, "k where A < 0", low=0.0),
            "lambda_neg": Param(2.0, float, "lambda where A < 0", low=0.0),
        },
    ),
    "dro": CellSpec(
        "-(A log pi - beta / 2 (log pi - log pi_old)^2)",
        "arXiv:2405.19107",
        {"beta": Param(0.3, float, "weight of the squared log ratio", low=0.0)},
    ),
    "reinforce": CellSpec("-A log pi", "Williams 1992"),
    "flash_reinforce": CellSpec(
        "-m sg[pi / mu] A log pi; m = 0 for sequences whose mean Bernoulli KL to the sampler exceeds delta",
        "FlashREINFORCE (Hu et al., 2026)",
        {
            "delta": Param(5e-3, float, "trust gate of a sequence", low=0.0),
            "entropy_keep": Param(
                1.0, float, "share of failed sequences' tokens kept, highest entropy first", low=0.0, high=1.0
            ),
        },
        frozenset({Trait.OWN_WEIGHTS}),
    ),
}

_LENGTH_EPS = Param(0.0, float, "added to a sequence's length (verl: 1e-8)", low=0.0)
AGGREGATIONS: Mapping[str, CellSpec] = {
    "token-mean": CellSpec("sum over tokens / tokens of the optimizer step", "arXiv:2503.14476"),
    "seq-mean-token-mean": CellSpec(
        "each sequence's mean, averaged over the sequences of the optimizer step",
        "arXiv:2402.03300",
        {"length_eps": _LENGTH_EPS},
    ),
    "seq-mean-token-sum": CellSpec("each sequence's sum, averaged over the sequences", "arXiv:2503.20783"),
    "seq-mean-token-sum-norm": CellSpec(
        "as seq-mean-token-sum, divided by a constant length",
        "arXiv:2503.20783",
        {"length": Param(None, int, "the constant; null: rollout.max_tokens", low=1)},
    ),
    "token-sum": CellSpec("plain sum: the gradient grows with the batch"),
}


def _kl_params(placement: str) -> dict[str, Param]:
    """What every KL cell has."""
    return {
        "coef": Param(0.001, float, "weight of the penalty; 0 in the loss only measures kl/ref", low=0.0),
        "placement": Param(placement, str, "a term of the loss, or taken off the reward", ("loss", "reward")),
        "target": Param(
            None, float, "adaptive: coef follows the measured KL a token (kl/ref, kl/in_reward) to this", low=1e-9
        ),
        "horizon": Param(10_000, int, "samples over which coef grows or shrinks by a fifth at most (target)", low=1),
    }


KLS: Mapping[str, CellSpec] = {
    name: CellSpec(
        doc,
        "joschu.net/blog/kl-approx; adaptive coefficient arXiv:1909.08593",
        {
            **_kl_params(placement),
            "gradient": Param(
                "own",
                str,
                "the estimator's own, or k2's (the value stays)",
                ("own", "k2"),
                only_if=("placement", ("loss",)),
            ),
            "importance_weight": Param(
                False,
                bool,
                "times pi / pi_old, the gradient flowing through it (arXiv:2512.02556)",
                only_if=("placement", ("loss",)),
            ),
            "bound": Param(20.0, float, "the log ratio is clamped to +- this before exp", low=0.0),
            "clamp": Param(None, float, "the estimate is clamped to +- this (verl, OpenRLHF: 10)", low=0.0),
        },
    )
    for name, doc, placement in (
        ("k1", "log pi - log ref; unbiased, has no restoring gradient as a loss: for the reward", "reward"),
        ("k2", "(log pi - log ref)^2 / 2; on-policy its gradient is that of KL(pi || ref)", "loss"),
        ("k3", "ref/pi - 1 - log(ref/pi), never negative; on-policy its gradient is that of KL(ref || pi)", "loss"),
        ("abs", "|log pi - log ref|", "loss"),
    )
} | {
    "full": CellSpec(
        "the exact KL of the two next-token distributions over the whole vocabulary; in the loss its gradient is exact "
        "too, and the reference is run beside every forward of the policy",
        "arXiv:2306.13649; adaptive coefficient arXiv:1909.08593",
        {
            **_kl_params("loss"),
            "direction": Param("reverse", str, "reverse KL(pi || ref), forward KL(ref || pi)", ("reverse", "forward")),
        },
    )
}

_LEVEL = Param(
    "token",
    str,
    "ratio of the token, product over the sequence, or its geometric mean",
    ("token", "sequence", "geometric"),
)
CORRECTIONS: Mapping[str, CellSpec] = {
    "tis": CellSpec(
        "weight min(pi_old / mu, high): truncated importance sampling",
        "fengyao.notion.site/off-policy-rl",
        {
            "level": _LEVEL,
            "low": Param(None, float, "lower bound; null: none", low=0.0),
            "high": Param(2.0, float, "upper bound", low=0.0),
        },
    ),
    "mis": CellSpec(
        "weight pi_old / mu, 0 above high: masked importance sampling",
        "fengyao.notion.site/off-policy-rl",
        {"level": _LEVEL, "high": Param(2.0, float, "masked above", low=0.0)},
    ),
    "icepop": CellSpec(
        "weight pi_old / mu, 0 outside [low, high]",
        "arXiv:2510.18855",
        {
            "level": _LEVEL,
            "low": Param(0.5, float, "masked below", low=0.0),
            "high": Param(2.0, float, "masked above", low=0.0),
        },
    ),
    "reject": CellSpec(
        "0 where the mismatch of a token or a sequence is out of bounds",
        "richardli.xyz/rl-collapse",
        {
            "metric": Param("ratio", str, "pi_old / mu or an estimate of KL", ("ratio", "k1", "k2", "k3")),
            "reduce": Param(
                "token", str, "per token, or mean, sum, max over the sequence", ("token", "mean", "sum", "max")
            ),
            "low": Param(None, float, "lower bound; null: none"),
            "high": Param(2.0, float, "upper bound"),
            "weight": Param(
                "none", str, "what is kept weighs 1, or pi_old / mu", ("none", "token", "sequence", "geometric")
            ),
        },
    ),
    "decoupled": CellSpec(
        "weight pi_prox / mu, not truncated: decoupled PPO (train.old: trainer)", "arXiv:2110.00641, arXiv:2505.24298"
    ),
    "opsm": CellSpec(
        "0 for sequences with A < 0 whose mean log(mu / pi) exceeds delta",
        "arXiv:2512.02556",
        {
            "delta": Param(0.1, float, "bound of the mean log ratio"),
        },
    ),
    "m2po": CellSpec(
        "the tokens with the largest log(pi_old / mu)^2 of the batch get advantage 0 until the rest's mean is below",
        "arXiv:2510.01161",
        {"threshold": Param(0.04, float, "bound of the second moment", low=0.0)},
        frozenset({Trait.NEEDS_PROXIMAL}),
    ),
}

_MAX_REFILL = Param(
    10, int, "the run stops when a step drops more groups than this times rollout.groups_per_step", low=1
)
FILTERS: Mapping[str, CellSpec] = {
    "dynamic_sampling": CellSpec(
        "groups whose rewards are all equal are replaced",
        "arXiv:2503.14476",
        {
            "min_std": Param(1e-6, float, "equal: the rewards' standard deviation is at most this", low=0.0),
            "max_refill": _MAX_REFILL,
        },
    ),
    "mean_range": CellSpec(
        "groups whose mean reward is not strictly between low and high are replaced",
        "OpenRLHF dynamic filtering",
        {
            "low": Param(0.0, float, "mean reward must be above"),
            "high": Param(1.0, float, "mean reward must be below"),
            "max_refill": _MAX_REFILL,
        },
    ),
    "overlong_penalty": CellSpec(
        "up to -factor is added to the reward over the last `buffer` tokens before max_tokens",
        "arXiv:2503.14476, eq. 13",
        {
            "buffer": Param(
                None, int, "tokens before max_tokens where the penalty grows; null: a fifth of max_tokens", low=1
            ),
            "factor": Param(1.0, float, "largest penalty", low=0.0),
        },
    ),
    "overlong_mask": CellSpec("truncated samples leave the loss (not the baseline)", "arXiv:2503.14476"),
    "reward_clip": CellSpec(
        "the reward is clamped",
        "",
        {"low": Param(-1.0, float, "smallest reward"), "high": Param(1.0, float, "largest reward")},
    ),
}

_PAIRS = frozenset({Trait.NEEDS_PAIRS})
_LOSS = ("loss", ("sigmoid", "robust"))
OBJECTIVES: Mapping[str, CellSpec] = {
    "dpo": CellSpec(
        "-log sigmoid(beta h), h = log(pi/ref) of the chosen minus that of the rejected answer; hinge: max(0, 1 - beta "
        "h); ipo: (h - 1/(2 beta))^2; robust: the sigmoid loss, unbiased when a share label_smoothing of labels is "
        "flipped",
        "arXiv:2305.18290; hinge arXiv:2305.10425; ipo arXiv:2310.12036; robust arXiv:2403.00409",
        {
            "loss": Param("sigmoid", str, "the function of h", ("sigmoid", "hinge", "ipo", "robust")),
            "beta": Param(0.1, float, "how far the policy may move from the reference: less is further", low=1e-6),
            "label_smoothing": Param(
                0.0, float, "probability that a label is wrong (conservative DPO)", low=0.0, high=0.49, only_if=_LOSS
            ),
            "per_token": Param(
                True, bool, "log-ratios averaged over the answer's tokens (as TRL)", only_if=("loss", ("ipo",))
            ),
        },
        _PAIRS | {Trait.NEEDS_REF},
    ),
    "simpo": CellSpec(
        "-log sigmoid(beta (mean log pi of the chosen - of the rejected answer) - gamma); no reference",
        "arXiv:2405.14734",
        {
            "beta": Param(2.0, float, "scale of the mean log-probability", low=1e-6),
            "gamma": Param(1.0, float, "margin that the chosen answer must have", low=0.0),
        },
        _PAIRS,
    ),
    "orpo": CellSpec(
        "negative log-likelihood of the chosen answer - beta log sigmoid(log odds ratio of the mean log-probabilities)",
        "arXiv:2403.07691",
        {"beta": Param(0.1, float, "weight of the odds ratio", low=0.0)},
        _PAIRS,
    ),
    "kto": CellSpec(
        "w (1 - sigmoid(+-beta (log(pi/ref) - z0))), + for desirable answers; z0: the batch's KL on mismatched pairs",
        "arXiv:2402.01306",
        {
            "beta": Param(0.1, float, "as in dpo", low=1e-6),
            "weight_desirable": Param(1.0, float, "w of desirable answers", low=0.0),
            "weight_undesirable": Param(1.0, float, "w of the others", low=0.0),
        },
        frozenset({Trait.NEEDS_REF}),
    ),
    "bradley_terry": CellSpec(
        "-log sigmoid(r_chosen - r_rejected - margin) + centre (r_chosen + r_rejected)^2; margin is a column of the "
        "data (data.answers.margin)",
        "arXiv:2203.02155; margin arXiv:2307.09288; centring arXiv:2312.09244",
        {"centre": Param(0.0, float, "keeps rewards around 0 (0.01 is usual)", low=0.0)},
        _PAIRS | {Trait.TRAINS_REWARD},
    ),
    "likelihood": CellSpec("-log pi of the answer, token-mean over the optimizer step"),
}

COLUMNS: Mapping[str, Mapping[str, CellSpec]] = {
    "advantage": ADVANTAGES,
    "policy_loss": POLICY_LOSSES,
    "aggregation": AGGREGATIONS,
    "kl": KLS,
    "correction": CORRECTIONS,
    "filters": FILTERS,
    "objective": OBJECTIVES,
}
