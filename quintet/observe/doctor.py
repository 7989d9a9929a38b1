"""Rules that read a run's metrics and say in plain words what is wrong, how bad, and what to do.

A rule is a function of the rows of `metrics.jsonl` and of the resolved config; it gives a Finding or None. The
live view asks after every step, the end of a run and the report ask once about all steps. Few steps prove little:
below `SURE` steps a share must be total before a rule speaks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

Rows = Sequence[Mapping[str, Any]]
Config = Mapping[str, Any]
Level = Literal["problem", "warning", "note"]

RECENT = 10  # steps that a rule about "now" looks at
SURE = 5  # steps from which on a share below 1 counts
_FASTER_REWARDS = {  # what makes these reward functions faster; all others run in reward.workers
    "raise the `workers` of the sandbox": {"code"},
    "give the reward model more `batch_tokens` or a server of its own": {"model"},
    "raise the concurrency of the served model or judge": {"remote_model", "judge"},
}
_ORDER: dict[Level, int] = {"problem": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """`text` says what was seen, with numbers; `mend` what to do, naming options. `note`: nothing is wrong."""

    key: str  # one per rule
    level: Level
    text: str
    mend: str

    def __str__(self) -> str:
        return f"{self.text} {self.mend}".rstrip()


def diagnose(rows: Rows, config: Config) -> list[Finding]:
    """What the rules find, worst first. `rows`: one dict per step, ascending, with `step`; `config`: the resolved tree
    (or an empty one: limits that depend on it are then the widest)."""
    trained = [row for row in rows if row["step"] > 0]
    found = [finding for rule in RULES if (finding := rule(trained, config)) is not None]
    return sorted(found, key=lambda f: _ORDER[f.level])


# -- rules -------------------------------------------------------------------------------------------


def equal_rewards(rows: Rows, config: Config) -> Finding | None:
    """Groups without a spread have advantage 0: they cost a rollout and teach nothing."""
    shares = _recent(rows, "reward/zero_std_frac")
    if not _mostly(shares, 0.5):
        return None
    mean, low, high = _mean(_recent(rows, "reward/mean")), min(_all(rows, "reward/min")), max(_all(rows, "reward/max"))
    size = config.get("rollout", {}).get("group_size")
    of = f" of {size} samples" if size else ""
    text = f"In {fmean(shares):.0%} of the groups{of} all rewards were equal ({_span(shares)}): they teach nothing."
    if high > low and mean > low + 0.8 * (high - low):
        mend = (
            f"The mean reward is {mean:.3g} of at most {high:.3g}: the task is nearly solved. Stop here, give harder "
            "prompts, or use algorithm.preset: dapo, which draws new prompts instead of such groups."
        )
        return Finding("equal-rewards", "note", text, mend)
    if high <= low:
        mend = (
            f"Every sample of the run had reward {high:.3g}. Run `quintet check` on the recipe and look at the "
            "samples: the task is out of reach, or the reward function does not see the answer."
        )
        return Finding("equal-rewards", "problem", text, mend)
    mend = (
        f"The mean reward is {mean:.3g} between {low:.3g} and {high:.3g}: use easier prompts, a larger "
        "rollout.group_size, a reward with more steps between wrong and right, or a warm_start."
    )
    return Finding("equal-rewards", "warning", text, mend)


def truncated(rows: Rows, config: Config) -> Finding | None:
    shares = _recent(rows, "rollout/truncated_frac")
    if not _mostly(shares, 0.25):
        return None
    limit = config.get("rollout", {}).get("max_tokens")
    shown = f"rollout.max_tokens ({limit})" if limit else "rollout.max_tokens"
    text = f"{fmean(shares):.0%} of the responses were cut off at {shown} ({_span(shares)})."
    mend = (
        "Raise rollout.max_tokens, or let the reward prefer shorter answers (algorithm.preset: dapo has an overlong "
        "penalty); if all are cut, check that the model's end token is known: `quintet check` shows it."
    )
    return Finding("truncated", "warning", text, mend)


def entropy_collapse(rows: Rows, config: Config) -> Finding | None:
    values = _all(rows, "actor/entropy")
    if len(values) < 2 * RECENT:
        return None
    first, last = fmean(values[:SURE]), fmean(values[-RECENT:])
    if last >= 0.1 * first and last >= 0.01:
        return None
    text = f"Entropy fell from {first:.3g} to {last:.3g} nats a token: samples of one prompt are nearly the same."
    rewards, high = _recent(rows, "reward/mean"), max(_all(rows, "reward/max"), default=0.0)
    if rewards and high > 0 and fmean(rewards) > 0.9 * high:
        return Finding("entropy-collapse", "note", text, "The mean reward is near its maximum, so this is convergence.")
    mend = "Lower train.lr, set algorithm.entropy_coef (e.g. 0.001) or algorithm.kl, or clip higher (preset dapo)."
    return Finding("entropy-collapse", "warning", text, mend)


def loss_near_zero(rows: Rows, config: Config) -> Finding | None:
    """A worry of nearly every beginner: the loss of one update per batch is 0 by construction."""
    losses = _recent(rows, "actor/loss")
    norms = _recent(rows, "actor/grad_norm")
    if not losses or max(map(abs, losses)) >= 1e-3 or not norms or max(norms) == 0.0:
        return None
    text = (
        "actor/loss near 0 is normal: with one update per batch every ratio is 1 and the advantages of a group "
        f"sum to 0, yet the gradient is not 0 (actor/grad_norm {_mean(norms):.3g})."
    )
    return Finding("loss-near-zero", "note", text, "Watch reward/mean and eval/accuracy instead.")


def mismatch(rows: Rows, config: Config) -> Finding | None:
    """Engine and trainer should agree on the log-probability of what was sampled with the same weights."""
    gaps = _recent(rows, "mismatch/max_abs_logprob")
    same_bits = config.get("rollout", {}).get("numerics") == "reproducible"
    limit = 0.0 if same_bits else 1e-2 if config.get("model", {}).get("dtype") == "float32" else 1.0
    if not gaps or median(gaps) <= limit:
        return None
    text = (
        f"Engine and trainer differ by up to {max(gaps):.2g} nats on the tokens just sampled (median of the steps' "
        f"largest {median(gaps):.2g}; {'exactly 0' if same_bits else f'below {limit:g}'} is usual here): the update is "
        "off-policy without knowing it."
    )
    mend = (
        "In reproducible numerics both compute the same bits; please report this, with the model's config.json."
        if same_bits
        else "Set model.dtype: float32 to see whether it is rounding; if it stays, the engine computes another model. "
        "train.old: trainer with algorithm.correction: tis corrects what is left."
    )
    return Finding("mismatch", "warning", text, mend)


def kl_explosion(rows: Rows, config: Config) -> Finding | None:
    limits = {"kl/ref": (5.0, "the reference"), "kl/approx": (0.2, "the policy before the update")}
    for name, (limit, what) in limits.items():
        series = _steps(rows, name)
        over = [(step, value) for step, value in series if value > limit]
        if len(over) < 2 and not (over and len(series) <= 2):
            continue
        step, worst = max(over, key=lambda pair: pair[1])
        text = (
            f"{name}, the distance from {what}, went over {limit:g} in {len(over)} steps "
            f"(worst {worst:.3g}, step {step})."
        )
        mend = "Lower train.lr, lower train.max_grad_norm, or hold on to the reference with algorithm.kl."
        return Finding("kl-explosion", "warning", text, mend)
    return None


def gradient_spikes(rows: Rows, config: Config) -> Finding | None:
    series = _steps(rows, "actor/grad_norm")
    if len(series) < RECENT:
        return None
    usual = median(v for _, v in series)
    spikes = [(step, v) for step, v in series if v > 10 * usual > 0]
    if not spikes:
        return None
    step, worst = max(spikes, key=lambda pair: pair[1])
    clip = config.get("train", {}).get("max_grad_norm")
    text = (
        f"The gradient norm was over ten times its median ({usual:.3g}) in {len(spikes)} steps, "
        f"worst {worst:.3g} at step {step}."
    )
    if clip == 0:
        return Finding("gradient-spikes", "warning", text, "Nothing clips it: set train.max_grad_norm (1.0 is usual).")
    return Finding("gradient-spikes", "note", text, "They were clipped; look at the samples of that step.")


def nonfinite(rows: Rows, config: Config) -> Finding | None:
    skipped = _total(rows, "actor/skipped_nonfinite")
    if not skipped:
        return None
    steps = [step for step, v in _steps(rows, "actor/skipped_nonfinite") if v]
    text = f"{skipped:.0f} optimizer steps were skipped because the gradient was not finite (first in step {steps[0]})."
    mend = "Lower train.lr; with model.dtype: bfloat16 try float32."
    return Finding("nonfinite", "problem", text, mend)


def failures(rows: Rows, config: Config) -> Finding | None:
    """Samples and groups lost to faults that are not the policy's doing."""
    kinds = failure_totals(rows)
    lost = {name: n for name, n in kinds.items() if name.startswith(("failures/", "dropped/failed"))}
    if not lost:
        return None
    shown = ", ".join(f"{name.partition('/')[2].replace('failed:', '')} {n:,}" for name, n in lost.items())
    share = _mean(_all(rows, "reward/unscored_frac"))
    text = (
        f"{sum(lost.values()):,} samples or groups were lost to faults ({shown}); "
        f"{share:.1%} of the trained steps' samples have no reward."
    )
    hung = any("timeout" in name for name in lost)
    mend = "Raise reward.timeout_s or rollout.timeout_s." if hung else "The samples table below names their messages."
    return Finding("failures", "problem" if share > 0.1 else "warning", text, mend)


