"""The scenarios, as a program: python -m rl_post_training_mini.demo [--scenario N] [--lang en] [--trace FILE]

A ✓ is printed only after the figures just measured were checked (Stage.verify); a claim that does not hold ends
the program with exit code 1. Scenarios 7 to 10 are in demo_extensions.py, the wording is in texts.py.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence

from .demo_extensions import scenario_7, scenario_8, scenario_9, scenario_10
from .model import EOS, FILLER, TinyPolicy
from .reward import RewardService
from .rollout import Rollout, RolloutWorker, StaleRolloutError
from .stage import Figures, ScenarioFailed, Stage, new_run, sample_text
from .texts import TITLES
from .trainer import TrainConfig

MARGIN = 0.1  # scenario 2: the evaluated reward grows by at least this from line to line
KL_BOUND = 1.0  # scenario 2
SLOTS = 8  # scenario 5


def scenario_1(stage: Stage, seed: int = 0, learning_rate: float = 8.0) -> Figures:
    """One GRPO step of 4 prompts × 4 samples; four PPO epochs, so that the ratio leaves 1 and the clip can act."""
    prompts = [(2,), (4,), (6,), (8,)]
    config = TrainConfig(learning_rate, epochs=4, seed=seed)
    run = new_run(stage.clock("1 one step"), seed, config, group_size=4, prompts=prompts)
    before = run.evaluate(samples=64)
    rollouts = run.worker.generate(prompts, weight_version=0)
    metrics = run.learn(rollouts)
    after = run.evaluate(samples=64)
    figures = {"before": before["reward"], "after": after["reward"], "kl": after["kl"]}
    figures["clip_frac"] = metrics["clip_frac"]
    stage.say("1.batch", samples=len(rollouts), epochs=config.epochs)
    stage.say("1.reward", **figures)
    stage.say("1.kl", **figures)
    stage.verify(figures["after"] > figures["before"] and figures["kl"] > 0.0, "1.learnt")
    stage.verify(figures["clip_frac"] > 0.0, "1.clipped")
    return figures


def scenario_2(stage: Stage, seed: int = 0, learning_rate: float = 8.0) -> Figures:
    """Ten steps; each line is an evaluation with the same random numbers, not the training samples."""
    run = new_run(stage.clock("2 convergence"), seed, TrainConfig(learning_rate, seed=seed))
    before = sample_text(run, (4,))
    figures: Figures = {}
    for step in range(1, 11):
        run.step()
        if step in (1, 5, 10):
            e = run.evaluate()
            figures |= {f"reward_{step}": e["reward"], f"kl_{step}": e["kl"]}
            stage.say("2.line", step=step, **e)
    stage.say("2.example", before=before, after=sample_text(run, (4,)))
    first, middle, last = (figures[f"reward_{step}"] for step in (1, 5, 10))
    stage.verify(first + MARGIN < middle and middle + MARGIN < last, "2.rises", margin=MARGIN)
    stage.verify(figures["kl_10"] < KL_BOUND, "2.kl", bound=KL_BOUND)
    return figures


def scenario_3(stage: Stage, seed: int = 0, learning_rate: float = 8.0) -> Figures:
    """Rollouts of version 3 arrive when the trainer is at 4: discarded and counted, or an error in strict mode."""
    run = new_run(stage.clock("3 versions"), seed, TrainConfig(learning_rate, seed=seed), strict=False)
    for _ in range(3):
        run.step()
    late = run.worker.generate(run.sample_prompts(3), weight_version=3)
    run.step()
    kept = run.check_versions(late)
    figures: Figures = {"rollout_version": late[0].weight_version, "version": run.version, "stale": run.stale}
    stage.say("3.versions", **figures)
    found = figures["rollout_version"] == 3 and run.version == 4 and not kept
    stage.verify(found and run.stale == len(late), "3.discarded", stale=run.stale)
    weights, refused = run.trainer.get_weights(), False
    run.strict = True
    try:
        run.learn(late)
    except StaleRolloutError:
        refused = True
    stage.verify(refused and run.version == 4 and run.trainer.get_weights() == weights, "3.strict")
    fresh = run.worker.generate(run.sample_prompts(4), weight_version=4)
    stage.verify(run.worker.policy.logits == weights and run.check_versions(fresh) == fresh, "3.fresh")
    return figures


def scenario_4(stage: Stage, seed: int = 0, learning_rate: float = 60.0) -> Figures:
    """The same run with β = 0 and β = 0.1, on the reward model's score (which loves "!" and pulls far away).

    Advantages are not divided by their standard deviation here (`scale_by_std=False`). With the division they keep
    size 1 however small the differences of reward are, and β = 0.1 beside them holds next to nothing: what β means
    depends on the unit of the advantage.
    """
    figures: Figures = {}
    for name, beta in (("free", 0.0), ("held", 0.1)):
        config = TrainConfig(learning_rate, beta=beta, seed=seed)
        run = new_run(stage.clock(f"4 beta={beta}"), seed, config, alpha=1.0, scale_by_std=False, prompts_per_step=4)
        figures["start"] = run.evaluate()["reward"]
        for _ in range(18):
            run.step()
        e = run.evaluate()
        figures |= {f"reward_{name}": e["reward"], f"kl_{name}": e["kl"]}
        stage.say("4.line", beta=beta, start=figures["start"], reward=e["reward"], kl=e["kl"])
    times = figures["kl_free"] / max(figures["kl_held"], 1e-9)
    stage.verify(times >= 3.0, "4.runaway", times=times)
    stage.verify(figures["start"] < figures["reward_held"] < figures["reward_free"], "4.cost")
    return figures


def long_tail_policy() -> TinyPolicy:
    """Ends soon from most states; in 9 ("still thinking") it stays: a few responses become very long."""
    policy = TinyPolicy.create(seed=0, skill=0.0)
    for prev, row in enumerate(policy.logits):
        row[EOS] += -2.0 if prev == 9 else 0.5
        row[9] += 5.5 if prev == 9 else 0.0
    return policy


def scenario_5(stage: Stage, seed: int = 0) -> Figures:
    """32 long-tailed responses on 8 slots, by static and by continuous batching; nothing is learnt here."""
    sizes: dict[str, list[int]] = {}
    seconds: dict[str, float] = {}
    for name in ("static", "continuous"):
        clock = stage.clock(f"5 {name}")
        worker = RolloutWorker(
            long_tail_policy(), clock, seed, max_tokens=256, slots=SLOTS, continuous=name == "continuous"
        )
        sizes[name] = [len(r.response) for r in worker.generate([(d,) for d in range(8)])]
        seconds[name] = clock.now()
    lengths, old_s, new_s = sizes["continuous"], seconds["static"], seconds["continuous"]
    mean = sum(lengths) / len(lengths)
    figures = {"static_s": old_s, "continuous_s": new_s}
    figures |= {"less_time": 1.0 - new_s / old_s, "more_throughput": old_s / new_s - 1.0}
    stage.say("5.lengths", n=len(lengths), slots=SLOTS, min=min(lengths), max=max(lengths), mean=mean)
    stage.say("5.times", **figures)
    stage.verify(sizes["static"] == sizes["continuous"], "5.same")
    stage.verify(len(lengths) == 32 and max(lengths) > 3.0 * mean and new_s < old_s, "5.faster")
    return figures | {f"length_{i}": n for i, n in enumerate(lengths)}


def scenario_6(stage: Stage, seed: int = 0, learning_rate: float = 16.0) -> Figures:
    """Trained on the reward model alone the policy shouts "! ! !"; trained on the mixture it learns to count."""
    figures: Figures = {}
    for name, alpha in (("hacked", 1.0), ("mixed", 0.2)):
        config = TrainConfig(learning_rate, seed=seed)
        run = new_run(stage.clock(f"6 alpha={alpha}"), seed, config, alpha=alpha, prompts_per_step=4)
        start = run.evaluate()
        for _ in range(30):
            run.step()
        e = run.evaluate()
        line = {"model_start": start["model"], "rule_start": start["rule"], "model": e["model"], "rule": e["rule"]}
        stage.say(f"6.{name}", **line, text=sample_text(run, (4,)))
        figures |= {f"{key}_{name}": value for key, value in line.items()}
    hacked, cured = figures["rule_hacked"], figures["rule_mixed"]
    fooled = figures["model_hacked"] > figures["model_start_hacked"] + 0.5
    stage.verify(fooled and hacked < 0.5 * figures["rule_start_hacked"], "6.detected")
    shout = RewardService(alpha=0.2).score([Rollout(0, 0, (4,), 0, response=[FILLER] * 3)])[0]
    stage.say("6.shout", model=shout.model, rule=shout.rule, mixture=shout.reward)
    hacker, counter = (0.8 * figures[f"rule_{n}"] + 0.2 * figures[f"model_{n}"] for n in ("hacked", "mixed"))
    exact = (round(shout.model, 2), shout.rule, round(shout.reward, 2)) == (0.95, 0.0, 0.19)
    rises = cured > figures["rule_start_mixed"] + 0.2
    stage.verify(exact and rises and hacker < counter, "6.cured", hacker=hacker, counter=counter)
    return figures


Scenario = Callable[[Stage, int], Figures]
CORE: list[Scenario] = [scenario_1, scenario_2, scenario_3, scenario_4, scenario_5, scenario_6]
EXTENSIONS: list[Scenario] = [scenario_7, scenario_8, scenario_9, scenario_10]
SCENARIOS = CORE + EXTENSIONS


def play(stage: Stage, number: int, seed: int) -> None:
    stage.say("title", number=number, title=TITLES[number - 1][stage.lang])
    SCENARIOS[number - 1](stage, seed)
    stage.write("")


def play_all(stage: Stage, seed: int) -> None:
    for number in range(1, 7):
        play(stage, number, seed)
    stage.say("passed_core")
    for number in range(7, 11):
        play(stage, number, seed)
    stage.say("passed_extensions")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    about = "Ten scenarios of RL post-training; every ✓ is printed only after its figures were checked."
    parser = argparse.ArgumentParser(prog="python -m rl_post_training_mini.demo", description=about)
    parser.add_argument("--scenario", type=int, choices=range(1, 11), metavar="N", help="only scenario N (1 to 10)")
    parser.add_argument("--lang", choices=("zh", "en"), default="zh", help="language of the output (default: zh)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--trace", metavar="FILE", help="write the virtual timeline as Chrome-trace JSON (Perfetto)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # a console in another encoding could not show ✓
    args = parse(argv)
    stage = Stage(args.lang)
    stage.say("task")
    try:
        if args.scenario:
            play(stage, args.scenario, args.seed)
            stage.say("passed_one", number=args.scenario)
        else:
            play_all(stage, args.seed)
    except ScenarioFailed as failure:
        stage.say("failed", claim=failure)
        return 1
    if args.trace:
        stage.write_trace(args.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
