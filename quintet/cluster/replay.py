"""Any past step's weights again, from the checkpoint before it and the journal: replay, inspection, fork.

The steps are done with the same code that training uses (`step_batch`, the train worker, `compute_advantages`),
on the journaled samples in their journaled order; nothing is generated and nothing is scored. The run's folder
is only read.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from quintet.algorithms.advantage import compute_advantages
from quintet.algorithms.presets import Algorithm, resolve
from quintet.buffer.reading import DamagedJournal, DamagedRow, JournalReader
from quintet.cluster.build import Base, load_policy, shared_kernels, with_adapters
from quintet.cluster.folder import RunFolder
from quintet.cluster.inspection import Inspection, inspect_update
from quintet.config import RunConfig, diff, load_config, save
from quintet.controller.experience import step_batch
from quintet.controller.state import newest_checkpoint, read_state
from quintet.observe.summary import library_versions
from quintet.train.worker import LocalTrainWorker
from quintet.types import ExperienceBatch, QuintetError
from quintet.weights.memory import MemoryStore

Say = Callable[[str], None]
_SAME_MODEL = ("model.name", "model.revision", "model.tiny")  # what a fork cannot change


class Replayed(msgspec.Struct, frozen=True):
    """The weights after `step`: their digest, and the one recorded when the run made them."""

    step: int
    from_step: int  # of the checkpoint that the replay began with; 0: the start of the run
    digest: str
    recorded: str | None
    inspection: Inspection | None = None
    differences: tuple[str, ...] = ()  # what is not as it was when the run was recorded

    @property
    def equal(self) -> bool:
        return self.digest == self.recorded


@dataclass
class _Replay:
    """A train worker holding the weights after `step`."""

    config: RunConfig
    base: Base
    train: LocalTrainWorker
    journal: JournalReader
    algorithm: Algorithm
    step: int

    async def advance(self, to_step: int) -> None:
        while self.step < to_step:
            await self.train.update(await self.next_batch())
            self.step += 1

    async def next_batch(self) -> ExperienceBatch:
        """What the step after this one trains on, advantages included."""
        step = self.step + 1
        groups = self.journal.step_groups(step)
        max_tokens = self.config.rollout.max_tokens
        batch = step_batch(self.algorithm, groups, step=step, version=self.step, max_tokens=max_tokens)
        return compute_advantages(self.algorithm, await self.train.prepare(batch))


async def replay(folder: RunFolder, step: int, *, inspect: bool = False) -> Replayed:
    """Rebuild the weights after `step`. Raises QuintetError when the journal or the checkpoints do not reach it."""
    async with _replaying(folder, step - 1 if inspect and step > 0 else step) as at:
        start, inspection = at.step, None
        if inspect:
            _require_a_step(step)
            await at.advance(step - 1)
            inspection = await inspect_update(at.train, await at.next_batch(), at.config.train, at.algorithm, at.base)
            at.step = step
        await at.advance(step)
        published = await at.train.publish(step)
        recorded = at.journal.digests().get(step)
        return Replayed(step, start, published.digest, recorded, inspection, tuple(_differences(at)))


async def fork(old: RunFolder, config: RunConfig, say: Say) -> RunFolder:
    """A new run folder beside `old` whose starting policy is the newest weights of `old`; `old` stays as it is.

    Optimizer, schedule, data offset and reference policy begin anew. Raises QuintetError when `old` holds no
    run, or one of another model.
    """
    before = _config_of(old)
    changed = [key for key in diff(before, config) if key.startswith(_SAME_MODEL)]
    if changed:
        raise QuintetError(f"a fork goes on with the model of {old.root}; {', '.join(changed)} cannot change")
    with JournalReader.open(old.journal) as journal:
        newest = journal.last_trained_step()
    new = old.next_fork()
    beside = RunFolder(new.root.with_name(f".{new.root.name}.partial"))
    shutil.rmtree(beside.root, ignore_errors=True)  # of a fork that was killed
    beside.root.mkdir(parents=True)
    async with _replaying(old, newest) as at:
        await at.advance(newest)
        published = await at.train.publish(newest)
        await at.train.export(str(beside.start))
    origin = {"run": str(old.root), "step": newest, "digest": published.digest}
    (beside.root / "fork.json").write_bytes(msgspec.json.format(msgspec.json.encode(origin)))
    save(config, beside.config)
    beside.root.rename(new.root)
    say(f"{new.root} is a new run from the weights of {old.root} after step {newest}; {old.root} is left as it is")
    return new


@asynccontextmanager
async def _replaying(folder: RunFolder, step: int) -> AsyncIterator[_Replay]:
    """A replay that stands at the newest whole checkpoint of `step` or before."""
    config = _config_of(folder)
    base = Base.of(config)
    algorithm = resolve(config.algorithm).bound_to(config.rollout.max_tokens)
    with JournalReader.open(folder.journal) as journal:
        checkpoint, _ = newest_checkpoint(folder.checkpoints, up_to=step)
        _require_reachable(journal, step, 0 if checkpoint is None else read_state(checkpoint).step)
        train = await asyncio.to_thread(_train_worker, config, base, folder, algorithm)
        try:
            if checkpoint is not None:
                await train.load_checkpoint(str(checkpoint))
            begun = 0 if checkpoint is None else read_state(checkpoint).step
            yield _Replay(config, base, train, journal, algorithm, begun)
        except (DamagedRow, sqlite3.DatabaseError) as error:
            raise DamagedJournal(f"{folder.journal} is damaged ({error}): this step cannot be rebuilt") from error
        finally:
            await train.close()


def _train_worker(config: RunConfig, base: Base, folder: RunFolder, algorithm: Algorithm) -> LocalTrainWorker:
    start = folder.start if (folder.start / "config.json").exists() else None
    if config.warm_start.steps > 0 and start is None:
        raise QuintetError(f"{folder.root}: the warm start was not finished; there is no step to replay")
    policy = load_policy(config.model, start=start)
    model = with_adapters(policy, config.model, config.seed)
    return LocalTrainWorker(
        model,
        tokenizer=base.tokenizer,
        config=config.train,
        algorithm=algorithm,
        temperature=config.rollout.temperature,
        total_steps=config.steps,
        dtype=base.dtype,
        store=MemoryStore(),
        seed=config.seed,
        kernels=shared_kernels(config, model),
    )


def _config_of(folder: RunFolder) -> RunConfig:
    if not folder.config.exists():
        raise QuintetError(f"{folder.root} holds no run (it has no config.yaml)")
    return load_config(folder.config)


def _require_a_step(step: int) -> None:
    if step < 1:
        raise QuintetError("--inspect shows a training step: use --step 1 or later")


def _require_reachable(journal: JournalReader, step: int, begun: int) -> None:
    last = journal.last_trained_step()
    if not 0 <= step <= last:
        raise QuintetError(f"{journal.path.parent} has no step {step}: its journal ends with step {last}")
    for missing in range(begun + 1, step + 1):
        journal.require_kept(missing)


def _differences(at: _Replay) -> list[str]:
    """What decides the last bits and is not what it was in the run's last sitting."""
    recorded: dict[str, Any] = (at.journal.environments() or [{}])[-1]
    now = {
        "threads": torch.get_num_threads(),
        "device": str(at.base.device),
        "dtype": str(at.base.dtype),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": library_versions(),
    }
    return [f"{key}: {recorded.get(key)} then, {value} now" for key, value in now.items() if recorded.get(key) != value]
