"""A damaged journal: found when a run is resumed, cut back to the last point that is whole, and said so.

Found are: a file that SQLite cannot read or calls malformed, rows whose CRC does not fit, a missing file, and
a log that lost its end (it knows fewer edges than the checkpoint says were written).

The mend never guesses. What can be read is read row by row. The last good point is the checkpoint, or the
last step after it whose groups are all whole; everything admitted later is left out and will be drawn and
generated again. The damaged files stay beside the new one.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quintet.buffer.journal import SCHEMA, SqliteJournal
from quintet.buffer.reading import SCHEMA_VERSION, DamagedRow, JournalReader, is_whole
from quintet.types import GroupId, GroupState

_TABLES = ("meta", "groups", "edges", "trajectories", "scores", "versions", "environments")
_BEYOND = 10_000  # rows looked for after the last readable one, where the number of rows cannot be read
_SIDE_FILES = ("", "-wal", "-shm")

Row = tuple[Any, ...]


class Anchor(msgspec.Struct, frozen=True):
    """What a checkpoint knows of the journal beside it.

    `edges` were written; of the groups admitted, the first `settled` are trained by the checkpoint's `step`
    or dropped, and `drawn` of these are first attempts (the data offset).
    """

    step: int = 0
    edges: int = 0
    settled: int = 0
    drawn: int = 0


@dataclass(frozen=True)
class BatchShape:
    """Groups of a step and samples of a group."""

    groups: int
    samples: int


def anchor(journal: JournalReader, step: int) -> Anchor:
    """The journal's position, to be kept in the checkpoint of `step`."""
    settled, drawn = journal.settled(step)
    return Anchor(step, journal.counts()["edges"], settled, drawn)


def open_journal(path: Path, known: Anchor, shape: BatchShape, say: Callable[[str], None]) -> SqliteJournal:
    """The journal of a run that starts, or goes on after the checkpoint that `known` comes from.

    A damaged one is mended first, and `say` is told in one sentence what was lost.
    """
    fault = find_fault(path, known)
    if fault is not None:
        say(_mend(path, known, shape, fault))
    return SqliteJournal(path)


def find_fault(path: Path, known: Anchor) -> str | None:
    """Why the journal cannot be trusted; None when it can."""
    if not path.exists():
        return None if known.edges == 0 else "the file is missing"
    if path.stat().st_size == 0 and known.edges == 0:
        return None
    try:
        with closing(sqlite3.connect(path)) as db:
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                return verdict.replace("\n", " ").removeprefix("*** in database main *** ")
            reader = JournalReader(db, path)
            reader.check_schema()
            if reader.counts()["edges"] < known.edges:
                return "its end is missing"
            if int(reader.meta("pruned_through") or 0) <= known.step:
                reader.load(known.step)
    except DamagedRow as row:
        return f"{row} is damaged"
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_CANTOPEN):
            raise
        return str(error)
    except sqlite3.DatabaseError as error:
        return str(error)
    return None


def _mend(path: Path, known: Anchor, shape: BatchShape, fault: str) -> str:
    aside = _copy_aside(path)
    rows = {table: list(_salvage(aside, table)) for table in _TABLES}
    found = _Cut.of(rows, known, shape)
    beside = path.with_name(path.name + ".mended")
    beside.unlink(missing_ok=True)
    with closing(sqlite3.connect(beside)) as db:
        db.executescript(SCHEMA)
        for table, kept in found.rows.items():
            if kept:
                places = ",".join("?" * len(kept[0]))
                db.executemany(f"INSERT OR REPLACE INTO {table} VALUES({places})", kept)
        db.commit()
    for suffix in _SIDE_FILES[1:]:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    beside.replace(path)
    return (
        f"the journal is damaged ({fault}): going on after step {found.step}; {found.forgotten} groups admitted later "
        f"are drawn and generated again (the damaged file is kept as {aside.name})."
    )


