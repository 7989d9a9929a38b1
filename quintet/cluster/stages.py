"""The smaller jobs: supervised fine-tuning alone, evaluation alone, answers to given prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from quintet.cluster.build import Base, load_data, load_policy, rollout_worker, sampling_params, warm_start
from quintet.cluster.folder import RunFolder
from quintet.config import RunConfig, digest
from quintet.controller.evaluate import evaluate
from quintet.models.export import save_hf_folder
from quintet.models.tokenizer import PromptEncoder
from quintet.observe.hacking import verifiable_parts
from quintet.observe.metrics import JsonlSink
from quintet.observe.summary import build_summary, write_summary
from quintet.protocols import RewardService, RolloutWorker
from quintet.reward.factory import make_reward_service
from quintet.types import Group, GroupId, Prompt, QuintetError, Rollout, SamplingParams

EventHandler = Callable[[str, Any], None]


async def supervised(config: RunConfig, folder: RunFolder, on_event: EventHandler) -> dict[str, Any]:
    """`warm_start` of the recipe and nothing else; the model goes to `final/`. Returns the summary."""
    if config.warm_start.steps == 0:
        raise QuintetError(
            "quintet sft: warm_start.steps is 0, there is nothing to do; set it, e.g. --set warm_start.steps=200"
        )
    started = time.monotonic()
    if folder.claim(config):
        raise QuintetError(f"{folder.root} holds a run already: choose another folder with --out")
    base = Base.of(config)
    data = load_data(config, base)
    model = await asyncio.to_thread(load_policy, config.model)
    sink = JsonlSink(folder.metrics)
    on_event("stage", {"name": "sft", "total": config.warm_start.steps})

    def progress(step: int, values: dict[str, float]) -> None:
        sink.log(step, values)
        on_event("progress", {"stage": "sft", "done": step, "total": config.warm_start.steps, "values": values})

    try:
        result = await asyncio.to_thread(warm_start, config, base, model, data.train, progress)
    finally:
        sink.close()
    await asyncio.to_thread(save_hf_folder, model, base.tokenizer, folder.final)
    summary = build_summary(
        recipe=config.name,
        seed=config.seed,
        steps=config.warm_start.steps,
        seconds=time.monotonic() - started,
        evals={},
        config_digest=digest(config),
        extra=result,
    )
    write_summary(folder.root, summary)
    on_event("done", {"summary": summary})
    return summary


async def held_out(
    config: RunConfig, functions: Sequence[Callable[..., Any]] | None, on_event: EventHandler
) -> dict[str, float]:
    """The recipe's held-out prompts, see `evaluate_all`."""
    base = Base.of(config)
    data = load_data(config, base)
    if not data.held_out:
        raise QuintetError("nothing is held out: set data.eval_size above 0 or data.eval_source")
    service = make_reward_service(config.reward, functions=functions)
    try:
        await asyncio.to_thread(service.start)
        async with _engine(config, base) as rollout:
            return await evaluate_all(config, rollout, service, data.held_out, 0, on_event)
    finally:
        service.close()


async def evaluate_all(
    config: RunConfig,
    rollout: RolloutWorker,
    reward: RewardService,
    prompts: list[Prompt],
    version: int,
    on_event: EventHandler,
) -> dict[str, float]:
    """`eval/*` greedy, and with `eval.samples` also `eval_sampled/*`."""

    def progress(done: int, total: int) -> None:
        on_event("progress", {"stage": "eval", "done": done, "total": total, "values": {}})

    values: dict[str, float] = {}
    rules = verifiable_parts(config.reward)
    for name, params in _evaluation_runs(config):
        on_event("stage", {"name": "eval", "total": len(prompts)})
        found, _ = await evaluate(rollout, reward, prompts, params, version, rules=rules, on_progress=progress)
        values |= {f"{name}/{key}": value for key, value in found.items()}
    return values


def _evaluation_runs(config: RunConfig) -> list[tuple[str, SamplingParams]]:
    """(metric prefix, how to sample): greedy always, sampled when `eval.samples` asks for it."""
    params = sampling_params(config)
    if config.eval.max_tokens is not None:
        params = msgspec.structs.replace(params, max_tokens=config.eval.max_tokens)
    runs = [("eval", params.greedy())]
    if config.eval.samples:
        runs.append(("eval_sampled", msgspec.structs.replace(params, n=config.eval.samples)))
    return runs


async def answers(config: RunConfig, texts: list[str], on_event: EventHandler) -> list[Rollout]:
    base = Base.of(config)
    encode = PromptEncoder(base.tokenizer, config.model)
    prompts = [Prompt(id=f"prompt-{i}", token_ids=encode(None, text), text=text) for i, text in enumerate(texts)]
    on_event("stage", {"name": "generate", "total": len(prompts)})
    async with _engine(config, base) as rollout:
        groups = [Group(GroupId(p.id), p) for p in prompts]
        rollouts = await rollout.generate(groups, sampling_params(config), 0)
    for failed in (r for r in rollouts if r.failure is not None):
        on_event("message", {"level": "error", "text": f"{failed.group_id}: {failed.failure}"})
    return rollouts


@asynccontextmanager
async def _engine(config: RunConfig, base: Base) -> AsyncIterator[RolloutWorker]:
    model = await asyncio.to_thread(load_policy, config.model)
    rollout = rollout_worker(config, base, model, 0)
    del model
    try:
        yield rollout
    finally:
        await rollout.close()  # type: ignore[attr-defined]