def learning_rate_zero(rows: Rows, config: Config) -> Finding | None:
    rates = _all(rows, "actor/lr")
    if not rates or max(rates) > 0.0:
        return None
    text = f"The learning rate was 0 in all {len(rates)} steps: the weights did not change."
    return Finding("lr-zero", "problem", text, "Set train.lr, or shorten train.warmup_steps.")


def no_gradient(rows: Rows, config: Config) -> Finding | None:
    """Steps that changed nothing although samples were paid for."""
    norms = _all(rows, "actor/grad_norm")
    idle = int(_total(rows, "actor/no_trainable_sample")) + sum(v == 0.0 for v in norms)
    if not idle or idle < 0.2 * len(rows):
        return None
    text = (
        f"{idle} of {len(rows)} steps had no gradient at all: every advantage was 0, or no sample could be trained on."
    )
    return Finding(
        "no-gradient", "warning", text, "More groups a step (rollout.groups_per_step) or more varied prompts."
    )


def reward_falls(rows: Rows, config: Config) -> Finding | None:
    rewards = _all(rows, "reward/mean")
    if len(rewards) < 4 * SURE:
        return None
    quarter = len(rewards) // 4
    first, last = rewards[:quarter], rewards[-quarter:]
    noise = math.sqrt((_variance(first) + _variance(last)) / quarter)
    gain = fmean(last) - fmean(first)
    if gain > 2 * noise:
        return None
    text = f"The mean reward went from {fmean(first):.3g} (first {quarter} steps) to {fmean(last):.3g} (last {quarter})"
    if gain < -2 * noise:
        mend = "Lower train.lr, or hold on to the start with algorithm.kl; compare the samples of first and last step."
        return Finding("reward-falls", "problem", f"{text}: training made it worse.", mend)
    mend = "Give it more steps or a higher train.lr; check that a few groups have both right and wrong samples."
    return Finding("reward-falls", "warning", f"{text}: no more than its noise.", mend)


