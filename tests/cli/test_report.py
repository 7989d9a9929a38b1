from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from quintet.cli.main import app
from quintet.config import RunConfig, save
from quintet.types import QuintetError

runner = CliRunner()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save(RunConfig(name=name), tmp_path / name / "config.yaml")
    monkeypatch.chdir(tmp_path)
    return ["one", "two"]


def test_one_run_gets_its_page_into_its_folder(runs: list[str]) -> None:
    result = runner.invoke(app, ["report", runs[0]])
    assert result.exit_code == 0 and result.stdout.strip() == "one/report.html"
    assert "<h1>one" in Path("one/report.html").read_text(encoding="utf-8")


def test_several_runs_get_one_page(runs: list[str]) -> None:
    assert runner.invoke(app, ["report", *runs]).stdout.strip() == "comparison.html"
    assert "<h1>2 runs" in Path("comparison.html").read_text(encoding="utf-8")


def test_out_names_the_page(runs: list[str]) -> None:
    assert runner.invoke(app, ["report", *runs, "--out", "both.html"]).exit_code == 0
    assert runner.invoke(app, ["report", "one", "--out", "alone.html"]).exit_code == 0
    assert Path("both.html").exists() and Path("alone.html").exists() and not Path("one/report.html").exists()


def test_a_missing_run_is_named(runs: list[str]) -> None:
    error = runner.invoke(app, ["report", "one", "three"]).exception
    assert isinstance(error, QuintetError) and "no run folder three" in str(error)
