"""Whole runs of a very small model in an environment, and over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import quintet
from quintet.buffer.reading import JournalReader
from quintet.cluster.build import supervised_batches
from quintet.cluster.serving import rollout_server
from quintet.config import load_config
from quintet.models.config import TinyConfig
from quintet.models.tiny import tiny_tokenizer
from quintet.models.tokenizer import Tokenizer
from quintet.observe.metrics import read_metrics
from quintet.rollout.factory import KEY_VARIABLE
from quintet.serving import ThreadedServer
from quintet.types import Prompt, QuintetError

ALPHABET = "0123456789*=<>/c[]?"
MODEL = {
    "name": "builtin:tiny",
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "max_position": 48}
    | {"alphabet": ALPHABET},
}
RECIPE: dict[str, Any] = {
    "name": "tools",
    "steps": 2,
    "model": MODEL,
    "data": {"source": "task:tool_products", "args": {"min": 2, "max": 9}, "eval_size": 4},
    "environment": {
        "kind": "tools",
        "tools": [{"fn": "calculator", "name": "c"}],
        "args": {"format": "tags", "error": "?"},
        "max_turns": 2,
    },
    "warm_start": {"steps": 60, "batch_size": 64, "lr": 5e-3},
    "rollout": {"groups_per_step": 4, "group_size": 4, "max_tokens": 24},
    "reward": {"functions": [{"fn": "exact"}]},
    "train": {"lr": 1e-3, "old": "sampler"},
    "log": {"trackers": []},
    "cluster": {"threads": 1},
}


def test_a_run_with_a_tool_trains_the_policys_tokens_and_journals_the_episodes(tmp_path: Path) -> None:
    result = quintet.train(RECIPE, out=tmp_path / "run")
    assert result.summary["finished"]
    steps = [row for row in read_metrics(result.folder / "metrics.jsonl") if "environment/turns_mean" in row]
    assert len(steps) == 2
    assert all(1.0 <= row["environment/turns_mean"] <= 2.0 for row in steps)
    assert all(row["mismatch/max_abs_logprob"] < 1e-4 for row in steps)  # the trainer sees what was sampled
    with JournalReader.open(result.folder / "journal.sqlite") as journal:
        group = journal.load(0)[0][0]
    calls = 0
    for rollout in group.rollouts:
        assert rollout.episode is not None
        assert len(rollout.loss_mask) == len(rollout.response_ids) == len(rollout.logprobs)
        masked = [p for p, m in zip(rollout.logprobs, rollout.loss_mask, strict=True) if not m]
        assert masked == [0.0] * len(masked)
        calls += rollout.episode.tool_calls
    assert calls > 0  # the warm start has shown how


def test_a_demonstration_gives_one_example_per_turn_of_the_policy() -> None:
    tokenizer = Tokenizer(tiny_tokenizer(TinyConfig(alphabet=ALPHABET)))
    prompt = Prompt("p", tokenizer.encode("2*3="), answer="6", metadata={"demonstration": ["<c>2*3</c>", "[6]", "6"]})
    batch = next(supervised_batches([prompt], tokenizer, 2, seed=0))
    shown = sorted((tokenizer.decode(list(before)), tokenizer.decode_all(list(after))) for before, after in batch)
    assert shown == [("2*3=", "<c>2*3</c>"), ("2*3=<c>2*3</c>[6]", "6<eos>")]


def test_a_run_over_http_goes_as_the_run_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k")
    plain = RECIPE | {"environment": {}, "warm_start": {}, "rollout": RECIPE["rollout"] | {"temperature": 0.7}}
    plain["reward"] = {"functions": [{"fn": "length", "args": {"max_tokens": 12, "buffer_tokens": 12}}]}
    in_process = quintet.train(plain, out=tmp_path / "a")
    served = load_config({"model": MODEL | {"tiny": MODEL["tiny"] | {"init_seed": 9}}}, training=False)  # other weights
    service = ThreadedServer(rollout_server(served, key="k", weights_root=tmp_path / "w").app())
    service.start()
    try:
        rollout = plain["rollout"] | {"engine": "http", "urls": [service.url], "weights_dir": str(tmp_path / "w" / "v")}
        over_http = quintet.train(plain | {"rollout": rollout}, out=tmp_path / "b")
    finally:
        service.close()
    names = ("reward/mean", "actor/loss", "actor/grad_norm", "rollout/response_length_mean")
    here, there = (
        [[row[name] for name in names] for row in read_metrics(r.folder / "metrics.jsonl") if "actor/loss" in row]
        for r in (in_process, over_http)
    )
    assert len(here) == len(there) == 2
    for a, b in zip(here, there, strict=True):
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": {"max_turns": 3}}, "no kind"),
        ({"environment": {}, "reward": {"functions": [{"fn": "environment"}]}}, "environment.kind"),
        ({"environment": {"kind": "tools", "tools": [{"fn": "calculater"}]}}, "neither calculator"),
        ({"environment": {"kind": "agent:tests.rollout.test_agents:silent"}}, "uses no chat template"),
        (
            {"environment": {"kind": "agent:tests.rollout.test_agents:silent", "max_turns": 3}},
            "max_turns has no effect",
        ),
        ({"environment": {"kind": "verifiers:x"}}, "set data.source verifiers:x, and the same args"),
        (
            {
                "environment": {"kind": "verifiers:x", "args": {"python": "/no/such"}},
                "data": {"source": "verifiers:x", "args": {"python": "/no/such"}},
            },
            r"environment\.args\.python: there is no file '/no/such'",
        ),
    ],
)
def test_a_wrong_environment_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(QuintetError, match=said):
        quintet.train(RECIPE | changes, out=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
