"""The run folder: what stands where, who may write in it, and whether a run in it can be taken up."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

from quintet.buffer.reading import DamagedJournal, JournalReader
from quintet.config import RunConfig, diff, load_config, require_writable, save
from quintet.controller.state import DiskFull, is_disk_full
from quintet.observe.summary import read_summary, write_summary
from quintet.types import QuintetError

_BEFORE_THE_RUN = (".lock", "config.yaml.tmp")  # what a process killed before it began leaves behind


class RunFolder:
    """`runs/<name>/`; every path in it has its name here and nowhere else."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.yaml"
        self.journal = root / "journal.sqlite"
        self.metrics = root / "metrics.jsonl"
        self.trace = root / "trace.json"
        self.checkpoints = root / "checkpoints"
        self.start = root / "start"  # the starting policy, where a warm start made it
        self.final = root / "final"
        self.rollouts = root / "rollouts"

    def claim(self, config: RunConfig) -> bool:
        """Make the folder this run's, or find that it is already. True when there is a run to resume.

        A run may be resumed with more `steps` than it was started with when its learning rate is constant: the
        first steps are then the same, whatever the number. Raises QuintetError when the folder cannot be
        written or holds a run with another config.
        """
        require_writable(self.root)
        is_run = self.holds_run()
        self.rollouts.mkdir(exist_ok=True)
        if not (is_run and self._began()):
            save(config, self.config)
            return False
        before = load_config(self.config)
        changed = diff(before, config)
        if changed == ["steps"] and config.train.schedule == "constant" and config.steps > before.steps:
            self._lengthen(config)
        elif changed:
            raise QuintetError(
                f"{self.root} holds a run with another config; it differs in {', '.join(changed)}.\n"
                "Resume it with the config it was started with (or more steps, where the learning rate is constant), "
                "start\na new run from its weights with --fork, or one in another folder with --out"
            )
        return True

    def holds_run(self) -> bool:
        """Whether there is a run to look at. Raises QuintetError for a folder of something else, and for a run of a
        version of this program whose files it cannot read."""
        if not self.config.exists():
            if self.root.exists() and any(p for p in self.root.iterdir() if p.name not in _BEFORE_THE_RUN):
                raise QuintetError(f"{self.root} is not empty and holds no run: choose another folder with --out")
            return False
        if self.journal.exists():
            with contextlib.suppress(DamagedJournal):  # a resume mends it
                JournalReader.open(self.journal).close()
        if (self.root / "summary.json").exists():
            read_summary(self.root)
        return True

    def _began(self) -> bool:
        """A run that was refused or stopped before its first group leaves nothing worth keeping: it is started anew,
        with whatever config mends it."""
        return any(path.exists() for path in (self.journal, self.checkpoints, self.start, self.final))

    def _lengthen(self, config: RunConfig) -> None:
        if (self.root / "summary.json").exists():
            write_summary(self.root, read_summary(self.root) | {"finished": False})
        save(config, self.config)

    def next_fork(self) -> RunFolder:
        """`NAME-fork1` beside this folder, or the next number that is free."""
        number = 1
        while (root := self.root.with_name(f"{self.root.name}-fork{number}")).exists():
            number += 1
        return RunFolder(root)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process works in a run folder. Raises QuintetError when another one does."""
        require_writable(self.root)
        with (self.root / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise QuintetError(
                    f"another process is running in {self.root}: wait for it, or use another --out"
                ) from None
            self._sweep()
            try:
                yield
            except QuintetError:
                raise
            except Exception as error:
                if not is_disk_full(error):
                    raise
                if (told := _first_told(error)) is not None:
                    raise told from error
                raise DiskFull(
                    f"{self.root}: no room on the disk ({error}); what was finished before is kept.\n"
                    "Free some space and run the same command."
                ) from error

    def _sweep(self) -> None:
        """Remove what a killed process was writing beside its place."""
        for unfinished in (*self.root.glob(".final-*"), *self.root.glob(".start-*")):
            shutil.rmtree(unfinished)


def _first_told(error: BaseException | None) -> DiskFull | None:
    """The complaint that was being raised when the next write, made on the way out, failed too."""
    while error is not None and not isinstance(error, DiskFull):
        error = error.__context__
    return error
