"""What the journal costs: the same run, every other step without it.

    python benchmarks/journal_overhead.py                                   # recipes/smollm2_sums.yaml, 24 steps
    python benchmarks/journal_overhead.py --recipe recipes/sums_tiny.yaml --steps 40 --set rollout.numerics=fast

One process, one model, one sequence of batches: the steps go with, without, without, with the journal, and so on, so
that what drifts (longer answers, a warmer processor) meets both alike. A step without it is a step of the same code
whose journal drops what it is given. That is possible because a run only reads its journal when it is resumed, and
`max_staleness: 0` lets no group cross from one step into the next. The evaluations stand outside the clock.

Step times differ by more than the journal costs (answers differ in length). So its own seconds are measured too: those
on the event loop, where a step waits for them, and those of the thread that forces the log to the disk beside it.
Ends with a DIRECT line (own seconds over seconds of a step) and a RATIO line (medians of the two kinds of steps).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import quintet
from quintet.buffer import journal as journal_module
from quintet.buffer.journal import SqliteJournal
from quintet.config import load_config
from quintet.types import Group, GroupState, QuintetError, StepMetrics

RECIPE = Path(__file__).parents[1] / "recipes" / "smollm2_sums.yaml"
FIRST = 2  # the first step warms caches up and counts on neither side


@dataclass
class Times:
    """Seconds: whole steps by number, and the journal's own by step."""

    step: dict[int, float] = field(default_factory=dict)
    loop: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    flush: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class Overhead:
    """Medians of the steps with and without the journal, and the journal's own mean seconds in a step with it."""

    with_s: float
    without_s: float
    loop_s: float
    flush_s: float

    @property
    def ratio(self) -> float:
        return self.with_s / self.without_s - 1.0

    @property
    def direct(self) -> float:
        return self.loop_s / self.with_s


def is_with(step: int) -> bool:
    """With, without, without, with, ... from step `FIRST` on; the steps before it are with."""
    return step < FIRST or (step - FIRST) % 4 in (0, 3)


class AlternatingJournal(SqliteJournal):
    """A journal that drops what belongs to a step without it, and takes the time of the rest."""

    def __init__(self, path: Path, times: Times) -> None:
        self._step = 1
        self._times = times
        super().__init__(path)

    def edge(self, group: Group, state: GroupState, *, step: int | None = None, reason: str | None = None) -> None:
        if is_with(self._step):
            with self._timed():
                super().edge(group, state, step=step, reason=reason)

    def assign(self, groups: Sequence[Group], step: int) -> None:
        if is_with(step):
            with self._timed():
                super().assign(groups, step)

    def version(self, version: int, step: int, digest: str) -> str | None:
        if not is_with(step):
            return None
        with self._timed():
            return super().version(version, step, digest)

    def trained(self, groups: Sequence[Group], step: int) -> None:
        """The last call of a step: what follows belongs to the next one."""
        if is_with(step):
            with self._timed():
                super().trained(groups, step)
        self._step = step + 1

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._times.loop[self._step] += time.perf_counter() - began


def measure(recipe: str | Path, overrides: Sequence[str], steps: int, out: Path) -> Times:
    """The run. Raises QuintetError when the recipe lets groups cross from one step into another."""
    config = load_config(recipe, [*overrides, f"steps={steps}", "checkpoint.every=0", "eval.every=0"])
    if config.algorithm.max_staleness:
        raise QuintetError("algorithm.max_staleness must be 0: a group must not cross into a step without a journal")
    times = Times()
    journals: list[AlternatingJournal] = []

    def opened(path: Path, *_: Any) -> SqliteJournal:
        journals.append(AlternatingJournal(path, times))
        return journals[0]

    def flush_timed(flusher: Any) -> None:
        began = time.perf_counter()
        flush(flusher)
        times.flush[journals[0]._step if journals else 1] += time.perf_counter() - began

    def note(event: str, payload: Any) -> None:
        if event == "step":
            assert isinstance(payload, StepMetrics)
            times.step[payload.step] = payload.values["time/step_s"]
            kind = "with" if is_with(payload.step) else "without"
            print(f"step {payload.step} {kind} {times.step[payload.step]:.3f} s")

    flush = journal_module._Flusher._flush
    with (
        patch("quintet.cluster.durable.open_journal", opened),
        patch.object(journal_module._Flusher, "_flush", flush_timed),
    ):
        quintet.train(config, out=out, on_event=note)
    return times


def overhead(times: Times) -> Overhead:
    counted = [step for step in times.step if step >= FIRST]
    with_, without = ([s for s in counted if is_with(s) == kind] for kind in (True, False))
    if not with_ or not without:
        raise QuintetError(
            f"--steps {len(times.step)} is too few: both kinds of steps are needed ({FIRST + 1} at least)"
        )
    return Overhead(
        median(times.step[s] for s in with_),
        median(times.step[s] for s in without),
        fmean(times.loop[s] for s in with_),
        fmean(times.flush[s] for s in with_),
    )


def main(arguments: Sequence[str] | None = None) -> Overhead:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=str(RECIPE))
    parser.add_argument("--steps", type=int, default=25, help="1 that does not count and a multiple of 4 (default: 25)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override an option")
    parser.add_argument("--out", type=Path, help="keep the run folder here; it must not exist")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as spare:
        found = overhead(measure(options.recipe, options.set, options.steps, options.out or Path(spare) / "run"))
    print(
        f"DIRECT journal_overhead {found.direct:.2%} loop={found.loop_s:.4f}s flush={found.flush_s:.4f}s (beside) "
        f"step={found.with_s:.3f}s"
    )
    print(f"RATIO journal_overhead {found.ratio:.2%} with={found.with_s:.3f}s without={found.without_s:.3f}s")
    return found


if __name__ == "__main__":
    main()
