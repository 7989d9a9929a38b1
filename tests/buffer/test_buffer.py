"""The group state machine: its edges, those that must not exist, the order of taking, the redo after a restart."""

import asyncio
import os
import sqlite3
import struct
import threading
import time
from pathlib import Path

import pytest

from quintet.buffer.buffer import IllegalEdge, JournaledBuffer
from quintet.buffer.journal import FLUSH_S, NullJournal, SqliteJournal
from quintet.types import (
    Failure,
    FailureKind,
    FinishReason,
    Group,
    GroupId,
    GroupState,
    Prompt,
    Rollout,
    Score,
    VersionRun,
)


def group(name: str, versions: tuple[int, ...] = (0,)) -> Group:
    return Group(GroupId(name), Prompt(id=name, token_ids=[1, 2, 3], text="1+1="))


def fill(g: Group, version: int = 0) -> None:
    g.rollouts = [
        Rollout(
            g.group_id,
            i,
            [1, 2, 3],
            [4, 5],
            "x",
            [struct.unpack("f", struct.pack("f", -0.1 * (i + 1)))[0], -1.5],
            [1, 1],
            [VersionRun(version, 2)],
            FinishReason.STOP,
        )
        for i in range(2)
    ]


async def to_ready(buffer: JournaledBuffer, g: Group, version: int = 0) -> None:
    fill(g, version)
    await buffer.advance(g, GroupState.GENERATED)
    g.scores = [Score(1.0, {"exact": 1.0}), Score(None, failure=Failure(FailureKind.GRADER, "boom"))]
    await buffer.advance(g, GroupState.SCORED)
    await buffer.advance(g, GroupState.READY)


def test_every_edge_that_is_not_drawn_is_refused() -> None:
    async def main() -> None:
        for target in GroupState:
            buffer = JournaledBuffer(NullJournal(), max_staleness=0)
            g = group("a")
            await buffer.admit([g])
            if target is GroupState.GENERATED:
                continue
            with pytest.raises(IllegalEdge):
                await buffer.advance(g, target)
        buffer = JournaledBuffer(NullJournal(), max_staleness=0)
        g = group("a")
        await buffer.admit([g])
        await to_ready(buffer, g)
        await buffer.take(1, 0)
        with pytest.raises(IllegalEdge):
            await buffer.drop(g, "too late")
        with pytest.raises(IllegalEdge):
            await buffer.advance(g, GroupState.READY)

    asyncio.run(main())


