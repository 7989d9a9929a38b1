"""The redo log: a SQLite file in WAL mode that every group passes through before it can be trained on.

Schema version 2 (readable with plain SQL; token arrays are little-endian: ids int32, log-probabilities
float32, masks uint8):

    meta(key, value)                             schema version, what was pruned or lost
    groups(group_id, admit_index, state, reason, step, position, prompt)
    edges(seq, group_id, state, step, reason, t) every edge of the state machine, in order; `step` of a dropped group
                                                 is the one that was being gathered
    trajectories(group_id, sample_index, prompt_ids, response_ids, logprobs, loss_mask, record, crc)
    scores(group_id, sample_index, reward, record, crc)
    versions(version, step, digest, t)           every published weight version
    environments(t, record)                      what made the numbers: threads, dtype, CPU, library versions

`trajectories.prompt_ids` is NULL where it equals the prompt's own ids. `record` columns are JSON of the
remaining fields; `crc` is the CRC-32 of the columns before it, keys left out.

What is durable when: a write is committed before the call returns (a killed process loses nothing), and
forced to the disk within half a second (a power cut loses at most that); batch membership is on the disk
before `assign` returns, that is, before the first backward.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quintet.buffer.reading import SCHEMA_VERSION, JournalReader, rollout_row, score_row
from quintet.types import Group, GroupState

FLUSH_S = 0.5

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups(
    group_id TEXT PRIMARY KEY, admit_index INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT,
    step INTEGER, position INTEGER, prompt TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups(step, position);
CREATE TABLE IF NOT EXISTS edges(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL, state TEXT NOT NULL, step INTEGER, reason TEXT,
    t REAL NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories(
    group_id TEXT NOT NULL, sample_index INTEGER NOT NULL, prompt_ids BLOB, response_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL, loss_mask BLOB NOT NULL, record TEXT NOT NULL, crc INTEGER NOT NULL,
    PRIMARY KEY(group_id, sample_index));
CREATE TABLE IF NOT EXISTS scores(
    group_id TEXT NOT NULL, sample_index INTEGER NOT NULL, reward REAL, record TEXT NOT NULL, crc INTEGER NOT NULL,
    PRIMARY KEY(group_id, sample_index));
CREATE TABLE IF NOT EXISTS versions(
    version INTEGER PRIMARY KEY, step INTEGER NOT NULL, digest TEXT NOT NULL, t REAL NOT NULL);
CREATE TABLE IF NOT EXISTS environments(t REAL NOT NULL, record TEXT NOT NULL);
"""


class Journal(Protocol):
    """What the buffer needs of a redo log."""

    def edge(self, group: Group, state: GroupState, *, step: int | None = None, reason: str | None = None) -> None: ...

    def assign(self, groups: Sequence[Group], step: int) -> None: ...

    def trained(self, groups: Sequence[Group], step: int) -> None: ...

    def load(self, from_step: int) -> list[tuple[Group, int | None]]: ...

    def unanswered(self) -> list[Group]: ...

    def counts(self) -> dict[str, int]: ...

    def dropped(self, from_step: int) -> dict[int, dict[str, int]]: ...

    def close(self) -> None: ...


class NullJournal:
    """Keeps nothing: for simulations."""

    def edge(self, group: Group, state: GroupState, *, step: int | None = None, reason: str | None = None) -> None:
        return

    def assign(self, groups: Sequence[Group], step: int) -> None:
        return

    def trained(self, groups: Sequence[Group], step: int) -> None:
        return

    def load(self, from_step: int) -> list[tuple[Group, int | None]]:
        return []

    def unanswered(self) -> list[Group]:
        return []

    def counts(self) -> dict[str, int]:
        return {}

    def dropped(self, from_step: int) -> dict[int, dict[str, int]]:
        return {}

    def close(self) -> None:
        return


