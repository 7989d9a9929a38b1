"""Scenarios 7 to 10: the four extensions."""

from __future__ import annotations

from collections.abc import Sequence

from .agent import AGENT_PROMPTS, calculator, create_agent, solved, trajectory_text
from .async_rollout import recompute_old, train_async, truncated_importance
from .controller import DIGIT_PROMPTS, Controller, Prepare, make_experience
from .model import EOS, TinyPolicy
from .paging import PagedKVCache, fragmentation
from .preference import BradleyTerry, make_pairs
from .reward import RewardService
from .rollout import Rollout, RolloutWorker
from .stage import Figures, Stage, new_run
from .trainer import TrainConfig, TrainWorker, loss_and_gradient

BLOCK, GROUP, MAX_TOKENS, SCARCE = 4, 8, 24, 24  # scenario 7: tokens a block, samples, tokens, blocks
LONG_PROMPT = (0, 1, 2, 3, 4, 5, 6, 7, 8, 0)  # 10 tokens: two full blocks and a half-full one
MAX_STALENESS = 4  # scenario 8
ACCURACY_BOUND = 0.75  # scenario 9


def endless_policy() -> TinyPolicy:
    """Never ends by itself, so that every length is known beforehand."""
    policy = TinyPolicy.create(seed=0)
    for row in policy.logits:
        row[EOS] -= 100.0
    return policy


def scenario_7(stage: Stage, seed: int = 0) -> Figures:
    """Peak blocks by hand and measured; fragmentation with sampled lengths; the same with too few blocks."""
    shared, unshared = PagedKVCache(64, BLOCK), PagedKVCache(64, BLOCK, share_prompts=False)
    for label, kv in (("7 shared", shared), ("7 unshared", unshared)):
        RolloutWorker(endless_policy(), stage.clock(label), seed, GROUP, 6, kv=kv).generate([LONG_PROMPT])
    peaks = {"shared": shared.peak_blocks, "unshared": unshared.peak_blocks}
    stage.say("7.peak", group=GROUP, block=BLOCK, **peaks)
    # 10 + 6 tokens are 4 blocks, of which sharing keeps the 2 full prompt blocks once; all but one sample copy
    by_hand = {"shared": 2 + GROUP * 2, "unshared": GROUP * 4}
    as_by_hand = peaks == by_hand and shared.copies == GROUP - 1
    stage.verify(as_by_hand, "7.by_hand", group=GROUP, copies=shared.copies, **peaks)

    policy, ample, scarce = TinyPolicy.create(seed), PagedKVCache(512, BLOCK), PagedKVCache(SCARCE, BLOCK)
    workers = [
        RolloutWorker(policy, stage.clock(label), seed, GROUP, MAX_TOKENS, kv=kv)
        for label, kv in (("7 ample", ample), ("7 scarce", scarce))
    ]
    expected, rollouts = (worker.generate([LONG_PROMPT] * 4) for worker in workers)
    totals = [len(r.prompt) + len(r.response) for r in expected]
    paged = fragmentation(totals, [ample.blocks_for(n) * BLOCK for n in totals])
    contiguous = fragmentation(totals, [len(LONG_PROMPT) + MAX_TOKENS] * len(totals))
    stage.say("7.fragmentation", paged=paged, contiguous=contiguous)
    stage.verify(paged < contiguous, "7.less_waste")

    preemptions = workers[1].preemptions
    stage.say("7.scarce", peak=ample.peak_blocks, blocks=SCARCE, preemptions=preemptions)
    for kv in (shared, unshared, ample, scarce):
        kv.check()
    leaked = sum(kv.used for kv in (shared, unshared, ample, scarce))
    stage.verify(preemptions > 0 and rollouts == expected and leaked == 0, "7.no_leak")
    return {**peaks, "paged": paged, "contiguous": contiguous, "preemptions": preemptions}


