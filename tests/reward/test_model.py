"""A reward model as a reward function: the trainer's numbers, batched, and refused when it is no reward model."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.models.config import ModelConfig, TinyConfig
from quintet.models.export import save_hf_folder, save_reward_folder
from quintet.models.loader import load_model, load_tokenizer
from quintet.models.tokenizer import Tokenizer
from quintet.reward.config import RewardConfig
from quintet.reward.model import _batches
from quintet.reward.service import LocalRewardService
from quintet.train.value import ValueModel
from quintet.types import FinishReason, Group, GroupId, Prompt, QuintetError, Rollout

TINY = ModelConfig(tiny=TinyConfig(hidden_size=32, intermediate_size=48, layers=2, heads=2, kv_heads=1))
ANSWERS = ("3", "12", "7+7", "")


@pytest.fixture
def reward_model(tmp_path: Path) -> tuple[ValueModel, Tokenizer, str]:
    """A random reward model and the folder that it was saved to."""
    model, tokenizer = ValueModel(load_model(TINY, seed=4), bias=False), load_tokenizer(TINY)
    torch.manual_seed(0)
    torch.nn.init.normal_(model.head.weight, std=1.0)
    save_reward_folder(model.body, model.head, tokenizer, tmp_path / "rm")
    return model, tokenizer, str(tmp_path / "rm")


def group(prompt: str, tokenizer: Tokenizer, finish: FinishReason = FinishReason.STOP) -> Group:
    rollouts = [
        Rollout(GroupId(prompt), i, tokenizer.encode(prompt), tokenizer.encode(text), text, [], [], [], finish)
        for i, text in enumerate(ANSWERS)
    ]
    return Group(GroupId(prompt), Prompt(prompt, tokenizer.encode(prompt), text=prompt), rollouts)


def expected(model: ValueModel, tokenizer: Tokenizer, prompt: str, ended: bool) -> list[float]:
    end = [tokenizer.eos_ids[0]] if ended else []
    out = []
    for text in ANSWERS:
        ids = torch.tensor([[*tokenizer.encode(prompt), *tokenizer.encode(text), *end]])
        with torch.no_grad():
            out.append(float(model.head(model.body.get_decoder()(input_ids=ids).last_hidden_state[0, -1])))
    return out


def service(path: str, **args: Any) -> LocalRewardService:
    functions = [{"fn": "model", "args": {"path": path} | args}, {"fn": "length", "args": {"max_tokens": 9}}]
    return LocalRewardService(RewardConfig.model_validate({"functions": functions, "workers": 0}))


@pytest.mark.parametrize("batch_tokens", [1, 8192])
@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_rewards_are_the_trained_heads_at_the_last_token(
    reward_model: tuple[ValueModel, Tokenizer, str], batch_tokens: int, finish: FinishReason
) -> None:
    model, tokenizer, path = reward_model
    graded = service(path, batch_tokens=batch_tokens)
    prompts = ("1+2=", "10+2=")
    scores = asyncio.run(graded.score([group(p, tokenizer, finish) for p in prompts]))
    graded.close()
    for prompt, found in zip(prompts, scores, strict=True):
        assert [s.parts["model"] for s in found] == pytest.approx(
            expected(model, tokenizer, prompt, finish is FinishReason.STOP), abs=1e-4
        )
        assert [s.reward for s in found] == [s.parts["model"] for s in found]


def test_a_response_without_its_end_loses_the_penalty(reward_model: tuple[ValueModel, Tokenizer, str]) -> None:
    model, tokenizer, path = reward_model
    graded = service(path, missing_end_penalty=2.5)
    cut, whole = (
        asyncio.run(graded.score([group("1+2=", tokenizer, finish)]))[0]
        for finish in (FinishReason.LENGTH, FinishReason.STOP)
    )
    graded.close()
    assert [s.reward for s in cut] == pytest.approx(
        [value - 2.5 for value in expected(model, tokenizer, "1+2=", False)], abs=1e-4
    )
    assert [s.reward for s in whole] == pytest.approx(expected(model, tokenizer, "1+2=", True), abs=1e-4)
    with pytest.raises(QuintetError, match="missing_end_penalty -1"):
        service(path, missing_end_penalty=-1)


def test_it_runs_on_a_thread_of_its_own(
    reward_model: tuple[ValueModel, Tokenizer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quintet.reward import model as module

    seen: list[str] = []
    inner = module._RewardModel._forward
    monkeypatch.setattr(
        module._RewardModel, "_forward", lambda s, ids: seen.append(threading.current_thread().name) or inner(s, ids)
    )
    graded = service(reward_model[2])
    asyncio.run(graded.score([group("1+2=", reward_model[1])]))
    graded.close()
    assert seen and set(seen) == {"reward"}


def test_transformers_loads_the_folder_as_a_classifier(reward_model: tuple[ValueModel, Tokenizer, str]) -> None:
    from transformers import AutoModelForSequenceClassification

    model, tokenizer, path = reward_model
    ids = torch.tensor([[*tokenizer.encode("1+2="), *tokenizer.encode("3"), tokenizer.eos_ids[0]]])
    classifier = AutoModelForSequenceClassification.from_pretrained(path)
    with torch.no_grad():
        found = float(classifier(input_ids=ids).logits)
    assert found == pytest.approx(expected(model, tokenizer, "1+2=", True)[0], abs=1e-4)


def test_a_model_that_fails_is_a_fault_and_no_zero(
    reward_model: tuple[ValueModel, Tokenizer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quintet.reward import model as module

    def fail(*_: object) -> list[float]:
        raise RuntimeError("out of memory")

    graded = service(reward_model[2])
    graded.start()
    good = asyncio.run(graded.score([group("1+2=", reward_model[1])]))[0]
    monkeypatch.setattr(module._RewardModel, "_forward", fail)
    groups = [group("1+2=", reward_model[1])]
    scores, faults = asyncio.run(graded._score_group(groups[0]))
    graded.close()
    assert all(s.failure is None for s in good)
    assert [s.reward for s in scores] == [None] * 4 and "out of memory" in faults[0].reason


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "option `path`: None is no model folder"),
        ({"path": "/no/such/folder"}, "is no model folder"),
        ({"path": "x", "pth": "x"}, "no option `pth`"),
    ],
)
def test_wrong_options_are_refused_before_anything_loads(args: dict[str, Any], words: str) -> None:
    config = RewardConfig.model_validate({"functions": [{"fn": "model", "args": args}]})
    with pytest.raises(QuintetError, match=words):
        LocalRewardService(config)


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    save_hf_folder(load_model(TINY), load_tokenizer(TINY), tmp_path / "lm")
    with pytest.raises(QuintetError, match="is no reward model: it is LlamaForCausalLM"):
        service(str(tmp_path / "lm")).start()


def test_batches_hold_rows_of_similar_length() -> None:
    assert _batches([3, 10, 4, 3, 10], 20) == [[0, 3, 2], [1, 4]]
    assert _batches([30, 5], 20) == [[1], [0]]
