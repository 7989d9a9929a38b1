"""`quintet check`: everything about a recipe that can be found wrong without training.

Data, chat template and end tokens, reward functions on reference answers, batch arithmetic, memory, disk, and
last a dry rollout of two samples by the real engine with their rewards. Each check reports lines; a problem in
one does not keep the others from running, unless they need what it could not give. Nothing is written but a
temporary file that proves that the run folder can be made.
"""

from __future__ import annotations

import asyncio
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import torch
from transformers import PreTrainedModel

from quintet.algorithms.presets import resolve
from quintet.cluster.build import Base, load_policy, rollout_worker, sampling_params, shared_kernels
from quintet.cluster.estimate import (
    available_memory,
    disk_estimate,
    fixed_bytes,
    free_disk,
    memory_estimate,
    parameter_counts,
    size,
)
from quintet.cluster.folder import RunFolder
from quintet.config import RunConfig, diff, load_config
from quintet.controller.scoring import score_group
from quintet.data.dataset import build_prompts, describe_skipped, load_rows
from quintet.data.sampler import PromptSampler
from quintet.models.tokenizer import PromptEncoder
from quintet.reward.factory import ManagedRewardService, make_reward_service
from quintet.train.forward import PolicyForward
from quintet.train.packing import TokenSample
from quintet.types import FinishReason, Group, GroupId, Prompt, QuintetError, Rollout, SamplingParams, Score

_GRADED = 32  # reference answers that the reward functions are tried on


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Line:
    """What one check found; `text` may have several lines."""

    about: str
    verdict: Verdict
    text: str


@dataclass
class _Found:
    """What earlier checks leave for later ones."""

    base: Base | None = None
    train: list[Prompt] = field(default_factory=list)
    held_out: list[Prompt] = field(default_factory=list)
    fits: bool = True  # weights and optimizer state fit into memory


class Checks(ABC):
    """What is looked at in every recipe; `say` hears of every line as soon as it is known."""

    def __init__(self, config: RunConfig, folder: Path, say: Callable[[Line], None]) -> None:
        self.config = config
        self.folder = folder
        self.lines: list[Line] = []
        self._say = say
        self._found = _Found()

    @abstractmethod
    async def run(self) -> list[Line]:
        """All checks in order; the lines that were said."""

    def _attempt(self, about: str, check: Callable[[], None]) -> bool:
        try:
            check()
        except QuintetError as error:
            self._tell(about, str(error), Verdict.PROBLEM)
            return False
        return True

    def _tell(self, about: str, text: str, verdict: Verdict = Verdict.OK) -> None:
        line = Line(about, verdict, text)
        self.lines.append(line)
        self._say(line)

    # -- before anything loads -------------------------------------------------------------------

    def _folder(self) -> None:
        """Writable, and free or holding this very run."""
        above = next(p for p in [self.folder, *self.folder.absolute().parents] if p.exists())
        try:
            with tempfile.NamedTemporaryFile(dir=above):
                pass
        except OSError as error:
            reason = error.strerror or str(error)
            self._tell("folder", f"{self.folder} cannot be written ({above}: {reason})", Verdict.PROBLEM)
            return
        existing = RunFolder(self.folder)
        if not existing.holds_run():
            self._tell("folder", f"{self.folder} can be written")
        elif changed := diff(load_config(existing.config), self.config):
            text = f"{self.folder} holds a run that differs in {', '.join(changed)}: choose another with --out"
            self._tell("folder", text, Verdict.WARNING if changed == ["steps"] else Verdict.PROBLEM)
        else:
            self._tell("folder", f"{self.folder} holds a run of this recipe, which would be resumed")

    def _model(self) -> None:
        self._found.base = base = Base.of(self.config)
        every, trained = parameter_counts(base.hf_config, self.config)
        context = base.hf_config.get_text_config().max_position_embeddings
        lora = "" if trained == every else f", {trained:,} trained (LoRA)"
        kind = str(base.dtype).removeprefix("torch.")
        self._tell(
            "model",
            f"{self.config.model.name}: {every:,} parameters{lora}, context {context:,}, {kind} on {base.device}",
        )

    @property
    def _base(self) -> Base:
        assert self._found.base is not None, "checks that need the model run after it was found"
        return self._found.base

    def _tell_memory(self, estimate: dict[str, int]) -> None:
        base = self._base
        total, fixed, there = sum(estimate.values()), fixed_bytes(estimate), available_memory(base.device)
        self._found.fits = there is None or fixed <= there
        verdict = Verdict.PROBLEM if not self._found.fits else Verdict.OK
        if there is not None and fixed <= there < total:
            verdict = Verdict.WARNING
        parts = ", ".join(f"{name} {size(count)}" for name, count in estimate.items() if count)
        free = "" if there is None else f", {size(there)} available on {base.device}"
        mend = ""
        if verdict is not Verdict.OK:
            mend = "\nlower train.micro_batch_tokens, rollout.max_running, or use model.lora"
        formula = "weights, gradients and AdamW: 4 + 4 + 8 = 16 bytes a trained parameter"
        self._tell("memory", f"about {size(total)}{free}: {parts}\n{formula}{mend}", verdict)

    def _tell_disk(self, estimate: dict[str, int]) -> None:
        above = next(p for p in [self.folder, *self.folder.absolute().parents] if p.exists())
        total, free = sum(estimate.values()), free_disk(above)
        parts = ", ".join(f"{name} {size(count)}" for name, count in estimate.items() if count)
        verdict = Verdict.OK if total <= free else Verdict.PROBLEM
        self._tell("disk", f"at most {size(total)}, {size(free)} free: {parts}", verdict)


