"""The run folder: what stands where, who may write in it, and whether a run in it can be taken up."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from quintet.config import RunConfig, diff, load_config, require_writable, save
from quintet.types import QuintetError


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

        Raises QuintetError when the folder cannot be written or holds a run with another config.
        """
        require_writable(self.root)
        if not self.config.exists():
            if any(p for p in self.root.iterdir() if p.name not in (".lock",)):
                raise QuintetError(f"{self.root} is not empty and holds no run: choose another folder with --out")
            save(config, self.config)
            self.rollouts.mkdir(exist_ok=True)
            return False
        changed = diff(load_config(self.config), config)
        if changed:
            raise QuintetError(
                f"{self.root} holds a run with another config; it differs in {', '.join(changed)}.\n"
                "Resume it with the config it was started with, or start a new run in another folder with --out"
            )
        return True

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
            yield
