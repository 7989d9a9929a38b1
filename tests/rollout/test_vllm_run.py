"""A whole GRPO run on the real vLLM (`make test-vllm`): weights go in hot, and its death in a step costs nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import quintet
from quintet.buffer.reading import JournalReader
from quintet.models.config import ModelConfig, TinyConfig
from quintet.models.loader import load_model, load_tokenizer
from quintet.observe.metrics import read_metrics
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.loading import load_weights
from quintet.rollout.vllm import VllmRolloutWorker
from quintet.types import FinishReason, Group, GroupId, Prompt, Rollout, SamplingParams, WeightRef
from quintet.weights import open_weights

PYTHON = Path(os.environ.get("QUINTET_VLLM_PYTHON", ".venv-vllm/bin/python"))
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: make vllm-env"),
]
STEPS, GROUPS, SAMPLES = 5, 4, 4
KILL_AT_VERSION, KILL_AFTER_TOKENS = 2, 40
TINY = TinyConfig(hidden_size=64, intermediate_size=128, layers=2, heads=2, kv_heads=1)
VLLM = {"python": str(PYTHON), "args": ["--enforce-eager"], "cpu_kv_gb": 1}
PATIENCE = {"start_timeout_s": 3600.0, "silence_s": 1800.0}  # where the machine is shared
RECIPE: dict[str, Any] = {
    "name": "vllm",
    "steps": STEPS,
    "model": {"name": "builtin:tiny", "tiny": TINY.model_dump()},
    "data": {"source": "task:sums", "args": {"max": 9, "template": "{a}+{b}="}, "eval_size": 0},
    "rollout": {"engine": "vllm", "vllm": VLLM | PATIENCE}
    | {"groups_per_step": GROUPS, "group_size": SAMPLES, "max_tokens": 120},
    "reward": {"functions": [{"fn": "length", "args": {"max_tokens": 120, "buffer_tokens": 120}}]},
    "train": {"lr": 1e-2, "old": "sampler"},
    "log": {"trackers": []},
}
QUESTIONS = ("1+2=", "9+9=", "0+7=")


class Watched(VllmRolloutWorker):
    """Asked for its greedy answers after each update; killed in the middle of a step."""

    made: list[Watched] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.made.append(self)
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.said: dict[int, list[list[int]]] = {}
        self.told = 0
        self.cut_at: list[int] = []  # how many tokens each sample had when the server was killed

    async def update_weights(self, weight_path: WeightRef, version: int) -> None:
        await super().update_weights(weight_path, version)
        self.weights[version] = {name: t.clone() for name, t in open_weights(weight_path).items()}
        self.said[version] = await greedy_answers(self)

    async def generate(
        self, prompts: list[Group], sampling_params: SamplingParams, weight_version: int, **kwargs: Any
    ) -> list[Rollout]:
        if weight_version == KILL_AT_VERSION and sampling_params.temperature > 0:
            kwargs["on_token"] = self._token
        return await super().generate(prompts, sampling_params, weight_version, **kwargs)

    def _token(self, _: object) -> None:
        self.told += 1
        if self.told == KILL_AFTER_TOKENS:
            self.cut_at = [len(sequence.output_ids) for sequence in self._running]
            assert self._server is not None and self._server._process is not None
            os.killpg(self._server._process.pid, signal.SIGKILL)


async def greedy_answers(worker: VllmRolloutWorker) -> list[list[int]]:
    params = SamplingParams(max_tokens=30, temperature=0.0)
    groups = [Group(GroupId(text), Prompt(text, load_tokenizer(model_config()).encode(text))) for text in QUESTIONS]
    return [r.response_ids for r in await worker.generate(groups, params, worker.version)]


def model_config() -> ModelConfig:
    return ModelConfig(tiny=TINY)


def fresh_model(weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    model = load_model(model_config(), seed=9)
    load_weights(model.state_dict(), weights)
    return model


def transformers_answers(weights: dict[str, torch.Tensor]) -> list[list[int]]:
    model, tokenizer = fresh_model(weights), load_tokenizer(model_config())
    out = []
    for text in QUESTIONS:
        ids = torch.tensor([tokenizer.encode(text)])
        mask = torch.ones_like(ids)
        whole = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=30)
        out.append(whole[0, ids.shape[1] :].tolist())
    return out


def fresh_vllm_answers(weights: dict[str, torch.Tensor]) -> list[list[int]]:
    """Of a server that was started on these weights and has never seen others."""
    tokenizer = load_tokenizer(model_config())

    async def ask() -> list[list[int]]:
        worker = VllmRolloutWorker(
            fresh_model(weights).config,
            weights,
            eos_ids=tokenizer.eos_ids,
            decode=tokenizer.decode,
            config=RolloutConfig.model_validate(RECIPE["rollout"]),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        try:
            return await greedy_answers(worker)
        finally:
            await worker.close()

    return asyncio.run(ask())


def test_a_run_gives_vllm_each_new_version_and_survives_its_death_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quintet.rollout.vllm.VllmRolloutWorker", Watched)
    result = quintet.train(RECIPE, out=tmp_path / "run")
    assert result.summary["finished"]
    (worker,) = Watched.made
    assert sum(n > 0 for n in worker.cut_at) >= 2, "the server was to die with samples half done"

    rows = [row for row in read_metrics(result.folder / "metrics.jsonl") if "actor/loss" in row]
    assert [row["engine/restarts"] for row in rows] == [0, 0, 1, 0, 0]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    mismatch = [row["mismatch/max_abs_logprob"] for row in rows]
    assert max(mismatch) < 1e-3  # what the trainer computes for the tokens of the broken samples too

    assert_all_is_trained_once(result.folder / "journal.sqlite")
    assert sorted(worker.said) == list(range(STEPS + 1))
    for version, said in worker.said.items():
        assert said == transformers_answers(worker.weights[version]), f"version {version}"
    assert len({str(said) for said in worker.said.values()}) > STEPS // 2  # old weights would have been noticed
    assert worker.said[STEPS] == fresh_vllm_answers(worker.weights[STEPS])
    with capsys.disabled():
        print(f"\ncut at {worker.cut_at} tokens; largest mismatch of each step: {mismatch}")


def assert_all_is_trained_once(path: Path) -> None:
    with JournalReader.open(path) as journal:
        steps = [journal.step_groups(step) for step in range(1, STEPS + 1)]
        counts = journal.counts()
        assert counts["trained"] == STEPS * GROUPS and not any(name.startswith("dropped") for name in counts)
        assert counts["edges"] == counts["trained"] * 6  # no group was sent through a state twice
    ids = Counter(group.group_id for groups in steps for group in groups)
    assert [len(groups) for groups in steps] == [GROUPS] * STEPS and set(ids.values()) == {1}
    for step, groups in enumerate(steps):
        for rollout in (r for group in groups for r in group.rollouts):
            assert rollout.failure is None and rollout.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert {run.version for run in rollout.weight_versions} == {step}
        assert {len(group.rollouts) for group in groups} == {SAMPLES}
