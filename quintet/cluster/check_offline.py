"""`quintet check` of an offline preset: rows with given answers, batch arithmetic, memory, disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import torch

from quintet.algorithms.offline import is_offline, resolve_offline
from quintet.cluster.answered import load_answered
from quintet.cluster.build import Base
from quintet.cluster.check import Checker, Checks, Line, Verdict, quote
from quintet.cluster.estimate import offline_disk_estimate, offline_memory_estimate, parameter_counts
from quintet.config import RunConfig
from quintet.data.answers import Answered
from quintet.models.tokenizer import PromptEncoder


def checker_of(config: RunConfig, folder: Path, say: Callable[[Line], None]) -> Checks:
    """The checks of this kind of preset."""
    return (OfflineChecker if is_offline(config.algorithm) else Checker)(config, folder, say)


class OfflineChecker(Checks):
    """One check of a recipe that trains on given answers."""

    def __init__(self, config: RunConfig, folder: Path, say: Callable[[Line], None]) -> None:
        super().__init__(config, folder, say)
        self._algorithm = resolve_offline(config.algorithm)
        self._rows: list[Answered] = []

    async def run(self) -> list[Line]:
        await asyncio.to_thread(self._run)
        return self.lines

    def _run(self) -> None:
        self._attempt("folder", self._folder)
        if self._attempt("model", self._model) and self._attempt("data", self._data):
            self._attempt("template", self._template)
            self._attempt("batches", self._batches)
            self._attempt("memory", self._memory)

    def _data(self) -> None:
        config = self.config

        def say(text: str) -> None:
            self._tell("data", text, Verdict.WARNING)

        self._rows, held_out = load_answered(config, self._algorithm, self._base, say)
        lengths = [len(a) for row in self._rows for a in _answers(row)]
        kinds = "pairs" if self._rows[0].rejected_ids is not None else "answers"
        self._tell(
            "data",
            f"{config.data.source}: {len(self._rows):,} {kinds}, {len(held_out):,} held out; an answer has "
            f"{min(lengths)} to {max(lengths)} tokens, {fmean(lengths):.1f} on average",
        )
        no_loser = kinds == "answers" and all(row.desirable for row in self._rows)
        if no_loser and self._algorithm.objective.name == "kto":
            self._tell("data", "every answer is desirable: there is nothing to move away from", Verdict.WARNING)

    def _template(self) -> None:
        """The first row as the model sees it."""
        tokenizer, row = self._base.tokenizer, self._rows[0]
        kind = "chat template" if PromptEncoder(tokenizer, self.config.model).uses_chat_template else "plain text"
        prompt = str(tokenizer.hf.decode(list(row.prompt_ids), skip_special_tokens=False))
        self._tell("template", f"{kind}; the first prompt, {len(row.prompt_ids)} ids:\n{quote(prompt)}")
        for name, ids in zip(("answer", "rejected answer"), _answers(row), strict=False):
            text = str(tokenizer.hf.decode(list(ids), skip_special_tokens=False))
            part = "" if row.loss_mask is None else f", {sum(row.trained)} of them trained"
            self._tell("template", f"its {name}, {len(ids)} ids{part}:\n{quote(text)}")

    def _batches(self) -> None:
        config, count = self.config, len(self._rows)
        size, steps = config.offline.batch_size, config.steps
        passes = steps * size / count
        text = f"{steps:,} steps x {size} rows = {steps * size:,} rows = {passes:.2f} passes over {count:,}"
        self._tell("batches", text)
        epochs = config.data.epochs
        if epochs is not None and epochs < passes:
            text = f"data.epochs {epochs} ends the run after {-(-epochs * count // size)} of {steps} steps"
            self._tell("batches", text, Verdict.WARNING)
        if config.train.lr == 0:
            self._tell("batches", "train.lr is 0: the weights will not change", Verdict.WARNING)

    def _memory(self) -> None:
        base: Base = self._base
        counts = parameter_counts(base.hf_config, self.config)
        longest = [len(row.prompt_ids) + sum(map(len, _answers(row))) for row in self._rows]
        dtype: torch.dtype = base.dtype
        self._tell_memory(
            offline_memory_estimate(
                self.config, self._algorithm, base.hf_config, counts, dtype=dtype, row_tokens=fmean(longest)
            )
        )
        self._tell_disk(offline_disk_estimate(self.config, self._algorithm, counts))


def _answers(row: Answered) -> list[list[int]]:
    return [list(ids) for ids in (row.response_ids, row.rejected_ids) if ids is not None]
