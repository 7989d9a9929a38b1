"""A row of data that still knows where it came from, so that every complaint can name it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quintet.types import QuintetError


@dataclass(frozen=True)
class Row:
    """One record. `number` counts from 1: the line of a JSONL file, else the position in the source."""

    source: str
    number: int
    values: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.source}:{self.number}" if self.source.endswith(".jsonl") else f"{self.source}, row {self.number}"


def as_rows(source: str, records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Number `records` from 1. Raises QuintetError for a record that is no mapping."""
    return [row_of(source, number, record) for number, record in enumerate(records, start=1)]


def row_of(source: str, number: int, record: object) -> Row:
    """Raises QuintetError when `record` is no mapping of column names."""
    if not isinstance(record, Mapping):
        where = Row(source, number, {}).where
        raise QuintetError(
            f"{where}: expected an object with named columns, found {type(record).__name__}: {str(record)[:80]}"
        )
    return Row(source, number, dict(record))


def require_columns(rows: list[Row], wanted: Mapping[str, str], mend: str) -> None:
    """`wanted`: option that names the column -> column. Raises QuintetError listing wanted and present columns
    at the first row that lacks one."""
    for row in rows:
        missing = [f"{column!r} ({option})" for option, column in wanted.items() if column not in row.values]
        if missing:
            present = ", ".join(map(repr, row.values)) or "none"
            raise QuintetError(f"{row.where}: wanted column {', '.join(missing)}; present: {present}.\n{mend}")
