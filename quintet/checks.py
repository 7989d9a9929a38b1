"""Cross-checks of a whole recipe: options that are fine alone and wrong together, or that would do nothing.

Torch-free. Contradictions inside one section are refused by that section's own class; checks that need the
data, the model or a user's function are made where those load. Each problem says what is wrong and what would
work; the first one is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from quintet.algorithms.filters import check_overlong_buffer
from quintet.algorithms.offline import OfflineAlgorithm, is_offline, resolve_offline
from quintet.algorithms.presets import Algorithm, resolve
from quintet.data.config import AnswerColumnsConfig
from quintet.observe.config import LogConfig
from quintet.rollout.environments import VERIFIERS, environment_problem
from quintet.rollout.factory import check_rollout_config
from quintet.train.config import CriticConfig, OfflineConfig, TrainConfig
from quintet.types import QuintetError

if TYPE_CHECKING:
    from quintet.config import RunConfig


class Problem(NamedTuple):
    key: str  # dotted name of the option to blame
    message: str


def find_problems(config: RunConfig, *, training: bool = True) -> Iterator[Problem]:
    """Every contradiction in the tree, the most basic first. `training` False: only what matters without RL too."""
    try:
        offline = resolve_offline(config.algorithm) if is_offline(config.algorithm) else None
        algorithm = resolve(config.algorithm) if offline is None else None
    except QuintetError as error:
        yield Problem(_blame(str(error)), str(error))
        return
    if training and offline is not None:
        yield from _offline(config, offline)
    if training and algorithm is not None:
        yield from _online(config, algorithm)
    yield from _engine(config)
    yield from _environment(config)
    yield from _held_out(config)
    yield from _best(config)
    yield from _trackers(config)


def _blame(message: str) -> str:
    """The option that a component's message begins with, e.g. `algorithm.kl`."""
    return message.split(maxsplit=1)[0].rstrip(":")


def _batching(config: RunConfig, algorithm: Algorithm) -> Iterator[Problem]:
    size, groups, mini = config.rollout.group_size, config.rollout.groups_per_step, config.train.mini_batches
    if size == 1 and algorithm.group_relative:
        yield Problem(
            "rollout.group_size",
            f"rollout.group_size is 1, but group-relative methods need n>=2: preset {algorithm.preset} compares the "
            "samples of one prompt.\nSet rollout.group_size to 2 or more (8 is usual), or use preset reinforce",
        )
    try:
        check_overlong_buffer(algorithm, config.rollout.max_tokens)
    except QuintetError as error:
        yield Problem(_blame(str(error)), str(error))
    if groups % mini:
        divisors = ", ".join(str(d) for d in range(1, groups + 1) if groups % d == 0)
        lower, upper = groups - groups % mini, groups - groups % mini + mini
        multiples = f"{lower} or {upper}" if lower else str(upper)
        yield Problem(
            "train.mini_batches",
            f"train.mini_batches {mini} does not divide rollout.groups_per_step {groups}.\n"
            f"groups_per_step counts prompts: {groups} x group_size {size} = {groups * size} completions a step.\n"
            f"Use train.mini_batches {divisors}, or rollout.groups_per_step {multiples}",
        )


def _old_policy(config: RunConfig, algorithm: Algorithm) -> Iterator[Problem]:
    old = config.train.old
    if algorithm.needs_proximal and old != "trainer":
        yield Problem(
            "train.old",
            f"algorithm.preset {algorithm.preset} needs the old policy before the first update, but "
            f"train.old is {old}: set train.old to trainer",
        )
    if old == "sampler" and config.algorithm.correction not in (None, "none"):
        yield Problem(
            "algorithm.correction",
            "algorithm.correction weighs the old policy against the sampler, but with train.old sampler they are the "
            "same and it does nothing: remove it, or set train.old to trainer",
        )


def _critic(config: RunConfig, algorithm: Algorithm) -> Iterator[Problem]:
    if not algorithm.needs_values and config.train.critic != CriticConfig():
        yield Problem(
            "train.critic",
            f"train.critic has no effect: preset {algorithm.preset} with advantage {algorithm.advantage.name} has no "
            "critic; remove it, or use preset ppo",
        )


def _mixture(config: RunConfig, algorithm: Algorithm) -> Iterator[Problem]:
    """gdpo normalises and weighs the parts as the functions gave them, not the reward."""
    if algorithm.advantage.name != "gdpo":
        return
    weights = algorithm.advantage.params["weights"]
    for function in config.reward.functions:
        name = function.part_name
        idle = "a gate" if function.gate is not None else "normalize" if function.normalize != "none" else None
        if idle is not None:
            yield Problem(
                "reward.functions",
                f"reward.functions `{name}` has {idle}, which has no effect with algorithm.advantage gdpo: that one "
                "normalises each part itself; remove it, or take another preset",
            )
        if function.weight == 0.0 and weights.get(name) != 0.0:
            yield Problem(
                "reward.functions",
                f"reward.functions `{name}` is only watched (weight 0), but algorithm.advantage gdpo weighs the parts "
                f"itself.\nSay it there too: algorithm.advantage: {{name: gdpo, weights: {{{name}: 0}}}}",
            )


