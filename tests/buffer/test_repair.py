"""A damaged journal, page by page and byte by byte: found, cut back to whole steps, nothing trained twice."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path

import pytest

from quintet.buffer.buffer import JournaledBuffer
from quintet.buffer.journal import SqliteJournal
from quintet.buffer.reading import JournalReader
from quintet.buffer.repair import Anchor, BatchShape, anchor, find_fault, open_journal
from quintet.types import Group, GroupId, GroupState, QuintetError
from tests.buffer.test_buffer import group, to_ready

SHAPE = BatchShape(groups=2, samples=2)
PAGE = 4096


def write_run(path: Path) -> Anchor:
    """Steps 1 to 6 of two groups trained, step 7 assigned, two groups in flight, one dropped on the way; the checkpoint
    was taken after step 4. Returns what that checkpoint knows."""

    async def main() -> Anchor:
        journal = SqliteJournal(path)
        buffer = JournaledBuffer(journal, max_staleness=0)
        known = Anchor()
        for step in range(1, 8):
            groups = [group(f"p{step}-{i}-{'x' * 300}") for i in range(3 if step in (2, 6) else 2)]
            await buffer.admit(groups)
            for g in groups[:2]:
                await to_ready(buffer, g, version=step - 1)
            if len(groups) == 3:
                await buffer.drop(groups[2], "equal_rewards")
            await buffer.take(2, step - 1)
            if step < 7:
                journal.version(step, step, f"digest-{step}")
                await buffer.commit(step, step)
            if step == 4:
                known = anchor(journal, 4)
        await buffer.admit([group("late-a"), group("late-b")])
        journal.close()
        return known

    return asyncio.run(main())


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Anchor]:
    path = tmp_path / "journal.sqlite"
    return path, write_run(path)


def resumed(path: Path, known: Anchor) -> tuple[list[str], list[int], list[Group], int, int]:
    """(sentences, steps to redo, pending groups, prompts drawn, groups admitted) of a resume after the checkpoint."""
    said: list[str] = []
    journal = open_journal(path, known, SHAPE, said.append)
    buffer = JournaledBuffer(journal, max_staleness=0, resume_from=known.step)
    found = asyncio.run(buffer.resume())
    for step in found.redo:
        assert [len(g.rollouts) for g in step.groups] == [2, 2] == [len(g.scores) for g in step.groups]
    admitted = buffer.stats().admitted
    journal.close()
    return said, [s.step for s in found.redo], found.pending, found.drawn, admitted


def test_a_checkpoint_knows_what_is_settled(run: tuple[Path, Anchor]) -> None:
    assert run[1] == Anchor(step=4, edges=4 * 2 * 6 + 2, settled=9, drawn=9)


def test_a_whole_journal_is_left_alone(run: tuple[Path, Anchor]) -> None:
    path, known = run
    assert find_fault(path, known) is None
    said, redo, pending, drawn, admitted = resumed(path, known)
    assert (said, redo, [g.group_id.prompt_id for g in pending]) == ([], [5, 6, 7], ["late-a", "late-b"])
    assert (drawn, admitted) == (18, 16)
    assert not list(path.parent.glob("*damaged*"))


def test_any_damaged_page_is_found_or_harmless_and_no_group_is_trained_twice(run: tuple[Path, Anchor]) -> None:
    path, known = run
    pages = path.stat().st_size // PAGE
    assert pages >= 15
    found = 0
    for page in range(pages):
        place = path.parent / f"page-{page}"
        place.mkdir()
        damaged = place / path.name
        blob = bytearray(path.read_bytes())
        blob[page * PAGE : (page + 1) * PAGE] = bytes((i * 37 + page) % 251 for i in range(PAGE))
        damaged.write_bytes(blob)
        said, redo, pending, drawn, admitted = resumed(damaged, known)
        found += bool(said)
        assert redo == list(range(5, 5 + len(redo))), page  # whole steps without a gap
        trained = 2 * (4 + len(redo))
        assert admitted == trained + len(pending), page
        if said:
            assert f"going on after step {4 + len(redo)};" in said[0] and pending == [], page
            dropped_too = 1 + (len(redo) == 3)  # the one of step 6 was admitted after the groups of step 6
            assert drawn == trained + dropped_too, page  # the next prompt drawn is the one after the last kept
    assert found >= pages - 2  # free pages may hold nothing


def test_flipped_bits_inside_a_trajectory_are_found_by_its_checksum(run: tuple[Path, Anchor]) -> None:
    path, known = run
    db = sqlite3.connect(path)
    key = "p6-1-" + "x" * 300 + "/e0.o0.a0"
    (blob,) = db.execute("SELECT logprobs FROM trajectories WHERE group_id=? AND sample_index=0", (key,)).fetchone()
    flipped = bytes([blob[0] ^ 1]) + blob[1:]
    db.execute("UPDATE trajectories SET logprobs=? WHERE group_id=? AND sample_index=0", (flipped, key))
    db.commit()
    db.close()
    said, redo, _, drawn, _ = resumed(path, known)
    assert redo == [5] and drawn == 11
    assert "a trajectory of group p6-1-" in said[0] and "going on after step 5" in said[0]
    assert "7 groups admitted later" in said[0]


def test_a_journal_older_than_its_checkpoint_is_brought_to_the_checkpoint(run: tuple[Path, Anchor]) -> None:
    """Nothing that the checkpoint was trained on is offered again, though the journal has forgotten that it was."""
    path, known = run
    db = sqlite3.connect(path)
    (seq,) = db.execute("SELECT seq FROM edges WHERE state='assigned' AND step=4").fetchone()
    db.execute("DELETE FROM edges WHERE seq >= ?", (seq,))
    db.execute("UPDATE groups SET state='ready', step=NULL, position=NULL WHERE step >= 4")
    db.execute("UPDATE groups SET state='ready' WHERE group_id LIKE 'p5%' OR group_id LIKE 'p6%'")
    db.commit()
    db.close()
    said, redo, pending, drawn, admitted = resumed(path, known)
    assert "its end is missing" in said[0] and "going on after step 4" in said[0]
    assert (redo, pending, drawn, admitted) == ([], [], 9, 8)
    states = dict(sqlite3.connect(path).execute("SELECT state, count(*) FROM groups GROUP BY state"))
    assert states == {"trained": 8, "dropped": 1}


def test_a_missing_journal_is_begun_after_the_checkpoint(run: tuple[Path, Anchor]) -> None:
    path, known = run
    path.unlink()
    said, redo, pending, drawn, admitted = resumed(path, known)
    assert "the file is missing" in said[0]
    assert (redo, pending, drawn, admitted) == ([], [], 9, 8)


def test_the_damaged_files_are_kept_and_numbered(run: tuple[Path, Anchor]) -> None:
    path, known = run
    for number in (1, 2):
        blob = bytearray(path.read_bytes())
        blob[-PAGE:] = b"\xff" * PAGE
        path.write_bytes(blob)
        resumed(path, known)
        assert path.with_name(f"journal.damaged-{number}.sqlite").read_bytes() == bytes(blob)


def test_what_a_dropped_group_had_failed_with_is_journaled_and_its_retry_survives_a_crash(tmp_path: Path) -> None:
    from quintet.types import Failure, FailureKind, FinishReason, Rollout

    def failed(g: Group, *, retryable: bool) -> Group:
        failure = Failure(FailureKind.ENGINE, "out of pages", retryable)
        g.rollouts = [Rollout(g.group_id, 0, [1], [], "", [], [], [], FinishReason.FAILED, failure=failure)]
        return g

    path = tmp_path / "journal.sqlite"

    async def first_life() -> None:
        buffer = JournaledBuffer(SqliteJournal(path), max_staleness=0)
        passing, lasting, stale = failed(group("a"), retryable=True), failed(group("b"), retryable=False), group("c")
        equal = group("d")
        await buffer.admit([passing, lasting, stale, equal])
        await buffer.drop(passing, "failed:engine")
        await buffer.drop(lasting, "failed:engine")
        await to_ready(buffer, stale)
        await buffer.drop(stale, "stale")
        await to_ready(buffer, equal)
        await buffer.drop(equal, "equal_rewards")

    asyncio.run(first_life())
    for _ in range(2):  # the second restart finds the retries admitted
        buffer = JournaledBuffer(SqliteJournal(path), max_staleness=0)
        found = asyncio.run(buffer.resume())
        assert [g.group_id for g in found.pending] == [GroupId("a", attempt=1), GroupId("c", attempt=1)]
        assert all(g.state is GroupState.ADMITTED and g.prompt.token_ids == [1, 2, 3] for g in found.pending)
        assert found.drawn == 4 and found.dropped == {"failed:engine": 2, "stale": 1, "equal_rewards": 1}
    with JournalReader.open(path) as journal:
        record = journal._db.execute("SELECT record FROM trajectories WHERE group_id='a/e0.o0.a0'").fetchone()
        assert "out of pages" in record[0]


def test_pruning_deletes_what_was_trained_or_dropped_up_to_a_step_and_says_so(run: tuple[Path, Anchor]) -> None:
    path, _ = run
    with SqliteJournal(path) as journal:
        journal.prune(3)
        journal.prune(2)  # never backwards
        assert [len(g.rollouts) for g in journal.step_groups(4)] == [2, 2]
        with pytest.raises(QuintetError, match="trajectories of steps up to 3 were deleted"):
            journal.step_groups(3)
        with pytest.raises(QuintetError, match="were deleted"):
            journal.load(1)
        assert journal.counts()["trained"] == 12
    steps = sqlite3.connect(path).execute("SELECT min(step) FROM groups JOIN trajectories USING (group_id)").fetchone()
    assert steps == (4,)


def test_another_schema_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    SqliteJournal(path).close()
    db = sqlite3.connect(path)
    db.execute("UPDATE meta SET value='1' WHERE key='schema_version'")
    db.commit()
    db.close()
    with pytest.raises(QuintetError, match="schema 1, this program reads 2"):
        open_journal(path, Anchor(), SHAPE, print)


def test_reading_a_journal_changes_nothing_in_its_folder(run: tuple[Path, Anchor]) -> None:
    path, _ = run
    before = {p.name: p.read_bytes() for p in path.parent.iterdir()}
    with JournalReader.open(path) as journal:
        assert journal.last_trained_step() == 6 and journal.digests()[6] == "digest-6"
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            journal._db.execute("DELETE FROM edges")
    assert {p.name: p.read_bytes() for p in path.parent.iterdir()} == before
    shutil.rmtree(path.parent)
