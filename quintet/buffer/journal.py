"""The redo log: a SQLite file in WAL mode that every group passes through before it can be trained on.

Schema version 1 (readable with plain SQL; token arrays are little-endian: ids int32, log-probabilities
float32, masks uint8):

    meta(key, value)                     schema version, run digest
    groups(group_id, admit_index, state, reason, step, position, prompt)
    edges(seq, group_id, state, step, t) every edge of the state machine, in order
    trajectories(group_id, sample_index, prompt_ids, response_ids, logprobs, loss_mask, record)
    scores(group_id, sample_index, reward, record)
    versions(version, step, digest, t)   every published weight version
    environments(t, record)              what made the numbers: threads, dtype, CPU, library versions

`trajectories.prompt_ids` is NULL where it equals the prompt's own ids. `record` columns are JSON of the
remaining fields. Size: 9 bytes a response token, that is 9 MB per million tokens, and about 400 bytes a
trajectory. A write is committed at once (a killed process loses nothing); `durable()` also forces it
to the disk (a power cut loses nothing before it).
"""

from __future__ import annotations

import json
import sqlite3
import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from quintet.types import (
    Group,
    GroupId,
    GroupState,
    Prompt,
    QuintetError,
    Rollout,
    Score,
)

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups(
    group_id TEXT PRIMARY KEY, admit_index INTEGER NOT NULL, state TEXT NOT NULL, reason TEXT,
    step INTEGER, position INTEGER, prompt TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups(step, position);
CREATE TABLE IF NOT EXISTS edges(
    seq INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT NOT NULL, state TEXT NOT NULL, step INTEGER, t REAL NOT NULL);
CREATE TABLE IF NOT EXISTS trajectories(
    group_id TEXT NOT NULL, sample_index INTEGER NOT NULL, prompt_ids BLOB, response_ids BLOB NOT NULL,
    logprobs BLOB NOT NULL, loss_mask BLOB NOT NULL, record TEXT NOT NULL, PRIMARY KEY(group_id, sample_index));
CREATE TABLE IF NOT EXISTS scores(
    group_id TEXT NOT NULL, sample_index INTEGER NOT NULL, reward REAL, record TEXT NOT NULL,
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

    def counts(self) -> dict[str, int]: ...

    def close(self) -> None: ...


class NullJournal:
    """Keeps nothing: for simulations and for `durability: off`."""

    def edge(self, group: Group, state: GroupState, *, step: int | None = None, reason: str | None = None) -> None:
        return

    def assign(self, groups: Sequence[Group], step: int) -> None:
        return

    def trained(self, groups: Sequence[Group], step: int) -> None:
        return

    def load(self, from_step: int) -> list[tuple[Group, int | None]]:
        return []

    def counts(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        return


class SqliteJournal:
    """One writer, any number of readers (`sqlite3 journal.sqlite` while the run goes on)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        self._check_schema()

    def _check_schema(self) -> None:
        row = self._db.execute("SELECT value FROM meta WHERE key='schema_version'").fetchone()
        if row is None:
            self._db.execute("INSERT INTO meta VALUES('schema_version', ?)", (str(SCHEMA_VERSION),))
        elif int(row[0]) != SCHEMA_VERSION:
            raise QuintetError(
                f"{self.path}: journal schema {row[0]}, this program reads {SCHEMA_VERSION}. "
                "Resume the run with the version that made it."
            )

    # -- writing ---------------------------------------------------------------------------------

    def edge(self, group: Group, state: GroupState, *, step: int | None = None, reason: str | None = None) -> None:
        """Record one edge together with what the group gained by it, in one transaction."""
        with self._transaction(durable=False):
            if state is GroupState.ADMITTED:
                self._insert_group(group)
            elif state is GroupState.GENERATED:
                self._insert_rollouts(group)
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

    def version(self, version: int, step: int, digest: str) -> None:
        """A published weight version. Publishing it again (a redone step) replaces the row."""
        self._db.execute("INSERT OR REPLACE INTO versions VALUES(?,?,?,?)", (version, step, digest, time.time()))

    def environment(self, record: dict[str, Any]) -> None:
        self._db.execute("INSERT INTO environments VALUES(?,?)", (time.time(), json.dumps(record)))

    def _transaction(self, *, durable: bool) -> _Transaction:
        return _Transaction(self._db, durable)

    def _write_edge(self, key: str, state: GroupState, step: int | None, reason: str | None) -> None:
        self._db.execute(
            "INSERT INTO edges(group_id, state, step, t) VALUES(?,?,?,?)", (key, state.value, step, time.time())
        )
        self._db.execute("UPDATE groups SET state=?, reason=? WHERE group_id=?", (state.value, reason, key))

    def _insert_group(self, group: Group) -> None:
        prompt = msgspec.json.encode(group.prompt).decode()
        self._db.execute(
            "INSERT INTO groups VALUES(?,?,?,NULL,NULL,NULL,?)",
            (str(group.group_id), group.admit_index, GroupState.ADMITTED.value, prompt),
        )

    def _insert_rollouts(self, group: Group) -> None:
        rows = [_rollout_row(str(group.group_id), r, group.prompt.token_ids) for r in group.rollouts]
        self._db.executemany("INSERT OR REPLACE INTO trajectories VALUES(?,?,?,?,?,?,?)", rows)

    def _insert_scores(self, group: Group) -> None:
        rows = [(str(group.group_id), i, s.reward, msgspec.json.encode(s).decode()) for i, s in enumerate(group.scores)]
        self._db.executemany("INSERT OR REPLACE INTO scores VALUES(?,?,?,?)", rows)

    # -- reading ---------------------------------------------------------------------------------

    def load(self, from_step: int) -> list[tuple[Group, int | None]]:
        """Every group still needed, with its step: those assigned to a step after `from_step` in order of
        training, then those in flight in order of admission. Rollouts and scores are filled in."""
        rows = self._db.execute(
            "SELECT group_id, admit_index, state, step, prompt FROM groups "
            "WHERE state IN ('admitted','generated','scored','ready') OR (state IN ('assigned','trained') AND step > ?) "
            "ORDER BY step IS NULL, step, position, admit_index",
            (from_step,),
        ).fetchall()
        return [(self._read_group(*row), row[3]) for row in rows]

    def counts(self) -> dict[str, int]:
        """Groups by state, dropped ones as `dropped:<reason>`; beside them `next_admit_index`, `last_step` and
        `drawn` (first attempts: the data offset of the run)."""
        out = dict(
            self._db.execute("SELECT state, count(*) FROM groups WHERE state!='dropped' GROUP BY state").fetchall()
        )
        for reason, n in self._db.execute("SELECT reason, count(*) FROM groups WHERE state='dropped' GROUP BY reason"):
            out[f"dropped:{reason}"] = n
        top = "SELECT coalesce(max(admit_index) + 1, 0), coalesce(max(step), 0) FROM groups"
        out["next_admit_index"], out["last_step"] = self._db.execute(top).fetchone()
        (out["drawn"],) = self._db.execute("SELECT count(*) FROM groups WHERE group_id LIKE '%.a0'").fetchone()
        return out

    def digests(self) -> dict[int, str]:
        """Version -> digest, as recorded when it was published."""
        return dict(self._db.execute("SELECT version, digest FROM versions ORDER BY version").fetchall())

    def _read_group(self, key: str, admit_index: int, state: str, _step: int | None, prompt_json: str) -> Group:
        group_id = GroupId.parse(key)
        prompt = msgspec.json.decode(prompt_json, type=Prompt)
        rollouts = self._db.execute(
            "SELECT prompt_ids, response_ids, logprobs, loss_mask, record FROM trajectories "
            "WHERE group_id=? ORDER BY sample_index",
            (key,),
        )
        scores = self._db.execute("SELECT record FROM scores WHERE group_id=? ORDER BY sample_index", (key,))
        return Group(
            group_id=group_id,
            prompt=prompt,
            rollouts=[_read_rollout(group_id, row, prompt.token_ids) for row in rollouts],
            scores=[msgspec.json.decode(row[0], type=Score) for row in scores],
            state=GroupState(state),
            admit_index=admit_index,
        )

    def close(self) -> None:
        self._db.close()


class _Transaction:
    """BEGIN IMMEDIATE ... COMMIT, rolled back on an exception; `durable` also forces the log to the disk."""

    def __init__(self, db: sqlite3.Connection, durable: bool) -> None:
        self._db = db
        self._durable = durable

    def __enter__(self) -> None:
        self._db.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._db.execute("ROLLBACK" if kind else "COMMIT")


def _rollout_row(key: str, rollout: Rollout, prompt_ids: list[int]) -> tuple[Any, ...]:
    record = msgspec.to_builtins(rollout)
    for name in ("group_id", "prompt_ids", "response_ids", "logprobs", "loss_mask"):
        del record[name]
    own_prompt = None if rollout.prompt_ids == prompt_ids else _pack("i", rollout.prompt_ids)
    return (
        key,
        rollout.sample_index,
        own_prompt,
        _pack("i", rollout.response_ids),
        _pack("f", rollout.logprobs),
        _pack("B", rollout.loss_mask),
        json.dumps(record, ensure_ascii=False),
    )


def _read_rollout(
    group_id: GroupId, row: tuple[bytes | None, bytes, bytes, bytes, str], prompt_ids: list[int]
) -> Rollout:
    own_prompt, response_ids, logprobs, loss_mask, record = row
    return msgspec.convert(
        json.loads(record)
        | {
            "group_id": msgspec.to_builtins(group_id),
            "prompt_ids": list(prompt_ids) if own_prompt is None else _unpack("i", own_prompt),
            "response_ids": _unpack("i", response_ids),
            "logprobs": _unpack("f", logprobs),
            "loss_mask": _unpack("B", loss_mask),
        },
        type=Rollout,
    )


def _pack(code: str, values: Iterable[float]) -> bytes:
    return array(code, values).tobytes()


def _unpack(code: str, blob: bytes) -> list[Any]:
    values = array(code)
    values.frombytes(blob)
    return values.tolist()
