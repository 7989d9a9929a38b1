"""The golden vectors: numbers of other implementations, loss and gradient, in float64."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .runner import WRONG_ON_PURPOSE, run_case, run_folder, summary, table

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "tests" / "data" / "golden"


def test_every_offered_case_agrees() -> None:
    results = run_folder(DATA)
    assert len(results) == 293
    assert [f"{r.file} {r.name}: {r.failure}" for r in results if r.failed] == []


def test_at_least_nine_tenths_of_the_standard_cases_are_used() -> None:
    standard = [r for r in run_folder(DATA) if r.standard]
    assert sum(r.used for r in standard) / len(standard) >= 0.9


def test_what_is_not_offered_is_named_in_the_summary() -> None:
    results = run_folder(DATA)
    lines = summary(results).splitlines()
    assert lines[-1] == "279 passed, 0 failed, 14 not offered"
    assert sum(line.startswith("not offered") for line in lines) == 14
    assert any("cispo_torchrl_BUG" in line for line in lines)


def test_the_table_counts_each_file_and_names_what_is_left_out() -> None:
    lines = table(run_folder(DATA)).splitlines()
    assert len(lines) == 2 + len(list(DATA.glob("*.json"))) + 1
    assert lines[-1] == "| all | 293 | 279 | 258 of 258 (100.0%) | |"
    (policy,) = (line for line in lines if line.startswith("| policy_losses.json"))
    assert policy.startswith("| policy_losses.json | 46 | 44 | 36 of 36 |") and "cispo_torchrl_BUG" in policy


@pytest.mark.parametrize(
    ("file", "name", "change"),
    [
        ("kl.json", "kl", {"kind": "k4"}),
        ("kl.json", "kl", {"clamp": "nobody"}),
        ("advantages.json", "grpo", {"ddof": 2}),
        ("aggregation.json", "agg", {"agg": "median"}),
        ("policy_losses.json", "policy", {"kind": "nobody"}),
        ("preference.json", "dpo", {"kind": "nobody"}),
        ("offpolicy.json", "reject", {"options": "seq_median_k3", "thr": "0.1"}),
        ("shaping.json", "filter", {"mode": "nobody"}),
    ],
)
def test_a_variant_that_nobody_knows_is_not_offered_rather_than_failed(
    file: str, name: str, change: dict[str, Any]
) -> None:
    case = next(c for c in json.loads((DATA / file).read_text()) if c["fn"] == name)
    assert not run_case(case | {"params": case["params"] | change}, file).used


def perturbed(value: Any) -> Any:
    if isinstance(value, list):
        return [perturbed(v) for v in value]
    return value if isinstance(value, str) else float(value) + 1e-3


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json")), ids=lambda p: p.stem)
def test_numbers_that_are_wrong_by_a_thousandth_fail(path: Path) -> None:
    for case in json.loads(path.read_text()):
        if not run_case(case, path.name).used:
            continue
        for key in set(case["expected"]) - WRONG_ON_PURPOSE:
            wrong = case | {"expected": case["expected"] | {key: perturbed(case["expected"][key])}}
            numeric = wrong["expected"][key] != case["expected"][key]
            big = max((abs(v) for v in _leaves(case["expected"][key])), default=0.0) * case["tolerance"] > 1e-4
            if numeric and not big:
                assert run_case(wrong, path.name).failed, f"{case['name']} {key}"


def _leaves(value: Any) -> list[float]:
    if isinstance(value, list):
        return [x for v in value for x in _leaves(v)]
    return [] if isinstance(value, str) else [float(value)]


def one_case(name: str, file: str) -> dict[str, Any]:
    return next(c for c in json.loads((DATA / file).read_text()) if c["name"] == name)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda c: c, "1 passed, 0 failed, 0 not offered"),
        (lambda c: c | {"expected": perturbed_case(c)}, "0 passed, 1 failed, 0 not offered"),
        (lambda c: c | {"fn": "nobody_knows"}, "0 passed, 0 failed, 1 not offered"),
    ],
)
def test_the_command_runs_a_folder(
    tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], outcome: str
) -> None:
    case = change(one_case("opo_verl/binary_rewards", "advantages.json"))
    (tmp_path / "some.json").write_text(json.dumps([case]))
    command = [sys.executable, "-m", "tests.golden", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == outcome
    assert done.returncode == (1 if "1 failed" in outcome else 0)


def perturbed_case(case: dict[str, Any]) -> dict[str, Any]:
    return {key: perturbed(value) for key, value in case["expected"].items()}
