"""The routing benchmark, small: strategies that know where tokens are cached reuse more of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from quintet.rollout.router import STRATEGIES

FILE = Path(__file__).parents[2] / "benchmarks" / "routing.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("routing_bench", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "routing_bench", module)
    spec.loader.exec_module(module)
    return module


def test_every_strategy_is_compared_and_those_that_know_the_cache_hit_it_more(bench: ModuleType) -> None:
    hits = {strategy: bench.simulate(strategy, sessions=40, workers=4)[0] for strategy in STRATEGIES}
    assert min(hits["sticky"], hits["prefix"]) > max(hits["power_of_two"], hits["round_robin"]) + 0.02
    assert bench.simulate("sticky", sessions=40, workers=4)[0] == hits["sticky"]  # the same every time
