"""Reproducible numerics: a sample's ids and log-probability bits do not depend on its company."""

from __future__ import annotations

import pytest
import torch

from quintet.models.decoder.numerics import ReproducibleKernels, reproducible_kernels, settle_row_counts
from quintet.types import QuintetError, SamplingParams
from tests.rollout.small_models import (
    finish,
    generate,
    ids_and_bits,
    make_engine,
    make_group,
    make_model,
    random_prompts,
)

PARAMS = SamplingParams(n=2, max_tokens=24, seed=3)


@pytest.mark.parametrize("name", ["llama-tied", "llama-3-heads-per-kv", "qwen2", "qwen3"])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_alone_among_many_and_after_preemption_give_the_same_bits(name, top_p):
    model = make_model(name)
    params = SamplingParams(n=2, max_tokens=24, seed=3, top_p=top_p)
    watched = [make_group("short", [7, 8, 9]), make_group("long", list(range(2, 110)) + [5] * 33)]
    crowd = random_prompts(31, 150, seed=1)
    alone = [pair for g in watched for pair in ids_and_bits(generate(_engine(model), [g], params))]

    among = generate(_engine(model), [*crowd[:15], *watched, *crowd[15:]], params)
    assert ids_and_bits(among[30:34]) == alone

    tight = _engine(model, kv_pages=60, max_running=16)
    squeezed = generate(tight, [*crowd[:3], *watched, *crowd[3:6]], params)
    assert tight.stats().preemptions > 0
    assert ids_and_bits(squeezed[6:10]) == alone

    one_by_one = generate(_engine(model, max_running=1), watched, params)
    assert ids_and_bits(one_by_one) == alone


def _engine(model, **options):
    return make_engine(model, eos_ids=(), numerics="reproducible", **options)


def test_a_recomputed_sequence_goes_on_with_the_same_bits():
    model = make_model()
    groups = random_prompts(6, 100)
    expected = ids_and_bits(generate(_engine(model), groups, PARAMS))
    engine = _engine(model)
    for group in groups:
        engine.add_group(group, PARAMS)
    done = []
    for step in range(12):
        done += engine.step()
        if step % 3 == 2:
            engine.update_weights(model.state_dict(), 0)  # preempts everything; the weights are the same
    assert not done
    assert ids_and_bits(finish(engine)) == expected


def test_only_row_counts_that_agree_are_used_and_kernels_that_never_do_are_refused():
    weights = [torch.randn(24, 40), torch.randn(72, 16)]
    settle_row_counts(ReproducibleKernels(16), weights, head_dim=16)

    class AnotherOrderBelow64(ReproducibleKernels):
        def linear(self, x_TK, weight_NK, bias_N):
            small = self.row_counts[0] < 64
            return super().linear(x_TK, weight_NK, bias_N) + (1e-3 if small else 0.0)

    class OneCountOnly(ReproducibleKernels):
        def linear(self, x_TK, weight_NK, bias_N):
            return super().linear(x_TK, weight_NK, bias_N) + 1e-3 * self.row_counts[0]

    for kernels, expected in ((AnotherOrderBelow64(16), (32, 16, 8)), (OneCountOnly(16), (8,))):
        settle_row_counts(kernels, weights, head_dim=16)
        assert set(kernels.row_counts) <= set(expected) and kernels.row_tile == kernels.row_counts[-1]

    class LeakyLinear(ReproducibleKernels):
        def linear(self, x_TK, weight_NK, bias_N):
            return super().linear(x_TK, weight_NK, bias_N) + 1e-3 * torch.arange(len(x_TK))[:, None]

    class LeakyAttention(ReproducibleKernels):
        def attend(self, q_NRD, k_NSD, v_NSD, bias):
            return super().attend(q_NRD, k_NSD, v_NSD, bias) + 1e-6 * k_NSD.shape[1]

    class LeakySilu(ReproducibleKernels):
        def gated(self, gate_up_TI):
            return super().gated(gate_up_TI) + 1e-6 * gate_up_TI.shape[0]

    for leaky, named in ((LeakyLinear, "matrix product"), (LeakyAttention, "attention"), (LeakySilu, "exp")):
        with pytest.raises(QuintetError, match=f"cannot be kept here: (the )?{named}"):
            settle_row_counts(leaky(16), weights, head_dim=16)


def test_a_matrix_product_has_one_of_the_settled_numbers_of_rows(monkeypatch):
    kernels, seen = ReproducibleKernels(16), []
    kernels.row_counts = (64, 16)
    plain = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, *rest, out: seen.append(len(x)) or plain(x, *rest, out=out))
    x, weight = torch.randn(176, 8), torch.randn(4, 8)
    torch.testing.assert_close(kernels.linear(x, weight, None), x @ weight.T)
    assert seen == [64, 64, 16, 16, 16]
    with pytest.raises(ValueError, match="multiple of 16"):
        kernels.linear(x[:40], weight, None)


def test_reproducible_attention_equals_torchs_to_rounding():
    torch.manual_seed(0)
    q, k, v = torch.randn(6, 8, 16), torch.randn(6, 128, 16), torch.randn(6, 128, 16)
    bias = torch.where(torch.arange(128) < 70, 0.0, -torch.inf).expand(3, 1, 8, 128)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.view(3, 2, 8, 16), k.view(3, 2, 128, 16), v.view(3, 2, 128, 16), attn_mask=bias, scale=1.0
    )
    torch.testing.assert_close(
        ReproducibleKernels(16).attend(q, k, v, bias), expected.view(6, 8, 16), atol=1e-5, rtol=1e-5
    )


def test_reproducible_needs_float32():
    with pytest.raises(QuintetError, match="needs float32"):
        reproducible_kernels(16, torch.bfloat16)
