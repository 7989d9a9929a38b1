"""The benchmark of the journal's cost, on a very small model."""

from __future__ import annotations

import importlib.util
import sqlite3
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from quintet.types import QuintetError
from tests.small_recipe import small

FILE = Path(__file__).parents[2] / "benchmarks" / "journal_overhead.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("journal_overhead", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "journal_overhead", module)
    spec.loader.exec_module(module)
    return module


def test_every_other_step_is_without_a_journal_and_both_kinds_are_timed(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(small()))
    found = bench.main(["--recipe", str(recipe), "--steps", "5", "--out", str(tmp_path / "run")])
    db = sqlite3.connect(tmp_path / "run/journal.sqlite")
    steps = "SELECT step, count(DISTINCT group_id) FROM groups WHERE state='trained' GROUP BY step"
    assert db.execute(steps).fetchall() == [(1, 4), (2, 4), (5, 4)]
    assert db.execute("SELECT count(*) FROM trajectories").fetchone() == (3 * 4 * 4,)
    assert 0 < found.loop_s < found.with_s and found.flush_s >= 0
    assert found.ratio == pytest.approx(found.with_s / found.without_s - 1)
    assert f"RATIO journal_overhead {found.ratio:.2%} with=" in capsys.readouterr().out


def test_medians_leave_the_first_step_out(bench: ModuleType) -> None:
    seconds = {1: 99.0, 2: 2.0, 3: 1.0, 4: 3.0, 5: 4.0, 6: 6.0}  # with: 2, 5, 6; without: 3, 4
    times = bench.Times(step=seconds)
    times.loop.update({1: 50.0, 2: 0.25, 5: 0.5, 6: 0.75})
    found = bench.overhead(times)
    assert (found.with_s, found.without_s, found.loop_s) == (4.0, 2.0, 0.5)
    with pytest.raises(QuintetError, match="too few"):
        bench.overhead(bench.Times(step={1: 1.0, 2: 1.0}))


def test_groups_that_may_cross_into_another_step_are_refused(bench: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(QuintetError, match="max_staleness must be 0"):
        bench.measure(small(algorithm={"max_staleness": 1}), [], 3, tmp_path / "run")
