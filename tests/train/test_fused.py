"""The fused decoder is used where it should be, and what it keeps between calls never goes stale."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quintet.models.config import LoraConfig
from quintet.models.lora import apply_lora
from quintet.train.config import TrainConfig
from quintet.train.forward import PolicyForward
from quintet.train.optimizer import Optimizer
from quintet.train.workspace import Gradients, Workspace, WorkspacePool
from tests.train.helpers import exact_logprobs, gradients, largest_relative_gap, random_samples, tiny_model

SAMPLES = random_samples(1, [(5, [3, 7, 1, 4]), (9, [2, 80]), (3, [6]), (5, [5, 5])])


def lora_model() -> nn.Module:
    """B is not zero, so that both factors have a gradient."""
    model = apply_lora(tiny_model(), LoraConfig(r=4), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def run(forward: PolicyForward, model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    out = forward(SAMPLES).logprobs_BT
    (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
    return out.detach(), gradients(model)


def autograds(model: nn.Module, monkeypatch: pytest.MonkeyPatch, **options: Any) -> PolicyForward:
    """A forward through transformers' own layers."""
    with monkeypatch.context() as patch:
        patch.setattr("quintet.train.fused.supports", lambda model: False)
        return PolicyForward(model, **options)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_these_architectures_are_fused(name: str) -> None:
    model = tiny_model(name, **({"sliding_window": None} if name == "mistral" else {}))
    assert PolicyForward(model)._fused is not None


@pytest.mark.parametrize("reason", ["gelu", "dropout", "architecture", "float64"])
def test_what_is_not_written_out_takes_transformers_layers(reason: str) -> None:
    model: Any = tiny_model("cohere") if reason == "architecture" else tiny_model()
    if reason == "gelu":
        model = tiny_model(hidden_act="gelu")
    elif reason == "dropout":
        model = apply_lora(model, LoraConfig(r=4, dropout=0.1), seed=0)
    elif reason == "float64":
        model = model.double()
    assert PolicyForward(model)._fused is None


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("lora", [False, True])
def test_values_and_gradients_equal_autograds(lora: bool, kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = lora_model() if lora else tiny_model(tie_word_embeddings=True)
    exact = [exact_logprobs(model, sample, 1.0) for sample in SAMPLES]
    plain = autograds(model, monkeypatch)
    _, expected_gradients = run(plain, model)
    plain.release()
    found, found_gradients = run(PolicyForward(model, fused_kernels=kernels), model)
    for row, expected in zip(found, exact, strict=True):
        torch.testing.assert_close(row[: len(expected)].double(), expected, rtol=0, atol=1e-5)
    assert largest_relative_gap(found_gradients, expected_gradients) <= 1e-5


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("lora", [False, True])
def test_bfloat16_is_no_further_from_float32_than_autocast_is(
    lora: bool, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lora_model() if lora else tiny_model(tie_word_embeddings=True)
    float32 = PolicyForward(model)
    exact, exact_gradients = run(float32, model)
    float32.release()
    plain = autograds(model, monkeypatch, dtype=torch.bfloat16)
    autocast, autocast_gradients = run(plain, model)
    plain.release()
    found, found_gradients = run(PolicyForward(model, dtype=torch.bfloat16, fused_kernels=kernels), model)

    def distance(gradients: dict[str, torch.Tensor]) -> float:
        return sum(float((gradients[n] - g).norm() / g.norm()) for n, g in exact_gradients.items())

    assert 0.0 < float((found - exact).norm()) <= 1.2 * float((autocast - exact).norm())
    assert 0.0 < distance(found_gradients) <= 1.2 * distance(autocast_gradients)


@pytest.mark.parametrize("lora", [False, True])
def test_copies_of_weights_follow_the_optimizer(lora: bool) -> None:
    """The fused AdamW changes a tensor without counting it as changed."""
    model = lora_model() if lora else tiny_model()
    forward = PolicyForward(model, dtype=torch.bfloat16)
    optimizer = Optimizer(model, TrainConfig(lr=0.1), 10)
    before = forward(SAMPLES).logprobs_BT
    before.sum().backward()
    optimizer.step()
    kept = forward(SAMPLES).logprobs_BT.detach()
    forward.release()
    fresh = PolicyForward(model, dtype=torch.bfloat16)(SAMPLES).logprobs_BT.detach()
    assert torch.equal(kept, fresh) and not torch.equal(kept, before.detach())


def test_gradients_of_two_micro_batches_add_up() -> None:
    model = tiny_model(tie_word_embeddings=True)
    forward = PolicyForward(model)
    _, once = run(forward, model)
    for _ in range(2):
        out = forward(SAMPLES).logprobs_BT
        (out * torch.linspace(-1.0, 1.0, out.numel()).view_as(out)).sum().backward()
    twice = gradients(model)
    assert all(torch.allclose(twice[n], 2.0 * once[n], rtol=1e-5, atol=1e-6) for n in once)


def test_two_graphs_may_wait_for_their_backward_passes() -> None:
    """As pairs do: each keeps its own activations, whichever is first."""
    model = tiny_model()
    forward, other = PolicyForward(model), random_samples(8, [(4, [6, 3])])
    separate = []
    for samples in (SAMPLES, other):
        forward(samples).logprobs_BT.sum().backward()
        separate.append(gradients(model))
    first, second = (forward(samples).logprobs_BT.sum() for samples in (SAMPLES, other))
    first.backward()
    second.backward()
    joint = gradients(model)
    assert all(torch.allclose(joint[n], separate[0][n] + separate[1][n], rtol=1e-4, atol=1e-5) for n in joint)


def test_adapters_that_are_switched_off_are_not_computed() -> None:
    """The reference of a LoRA policy is its base, through the same forward object."""
    model: Any = lora_model()
    forward, base = PolicyForward(model), PolicyForward(tiny_model())
    with torch.no_grad():
        expected = base(SAMPLES).logprobs_BT
        with model.disable_adapter():
            assert torch.allclose(forward(SAMPLES).logprobs_BT, expected, atol=1e-5)
        assert not torch.allclose(forward(SAMPLES).logprobs_BT, expected, atol=1e-2)


def test_a_workspace_hands_the_same_memory_out_again() -> None:
    workspace = Workspace()
    first, second = (workspace.empty((3, 5), torch.float32) for _ in range(2))
    large = workspace.empty((1 << 25,), torch.float32)  # larger than a slab
    assert first.data_ptr() % 64 == 0 and second.data_ptr() >= first.data_ptr() + 60 and large.numel() == 1 << 25
    workspace.rewind()
    assert workspace.empty((15,), torch.float32).data_ptr() == first.data_ptr()


def test_a_workspace_goes_back_when_its_graph_is_done_or_gone() -> None:
    pool = WorkspacePool()
    first, second = pool.lease(), pool.lease()
    assert first.workspace is not second.workspace
    known = {id(first.workspace), id(second.workspace)}
    first.release()
    del second
    assert {id(pool.lease().workspace), id(pool.lease().workspace)} <= known


def test_a_gradient_set_to_none_starts_again() -> None:
    parameter, sums = nn.Parameter(torch.zeros(2, 2)), Gradients()
    sums.add(parameter, torch.ones(2, 2))
    sums.add(parameter, torch.ones(2, 2, dtype=torch.bfloat16))
    memory = parameter.grad
    assert memory is not None and memory.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    parameter.grad = None
    sums.add_rows(parameter, torch.tensor([1, 1]), torch.ones(2, 2))
    assert parameter.grad is not None and parameter.grad.tolist() == [[0.0, 0.0], [2.0, 2.0]]
    assert parameter.grad.data_ptr() == memory.data_ptr()
