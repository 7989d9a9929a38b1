"""Answers of a judge on disk: one SQLite file, which several runs may share."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Self

import msgspec

from quintet.types import QuintetError


class Reply(msgspec.Struct, frozen=True):
    """One answer. `rating` None: it held no verdict."""

    rating: float | None
    text: str
    prompt_tokens: int
    completion_tokens: int


class JudgeCache:
    """Used from one thread. A crash loses nothing; a power cut may cost the last answers, which are asked again."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, function: str, path: str) -> Self:
        """Raises QuintetError when the file cannot be written or is something else."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=30.0, isolation_level=None)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")  # no fsync per answer
            connection.execute("CREATE TABLE IF NOT EXISTS replies (key BLOB PRIMARY KEY, reply BLOB) WITHOUT ROWID")
        except (OSError, sqlite3.Error) as error:
            raise QuintetError(f"reward function `{function}`, option `cache`: {path!r}: {error}") from error
        return cls(connection)

    def get(self, key: bytes) -> Reply | None:
        row = self._connection.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else msgspec.json.decode(row[0], type=Reply)

    def put(self, key: bytes, reply: Reply) -> None:
        self._connection.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, msgspec.json.encode(reply)))

    def close(self) -> None:
        self._connection.close()
