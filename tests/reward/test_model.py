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
    with pytest.raises(QuintetError, match="`missing_end_penalty`: Input should be greater than or equal to 0"):
        service(path, missing_end_penalty=-1)


def test_it_runs_on_a_thread_of_its_own(
    reward_model: tuple[ValueModel, Tokenizer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from quintet.reward import model as module

    seen: list[str] = []
    inner = module._LocalModel._forward
    monkeypatch.setattr(
        module._LocalModel, "_forward", lambda s, ids: seen.append(threading.current_thread().name) or inner(s, ids)
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
    monkeypatch.setattr(module._LocalModel, "_forward", fail)
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
    with pytest.raises(QuintetError, match="is no reward model: it is LlamaForCausalLM, and neither"):
        service(str(tmp_path / "lm")).start()


def test_batches_hold_rows_of_similar_length() -> None:
    assert _batches([3, 10, 4, 3, 10], 20) == [[0, 3, 2], [1, 4]]
    assert _batches([30, 5], 20) == [[1], [0]]


# ---- other kinds of reward model -----------------------------------------------------------------


def rewards(path: str, prompt: str = "1+2=", **args: Any) -> list[float | None]:
    graded = service(path, **args)
    try:
        tokenizer = load_tokenizer(TINY)
        return [s.parts["model"] for s in asyncio.run(graded.score([group(prompt, tokenizer)]))[0]]
    finally:
        graded.close()


@pytest.mark.parametrize("file", ["model.safetensors", "value_head.safetensors"])
def test_a_language_model_with_a_value_head_is_read_at_the_last_token(
    reward_model: tuple[ValueModel, Tokenizer, str], tmp_path: Path, file: str
) -> None:
    from safetensors.torch import load_file, save_file

    model, tokenizer, _ = reward_model
    folder = tmp_path / "lm"
    save_hf_folder(model.body, tokenizer, folder)
    head = {"v_head.summary.weight": model.head.weight.detach(), "v_head.summary.bias": torch.tensor([0.5])}
    before = load_file(folder / file) if (folder / file).exists() else {}
    save_file(before | head, folder / file, metadata={"format": "pt"})
    found = rewards(str(folder))
    assert found == pytest.approx([v + 0.5 for v in expected(model, tokenizer, "1+2=", True)], abs=1e-4)


def test_the_body_may_compute_in_bfloat16(reward_model: tuple[ValueModel, Tokenizer, str]) -> None:
    exact, rough = rewards(reward_model[2]), rewards(reward_model[2], dtype="bfloat16")
    assert rough == pytest.approx(exact, abs=0.2) and rough != pytest.approx(exact, abs=1e-6)


def test_an_encoder_reads_the_pair_in_its_own_form(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"0123456789+=", *(f"##{c}" for c in "0123456789+=")]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_labels": 3}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), num_attention_heads=2, **sizes)).eval()
    torch.nn.init.normal_(model.classifier.weight)
    model.save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    with torch.no_grad():
        one_by_one = [float(model(**tokenizer("1+2=", a, return_tensors="pt")).logits[0, 2]) for a in ANSWERS]
    assert rewards(str(tmp_path / "bert"), label=2) == pytest.approx(one_by_one, abs=1e-4)
    with pytest.raises(QuintetError, match=r"has 3 labels: say which one is the reward, label: N \(0 LABEL_0"):
        rewards(str(tmp_path / "bert"))
    with pytest.raises(QuintetError, match="there is no label 3"):
        rewards(str(tmp_path / "bert"), label=3)


def test_a_conversation_is_read_as_the_template_closes_it(
    reward_model: tuple[ValueModel, Tokenizer, str], tmp_path: Path
) -> None:
    model, tokenizer, path = reward_model
    with pytest.raises(QuintetError, match="has no chat template: use turn"):
        rewards(path, reads="conversation")
    end = tokenizer.hf.eos_token
    tokenizer.hf.chat_template = "{% for m in messages %}{{ m.content }}" + end + "=" + "{% endfor %}"
    save_reward_folder(model.body, model.head, tokenizer, tmp_path / "chat")
    found = rewards(str(tmp_path / "chat"), reads="conversation")
    for value, text in zip(found, ANSWERS, strict=True):
        ids = tokenizer.encode(f"1+2={end}={text}{end}=")
        with torch.no_grad():
            hidden = model.body.get_decoder()(input_ids=torch.tensor([ids])).last_hidden_state
            assert value == pytest.approx(float(model.head(hidden[0, -1])), abs=1e-4)
