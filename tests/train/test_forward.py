"""Packed, shared and chunked log-probabilities equal the model's own plain forward, and so do the gradients."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from quintet.models.config import LoraConfig
from quintet.models.lora import apply_lora
from quintet.train.forward import Layout, PolicyForward
from quintet.train.packing import TokenSample
from quintet.types import QuintetError
from tests.train.helpers import gradients, largest_relative_gap, plain_logprobs, random_samples, tiny_model

SAMPLES = random_samples(1, [(5, [3, 7, 1, 4]), (9, [2, 80]), (3, [6]), (5, [5, 5])])
TEMPERATURE = 0.7


ARCHITECTURES: dict[str, tuple[str, dict[str, Any], Layout]] = {
    "llama": ("llama", {}, Layout.SHARED),
    "llama-tied": ("llama", {"tie_word_embeddings": True}, Layout.SHARED),
    "llama-eager": ("llama", {"attn_implementation": "eager"}, Layout.SHARED),
    "qwen2": ("qwen2", {}, Layout.SHARED),
    "qwen3": ("qwen3", {"head_dim": 16}, Layout.SHARED),
    "gpt2": ("gpt2", {}, Layout.SHARED),
    "cohere-logit-scale": ("cohere", {"logit_scale": 0.3}, Layout.SHARED),
    "granite-logits-scaling": ("granite", {"logits_scaling": 3.0}, Layout.SHARED),
    "mistral-sliding-window": ("mistral", {"sliding_window": 4}, Layout.PADDED),
    "gemma2-softcap": ("gemma2", {"head_dim": 8, "attn_implementation": "eager"}, Layout.PADDED),
    "falcon-no-interface": ("falcon", {}, Layout.PADDED),
}


def compare(model: PreTrainedModel, samples: list[TokenSample], **options: Any) -> tuple[float, float, Layout]:
    """(largest log-probability gap, largest relative gradient gap, layout) against unpadded single forwards, in float32
    or float64, whichever is nearer: the float32 one of some of these models is itself 1.3e-5 from float64."""
    weights = torch.randn(80, generator=torch.Generator().manual_seed(5))
    forward = PolicyForward(model, temperature=TEMPERATURE, head_chunk_tokens=7, **options)
    out = forward(samples)
    (out.logprobs_BT * weights[: out.logprobs_BT.shape[1]]).sum().backward()
    forward.release()
    found, gaps = gradients(model), list[tuple[float, float]]()
    for plain in (model, copy.deepcopy(model).double()):
        reference = [plain_logprobs(plain, s, TEMPERATURE) for s in samples]
        torch.stack([(r * weights[: len(r)]).sum() for r in reference]).sum().backward()
        off = [float((out.logprobs_BT[b, : len(r)] - r).detach().abs().max()) for b, r in enumerate(reference)]
        gaps.append((max(off), largest_relative_gap(found, gradients(plain))))
    gap, gradient_gap = map(min, zip(*gaps, strict=True))
    return gap, gradient_gap, forward.layout


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equal_to_the_plain_forward_of_the_architecture(name: str) -> None:
    model_type, overrides, layout = ARCHITECTURES[name]
    gap, gradient_gap, used = compare(tiny_model(model_type, **overrides), SAMPLES)
    assert used is layout
    assert gap <= 1e-5
    assert gradient_gap <= 1e-5


def test_packed_without_sharing_is_equal_too() -> None:
    gap, gradient_gap, used = compare(tiny_model("qwen2"), SAMPLES, shared_prompt=False)
    assert used is Layout.PACKED and gap <= 1e-5 and gradient_gap <= 1e-5


def test_activation_checkpointing_changes_no_bit_and_saves_less() -> None:
    model, saved = tiny_model("llama"), {}

    def run(recompute: bool) -> dict[str, torch.Tensor]:
        forward = PolicyForward(model, activation_checkpointing=recompute)
        sizes: list[int] = []
        forward.training_mode()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            loss = forward(SAMPLES).logprobs_BT.sum()
        saved[recompute] = sum(sizes)
        loss.backward()
        forward.release()
        return gradients(model)

    plain, recomputed = run(False), run(True)
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert saved[True] < saved[False] / 2


def test_a_prompt_is_computed_once_for_its_samples() -> None:
    forward = PolicyForward(tiny_model())
    samples = random_samples(2, [(20, [5, 5, 5, 5])])
    assert forward(samples).rows == 20 + 4 * 4
    assert PolicyForward(tiny_model(), shared_prompt=False)(samples).rows == 4 * 24


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    model = tiny_model()
    sample = TokenSample([3, 4, 5], [6, 7], [1, 1])
    logits = model(input_ids=torch.tensor([[3, 4, 5, 6, 7]])).logits[0, 2:4] / TEMPERATURE
    expected = torch.distributions.Categorical(logits=logits).entropy()
    entropy = PolicyForward(model, temperature=TEMPERATURE)([sample]).entropy_BT
    torch.testing.assert_close(entropy[0], expected, rtol=1e-5, atol=1e-6)


def test_masked_tokens_cost_no_head_row_and_are_zero() -> None:
    with torch.no_grad():
        out = PolicyForward(tiny_model())([TokenSample([3, 4], [6, 7, 8], [1, 0, 1])])
    assert (out.logprobs_BT != 0.0).tolist() == (out.entropy_BT != 0.0).tolist() == [[True, False, True]]


def test_why_a_model_is_padded_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        forward = PolicyForward(tiny_model("mistral", sliding_window=4))
        forward(SAMPLES)
        forward(SAMPLES)
    messages = [r.getMessage() for r in caplog.records if "padded" in r.getMessage()]
    assert messages == ["MistralForCausalLM: samples are padded, not packed: its attention has a sliding window"]


def test_a_packed_forward_that_is_wrong_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The config lets it through, the comparison with the plain forward does not."""
    monkeypatch.setattr("quintet.train.attention.unsupported_reason", lambda model: None)
    model = tiny_model("mistral", sliding_window=None)
    monkeypatch.setattr(
        "quintet.train.attention._per_query_head", lambda x, rows, h: x[rows].transpose(1, 2).repeat(1, 2, 1, 1)
    )
    with caplog.at_level(logging.WARNING):
        forward = PolicyForward(model)
    assert forward.layout is Layout.PADDED and model.config._attn_implementation == "sdpa"
    assert "differs from its plain one" in caplog.text


