"""docs/durability.md against the journal itself: tables, columns, schema version, example queries, size."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path

import pytest

from quintet.buffer.buffer import JournaledBuffer
from quintet.buffer.journal import SqliteJournal
from quintet.buffer.reading import SCHEMA_VERSION
from quintet.types import FinishReason, Group, GroupId, GroupState, Prompt, Rollout, Score, VersionRun

DOC = (Path(__file__).parents[2] / "docs" / "durability.md").read_text(encoding="utf-8")


def journal_of(path: Path, *, groups: int, samples: int, tokens: int) -> None:
    """One trained step with responses of `tokens` tokens, four characters each."""

    async def main(buffer: JournaledBuffer) -> None:
        batch = [
            Group(GroupId(f"p{i}"), Prompt(id=f"p{i}", token_ids=[1] * 100, text="what " * 80)) for i in range(groups)
        ]
        await buffer.admit(batch)
        for group in batch:
            ids, versions = [7] * tokens, [VersionRun(0, tokens)]
            group.rollouts = [
                Rollout(
                    group.group_id, i, group.prompt.token_ids, ids, "word" * tokens, [-0.1] * tokens, [1] * tokens,
                    versions, FinishReason.STOP, timing={"start_s": 12345.678, "end_s": 12345.678},
                )
                for i in range(samples)
            ]  # fmt: skip
            await buffer.advance(group, GroupState.GENERATED)
            group.scores = [Score(1.0, {"exact": 1.0})] * samples
            await buffer.advance(group, GroupState.SCORED)
            await buffer.advance(group, GroupState.READY)
        await buffer.take(groups, 0)
        await buffer.commit(1, 1)

    with SqliteJournal(path) as journal:
        journal.version(0, 0, "a")
        journal.version(1, 1, "b")
        journal.environment({"threads": 1})
        asyncio.run(main(JournaledBuffer(journal, max_staleness=0)))


def test_the_documented_tables_are_those_of_the_journal(tmp_path: Path) -> None:
    journal_of(tmp_path / "journal.sqlite", groups=1, samples=1, tokens=1)
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    real = {
        name: {column for _, column, *_ in db.execute(f"PRAGMA table_info({name})")}
        for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite_%'")
    }
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (.+) \|$", DOC, re.MULTILINE)
    documented = {
        table: set(re.findall(r"`(\w+)`", columns.split(":")[0] if table == "meta" else columns))
        for table, columns in rows
    }
    assert {name: documented.get(name) for name in real} == real
    assert f"schema version {SCHEMA_VERSION}" in DOC


def test_the_example_queries_answer(tmp_path: Path) -> None:
    journal_of(tmp_path / "journal.sqlite", groups=2, samples=2, tokens=5)
    db = sqlite3.connect(tmp_path / "journal.sqlite")
    queries = re.findall(r'sqlite3 runs/first/journal\.sqlite "([^"]+)"', DOC)
    assert len(queries) >= 4
    for query in queries:
        assert db.execute(query).fetchall() != [], query


@pytest.mark.parametrize(
    ("tokens", "documented"),
    [(1024, r"(\d+) MB per million response tokens with long"), (64, r"(\d+) MB with\s+short ones")],
)
def test_the_size_per_million_tokens_is_the_documented_one(tmp_path: Path, tokens: int, documented: str) -> None:
    path = tmp_path / "journal.sqlite"
    samples = 65536 // tokens
    journal_of(path, groups=samples // 16, samples=16, tokens=tokens)
    found = re.search(documented, DOC)
    assert found is not None
    assert path.stat().st_size / 65536 == pytest.approx(float(found[1]), rel=0.1)
