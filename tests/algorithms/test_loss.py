"""The loss of a micro-batch: what it may not depend on, and how its terms combine."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quintet.algorithms.aggregate import aggregate, count
from quintet.algorithms.cells import POLICY_LOSSES
from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.loss import Counts, TokenBatch, policy_objective
from quintet.algorithms.presets import PRESETS, Algorithm, resolve
from quintet.types import QuintetError

ROWS: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS},
    "kl_k3": {"kl": {"name": "k3", "coef": 0.1}, "entropy_coef": 0.01},
    "kl_k2": {"kl": {"name": "k2", "coef": 0.1, "clamp": 10.0}},
    "kl_k1_straight_through": {"kl": {"name": "k1", "coef": 0.1, "placement": "loss", "gradient": "k2"}},
    "kl_abs": {"kl": {"name": "abs", "coef": 0.1}},
    "kl_full": {"kl": {"name": "full", "coef": 0.1}},
    "loss_dro": {"policy_loss": "dro"},
    "loss_topr_token": {"policy_loss": {"name": "topr", "level": "token"}},
    "loss_dual_clip": {"policy_loss": {"name": "ppo", "dual_clip": 3.0}},
    "mean_token_sum": {"aggregation": "token-sum"},
    "kl_weighted": {"kl": {"name": "k3", "coef": 0.1, "importance_weight": True}},
    "correction_tis": {"correction": {"name": "tis", "level": "sequence"}},
    "correction_icepop": {"correction": {"name": "icepop", "low": 0.8, "high": 1.2}},
    "correction_mis": {"correction": {"name": "mis", "level": "geometric", "high": 1.05}},
    "correction_reject": {"correction": {"name": "reject", "metric": "k3", "reduce": "mean", "high": 0.05}},
    "correction_reject_token": {"correction": {"name": "reject", "high": 1.2, "low": 0.8, "weight": "token"}},
    "correction_opsm": {"correction": {"name": "opsm", "delta": 0.0}},
    "flash_selected": {"preset": "flash_reinforce", "policy_loss": {"entropy_keep": 0.5, "delta": 0.05}},
}


def algorithm(**options: Any) -> Algorithm:
    return resolve(AlgorithmConfig(**options))


def random_batch(seed: int, rows: int = 6, width: int = 7) -> TokenBatch:
    """Ragged rows with holes; the last row has no loss token."""
    g = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(rows, width, generator=g, dtype=torch.float64)

    logprobs = -torch.rand(rows, width, generator=g, dtype=torch.float64) * 2 - 0.05
    lengths = torch.randint(1, width + 1, (rows, 1), generator=g)
    mask = (torch.arange(width) < lengths).double() * (torch.rand(rows, width, generator=g) > 0.2)
    mask[:, 0], mask[-1] = 1.0, 0.0
    return TokenBatch(
        logprobs=logprobs,
        old_logprobs=(logprobs + noise(0.3)).clamp(max=-1e-3),
        sampler_logprobs=(logprobs + noise(0.3)).clamp(max=-1e-3),
        advantages=torch.randn(rows, 1, generator=g, dtype=torch.float64).expand(rows, width).clone(),
        mask=mask,
        ref_logprobs=(logprobs + noise(0.3)).clamp(max=-1e-3),
        entropy=torch.rand(rows, width, generator=g, dtype=torch.float64),
        rewards=torch.randint(0, 2, (rows,), generator=g).double(),
        full_kl=noise(0.3).abs(),
    )


def changed(batch: TokenBatch, fn: Any) -> TokenBatch:
    """`fn` applied to every tensor of the batch."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return TokenBatch(**{k: None if v is None else fn(v) for k, v in tensors.items()})