def _copy_aside(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
        number += 1
    for suffix in _SIDE_FILES:
        source = path.with_name(path.name + suffix)
        if source.exists():
            shutil.copy2(source, aside.with_name(aside.name + suffix))
    return aside


def _salvage(path: Path, table: str) -> Iterator[Row]:
    """Every row that can still be read: a scan up to the damage, then one look-up per row number."""
    if not path.exists():
        return
    last = 0
    with closing(sqlite3.connect(path)) as db:
        try:
            for number, *row in db.execute(f"SELECT rowid, * FROM {table} ORDER BY rowid"):
                last = number
                yield tuple(row)
            return
        except sqlite3.DatabaseError:
            top = _largest_rowid(db, table, last + _BEYOND)
        for number in range(last + 1, top + 1):
            try:
                row = db.execute(f"SELECT * FROM {table} WHERE rowid=?", (number,)).fetchone()
            except sqlite3.DatabaseError:
                continue  # this row lies on a damaged page: what is missing is counted by `_Cut`
            if row is not None:
                yield row


def _largest_rowid(db: sqlite3.Connection, table: str, otherwise: int) -> int:
    try:
        return db.execute(f"SELECT max(rowid) FROM {table}").fetchone()[0] or otherwise
    except sqlite3.DatabaseError:
        return otherwise


@dataclass
class _Cut:
    """What is kept of the salvaged rows, and the step after which the run goes on."""

    step: int
    forgotten: int  # groups that the damaged journal had, and are left out
    rows: dict[str, list[Row]]

    @classmethod
    def of(cls, rows: dict[str, list[Row]], known: Anchor, shape: BatchShape) -> _Cut:
        trajectories = [r for r in rows["trajectories"] if is_whole(r[2:7], r[7])]
        scores = [r for r in rows["scores"] if is_whole((r[3],), r[4])]
        samples = Counter(r[0] for r in trajectories)
        scored = Counter(r[0] for r in scores)
        whole = {key for key, n in samples.items() if n == shape.samples == scored[key]}
        step, cut = _last_whole_step(rows["groups"], whole, known, shape)
        groups = [_settled_row(r, known) for r in rows["groups"] if r[1] < cut]
        kept = {r[0] for r in groups}
        edges = [r for r in rows["edges"] if r[1] in kept]
        mended = {
            "groups": groups,
            "edges": [*edges, *_missing_edges(groups, edges)],
            "trajectories": [r for r in trajectories if r[0] in kept],
            "scores": [r for r in scores if r[0] in kept],
            "versions": [r for r in rows["versions"] if r[0] <= step],
            "environments": rows["environments"],
            "meta": _meta(rows["meta"], groups, cut, step, known, shape),
        }
        return cls(step, len({r[0] for r in rows["groups"]} - kept), mended)


def _last_whole_step(groups: list[Row], whole: set[str], known: Anchor, shape: BatchShape) -> tuple[int, int]:
    """(step, first admit index that is not settled by it)."""
    by_step: defaultdict[int, dict[int, Row]] = defaultdict(dict)
    for row in groups:
        if row[4] is not None:
            by_step[row[4]][row[5]] = row
    step, cut = known.step, known.settled
    while True:
        members = by_step[step + 1]
        if sorted(members) != list(range(shape.groups)) or any(r[0] not in whole for r in members.values()):
            return step, cut
        step, cut = step + 1, max(r[1] for r in members.values()) + 1


def _settled_row(row: Row, known: Anchor) -> Row:
    """A group below the cut is trained or dropped; where the row says less, its last edge was lost."""
    key, index, state, reason, step, position, prompt = row
    if state in (GroupState.TRAINED, GroupState.DROPPED, GroupState.ASSIGNED):
        if state == GroupState.ASSIGNED and step <= known.step:
            state = GroupState.TRAINED.value
        return key, index, state, reason, step, position, prompt
    if index < known.settled:
        return key, index, GroupState.TRAINED.value, None, known.step, position, prompt
    return key, index, GroupState.DROPPED.value, "lost", step, position, prompt


def _missing_edges(groups: list[Row], edges: list[Row]) -> list[Row]:
    """The last edge of each group whose own was lost."""
    there = {(r[1], r[2]) for r in edges}
    following = max((r[0] for r in edges), default=0) + 1
    lost = [r for r in groups if (r[0], r[2]) not in there]
    return [(following + i, r[0], r[2], r[4], r[3], time.time()) for i, r in enumerate(lost)]


def _meta(meta: list[Row], groups: list[Row], cut: int, step: int, known: Anchor, shape: BatchShape) -> list[Row]:
    """The old entries, and by how much the counts of the rows that are left fall short."""
    first_attempts = sum(GroupId.parse(r[0]).attempt == 0 for r in groups)
    unknown = max(0, cut - known.settled - sum(r[1] >= known.settled for r in groups))  # dropped after the checkpoint
    drawn = known.drawn + unknown + sum(r[1] >= known.settled and GroupId.parse(r[0]).attempt == 0 for r in groups)
    used = sum(r[2] in (GroupState.TRAINED, GroupState.ASSIGNED) for r in groups)
    return [
        *meta,
        ("schema_version", str(SCHEMA_VERSION)),
        ("next_admit_index", str(cut)),
        ("lost_drawn", str(drawn - first_attempts)),
        ("lost_trained", str(step * shape.groups - used)),
    ]