class Checker(Checks):
    """One check of a recipe that samples."""

    def __init__(self, config: RunConfig, folder: Path, say: Callable[[Line], None]) -> None:
        super().__init__(config, folder, say)
        self._algorithm = resolve(config.algorithm).bound_to(config.rollout.max_tokens)

    async def run(self) -> list[Line]:
        reward = make_reward_service(self.config.reward)
        try:
            self._attempt("folder", self._folder)
            if self._attempt("model", self._model) and self._attempt("data", self._data):
                self._attempt("template", self._template)
                self._attempt("batches", self._batches)
                self._attempt("memory", self._memory)
                if await self._attempt_async("reward", lambda: self._reward(reward)):
                    await self._attempt_async("dry run", lambda: self._dry_run(reward))
        finally:
            reward.close()
        return self.lines

    async def _attempt_async(self, about: str, check: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        try:
            await check()
        except QuintetError as error:
            self._tell(about, str(error), Verdict.PROBLEM)
            return False
        return True

    def _data(self) -> None:
        config, base = self.config, self._base
        encode = PromptEncoder(base.tokenizer, config.model)
        room = base.hf_config.get_text_config().max_position_embeddings - config.rollout.max_tokens
        sides = []
        for rows in load_rows(config.data, config.seed):
            prompts, skipped = build_prompts(rows, config.data, encode, prompt_limit=room)
            sides.append(prompts)
            for text in describe_skipped(skipped):
                self._tell("data", text, Verdict.WARNING)
        self._found.train, self._found.held_out = sides[0], sides[1][: config.eval.max_prompts]
        lengths = [len(p.token_ids) for p in self._found.train]
        self._tell(
            "data",
            f"{config.data.source}: {len(sides[0]):,} training prompts, {len(self._found.held_out):,} held out; "
            f"a prompt has {min(lengths)} to {max(lengths)} tokens, {fmean(lengths):.1f} on average",
        )
        known = {tuple(p.token_ids) for p in sides[0]}
        both = sum(tuple(p.token_ids) in known for p in sides[1])
        if both:
            text = f"{both} of {len(sides[1])} held-out prompts are also trained on: held-out accuracy will flatter"
            self._tell("data", text, Verdict.WARNING)

    def _template(self) -> None:
        """One prompt as the model sees it, and what ends an answer."""
        tokenizer, config = self._base.tokenizer, self.config
        prompt = self._found.train[0]
        kind = "chat template" if PromptEncoder(tokenizer, config.model).uses_chat_template else "plain text"
        shown = str(tokenizer.hf.decode(prompt.token_ids, skip_special_tokens=False))
        self._tell("template", f"{kind}; the first prompt, {len(prompt.token_ids)} ids:\n{quote(shown)}")
        ends = ", ".join(f"{tokenizer.hf.convert_ids_to_tokens(i)!r} ({i})" for i in tokenizer.eos_ids)
        stops = "".join(f", {text!r}" for text in config.rollout.stop)
        self._tell("template", f"an answer ends with {ends}{stops}, or after {config.rollout.max_tokens} tokens")

    def _batches(self) -> None:
        rollout, train, steps = self.config.rollout, self.config.train, self.config.steps
        groups, count = rollout.groups_per_step, len(self._found.train)
        samples, updates = groups * rollout.group_size, train.epochs * train.mini_batches
        self._tell(
            "batches",
            f"{groups} prompts x {rollout.group_size} samples = {samples:,} samples a step, at most "
            f"{samples * rollout.max_tokens:,} sampled tokens\n"
            f"{train.epochs} epochs x {train.mini_batches} mini-batches = {updates} optimizer steps a step, "
            f"{updates * steps:,} in {steps} steps\n"
            f"{steps} steps x {groups} prompts = {steps * groups:,} draws = {steps * groups / count:.2f} passes over "
            f"{count:,} prompts",
        )
        epochs = self.config.data.epochs
        if epochs is not None and epochs * count < steps * groups:
            possible = epochs * count // groups
            text = f"data.epochs {epochs} ends the run after {possible} of {steps} steps"
            self._tell("batches", text, Verdict.WARNING)
        if train.lr == 0:
            self._tell("batches", "train.lr is 0: the weights will not change", Verdict.WARNING)

    def _memory(self) -> None:
        """Memory, then disk."""
        base, config = self._base, self.config
        counts = parameter_counts(base.hf_config, config)
        lengths = [len(p.token_ids) for p in self._found.train]
        estimate = memory_estimate(
            config,
            self._algorithm,
            base.hf_config,
            counts,
            dtype=base.dtype,
            prompt_tokens=(fmean(lengths), max(lengths)),
        )
        self._tell_memory(estimate)
        self._tell_disk(disk_estimate(config, self._algorithm, counts))

    # -- with reward functions and model -----------------------------------------------------------

    async def _reward(self, service: ManagedRewardService) -> None:
        """The functions load, and tell a reference answer from another prompt's."""
        await asyncio.to_thread(service.start)
        self._tell("reward", f"loaded: {', '.join(service.names)}")
        for side, prompts in (("training", self._found.train), ("held-out", self._found.held_out)):
            faults = dict(service.unusable_references(prompts))
            if faults:
                row, reason = next(iter(faults.items()))
                text = (
                    f"{len(faults)} of {len(prompts)} {side} prompts will be left out, e.g. {prompts[row].id}: {reason}"
                )
                everything = len(faults) == len(prompts)
                self._tell("reward", text, Verdict.PROBLEM if everything else Verdict.WARNING)
            prompts[:] = [p for i, p in enumerate(prompts) if i not in faults]
        if not self._found.train:
            raise QuintetError("no training prompt is left")
        await self._references(service)

    async def _references(self, service: ManagedRewardService) -> None:
        prompts = [p for p in self._found.train if p.answer is not None][:_GRADED]
        if not prompts:
            self._tell("reward", "the data has no reference answers: not tried")
            return
        others = [next((q.answer for q in prompts if q.answer != p.answer), "") for p in prompts]
        scores = [
            await score_group(service, self._answered(prompt, [prompt.answer or "", other or ""]))
            for prompt, other in zip(prompts, others, strict=True)
        ]
        failure = next((s.failure for pair in scores for s in pair if s.failure is not None), None)
        if failure is not None:
            self._tell("reward", f"a reference answer could not be scored: {failure.message}", Verdict.PROBLEM)
            return
        right, wrong = ([pair[i].reward or 0.0 for pair in scores] for i in (0, 1))
        text = (
            f"given as the response, {len(prompts)} reference answers earn {fmean(right):.3g} on average, "
            f"another prompt's answer {fmean(wrong):.3g}"
        )
        poor = [p for p, r in zip(prompts, right, strict=True) if r < max(right)]
        if fmean(right) <= fmean(wrong):
            text += f"\nno difference: {_parts(scores[0][0])} for {prompts[0].answer!r:.60}. Is it the right function?"
            self._tell("reward", text, Verdict.WARNING)
        elif poor:
            text += f"\n{len(poor)} earn less than others, e.g. {poor[0].answer!r:.60} of prompt {poor[0].id}"
            self._tell("reward", text, Verdict.WARNING)
        else:
            self._tell("reward", text)

    def _answered(self, prompt: Prompt, texts: list[str]) -> Group:
        """A group whose responses are these texts, as if they had been sampled."""
        tokenizer = self._base.tokenizer
        group_id = GroupId(prompt.id)
        rollouts = []
        for i, text in enumerate(texts):
            ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
            ones = [1] * len(ids)
            rollouts.append(
                Rollout(group_id, i, prompt.token_ids, ids, text, [0.0] * len(ids), ones, [], FinishReason.STOP)
            )
        return Group(group_id, prompt, rollouts=rollouts)

    async def _dry_run(self, service: ManagedRewardService) -> None:
        """Two samples of the first prompt that the run would draw."""
        if not self._found.fits:
            self._tell("dry run", "left out: the model does not fit into memory", Verdict.WARNING)
            return
        config, base = self.config, self._base
        policy = await asyncio.to_thread(load_policy, config.model)
        worker = rollout_worker(config, base, policy, 0)
        draw = PromptSampler(self._found.train, seed=config.seed, shuffle=config.data.shuffle).draw(0)
        assert draw is not None
        group = Group(GroupId(draw.prompt.id), draw.prompt)
        params: SamplingParams = msgspec.structs.replace(sampling_params(config), n=2)
        try:
            group.rollouts = await worker.generate([group], params, 0)
        finally:
            await worker.close()  # type: ignore[attr-defined]
        group.scores = await score_group(service, group)
        if config.warm_start.steps:
            self._tell("dry run", "these samples are of the model before its warm start")
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            self._tell_sample(draw.prompt, rollout, score)
        self._tell_mismatch(policy, group.rollouts)

    def _tell_sample(self, prompt: Prompt, rollout: Rollout, score: Score) -> None:
        failure = rollout.failure or score.failure
        reward = "not scored" if score.reward is None else f"reward {score.reward:.3g} ({_parts(score)})"
        answer = "" if prompt.answer is None else f", reference {prompt.answer!r:.60}"
        tokens = len(rollout.response_ids)
        head = (
            f"sample {rollout.sample_index}: {tokens} tokens, ended by {rollout.finish_reason.value}, {reward}{answer}"
        )
        body = f"{failure.kind.value}: {failure.message}" if failure else rollout.text
        self._tell("dry run", f"{head}\n{quote(body)}", Verdict.PROBLEM if failure else Verdict.OK)

    def _tell_mismatch(self, policy: PreTrainedModel, rollouts: list[Rollout]) -> None:
        kernels = shared_kernels(self.config, policy)
        forward = PolicyForward(
            policy,
            temperature=self.config.rollout.temperature,
            dtype=self._base.dtype,
            kernels=kernels,
            fused_kernels=self.config.train.kernels,
        )
        gaps = [_largest_gap(forward, r) for r in rollouts if any(r.loss_mask)]
        if not gaps:
            return
        usual = 0.0 if kernels is not None else 1e-2 if self._base.dtype == torch.float32 else 1.0
        text = f"engine and trainer differ by at most {max(gaps):.1e} nats on the sampled tokens"
        self._tell("dry run", text, Verdict.OK if max(gaps) <= usual else Verdict.WARNING)


@torch.no_grad()
def _largest_gap(forward: PolicyForward, rollout: Rollout) -> float:
    """Largest |engine - trainer| log-probability of the sampled tokens."""
    sample = TokenSample(rollout.prompt_ids, rollout.response_ids, rollout.loss_mask)
    logprobs_T = forward([sample]).logprobs_BT[0].cpu()
    sampled_T = torch.tensor(rollout.loss_mask, dtype=torch.bool)
    return float((logprobs_T - torch.tensor(rollout.logprobs)).abs()[sampled_T].max())


def _parts(score: Score) -> str:
    return ", ".join(f"{name} {'abstained' if v is None else f'{v:.3g}'}" for name, v in score.parts.items())


def quote(text: str, limit: int = 1200) -> str:
    """Each line behind a bar."""
    shown = text if len(text) <= limit else f"{text[:limit]} ..."
    return "\n".join(f"| {line}" for line in shown.split("\n"))
