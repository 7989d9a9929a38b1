"""Presets and overrides: what resolves, and what is refused with which words."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quintet.algorithms import advantage, cells, correction, kl, policy_loss
from quintet.algorithms.cells import COLUMNS
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.presets import PRESETS, Algorithm, resolve
from quintet.types import QuintetError


def algorithm(**options: Any) -> Algorithm:
    return resolve(AlgorithmConfig(**options))


def refusal(**options: Any) -> str:
    with pytest.raises(QuintetError) as error:
        algorithm(**options)
    text = str(error.value)
    assert len(text.splitlines()) <= 3
    return text


def test_the_tables_load_without_torch() -> None:
    code = "import sys, quintet.algorithms.presets, quintet.algorithms.filters; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_with_all_parameters(name: str) -> None:
    resolved = algorithm(preset=name)
    for column in ("advantage", "policy_loss", "aggregation"):
        cell = getattr(resolved, column)
        assert set(cell.params) == set(COLUMNS[column][cell.name].params)


def test_grpo_is_the_published_row_with_population_deviation() -> None:
    grpo = algorithm()
    assert (grpo.advantage.name, grpo.policy_loss.name, grpo.aggregation.name) == ("grpo", "ppo", "seq-mean-token-mean")
    assert grpo.advantage.params == {"std": "population", "eps": 1e-8, "scale": "group", "singleton": "zero"}
    assert grpo.policy_loss.params == {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None}
    assert (grpo.kl, grpo.correction, grpo.filters) == (None, None, ())
    assert grpo.group_relative and not grpo.needs_ref and not grpo.needs_entropy


def test_the_other_rows_differ_where_their_papers_do() -> None:
    dapo = algorithm(preset="dapo")
    assert dapo.policy_loss.params["eps_high"] == 0.28 and dapo.aggregation.name == "token-mean"
    assert [c.name for c in dapo.filters] == ["dynamic_sampling", "overlong_penalty"]
    assert algorithm(preset="dr_grpo").advantage.params["std"] == "none"
    assert algorithm(preset="dr_grpo").aggregation.name == "seq-mean-token-sum-norm"
    assert algorithm(preset="reinforce_pp").kl.params["placement"] == "reward"
    assert not algorithm(preset="reinforce_pp").group_relative
    assert algorithm(preset="reinforce_pp_baseline").group_relative


def test_an_override_without_a_name_keeps_the_function() -> None:
    changed = algorithm(policy_loss={"eps_high": 0.28})
    assert changed.policy_loss.name == "ppo" and changed.policy_loss.params["eps_high"] == 0.28
    assert changed.policy_loss.params["eps_low"] == 0.2


def test_another_function_starts_from_its_own_defaults() -> None:
    changed = algorithm(preset="dapo", policy_loss={"name": "gspo", "eps_low": 1e-3})
    assert changed.policy_loss.params == {"eps_low": 1e-3, "eps_high": 4e-4}


def test_none_takes_a_cell_away_and_an_empty_list_the_filters() -> None:
    changed = algorithm(preset="reinforce_pp_baseline", kl="none")
    assert changed.kl is None and not changed.needs_ref
    assert algorithm(preset="dapo", filters=[]).filters == ()
    kept = algorithm(preset="dapo", filters=["dynamic_sampling", {"name": "overlong_penalty", "buffer": 4}])
    assert kept.filters[1].params == {"buffer": 4, "factor": 1.0}


def test_entropy_is_needed_by_the_bonus_and_by_the_selector() -> None:
    assert algorithm(entropy_coef=0.01).needs_entropy
    assert algorithm(preset="flash_reinforce", policy_loss={"entropy_keep": 0.4}).needs_entropy
    assert algorithm(correction="m2po").needs_proximal


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "grop"}, ["algorithm.preset", "'grop'", "did you mean grpo"]),
        ({"policy_loss": "gsp"}, ["algorithm.policy_loss", "did you mean gspo"]),
        ({"policy_loss": {"eps_hihg": 0.3}}, ["ppo", "'eps_hihg'", "did you mean eps_high"]),
        ({"policy_loss": {"eps_high": "1e-2"}}, ["a number", "1.0e-8"]),
        ({"policy_loss": {"eps_high": -0.1}}, ["at least 0"]),
        ({"policy_loss": {"eps_low": 1.5}}, ["at most 1"]),
        ({"policy_loss": {"eps_high": True}}, ["a number", "True"]),
        ({"policy_loss": "none"}, ["none is not possible"]),
        ({"advantage": {"std": "sampel"}}, ["did you mean sample"]),
        ({"advantage": {"std": "none", "eps": 1e-4}}, ["eps has no effect with std none"]),
        ({"preset": "rloo", "advantage": {"eps": 1e-3}}, ["eps has no effect with normalise False"]),
        ({"kl": {"coef": 0.1}}, ["the preset has none", "coef", "no effect"]),
        ({"kl": {"name": "k1", "placement": "loss"}}, ["no restoring gradient", "k2 or k3"]),
        ({"kl": {"name": "k3", "placement": "reward", "gradient": "k2"}}, ["gradient has no effect"]),
        ({"kl": {"name": "k1", "coef": 0}}, ["coef 0 with placement reward has no effect"]),
        ({"kl": {"name": "none", "coef": 0.1}}, ["none takes no parameters"]),
        ({"preset": "flash_reinforce", "correction": "tis"}, ["twice"]),
        ({"preset": "gdpo", "filters": ["overlong_penalty"]}, ["no effect", "gdpo"]),
        ({"preset": "gdpo", "kl": "k1"}, ["no effect", "gdpo"]),
        ({"filters": [{"buffer": 4}]}, ["has no name"]),
        ({"filters": ["overlong_mask", "overlong_mask"]}, ["named twice"]),
        ({"filters": [{"name": "reward_clip", "low": 1.0, "high": 0.0}]}, ["low 1 must be below high 0"]),
        ({"correction": {"name": "icepop", "low": 3.0}}, ["low 3 must be below high 2"]),
        ({"advantage": "no_such_module_at_all:f"}, ["algorithm.advantage", "cannot import"]),
        ({"policy_loss": "math:no_such"}, ["'math' has no function 'no_such'"]),
    ],
)
def test_a_wrong_option_is_refused_in_words_that_mend_it(options: dict[str, Any], words: list[str]) -> None:
    text = refusal(**options)
    for word in words:
        assert word in text


def test_k1_in_the_loss_is_allowed_with_a_gradient_that_pulls_back() -> None:
    assert algorithm(kl={"name": "k1", "placement": "loss", "gradient": "k2"}).needs_ref


def test_a_users_function_is_imported_and_its_parameters_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_advantage.py").write_text("def double(x, *, scale=2.0):\n    return scale * x.rewards_N\n")
    monkeypatch.syspath_prepend(tmp_path)
    cell = algorithm(advantage={"name": "own_advantage:double", "scale": 3.0}).advantage
    assert cell.custom and cell.params == {"scale": 3.0}
    assert "'scales'" in refusal(advantage={"name": "own_advantage:double", "scales": 3.0})


def test_catalogue_and_functions_have_the_same_names_and_parameters() -> None:
    assert set(cells.ADVANTAGES) == set(advantage.ESTIMATORS)
    assert set(cells.POLICY_LOSSES) == set(policy_loss.POLICY_LOSSES)
    for name, spec in cells.POLICY_LOSSES.items():
        parameters = set(inspect.signature(policy_loss.POLICY_LOSSES[name]).parameters) - {"x"}
        assert parameters == set(spec.params), name
    of_the_term = {"coef", "placement", "importance_weight", "target", "horizon"}
    for name, spec in cells.KLS.items():
        function = kl.full_kl if name == "full" else kl.kl_estimate
        assert set(spec.params) - of_the_term <= set(inspect.signature(function).parameters)
    assert set(cells.CORRECTIONS["reject"].params) - {"weight"} <= set(
        inspect.signature(correction.rejection_mask).parameters
    )


def test_the_page_in_docs_is_the_generated_one() -> None:
    from quintet.algorithms.docs import render

    page = Path(__file__).parents[2] / "docs" / "algorithms.md"
    assert page.read_text() == render(), "run: python -m quintet.algorithms.docs > docs/algorithms.md"
