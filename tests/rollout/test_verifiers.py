"""The unmodified verifiers package (`make verifiers-env`): its environments play against the gateway."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

import quintet
from quintet.data.verifiers import verifiers_rows
from quintet.models.config import ModelConfig
from quintet.models.tokenizer import PromptEncoder
from quintet.observe.metrics import read_metrics
from quintet.rollout.agents import AgentRolloutWorker
from quintet.rollout.config import EnvironmentConfig
from quintet.rollout.openai_api import MAX_N
from quintet.rollout.verifiers_agent import VerifiersAgent
from quintet.types import FailureKind, Group, GroupId, Prompt, QuintetError, Rollout, SamplingParams
from tests.rollout.serving_models import CALL, chat_tokenizer, make_worker, random_model, scripted_model
from tests.rollout.test_gateway import Tape

ENVIRONMENTS = Path(__file__).parents[1] / "data" / "verifiers_envs"
PYTHON = Path(os.environ.get("QUINTET_VERIFIERS_PYTHON", ".venv-verifiers/bin/python"))
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with verifiers: make verifiers-env"),
]
ENV_ID = "toy-tools"
TOKENIZER = chat_tokenizer()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ENVIRONMENTS))


def arguments(**args: Any) -> dict[str, Any]:
    return {"python": str(PYTHON.absolute())} | args


def play(model: Any, args: dict[str, Any], n: int = 3, **options: Any) -> tuple[list[Rollout], list[Rollout]]:
    """The rollouts of two samples of each prompt, and what the engine sampled."""
    rows = verifiers_rows(ENV_ID, args, "train")[:n]
    groups = [
        Group(
            GroupId(f"p{i}"),
            Prompt(f"p{i}", [1], row.values["prompt"], metadata={"verifiers": row.values["verifiers"]}),
        )
        for i, row in enumerate(rows)
    ]
    tape = Tape(make_worker(model, TOKENIZER))
    agent = VerifiersAgent(ENV_ID, args)

    async def program() -> list[Rollout]:
        worker = AgentRolloutWorker(
            tape,
            agent.run,
            tokenizer=TOKENIZER,
            encoder=PromptEncoder(TOKENIZER, ModelConfig()),
            config=EnvironmentConfig(kind=f"verifiers:{ENV_ID}", args=args, **options),
            context=2000,
            on_start=agent.start,
            on_close=agent.close,
        )
        try:
            return await worker.generate(groups, SamplingParams(n=2, max_tokens=10, seed=5), 0)
        finally:
            await worker.close()

    return asyncio.run(program()), tape.rollouts


def calls_of(rollout: Rollout, sampled: list[Rollout]) -> list[Rollout]:
    return [r for r in sampled if (r.group_id, r.sample_index // MAX_N) == (rollout.group_id, rollout.sample_index)]


def assert_recorded_as_sampled(rollouts: list[Rollout], sampled: list[Rollout]) -> None:
    for rollout in rollouts:
        own = calls_of(rollout, sampled)
        masked = [i for i, mask in enumerate(rollout.loss_mask) if mask]
        assert rollout.turns == len(own) > 0
        assert [rollout.response_ids[i] for i in masked] == [i for r in own for i in r.response_ids]
        assert [rollout.logprobs[i] for i in masked] == [p for r in own for p in r.logprobs]
        assert rollout.prompt_ids + rollout.response_ids == own[-1].prompt_ids + own[-1].response_ids


def test_a_single_turn_environment_scores_what_was_sampled_with_its_own_rubric() -> None:
    rollouts, sampled = play(random_model(TOKENIZER, context=2000), arguments(kind="single"))
    assert len(rollouts) == 6 and [r.failure for r in rollouts] == [None] * 6
    assert_recorded_as_sampled(rollouts, sampled)
    for rollout in rollouts:
        assert rollout.turns == 1
        assert TOKENIZER.decode_all(rollout.prompt_ids).startswith("<|im_start|>system\nbe short")
        assert rollout.episode is not None
        assert rollout.episode.reward == pytest.approx(len(TOKENIZER.decode(rollout.response_ids)) / 100)


def test_a_tool_environment_is_recorded_turn_by_turn() -> None:
    model = scripted_model(TOKENIZER, {"\n": CALL}, context=2000, noise=0.02)
    rollouts, sampled = play(model, arguments())
    assert [r.failure for r in rollouts] == [None] * 6
    assert_recorded_as_sampled(rollouts, sampled)
    rewards = []
    for rollout in rollouts:
        text = TOKENIZER.decode_all(rollout.response_ids)
        calls = [
            r for r in sampled if r.group_id == rollout.group_id and r.sample_index // MAX_N == rollout.sample_index
        ]
        # the last turn's call, where it has one, is not answered any more
        asked = sum(CALL in TOKENIZER.decode_all(r.response_ids) for r in calls[:-1])
        assert text.count("<|im_start|>tool\n3<|im_end|>") == asked == rollout.turns - 1
        assert rollout.episode is not None and rollout.episode.reward == 0.5 * asked
        rewards.append(rollout.episode.reward)
    assert len(set(rewards)) > 1


def test_an_environment_that_hangs_or_dies_is_a_failure_and_the_next_one_is_started() -> None:
    model = scripted_model(TOKENIZER, {"\n": CALL}, context=2000)
    (late, *_), _ = play(model, arguments(tool="slow"), n=1, timeout_s=6.0)
    assert late.failure is not None and late.failure.kind is FailureKind.TIMEOUT
    rollouts, _ = play(model, arguments(tool="deadly"), n=2)
    assert {r.failure.kind for r in rollouts if r.failure} == {FailureKind.ENVIRONMENT}
    assert all(r.failure is not None and "its process ended" in r.failure.message for r in rollouts)
    assert all(r.response_ids for r in rollouts)  # recorded all the same


@pytest.mark.parametrize(
    ("env_id", "args", "said"),
    [
        ("no-such-thing", {}, "Could not import 'no-such-thing'"),
        (ENV_ID, {"kind": "broken"}, "no such map"),
        (ENV_ID, {"colour": 1}, "unexpected keyword argument 'colour'"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_the_model_is(env_id: str, args: dict[str, Any], said: str) -> None:
    with pytest.raises(QuintetError, match=said):
        verifiers_rows(env_id, arguments(**args), "train")


def test_a_run_trains_on_a_verifiers_environment(tmp_path: Path) -> None:
    model = tmp_path / "model"
    scripted = scripted_model(TOKENIZER, {"\n": CALL}, context=2000, noise=0.02)
    scripted.save_pretrained(model)
    TOKENIZER.save(str(model))
    data = {"source": f"verifiers:{ENV_ID}", "args": arguments(size=8), "eval_size": 2}
    recipe = {
        "name": "verifiers",
        "steps": 2,
        "model": {"name": str(model)},
        "data": data,
        "environment": {"kind": data["source"], "args": data["args"]},
        "rollout": {"groups_per_step": 2, "group_size": 4, "max_tokens": 10},
        "reward": {"functions": [{"fn": "environment"}]},
        "train": {"lr": 1e-4, "old": "sampler"},
        "log": {"trackers": []},
    }
    result = quintet.train(recipe, out=tmp_path / "run")
    rows = [row for row in read_metrics(result.folder / "metrics.jsonl") if "actor/loss" in row]
    assert result.summary["finished"] and len(rows) == 2
    assert all(1.0 < row["environment/turns_mean"] <= 3.0 and row["reward/max"] > 0 for row in rows)
    assert all(row["mismatch/max_abs_logprob"] < 1e-4 for row in rows)
    assert not any(name.startswith("failures/") for row in rows for name in row)