def evaluate(row: Algorithm, batch: TokenBatch, counts: Counts) -> tuple[Tensor, Tensor]:
    leaf = batch.logprobs.clone().requires_grad_()
    loss, _ = policy_objective(row, replace(batch, logprobs=leaf), counts)
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), order=st.permutations(range(6)))
def test_the_order_of_samples_changes_nothing(name: str, seed: int, order: list[int]) -> None:
    row, batch = algorithm(**ROWS[name]), random_batch(seed)
    counts = count(batch.mask)
    loss, grad = evaluate(row, batch, counts)
    shuffled_loss, shuffled_grad = evaluate(row, changed(batch, lambda t: t[order]), counts)
    assert close(loss, shuffled_loss) and close(grad[order], shuffled_grad)


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), extra=st.integers(1, 5), filler=st.sampled_from([0.0, -500.0, 500.0]))
def test_padding_changes_nothing_whatever_it_holds(name: str, seed: int, extra: int, filler: float) -> None:
    row, batch = algorithm(**ROWS[name]), random_batch(seed)
    counts = count(batch.mask)
    loss, grad = evaluate(row, batch, counts)

    def pad(t: Tensor) -> Tensor:
        return t if t.ndim == 1 else torch.cat([t, torch.full((t.shape[0], extra), filler, dtype=t.dtype)], dim=1)

    wider = changed(batch, pad)
    wider.mask[:, -extra:] = 0.0
    padded_loss, padded_grad = evaluate(row, wider, counts)
    assert close(loss, padded_loss) and close(grad, padded_grad[:, :-extra])
    assert torch.equal(padded_grad[:, -extra:], torch.zeros_like(padded_grad[:, -extra:]))


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), cuts=st.sets(st.integers(1, 5), max_size=4))
def test_micro_batches_add_up_to_the_whole_step(name: str, seed: int, cuts: set[int]) -> None:
    row, batch = algorithm(**ROWS[name]), random_batch(seed)
    counts = count(batch.mask)
    loss, grad = evaluate(row, batch, counts)
    edges = [0, *sorted(cuts), 6]
    shares = [evaluate(row, changed(batch, lambda t, a=a, b=b: t[a:b]), counts) for a, b in pairwise(edges)]
    assert close(loss, torch.stack([s[0] for s in shares]).sum())
    assert close(grad, torch.cat([s[1] for s in shares]))


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), rank_of=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_ranks_that_divide_by_the_global_counts_add_up_to_the_whole_step(
    name: str, seed: int, rank_of: list[int]
) -> None:
    """Any samples on any of three ranks, each rank's in micro-batches of two: gradients are summed over ranks."""
    row, batch = algorithm(**ROWS[name]), random_batch(seed)
    counts = count(batch.mask)
    loss, grad = evaluate(row, batch, counts)
    total, found = torch.zeros((), dtype=loss.dtype), torch.zeros_like(grad)
    for rank in range(3):
        mine = [i for i, owner in enumerate(rank_of) if owner == rank]
        for rows in (mine[i : i + 2] for i in range(0, len(mine), 2)):
            share, part = evaluate(row, changed(batch, lambda t, rows=rows: t[rows]), counts)
            total, found[rows] = total + share, part
    assert close(loss, total) and close(grad, found)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("bad", [500.0, -500.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_masked_token_contributes_exactly_nothing(name: str, bad: float, dtype: torch.dtype) -> None:
    row, batch = algorithm(**ROWS[name]), changed(random_batch(3), lambda t: t.to(dtype))
    counts = count(batch.mask)
    loss, grad = evaluate(row, batch, counts)

    def spoil(t: Tensor) -> Tensor:
        return t if t.ndim == 1 else torch.where(batch.mask > 0, t, bad)

    spoilt = changed(batch, spoil)
    spoilt.mask = batch.mask
    spoilt_loss, spoilt_grad = evaluate(row, spoilt, counts)
    assert torch.equal(loss, spoilt_loss) and torch.equal(grad, spoilt_grad)
    assert torch.equal(grad[batch.mask == 0], torch.zeros_like(grad[batch.mask == 0]))


@pytest.mark.parametrize("name", ROWS)
def test_a_batch_without_loss_tokens_is_exactly_zero(name: str) -> None:
    batch = random_batch(4)
    batch.mask = torch.zeros_like(batch.mask)
    loss, grad = evaluate(algorithm(**ROWS[name]), batch, count(batch.mask))
    assert loss.item() == 0.0 and torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_on_policy_every_loss_has_the_policy_gradient(name: str, seed: int) -> None:
    row, batch = algorithm(policy_loss=name, aggregation="token-mean"), random_batch(seed)
    batch.old_logprobs, batch.sampler_logprobs = None, batch.logprobs.clone()
    _, grad = evaluate(row, batch, count(batch.mask))
    assert torch.allclose(grad, -batch.advantages * batch.mask / batch.mask.sum(), rtol=1e-9, atol=1e-12)


def test_old_self_is_the_current_policy_detached() -> None:
    batch = random_batch(6)
    batch.old_logprobs = None
    _, stats = policy_objective(algorithm(), batch, count(batch.mask))
    numerator, denominator = stats["actor/ratio_mean"]
    assert numerator / denominator == 1.0 and stats["kl/approx"][0] == 0.0 and stats["actor/clip_frac"][0] == 0.0


def test_kl_is_added_with_its_coefficient_and_entropy_taken_off() -> None:
    batch = random_batch(7)
    counts = count(batch.mask)
    plain, _ = evaluate(algorithm(), batch, counts)
    with_kl, _ = evaluate(algorithm(kl={"name": "k2", "coef": 0.5}), batch, counts)
    assert batch.ref_logprobs is not None and batch.entropy is not None
    k2 = 0.5 * (batch.logprobs - batch.ref_logprobs).square()
    assert close(with_kl - plain, 0.5 * aggregate(k2, batch.mask, counts, "seq-mean-token-mean"))
    with_bonus, _ = evaluate(algorithm(entropy_coef=0.1), batch, counts)
    assert close(plain - with_bonus, 0.1 * aggregate(batch.entropy, batch.mask, counts, "seq-mean-token-mean"))


def test_a_coefficient_of_zero_only_measures_the_kl() -> None:
    batch = random_batch(8)
    counts = count(batch.mask)
    loss, stats = policy_objective(algorithm(kl={"name": "k3", "coef": 0.0}), batch, counts)
    assert torch.equal(loss, policy_objective(algorithm(), batch, counts)[0])
    assert stats["kl/ref"][0] > 0 and stats["kl/ref"][1] == batch.mask.sum()


def test_a_correction_multiplies_the_numerator_only() -> None:
    batch = random_batch(9)
    counts = count(batch.mask)
    row = algorithm(
        preset="reinforce", aggregation="token-mean", correction={"name": "icepop", "low": 0.9, "high": 1.1}
    )
    loss, stats = policy_objective(row, batch, counts)
    assert batch.old_logprobs is not None
    ratio = (batch.old_logprobs - batch.sampler_logprobs).exp()
    weight = ratio * ((ratio >= 0.9) & (ratio <= 1.1))
    expected = -(weight * batch.advantages * batch.logprobs * batch.mask).sum() / batch.mask.sum()
    assert close(loss, expected)
    masked, tokens = stats["correction/masked_frac"]
    assert 0 < masked < tokens == batch.mask.sum()


def test_a_token_the_engine_gave_no_logprob_for_has_weight_one() -> None:
    batch = random_batch(10)
    assert batch.old_logprobs is not None
    same = replace(batch, sampler_logprobs=batch.old_logprobs.clone())
    unknown = replace(batch, sampler_logprobs=torch.full_like(batch.old_logprobs, float("nan")))
    row, counts = algorithm(correction="tis"), count(batch.mask)
    for a, b in zip(evaluate(row, same, counts), evaluate(row, unknown, counts), strict=True):
        assert torch.equal(a, b)


def test_clip_fractions_are_shares_of_the_loss_tokens() -> None:
    logprobs = torch.log(torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.0, 9.0]], dtype=torch.float64)) - 3
    batch = TokenBatch(
        logprobs=logprobs,
        old_logprobs=torch.full_like(logprobs, -3.0),
        sampler_logprobs=torch.full_like(logprobs, -3.0),
        advantages=torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0, 1.0]], dtype=torch.float64),
        mask=torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 0.0]], dtype=torch.float64),
    )
    _, stats = policy_objective(algorithm(), batch, count(batch.mask))
    shares = {k: float(n / d) for k, (n, d) in stats.items()}
    assert shares["actor/clip_frac"] == 0.4
    assert (shares["actor/clip_frac_low"], shares["actor/clip_frac_high"]) == (0.2, 0.2)
    assert shares["actor/ratio_mean"] == pytest.approx(1.0) and shares["actor/ratio_max"] == pytest.approx(1.5)


