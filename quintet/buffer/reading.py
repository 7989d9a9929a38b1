"""Reading a journal: what a resume, a replay or a curious person asks of it. Never writes.

The tables are described in `journal.py`.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import msgspec

from quintet.types import Group, GroupId, GroupState, Prompt, QuintetError, Rollout, Score

SCHEMA_VERSION = 2


class DamagedRow(Exception):
    """The bytes of a row are not those that were written, or the row is gone."""


class DamagedJournal(QuintetError):
    """The file is not one that SQLite can read, or not one with a journal's tables."""


class JournalReader:
    """Read-only view of a run's journal. Use as a context manager, or `close()` it."""

    def __init__(self, db: sqlite3.Connection, path: Path) -> None:
        self._db = db
        self.path = path

    @classmethod
    def open(cls, path: Path) -> JournalReader:
        """A journal that another process may be writing to; nothing in its folder is changed.

        Raises QuintetError when there is none, or it is damaged or of another schema version.
        """
        if not path.exists():
            raise QuintetError(f"{path}: there is no journal; the run has not begun, or the folder is no run folder")
        # a log beside the file (a run that goes on, or was killed) must be read too; without one, no lock is needed
        mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "immutable=1"
        reader = cls(sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True), path)
        try:
            reader.check_schema()
        except sqlite3.DatabaseError as error:
            reader.close()
            raise DamagedJournal(
                f"{path}: this is no journal, or a damaged one ({error}). Resuming a run mends its damaged journal."
            ) from None
        return reader

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def check_schema(self) -> None:
        """Raises QuintetError when the journal was made by a version of the program that wrote other tables."""
        found = self.meta("schema_version")
        if found != str(SCHEMA_VERSION):
            raise QuintetError(
                f"{self.path}: journal schema {found}, this program reads {SCHEMA_VERSION}. "
                "Resume the run with the version that made it."
            )

    def meta(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key=?", (key,)).fetchone()
        return None if row is None else row[0]

    # -- accounting ------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Groups by state, dropped ones as `dropped:<reason>`; beside them `next_admit_index`, `last_step`,
        `edges`, `drawn` (first attempts: the data offset of the run) and `lost` (trained groups of which a repaired
        journal knows only that they were)."""
        out = dict(self._db.execute("SELECT state, count(*) FROM groups WHERE state!='dropped' GROUP BY state"))
        for reason, n in self._db.execute("SELECT reason, count(*) FROM groups WHERE state='dropped' GROUP BY reason"):
            out[f"dropped:{reason}"] = n
        top = "SELECT coalesce(max(admit_index) + 1, 0), coalesce(max(step), 0) FROM groups"
        next_index, out["last_step"] = self._db.execute(top).fetchone()
        out["next_admit_index"] = max(next_index, int(self.meta("next_admit_index") or 0))
        (drawn,) = self._db.execute("SELECT count(*) FROM groups WHERE group_id LIKE '%.a0'").fetchone()
        out["drawn"] = drawn + int(self.meta("lost_drawn") or 0)
        out["lost"] = int(self.meta("lost_trained") or 0)
        (out["edges"],) = self._db.execute("SELECT coalesce(max(seq), 0) FROM edges").fetchone()
        return out

    def settled(self, step: int) -> tuple[int, int]:
        """(n, drawn): every group with admit index below n is trained by the end of `step` or dropped, and `drawn` of
        them are first attempts. Groups are taken oldest first, so that none older than a trained one is left."""
        (top,) = self._db.execute("SELECT max(admit_index) FROM groups WHERE step=?", (step,)).fetchone()
        if top is None:
            return 0, 0
        query = "SELECT count(*) FROM groups WHERE admit_index <= ? AND group_id LIKE '%.a0'"
        (drawn,) = self._db.execute(query, (top,)).fetchone()
        return top + 1, drawn + int(self.meta("lost_drawn") or 0)

    def dropped(self, from_step: int) -> dict[int, dict[str, int]]:
        """Step that was being gathered -> reason -> groups dropped, for steps after `from_step`."""
        out: dict[int, dict[str, int]] = {}
        query = "SELECT step, reason, count(*) FROM edges WHERE state='dropped' AND step > ? GROUP BY step, reason"
        for step, reason, n in self._db.execute(query, (from_step,)):
            out.setdefault(step, {})[reason] = n
        return out

    def digests(self) -> dict[int, str]:
        """Version -> digest, as recorded when it was published."""
        return dict(self._db.execute("SELECT version, digest FROM versions ORDER BY version").fetchall())

    def last_trained_step(self) -> int:
        """The newest step whose groups are all trained; 0 when there is none."""
        (step,) = self._db.execute("SELECT coalesce(max(step), 0) FROM groups WHERE state='trained'").fetchone()
        return step

    def environments(self) -> list[dict[str, Any]]:
        """One record per sitting of the run, oldest first."""
        return [json.loads(record) for (record,) in self._db.execute("SELECT record FROM environments ORDER BY t")]

    # -- groups ----------------------------------------------------------------------------------

    def load(self, from_step: int) -> list[tuple[Group, int | None]]:
        """Every group still needed, with its step: those assigned to a step after `from_step` in order of
        training, then those in flight in order of admission. Rollouts and scores are filled in.

        Raises QuintetError when trajectories that are needed were pruned.
        """
        self.require_kept(from_step + 1)
        rows = self._db.execute(
            "SELECT group_id, admit_index, state, step, prompt FROM groups "
            "WHERE state IN ('admitted','generated','scored','ready') "
            "OR (state IN ('assigned','trained') AND step > ?) "
            "ORDER BY step IS NULL, step, position, admit_index",
            (from_step,),
        ).fetchall()
        return [(self._read_group(*row), row[3]) for row in rows]

    def step_groups(self, step: int) -> list[Group]:
        """The groups of one step in the order in which they were trained. Raises QuintetError when there are none, or
        their trajectories were pruned."""
        self.require_kept(step)
        rows = self._db.execute(
            "SELECT group_id, admit_index, state, step, prompt FROM groups "
            "WHERE step=? AND state IN ('assigned','trained') ORDER BY position",
            (step,),
        ).fetchall()
        if not rows:
            raise QuintetError(f"{self.path}: the journal has no step {step}; the last one is {self._last_step()}")
        return [self._read_group(*row) for row in rows]

    def unanswered(self) -> list[Group]:
        """Dropped groups that were to come back as their next attempt and have not yet: too old ones, and those whose
        failure may pass. With their prompts, in order of admission."""
        rows = self._db.execute(
            "SELECT group_id, admit_index, state, step, prompt FROM groups "
            "WHERE state='dropped' AND (reason='stale' OR reason LIKE 'failed:%') ORDER BY admit_index"
        ).fetchall()
        out = []
        for row in rows:
            following = str(GroupId.parse(row[0]).next_attempt())
            if self._db.execute("SELECT 1 FROM groups WHERE group_id=?", (following,)).fetchone() is None:
                out.append(self._read_group(*row))
        return [g for g in out if all(r.failure is None or r.failure.retryable for r in g.rollouts)]

    def require_kept(self, step: int) -> None:
        pruned = int(self.meta("pruned_through") or 0)
        if step <= pruned:
            raise QuintetError(
                f"{self.path}: step {step} cannot be rebuilt: the trajectories of steps up to {pruned} were deleted\n"
                f"(checkpoint.keep_trajectories_steps), and no whole checkpoint of step {step - 1} or later is left."
            )

    def _last_step(self) -> int:
        (step,) = self._db.execute("SELECT coalesce(max(step), 0) FROM groups").fetchone()
        return step

    def _read_group(self, key: str, admit_index: int, state: str, _step: int | None, prompt_json: str) -> Group:
        group_id = GroupId.parse(key)
        prompt = msgspec.json.decode(prompt_json, type=Prompt)
        rollouts = self._db.execute(
            "SELECT prompt_ids, response_ids, logprobs, loss_mask, record, crc FROM trajectories "
            "WHERE group_id=? ORDER BY sample_index",
            (key,),
        )
        scores = self._db.execute("SELECT record, crc FROM scores WHERE group_id=? ORDER BY sample_index", (key,))
        return Group(
            group_id=group_id,
            prompt=prompt,
            rollouts=[_read_rollout(group_id, row, prompt.token_ids) for row in rollouts],
            scores=[_read_score(*row) for row in scores],
            state=GroupState(state),
            admit_index=admit_index,
        )


def rollout_row(key: str, rollout: Rollout, prompt_ids: list[int]) -> tuple[Any, ...]:
    """A row of `trajectories`. `prompt_ids` are the prompt's own, which are not stored a second time."""
    record = msgspec.to_builtins(rollout)
    for name in ("group_id", "prompt_ids", "response_ids", "logprobs", "loss_mask"):
        del record[name]
    own_prompt = None if rollout.prompt_ids == prompt_ids else _pack("i", rollout.prompt_ids)
    columns = (
        own_prompt,
        _pack("i", rollout.response_ids),
        _pack("f", rollout.logprobs),
        _pack("B", rollout.loss_mask),
        json.dumps(record, ensure_ascii=False),
    )
    return (key, rollout.sample_index, *columns, _crc(columns))


def score_row(key: str, index: int, score: Score) -> tuple[Any, ...]:
    """A row of `scores`."""
    record = msgspec.json.encode(score).decode()
    return (key, index, score.reward, record, _crc((record,)))


def is_whole(columns: Iterable[Any], crc: int) -> bool:
    """Whether the stored columns (without keys) are those that were written."""
    return _crc(columns) == crc


def _crc(columns: Iterable[Any]) -> int:
    value = 0
    for column in columns:
        value = zlib.crc32(column.encode() if isinstance(column, str) else column or b"", value)
    return value


def _read_rollout(group_id: GroupId, row: tuple[Any, ...], prompt_ids: list[int]) -> Rollout:
    own_prompt, response_ids, logprobs, loss_mask, record, crc = row
    if not is_whole(row[:-1], crc):
        raise DamagedRow(f"a trajectory of group {group_id}")
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


def _read_score(record: str, crc: int) -> Score:
    if not is_whole((record,), crc):
        raise DamagedRow("a score")
    return msgspec.json.decode(record, type=Score)


def _pack(code: str, values: Iterable[float]) -> bytes:
    return array(code, values).tobytes()


def _unpack(code: str, blob: bytes) -> list[Any]:
    values = array(code)
    values.frombytes(blob)
    return values.tolist()