def test_a_head_that_is_no_plain_linear_uses_the_models_own_logits(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()

    class Doubled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2.0 * super().forward(input)

    model.set_output_embeddings(Doubled(32, 61, bias=False))
    gap, gradient_gap, used = compare(model, SAMPLES)
    assert used is Layout.SHARED and gap <= 1e-5 and gradient_gap <= 1e-5
    assert "full logits" in caplog.text


def test_the_model_gets_its_own_attention_back() -> None:
    model, ids = tiny_model(), torch.arange(1, 9)[None]
    before = model(input_ids=ids).logits
    forward = PolicyForward(model)
    with pytest.raises(RuntimeError, match="packed forward"):
        model(input_ids=ids)
    forward.release()
    assert torch.equal(model(input_ids=ids).logits, before)


def test_base_dropout_is_off_and_lora_dropout_on_in_training_mode() -> None:
    base = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    forward = PolicyForward(base)
    forward.training_mode()
    assert torch.equal(forward(SAMPLES).logprobs_BT, forward(SAMPLES).logprobs_BT)
    adapted = apply_lora(tiny_model(), LoraConfig(r=4, dropout=0.5), seed=0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    forward = PolicyForward(adapted)
    forward.training_mode()
    assert not torch.equal(forward(SAMPLES).logprobs_BT, forward(SAMPLES).logprobs_BT)


def test_bfloat16_is_autocast_over_float32_weights() -> None:
    model = tiny_model()
    plain = PolicyForward(model)
    exact = plain(SAMPLES).logprobs_BT.detach()
    plain.release()
    forward = PolicyForward(model, dtype=torch.bfloat16)
    logprobs = forward(SAMPLES).logprobs_BT
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32 and 0 < float((logprobs - exact).detach().abs().max()) < 1.0
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


def test_checkpointing_a_model_without_decoder_layers_is_refused() -> None:
    with pytest.raises(QuintetError, match="activation_checkpointing"):
        PolicyForward(tiny_model(num_hidden_layers=0), activation_checkpointing=True)