def test_a_row_split_in_two_divides_by_the_whole_sequence() -> None:
    loss = torch.tensor([[1.0, 2.0, 6.0]], dtype=torch.float64)
    mask = torch.ones_like(loss)
    counts = count(mask)
    halves = [
        aggregate(loss[:, part], mask[:, part], counts, "seq-mean-token-mean", lengths_B=torch.tensor([3.0]))
        for part in (slice(0, 2), slice(2, 3))
    ]
    assert sum(halves) == aggregate(loss, mask, counts, "seq-mean-token-mean") == 3.0


def test_missing_tensors_are_named() -> None:
    batch = random_batch(11)
    counts = count(batch.mask)
    with pytest.raises(ValueError, match="ref_logprobs"):
        policy_objective(algorithm(kl="k3"), replace(batch, ref_logprobs=None), counts)
    with pytest.raises(ValueError, match="full_kl"):
        policy_objective(algorithm(kl="full"), replace(batch, full_kl=None), counts)
    with pytest.raises(ValueError, match="entropy"):
        policy_objective(algorithm(entropy_coef=0.1), replace(batch, entropy=None), counts)
    with pytest.raises(ValueError, match="rewards"):
        policy_objective(algorithm(preset="topr"), replace(batch, rewards=None), counts)


def test_a_users_loss_is_masked_and_its_result_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loss.py").write_text(
        "from quintet.algorithms.policy_loss import LossTerms\n\n\n"
        "def ones(x, *, height=1.0):\n"
        "    return LossTerms(0 * x.logprobs_BT + height, {'all_frac': x.mask_BT > 0})\n\n\n"
        "def broken(x):\n    return x.logprobs_BT\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    batch = random_batch(12)
    row = algorithm(policy_loss={"name": "own_loss:ones", "height": 2.0}, aggregation="token-mean")
    loss, stats = policy_objective(row, batch, count(batch.mask))
    assert loss.item() == pytest.approx(2.0) and stats["actor/all_frac"][0] == batch.mask.sum()
    with pytest.raises(QuintetError, match="must return LossTerms"):
        policy_objective(algorithm(policy_loss="own_loss:broken"), batch, count(batch.mask))
