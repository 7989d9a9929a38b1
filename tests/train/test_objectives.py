"""The loop over given answers: losses against the plain model, cuts that change nothing, reference, checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quintet.algorithms import preference
from quintet.algorithms.cells import OBJECTIVES as CATALOGUE
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.offline import resolve_offline
from quintet.algorithms.presets import OFFLINE_PRESETS
from quintet.data.answers import Answered
from quintet.models.config import LoraConfig
from quintet.models.lora import apply_lora
from quintet.train.batching import unit_batches
from quintet.train.config import TrainConfig
from quintet.train.forward import Layout
from quintet.train.objectives import OBJECTIVES
from quintet.train.offline import OfflineTrainer
from quintet.train.packing import TokenSample
from tests.train.helpers import gradients, largest_relative_gap, plain_logprobs, tiny_model

PAIRS = [
    Answered([5, 6, 7], [8, 9, 2], [10, 2], margin=0.5),
    Answered([11, 12], [13, 2], [14, 15, 16, 2], margin=1.0),
    Answered([5, 6, 7], [20, 2], [21, 22, 2]),
    Answered([30], [31, 32, 33, 2], [34, 2], margin=0.25),
]
LABELS = [Answered(p.prompt_ids, p.response_ids, desirable=i % 2 == 0) for i, p in enumerate(PAIRS)]


def trainer(
    preset: str, model: Any = None, *, objective: dict[str, Any] | None = None, **options: Any
) -> OfflineTrainer:
    return OfflineTrainer(
        tiny_model() if model is None else model,
        algorithm=resolve_offline(AlgorithmConfig(preset=preset, objective=objective)),
        config=TrainConfig(**({"lr": 1e-2} | options)),
        total_steps=10,
    )


def total(model: Any, prompt: Any, answer: Any) -> torch.Tensor:
    return plain_logprobs(model, TokenSample(prompt, answer, [1] * len(answer)), 1.0).sum()


def totals(model: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(chosen, rejected) sums and lengths from plain forwards."""
    chosen = torch.stack([total(model, p.prompt_ids, p.response_ids) for p in PAIRS])
    rejected = torch.stack([total(model, p.prompt_ids, p.rejected_ids) for p in PAIRS])
    lengths = [torch.tensor([float(len(ids or ())) for ids in column]) for column in (
        [p.response_ids for p in PAIRS], [p.rejected_ids for p in PAIRS])]  # fmt: skip
    return chosen, rejected, lengths[0], lengths[1]


def expected_loss(preset: str, model: Any, reference: Any) -> torch.Tensor:
    chosen, rejected, n_chosen, n_rejected = totals(model)
    ref_chosen, ref_rejected, *_ = totals(reference)
    if preset == "simpo":
        return preference.simpo(chosen / n_chosen, rejected / n_rejected).mean()
    if preset == "orpo":
        return -chosen.sum() / n_chosen.sum() + preference.orpo_odds(chosen / n_chosen, rejected / n_rejected).mean()
    if preset == "sft":
        return -chosen.sum() / n_chosen.sum()
    kinds: dict[str, dict[str, Any]] = {
        "dpo": {},
        "cdpo": {"label_smoothing": 0.1},
        "robust_dpo": {"kind": "robust", "label_smoothing": 0.1},
        "dpo_hinge": {"kind": "hinge"},
        "ipo": {"kind": "ipo", "lengths_chosen": n_chosen, "lengths_rejected": n_rejected},
    }
    return preference.dpo(chosen, rejected, ref_chosen.detach(), ref_rejected.detach(), **kinds[preset]).mean()


@pytest.mark.parametrize("preset", sorted(set(OFFLINE_PRESETS) - {"kto", "reward_model"}))
def test_loss_and_first_update_are_those_of_the_plain_model(preset: str) -> None:
    """Compared after a first step, where policy and reference differ."""
    ours = trainer(preset, max_grad_norm=0.0, lr=1e-3)
    ours.step(PAIRS)
    moved = tiny_model()
    moved.load_state_dict(ours.model.state_dict())
    expected = expected_loss(preset, moved, tiny_model())
    expected.backward()
    plain = gradients(moved)
    found: dict[str, torch.Tensor] = {}
    ours._optimizer.step = lambda: found.update(gradients(ours.model)) or _NoStep()  # type: ignore[method-assign]
    assert ours.step(PAIRS)["offline/loss"] == pytest.approx(expected.item(), abs=2e-5)
    assert largest_relative_gap(found, plain) < 1e-3


class _NoStep:
    grad_norm, lr, applied = 0.0, 0.0, True