def _online(config: RunConfig, algorithm: Algorithm) -> Iterator[Problem]:
    yield from _batching(config, algorithm)
    yield from _old_policy(config, algorithm)
    yield from _critic(config, algorithm)
    yield from _mixture(config, algorithm)
    yield from _sampling(config)
    yield from _dropout(config)
    if config.rollout.vllm.sleep and algorithm.max_staleness > 0:
        yield Problem(
            "rollout.vllm.sleep",
            f"rollout.vllm.sleep needs an engine that rests while the trainer works, but algorithm.max_staleness "
            f"{algorithm.max_staleness} lets them overlap: set it to 0, or remove rollout.vllm.sleep",
        )
    for key, value, default in (
        ("offline", config.offline, OfflineConfig()),
        ("data.answers", config.data.answers, AnswerColumnsConfig()),
    ):
        if value != default:
            yield Problem(
                key,
                f"{key} has no effect: preset {algorithm.preset} samples answers; remove it, or use an offline one",
            )


def _offline(config: RunConfig, algorithm: OfflineAlgorithm) -> Iterator[Problem]:
    """Rollout and reward options are left alone: `quintet eval` and `generate` use them on the same recipe."""
    plain, name = TrainConfig(), algorithm.preset
    for option in ("epochs", "mini_batches", "old", "critic"):
        if getattr(config.train, option) != getattr(plain, option):
            yield Problem(
                f"train.{option}",
                f"train.{option} has no effect with the offline preset {name}: a step is one update on "
                "offline.batch_size rows (data.epochs bounds the passes); remove it",
            )
    if config.offline.train_on == "all" and algorithm.objective.name != "likelihood":
        yield Problem("offline.train_on", f"offline.train_on all has no effect with preset {name}: only sft. Remove it")
    if config.data.answers.margin is not None and not algorithm.trains_reward:
        yield Problem("data.answers.margin", f"data.answers.margin has no effect with preset {name}: only reward_model")


def _sampling(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout
    if rollout.temperature == 0:
        yield Problem(
            "rollout.temperature",
            "rollout.temperature 0 is greedy: every sample of a group is the same and there is nothing to learn from; "
            "set it above 0 (1.0 is usual). Evaluation is greedy already",
        )
    truncated = [f"top_p {rollout.top_p:g}"] if rollout.top_p < 1 else []
    truncated += [f"top_k {rollout.top_k}"] if rollout.top_k > 0 else []
    truncated += [f"min_p {rollout.min_p:g}"] if rollout.min_p > 0 else []
    if truncated:
        yield Problem(
            f"rollout.{truncated[0].split()[0]}",
            f"rollout {' and '.join(truncated)}: training on truncated sampling needs the sampler's kept set of "
            "tokens, which is not stored yet; set top_p 1.0, top_k 0 and min_p 0 (quintet generate may use them)",
        )


def _engine(config: RunConfig) -> Iterator[Problem]:
    try:
        check_rollout_config(config.rollout)
    except QuintetError as error:
        yield Problem(_blame(str(error)), str(error))
    if config.rollout.numerics == "reproducible" and config.model.dtype != "float32":
        yield Problem(
            "rollout.numerics",
            f"rollout.numerics reproducible is float32 arithmetic, but model.dtype is {config.model.dtype}: "
            "set model.dtype float32, or rollout.numerics fast",
        )


def _dropout(config: RunConfig) -> Iterator[Problem]:
    lora = config.model.lora
    if config.rollout.numerics == "reproducible" and lora is not None and lora.dropout > 0:
        yield Problem(
            "model.lora.dropout",
            f"model.lora.dropout {lora.dropout:g} trains another policy than the one that sampled, and "
            "rollout.numerics reproducible computes the same one on both sides.\n"
            "Set model.lora.dropout 0, or rollout.numerics fast",
        )


def _environment(config: RunConfig) -> Iterator[Problem]:
    found = environment_problem(config.environment)
    if found is not None:
        yield Problem(*found)
    graded = any(function.fn == "environment" for function in config.reward.functions)
    if graded and config.environment.kind is None:
        yield Problem("reward.functions", "the reward function environment has nothing to go by: set environment.kind")
    kind, data = config.environment.kind, config.data
    if kind is not None and kind.startswith(VERIFIERS) and (data.source, data.args) != (kind, config.environment.args):
        yield Problem(
            "environment.kind", f"environment.kind {kind} plays its own data: set data.source {kind}, and the same args"
        )


def _held_out(config: RunConfig) -> Iterator[Problem]:
    if config.eval.every and not config.data.eval_size and config.data.eval_source is None:
        yield Problem(
            "eval.every",
            f"eval.every is {config.eval.every}, but nothing is held out: set data.eval_size above 0 or "
            "data.eval_source",
        )


def _best(config: RunConfig) -> Iterator[Problem]:
    if config.checkpoint.keep_best and not config.eval.every:
        yield Problem(
            "checkpoint.keep_best",
            "checkpoint.keep_best compares evaluations, but there is none between the steps: set eval.every above 0",
        )


def _trackers(config: RunConfig) -> Iterator[Problem]:
    if "wandb" in config.log.trackers and find_spec("wandb") is None:
        yield Problem(
            "log.trackers",
            "log.trackers has wandb, which is not installed: pip install 'quintet[wandb]', or remove it from the list",
        )
    if config.log.wandb_project != LogConfig().wandb_project and "wandb" not in config.log.trackers:
        yield Problem("log.wandb_project", "log.wandb_project is set, but log.trackers has no wandb: add it there")