def scenario_8(stage: Stage, seed: int = 0, learning_rate: float = 4.0) -> Figures:
    """Asynchronous with and without truncated importance weights, and synchronous for as much virtual time.

    Equal time, not equal steps: learning slows down as it nears its end, so that gain per second would flatter
    whichever run stops first.
    """
    figures: Figures = {}
    runs: list[tuple[str, int, Prepare | None]] = [
        ("async", MAX_STALENESS, truncated_importance),
        ("uncorrected", MAX_STALENESS, recompute_old),
        ("sync", 0, None),
    ]
    for name, bound, prepare in runs:
        clock, config = stage.clock(f"8 {name}"), TrainConfig(learning_rate, epochs=4, seed=seed)
        run = new_run(clock, seed, config, prompts_per_step=4, max_staleness=bound, prepare=prepare)
        start = run.evaluate()["reward"]
        if name != "sync":
            train_async(run, steps=14, queue_size=MAX_STALENESS)
        while name == "sync" and clock.now() < figures["seconds_async"]:
            run.step()
        seconds, reward = clock.now(), run.evaluate()["reward"]
        line = {"start": start, "reward": reward, "seconds": seconds, "rate": (reward - start) / seconds}
        line["staleness"] = max(metrics["staleness"] for metrics in run.history)
        stage.say(f"8.{name}", rest=stage.text("8.rest", steps=len(run.history), **line))
        figures |= {f"{key}_{name}": value for key, value in line.items()}
    stale = figures["staleness_async"], figures["staleness_uncorrected"]
    bounded = figures["staleness_sync"] == 0 < min(stale) and max(stale) <= MAX_STALENESS
    stage.verify(bounded, "8.bounded", bound=MAX_STALENESS)
    no_less_time = figures["seconds_sync"] >= figures["seconds_async"]
    stage.verify(figures["reward_async"] > figures["reward_sync"] and no_less_time, "8.faster")
    same_time = figures["seconds_async"] == figures["seconds_uncorrected"]
    stage.verify(figures["reward_async"] > figures["reward_uncorrected"] and same_time, "8.corrected")
    return figures


def scenario_9(stage: Stage, seed: int = 0, learning_rate: float = 8.0) -> Figures:
    """Preference pairs → Bradley–Terry model → the reward of a training run (at rate 0 neither one learns)."""
    policy, clock = TinyPolicy.create(seed), stage.clock("9 preferences")
    annotated = RolloutWorker(policy, clock, seed=1000 + seed, group_size=2)
    train, held_out = make_pairs(annotated, DIGIT_PROMPTS, 200, seed), make_pairs(annotated, DIGIT_PROMPTS, 100, seed)
    model = BradleyTerry()
    before = model.accuracy(held_out)
    model.fit(train, learning_rate=2.5 * learning_rate)
    accuracy = model.accuracy(held_out)
    stage.say("9.accuracy", train=len(train), held_out=len(held_out), before=before, accuracy=accuracy)
    stage.verify(accuracy > ACCURACY_BOUND, "9.generalises", bound=ACCURACY_BOUND)

    trainer = TrainWorker(policy, TrainConfig(learning_rate, seed=seed), clock)
    run = Controller(RolloutWorker(policy, clock, seed, 8), RewardService(1.0, model, clock=clock), trainer, seed=seed)
    start = run.evaluate()
    for _ in range(10):
        run.step()
    end = run.evaluate()
    line = {"model_start": start["model"], "model": end["model"], "rule_start": start["rule"], "rule": end["rule"]}
    stage.say("9.reward", steps=len(run.history), **line)
    stage.verify(end["rule"] > start["rule"] + 0.2, "9.transfers")
    return {"accuracy": accuracy, **line}


def ignores_tool_logprobs(trainer: TrainWorker, rollouts: Sequence[Rollout]) -> bool:
    """Whether loss and gradient stay the same when the log-probabilities of the tool's tokens are replaced."""
    reports = []
    for nonsense in (0.0, -7.0):
        batch = make_experience(rollouts, RewardService(rule=solved).score(rollouts))
        for e in batch:
            e.advantage = e.reward - 0.5
            e.logprobs = [old if own else nonsense for old, own in zip(e.logprobs, e.loss_mask, strict=True)]
        reports.append(loss_and_gradient(trainer.policy, trainer.reference, batch))
    return reports[0] == reports[1]


def scenario_10(stage: Stage, seed: int = 0, learning_rate: float = 16.0) -> Figures:
    """The same controller, worker and trainer; only the tool, the rule and the vocabulary are others."""
    policy, clock = create_agent(seed), stage.clock("10 agent")
    worker = RolloutWorker(policy, clock, seed, group_size=8, tool=calculator)
    trainer = TrainWorker(policy, TrainConfig(learning_rate, seed=seed), clock)
    run = Controller(worker, RewardService(rule=solved, clock=clock), trainer, AGENT_PROMPTS, seed=seed)
    before = run.evaluate(samples=4)["rule"]
    for _ in range(15):
        run.step()
    after = run.evaluate(samples=4)["rule"]
    rollouts = worker.evaluator(trainer.policy, seed, samples=1).generate(AGENT_PROMPTS)
    several_turns = [r for r in rollouts if r.loss_mask.count(0) >= 3]
    example = max(several_turns or rollouts, key=lambda r: solved(r.prompt, r.response))
    question = " + ".join(str(n) for n in example.prompt[:-1])
    stage.say("10.example", question=question, text=trajectory_text(example))
    stage.say("10.rate", before=before, after=after)
    tool_tokens = sum(r.loss_mask.count(0) for r in rollouts)
    unmoved = tool_tokens > 0 and ignores_tool_logprobs(trainer, rollouts)
    stage.verify(unmoved, "10.masked", tool_tokens=tool_tokens)
    stage.verify(after > before + 0.3, "10.learnt")
    return {"before": before, "after": after}
