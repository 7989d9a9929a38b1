"""Run folders that are not what they should be: every command says so in one message, with exit code 2."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quintet.buffer.journal import SqliteJournal
from quintet.cli.main import main
from quintet.config import load_config, save
from tests.small_recipe import small


def of_an_older_version(run: Path) -> None:
    SqliteJournal(run / "journal.sqlite").close()
    db = sqlite3.connect(run / "journal.sqlite")
    db.execute("UPDATE meta SET value='1' WHERE key='schema_version'")
    db.commit()
    db.close()


def with_a_corrupt_summary(run: Path) -> None:
    SqliteJournal(run / "journal.sqlite").close()
    (run / "summary.json").write_text('{"steps": 3, "eval')


def with_corrupt_metrics(run: Path) -> None:
    SqliteJournal(run / "journal.sqlite").close()
    (run / "metrics.jsonl").write_text('{"step": 1}\n\x00\x00\x00\n')


def without_a_journal(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")


def with_a_journal_of_something_else(run: Path) -> None:
    (run / "journal.sqlite").write_text("no database\n" * 100)


def foreign(run: Path) -> None:
    (run / "config.yaml").unlink()
    (run / "thesis.tex").write_text("mine")


def with_another_recipe(run: Path) -> None:
    SqliteJournal(run / "journal.sqlite").close()
    (run / "config.yaml").write_text("speed: 3\n")


@pytest.mark.parametrize(
    ("spoil", "command", "said"),
    [
        (of_an_older_version, "train", "journal schema 1, this program reads 2"),
        (of_an_older_version, "replay", "journal schema 1, this program reads 2"),
        (of_an_older_version, "check", "journal schema 1, this program reads 2"),
        (with_a_corrupt_summary, "train", "summary.json cannot be read"),
        (with_a_corrupt_summary, "report", "summary.json cannot be read"),
        (with_a_corrupt_summary, "check", "summary.json cannot be read"),
        (with_corrupt_metrics, "train", "metrics.jsonl:2 is damaged"),
        (with_corrupt_metrics, "report", "metrics.jsonl:2 is damaged"),
        (without_a_journal, "replay", "there is no journal"),
        (with_a_journal_of_something_else, "replay", "this is no journal, or a damaged one"),
        (foreign, "train", "is not empty and holds no run"),
        (foreign, "check", "is not empty and holds no run"),
        (foreign, "report", "holds no run"),
        (foreign, "replay", "holds no run"),
        (with_another_recipe, "train", "speed"),
        (with_another_recipe, "replay", "speed"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    command: str,
    said: str,
) -> None:
    run, recipe = tmp_path / "run", tmp_path / "small.yaml"
    run.mkdir()
    save(load_config(small()), run / "config.yaml")
    save(load_config(small()), recipe)
    spoil(run)
    words = {
        "train": ["train", str(recipe), "--out", str(run)],
        "check": ["check", str(recipe), "--out", str(run)],
        "replay": ["replay", str(run), "--step", "1"],
        "report": ["report", str(run), "--out", str(tmp_path / "page.html")],
    }
    monkeypatch.setattr(sys, "argv", ["quintet", *words[command]])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    if command == "check":
        assert said in " ".join(out.split())
    else:
        assert said in err and err.startswith("quintet: ") and len(err.splitlines()) <= 3