def reward_hacking(rows: Rows, config: Config) -> Finding | None:
    """The monitor's alarm (`observe/hacking.py`), in words: of the last step that raised one."""
    prefix = "reward/hacking_alarm/"
    alarms = [
        (row["step"], name.removeprefix(prefix), int(value))
        for row in rows
        for name, value in row.items()
        if name.startswith(prefix) and value
    ]
    if not alarms:
        return None
    last, pair, window = alarms[-1]
    model, _, rule = pair.partition("~")
    over = [row for row in rows if last - window < row["step"] <= last]
    rose, fell = _first_to_last(over, model), _first_to_last(over, rule)
    text = (
        f"The score of `{model}` rose ({rose}) while `{rule}` fell ({fell}) in the {window} steps up to step {last} "
        f"(alarm first raised at step {alarms[0][0]}): the policy is fooling `{model}`."
    )
    mend = (
        f"Do not use the later checkpoints; read the samples. Give `{rule}` the larger weight, let `{model}` count "
        "only behind a gate on it, bound its score (normalize: sigmoid or group_rank), or hold on to the start with "
        "algorithm.kl (docs/rewards.md)."
    )
    return Finding("reward-hacking", "problem", text, mend)


def slow_reward(rows: Rows, config: Config) -> Finding | None:
    spent, whole = _total(rows, "time/reward_s"), _total(rows, "time/step_s")
    if len(rows) < SURE or spent <= 0.2 * whole:
        return None
    text = f"{spent / whole:.0%} of the time went into waiting for rewards ({spent / len(rows):.2g} s a step)."
    kinds = {str(function.get("fn")) for function in config.get("reward", {}).get("functions", [])}
    mends = [mend for mend, of in _FASTER_REWARDS.items() if kinds & of]
    if kinds - set().union(*_FASTER_REWARDS.values()):
        mends.insert(0, "raise reward.workers")
    mend = ", ".join([*mends, "raise algorithm.max_staleness to overlap it"])
    return Finding("slow-reward", "warning", text, f"Of these what fits: {mend}.")