class SqliteJournal(JournalReader):
    """One writer, any number of readers (`sqlite3 journal.sqlite` while the run goes on)."""

    def __init__(self, path: Path) -> None:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        super().__init__(db, path)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        fresh = db.execute("SELECT 1 FROM sqlite_master WHERE name='meta'").fetchone() is None
        if fresh:
            db.executescript(f"BEGIN; {SCHEMA} INSERT INTO meta VALUES('schema_version', '{SCHEMA_VERSION}'); COMMIT;")
        self.check_schema()
        self._flusher = _Flusher(path.with_name(path.name + "-wal"))

    def edge(self, group: Group, state: GroupState, *, step: int | None = None, reason: str | None = None) -> None:
        """Record one edge together with what the group gained by it, in one transaction."""
        with self._transaction(durable=False):
            if state is GroupState.ADMITTED:
                self._insert_group(group)
            elif state is GroupState.GENERATED or (state is GroupState.DROPPED and group.state is GroupState.ADMITTED):
                self._insert_rollouts(group)  # those of a dropped group are failures
            elif state is GroupState.SCORED:
                self._insert_scores(group)
            self._write_edge(str(group.group_id), state, step, reason)

    def assign(self, groups: Sequence[Group], step: int) -> None:
        """Batch membership and order, on the disk before this returns."""
        with self._transaction(durable=True):
            for position, group in enumerate(groups):
                key = str(group.group_id)
                self._write_edge(key, GroupState.ASSIGNED, step, None)
                self._db.execute("UPDATE groups SET step=?, position=? WHERE group_id=?", (step, position, key))

    def trained(self, groups: Sequence[Group], step: int) -> None:
        with self._transaction(durable=False):
            for group in groups:
                self._write_edge(str(group.group_id), GroupState.TRAINED, step, None)

    def version(self, version: int, step: int, digest: str) -> str | None:
        """A published weight version. A redone step publishes it again: the row is replaced. Returns the digest that
        was recorded before, if any."""
        with self._transaction(durable=False):
            before = self._db.execute("SELECT digest FROM versions WHERE version=?", (version,)).fetchone()
            self._db.execute("INSERT OR REPLACE INTO versions VALUES(?,?,?,?)", (version, step, digest, time.time()))
        return None if before is None else before[0]

    def environment(self, record: dict[str, Any]) -> None:
        with self._transaction(durable=False):
            self._db.execute("INSERT INTO environments VALUES(?,?)", (time.time(), json.dumps(record)))

    def prune(self, through_step: int) -> None:
        """Delete trajectories and scores of groups trained or dropped up to `through_step`; edges and groups stay.

        SQLite uses the freed pages again: the file stops growing, it does not shrink.
        """
        if through_step <= int(self.meta("pruned_through") or 0):
            return
        with self._transaction(durable=False):
            for table in ("trajectories", "scores"):
                self._db.execute(
                    f"DELETE FROM {table} WHERE group_id IN (SELECT group_id FROM edges "
                    "WHERE state IN ('trained','dropped') AND step <= ?)",
                    (through_step,),
                )
            self._db.execute("INSERT OR REPLACE INTO meta VALUES('pruned_through', ?)", (str(through_step),))

    def close(self) -> None:
        self._flusher.close()
        super().close()

    def _transaction(self, *, durable: bool) -> _Transaction:
        return _Transaction(self._db, self._flusher, durable)

    def _write_edge(self, key: str, state: GroupState, step: int | None, reason: str | None) -> None:
        self._db.execute(
            "INSERT INTO edges(group_id, state, step, reason, t) VALUES(?,?,?,?,?)",
            (key, state.value, step, reason, time.time()),
        )
        self._db.execute("UPDATE groups SET state=?, reason=? WHERE group_id=?", (state.value, reason, key))

    def _insert_group(self, group: Group) -> None:
        prompt = msgspec.json.encode(group.prompt).decode()
        self._db.execute(
            "INSERT INTO groups VALUES(?,?,?,NULL,NULL,NULL,?)",
            (str(group.group_id), group.admit_index, GroupState.ADMITTED.value, prompt),
        )

    def _insert_rollouts(self, group: Group) -> None:
        rows = [rollout_row(str(group.group_id), r, group.prompt.token_ids) for r in group.rollouts]
        self._db.executemany("INSERT OR REPLACE INTO trajectories VALUES(?,?,?,?,?,?,?,?)", rows)

    def _insert_scores(self, group: Group) -> None:
        rows = [score_row(str(group.group_id), i, s) for i, s in enumerate(group.scores)]
        self._db.executemany("INSERT OR REPLACE INTO scores VALUES(?,?,?,?,?)", rows)


class _Flusher:
    """Forces the write-ahead log to the disk, `FLUSH_S` after a write at the latest, off the caller's thread.

    SQLite itself (`synchronous=NORMAL`) would do so only now and then. An error of the disk is raised by the
    next write.
    """

    def __init__(self, wal: Path) -> None:
        self._wal = wal
        self._dirty = threading.Event()
        self._closing = threading.Event()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="journal-flush", daemon=True)
        self._thread.start()

    def note_write(self) -> None:
        if self._error is not None:
            raise self._error
        self._dirty.set()

    def close(self) -> None:
        self._closing.set()
        self._dirty.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._dirty.wait()
            self._closing.wait(FLUSH_S)  # one flush for all writes of this span
            self._dirty.clear()
            try:
                self._flush()
            except OSError as error:
                self._error = error

    def _flush(self) -> None:
        fd = os.open(self._wal, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class _Transaction:
    """BEGIN IMMEDIATE ... COMMIT, rolled back on an exception; `durable` also forces the log to the disk."""

    def __init__(self, db: sqlite3.Connection, flusher: _Flusher, durable: bool) -> None:
        self._db = db
        self._flusher = flusher
        self._durable = durable

    def __enter__(self) -> None:
        self._db.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            if self._db.in_transaction:  # SQLite has rolled back by itself when the disk was full
                self._db.execute("ROLLBACK")
            return
        self._db.execute("COMMIT")
        self._flusher.note_write()