@pytest.mark.parametrize("preset", sorted(OFFLINE_PRESETS))
@pytest.mark.parametrize("options", [{"micro_batch_tokens": 1}, {"shared_prompt": False}], ids=["cut", "unshared"])
def test_how_a_batch_is_cut_or_packed_changes_nothing(preset: str, options: dict[str, Any]) -> None:
    rows = LABELS if preset == "kto" else PAIRS
    whole, cut = trainer(preset), trainer(preset, **options)
    for _ in range(2):
        a, b = whole.step(rows), cut.step(rows)
        for name in ("offline/loss", "offline/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=2e-3, abs=1e-6), name


@pytest.mark.parametrize("preset", sorted(set(OFFLINE_PRESETS) - {"sft"}))
def test_pairs_come_apart(preset: str) -> None:
    ours = trainer(preset, lr=3e-3)
    before = ours.evaluate(PAIRS)
    for _ in range(25):
        ours.step(PAIRS)
    after = ours.evaluate(PAIRS)
    assert after["eval/margin"] > before["eval/margin"] and after["eval/loss"] < before["eval/loss"]
    assert after["eval/pair_accuracy"] == 1.0 and after["eval/n"] == 4


def test_at_the_start_dpo_knows_no_difference() -> None:
    values = trainer("dpo").evaluate(PAIRS)
    assert values["eval/loss"] == pytest.approx(0.693147, abs=1e-6)
    assert (values["eval/margin"], values["eval/pair_accuracy"]) == (0.0, 0.5)


def test_kto_compares_with_the_mismatched_baseline_and_moves_labels_apart() -> None:
    ours = trainer("kto", lr=3e-3)
    assert ours.evaluate(LABELS)["eval/loss"] == pytest.approx(0.5, abs=1e-6), "no difference yet: 1 - sigmoid(0)"
    for _ in range(25):
        values = ours.step(LABELS)
    assert values["labels/desirable_reward"] > values["labels/undesirable_reward"]


def test_the_margin_of_the_data_enters_the_reward_models_loss() -> None:
    ours, plain = trainer("reward_model"), trainer("reward_model")
    margins = torch.tensor([p.margin for p in PAIRS])
    expected = preference.bradley_terry(torch.zeros(4), torch.zeros(4), margins).mean()
    assert ours.step(PAIRS)["offline/loss"] == pytest.approx(float(expected), abs=1e-6)
    without = [Answered(p.prompt_ids, p.response_ids, p.rejected_ids) for p in PAIRS]
    assert plain.step(without)["offline/loss"] == pytest.approx(0.693147, abs=1e-6)


def test_centring_keeps_rewards_near_zero() -> None:
    def spread(centre: float) -> float:
        ours = trainer("reward_model", objective={"centre": centre}, lr=3e-3)
        for _ in range(30):
            values = ours.step(PAIRS)
        return abs(values["pairs/chosen_reward"] + values["pairs/rejected_reward"])

    assert spread(0.5) < 0.3 * spread(0.0)


def test_under_lora_the_reference_is_the_base_and_only_adapters_are_trained() -> None:
    model = apply_lora(tiny_model(), LoraConfig(r=2), seed=0)
    ours = trainer("dpo", model, lr=1e-2)
    assert ours.evaluate(PAIRS)["eval/margin"] == pytest.approx(0.0, abs=1e-6)
    for _ in range(10):
        ours.step(PAIRS)
    assert ours.evaluate(PAIRS)["eval/margin"] > 0.01
    with model.disable_adapter():
        torch.testing.assert_close(
            ours._reference_totals([TokenSample([5, 6], [7, 2], [1, 1])]),
            ours._totals([TokenSample([5, 6], [7, 2], [1, 1])]).detach(),
        )


@pytest.mark.parametrize("preset", ["dpo", "reward_model"])
def test_a_checkpoint_goes_on_bit_for_bit(tmp_path: Path, preset: str) -> None:
    first = trainer(preset)
    first.step(PAIRS)
    first.save_checkpoint(tmp_path)
    expected = [first.step(PAIRS) for _ in range(2)]
    second = trainer(preset, tiny_model(seed=9))
    second.load_checkpoint(tmp_path)
    assert [second.step(PAIRS) for _ in range(2)] == expected


def test_a_pair_is_never_cut() -> None:
    units = [[TokenSample([1] * 10, [2] * 6, [1] * 6)] * 2] * 3  # 10 + 5 + 5 tokens each, 10 shared
    assert unit_batches(units, 30, Layout.SHARED) == [range(0, 2), range(2, 3)]
    assert unit_batches(units, 1, Layout.SHARED) == [range(0, 1), range(1, 2), range(2, 3)]
    assert unit_batches(units, 60, Layout.PACKED) == [range(0, 2), range(2, 3)]


def test_catalogue_and_functions_agree() -> None:
    import inspect

    assert set(CATALOGUE) == set(OBJECTIVES)
    for name, spec in CATALOGUE.items():
        assert list(inspect.signature(OBJECTIVES[name]).parameters)[2:] == list(spec.params), name
