"""An algorithm from outside the package: one row and one function, by import path or by an entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.algorithms.advantage import compute_advantages
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.offline import is_offline, resolve_offline
from quintet.algorithms.presets import find_row, resolve
from quintet.config import load_config
from quintet.types import Experience, ExperienceBatch, GroupId, QuintetError

MODULE = """
from quintet.algorithms.presets import Cell, OfflineRow, Row


def above_median(x, *, scale=1.0):
    return scale * (x.rewards_N - x.rewards_N.median())


MEDIAN = Row("median as baseline", "nowhere", Cell("outside_algo:above_median", {"scale": 2.0}), Cell("ppo"),
             Cell("token-mean"))
STRONG_DPO = OfflineRow("DPO that moves little", "nowhere", Cell("dpo", {"beta": 1.0}))
NOT_A_ROW = 3
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package installed somewhere on the path: a module, and the metadata with its entry points."""
    (tmp_path / "outside_algo.py").write_text(MODULE)
    info = tmp_path / "outside_algo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-algo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[quintet.presets]\nmedian = outside_algo:MEDIAN\nstrong_dpo = outside_algo:STRONG_DPO\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def batch(*rewards: float) -> ExperienceBatch:
    return ExperienceBatch(
        1, 0, [Experience(GroupId("p"), i, [1], [2, 3], [-1.0, -1.0], [1, 1], r, 0) for i, r in enumerate(rewards)]
    )


@pytest.mark.parametrize("preset", ["median", "outside_algo:MEDIAN"])
def test_a_row_and_its_function_work_like_a_built_in(outside: None, preset: str) -> None:
    config = load_config({"algorithm": {"preset": preset}, "rollout": {"group_size": 1}})
    algorithm = resolve(config.algorithm)
    assert algorithm.preset == preset and algorithm.aggregation.name == "token-mean"
    found = compute_advantages(algorithm, batch(0.0, 1.0, 4.0))
    assert [e.advantage for e in found.experiences] == [-2.0, 0.0, 6.0]


def test_its_cells_can_be_overridden(outside: None) -> None:
    algorithm = resolve(AlgorithmConfig(preset="median", advantage={"scale": 1.0}, policy_loss={"eps_high": 0.3}))
    assert algorithm.advantage.params == {"scale": 1.0} and algorithm.policy_loss.params["eps_high"] == 0.3


def test_an_offline_row_from_outside(outside: None) -> None:
    config = AlgorithmConfig(preset="strong_dpo")
    assert is_offline(config) and resolve_offline(config).objective.params["beta"] == 1.0


def test_what_is_no_row_is_refused_and_names_of_plugins_are_suggested(outside: None) -> None:
    with pytest.raises(QuintetError, match="is a int, not a Row"):
        find_row("outside_algo:NOT_A_ROW")
    with pytest.raises(QuintetError, match="has no row 'MISSING'"):
        find_row("outside_algo:MISSING")
    with pytest.raises(QuintetError, match="cannot import 'no_such_module'"):
        find_row("no_such_module:ROW")
    with pytest.raises(QuintetError, match="did you mean median"):
        find_row("medain")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "dpo", "advantage": "rloo"}, "algorithm.advantage has no effect"),
        ({"preset": "dpo", "max_staleness": 2}, "algorithm.max_staleness has no effect"),
        ({"preset": "dpo", "objective": {"bta": 1.0}}, "did you mean beta"),
        ({"preset": "dpo_hinge", "objective": {"label_smoothing": 0.1}}, "label_smoothing has no effect"),
        ({"preset": "dpo", "objective": "none"}, "none is not possible"),
        ({"preset": "grpo"}, "is no offline preset"),
    ],
)
def test_offline_options_that_do_nothing_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(QuintetError, match=words):
        resolve_offline(AlgorithmConfig(**options))


def test_an_objective_does_nothing_under_an_online_preset() -> None:
    with pytest.raises(QuintetError, match=r"algorithm\.objective has no effect"):
        resolve(AlgorithmConfig(objective="dpo"))