def test_groups_are_taken_in_admission_order_even_when_a_later_one_is_ready_first() -> None:
    async def main() -> None:
        buffer = JournaledBuffer(NullJournal(), max_staleness=1)
        a, b, c = group("a"), group("b"), group("c")
        await buffer.admit([a, b, c])
        await to_ready(buffer, b)
        await to_ready(buffer, c)
        waiting = asyncio.ensure_future(buffer.take(2, 0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await to_ready(buffer, a)
        assert [g.group_id.prompt_id for g in await waiting] == ["a", "b"]

    asyncio.run(main())


def test_a_dropped_group_gives_its_place_back_and_the_next_one_moves_up() -> None:
    async def main() -> None:
        buffer = JournaledBuffer(NullJournal(), max_staleness=0)
        a, b = group("a"), group("b")
        await buffer.admit([a, b])
        await to_ready(buffer, b)
        waiting = asyncio.ensure_future(buffer.take(1, 0))
        await buffer.drop(a, "equal_rewards")
        assert (await waiting)[0] is b
        stats = buffer.stats()
        assert (stats.admitted, stats.assigned, stats.dropped) == (1, 1, {"equal_rewards": 1})

    asyncio.run(main())


def test_a_group_older_than_the_bound_is_dropped_as_stale_and_reported() -> None:
    async def main() -> None:
        reported: list[str] = []
        buffer = JournaledBuffer(
            NullJournal(),
            max_staleness=1,
            on_drop=lambda g, reason: reported.append(f"{g.group_id.prompt_id}:{reason}"),
        )
        old, fresh = group("old"), group("fresh")
        await buffer.admit([old, fresh])
        await to_ready(buffer, old, version=3)
        await to_ready(buffer, fresh, version=4)
        taken = await buffer.take(1, 5)
        assert [g.group_id.prompt_id for g in taken] == ["fresh"]
        assert reported == ["old:stale"]

    asyncio.run(main())


def test_resume_returns_steps_to_redo_with_every_bit_and_adds_no_edge(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"

    async def first_life() -> None:
        buffer = JournaledBuffer(SqliteJournal(path), max_staleness=2)
        groups = [group(n) for n in "abcd"]
        await buffer.admit(groups)
        for g in groups[:3]:
            await to_ready(buffer, g)
        await buffer.take(1, 0)
        await buffer.commit(1, 1)
        await buffer.take(1, 1)  # the process dies here, before commit

    async def second_life() -> None:
        buffer = JournaledBuffer(SqliteJournal(path), max_staleness=2)
        found = await buffer.resume()
        assert [(s.step, [g.group_id.prompt_id for g in s.groups]) for s in found.redo] == [(1, ["a"]), (2, ["b"])]
        assert [(g.group_id.prompt_id, g.state) for g in found.pending] == [
            ("c", GroupState.READY),
            ("d", GroupState.ADMITTED),
        ]
        assert found.drawn == 4
        expected = group("b")
        fill(expected)
        assert found.redo[1].groups[0].rollouts == expected.rollouts
        assert found.redo[1].groups[0].scores[1].failure == Failure(FailureKind.GRADER, "boom")
        assert buffer.stats().admitted == 4
        await buffer.commit(1, 1)
        await buffer.commit(2, 2)
        assert buffer.stats().trained == 2
        taken = await buffer.take(1, 2)
        assert taken[0].group_id.prompt_id == "c"

    asyncio.run(first_life())
    asyncio.run(second_life())
    db = sqlite3.connect(path)
    edges = db.execute("SELECT group_id, count(*) FROM edges WHERE state='trained' GROUP BY group_id").fetchall()
    assert edges == [("a/e0.o0.a0", 1), ("b/e0.o0.a0", 1)]
    assert db.execute("SELECT max(step) FROM groups").fetchone() == (3,)


def test_resume_after_a_checkpoint_redoes_only_later_steps_and_counts_the_earlier_ones(tmp_path: Path) -> None:
    """BUF01: the admission count is rebuilt from the journal, not restarted at 0."""
    path = tmp_path / "journal.sqlite"

    async def main() -> None:
        buffer = JournaledBuffer(SqliteJournal(path), max_staleness=0)
        for step, name in enumerate("abc", start=1):
            g = group(name)
            await buffer.admit([g])
            await to_ready(buffer, g, version=step - 1)
            await buffer.take(1, step - 1)
            await buffer.commit(step, step)
        later = JournaledBuffer(SqliteJournal(path), max_staleness=0, resume_from=2)
        found = await later.resume()
        assert [s.step for s in found.redo] == [3]
        assert later.stats().trained == 2 and later.stats().admitted == 3

    asyncio.run(main())


def test_membership_is_forced_to_the_disk_at_once_and_everything_else_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = threading.Event()
    real = os.fsync
    monkeypatch.setattr("os.fsync", lambda fd: (real(fd), flushed.set()))
    journal = SqliteJournal(tmp_path / "journal.sqlite")
    statements: list[str] = []
    journal._db.set_trace_callback(statements.append)

    async def main() -> None:
        buffer = JournaledBuffer(journal, max_staleness=0)
        g = group("a")
        await buffer.admit([g])
        await to_ready(buffer, g)
        assert not any("FULL" in s for s in statements)
        assert flushed.wait(30)  # by the flusher: SQLite's own fsync is not Python's
        statements.clear()
        await buffer.take(1, 0)
        assert statements[:2] == ["PRAGMA synchronous=FULL", "BEGIN IMMEDIATE"] and statements[-1] == "COMMIT"

    asyncio.run(main())
    assert FLUSH_S <= 1.0
    journal.close()


def test_a_failing_disk_is_told_by_the_next_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SqliteJournal(tmp_path / "journal.sqlite")
    tried = threading.Event()

    def broken(fd: int) -> None:
        tried.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", broken)
    journal.version(0, 0, "x")
    assert tried.wait(30)
    deadline = time.monotonic() + 30.0  # the flusher notes the error right after
    with pytest.raises(OSError, match="Input/output error"):
        while time.monotonic() < deadline:
            journal.version(1, 1, "y")
            time.sleep(0.01)
    journal.close()
