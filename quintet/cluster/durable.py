"""What a run keeps on the disk so that it survives its process: the journal, the checkpoints, the best of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from quintet.algorithms.presets import resolve
from quintet.buffer.journal import SqliteJournal
from quintet.buffer.repair import Anchor, BatchShape, anchor, open_journal
from quintet.cluster.folder import RunFolder
from quintet.config import RunConfig
from quintet.controller.state import (
    ControllerState,
    Save,
    forget_best_after,
    is_best,
    mark_best,
    newest_checkpoint,
    oldest_kept,
    read_state,
    write_checkpoint,
)
from quintet.types import WeightRef

_ANCHOR = "journal.json"  # the journal's position, in a checkpoint


class Keeper:
    """Opens the journal of a run that starts or goes on, and writes its checkpoints. `say` takes warnings."""

    def __init__(self, config: RunConfig, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._config = config
        self._folder = folder
        self._say = say
        self.journal: SqliteJournal

    def newest(self) -> tuple[Path | None, ControllerState]:
        """Where the run goes on from; complains of every newer checkpoint that is not whole."""
        checkpoint, complaints = newest_checkpoint(self._folder.checkpoints)
        for complaint in complaints:
            self._say(complaint)
        state = ControllerState() if checkpoint is None else read_state(checkpoint)
        forget_best_after(self._folder.checkpoints, state.step)
        return checkpoint, state

    def open(self, checkpoint: Path | None, published: WeightRef) -> SqliteJournal:
        """The journal, mended if need be. `published` are the weights that the run goes on from: they must be those
        that were recorded when they were made."""
        known = Anchor() if checkpoint is None else _read_anchor(checkpoint)
        rollout = self._config.rollout
        samples = resolve(self._config.algorithm).rollouts_per_group(rollout.group_size)
        shape = BatchShape(rollout.groups_per_step, samples)
        self.journal = open_journal(self._folder.journal, known, shape, self._say)
        self.record_version(published, known.step)
        return self.journal

    def record_version(self, ref: WeightRef, step: int) -> None:
        """Journal a publication. Says so when a redone step gives other weights than it gave the first time."""
        before = self.journal.version(ref.version, step, ref.digest)
        if before not in (None, ref.digest):
            self._say(
                f"step {step} done again gives other weights than before: the run goes on from the new ones "
                "(threads, libraries or processor differ, see the journal's environments)"
            )

    async def save(self, state: ControllerState, save_trainer: Save) -> None:
        """A checkpoint of this step; then forget checkpoints and trajectories that are no longer to be kept."""
        options, root = self._config.checkpoint, self._folder.checkpoints
        extra: dict[str, msgspec.Struct] = {_ANCHOR: anchor(self.journal, state.step)}
        await write_checkpoint(root, state, save_trainer, keep_last=options.keep_last, extra=extra)
        if options.keep_trajectories_steps is not None:
            unneeded = min(oldest_kept(root, options.keep_last), state.step - options.keep_trajectories_steps)
            self.journal.prune(unneeded)

    async def note_accuracy(self, accuracy: float | None, state: ControllerState, save_trainer: Save) -> None:
        """With `checkpoint.keep_best`, keep the weights of this evaluation if it is the highest so far."""
        options, root = self._config.checkpoint, self._folder.checkpoints
        if options.keep_best and accuracy is not None and is_best(root, accuracy):
            await self.save(state, save_trainer)
            mark_best(root, state.step, accuracy, keep_last=options.keep_last)


def _read_anchor(checkpoint: Path) -> Anchor:
    return msgspec.json.decode((checkpoint / _ANCHOR).read_bytes(), type=Anchor)