Rule = Callable[[Rows, Config], Finding | None]
RULES: tuple[Rule, ...] = (
    equal_rewards, truncated, entropy_collapse, loss_near_zero, mismatch, kl_explosion, gradient_spikes, nonfinite,
    failures, learning_rate_zero, no_gradient, reward_falls, reward_hacking, slow_reward,
)  # fmt: skip


# -- what rules need ---------------------------------------------------------------------------------


def failure_totals(rows: Rows) -> dict[str, int]:
    """Failures of samples (`failures/<kind>`) and dropped groups (`dropped/<reason>`) of all steps, most first."""
    totals: Counter[str] = Counter()
    for row in rows:
        for name, value in row.items():
            if name.startswith(("failures/", "dropped/")) and value:
                totals[name] += int(value)
    return dict(totals.most_common())


def _first_to_last(rows: Rows, part: str) -> str:
    """A part's mean in the first and the last quarter of the rows."""
    values = _all(rows, f"reward/{part}/mean")
    quarter = max(1, len(values) // 4)
    return f"{fmean(values[:quarter]):.3g} to {fmean(values[-quarter:]):.3g}"


def _steps(rows: Rows, name: str) -> list[tuple[int, float]]:
    return [(row["step"], float(v)) for row in rows if (v := row.get(name)) is not None and math.isfinite(v)]


def _all(rows: Rows, name: str) -> list[float]:
    return [value for _, value in _steps(rows, name)]


def _recent(rows: Rows, name: str) -> list[float]:
    return _all(rows[-RECENT:], name)


def _total(rows: Rows, name: str) -> float:
    return sum(_all(rows, name))


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return fmean(known) if known else 0.0


def _variance(values: Sequence[float]) -> float:
    mean = fmean(values)
    return fmean((v - mean) ** 2 for v in values)


def _mostly(shares: Sequence[float], limit: float) -> bool:
    """Whether the mean share reaches `limit`; with few steps, whether it is total."""
    return bool(shares) and fmean(shares) >= (limit if len(shares) >= SURE else 1.0)


def _span(values: Sequence[float]) -> str:
    return "this step" if len(values) == 1 else f"last {len(values)} steps"
