"""The sampler: keyed draws, inverse CDF, truncation, log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quintet.models.native.compile import NativeUnavailable
from quintet.rollout.engine import sampling
from quintet.rollout.engine.native.library import load_library
from quintet.rollout.engine.sampling import SamplingRows, keyed_uniform, sequence_key
from quintet.rollout.engine.step import DRAW
from quintet.types import GroupId

GROUP = GroupId("p")


def rows(count, uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    settings = [np.float64(temperature), np.int64(top_k), np.float64(top_p), np.float64(min_p)]
    return SamplingRows(*(np.broadcast_to(value, count) for value in settings), uniform)


def native_sample(logits, rows):
    """The sampler of the C++ kernels, called as torch's is."""
    draws = np.zeros(len(rows.uniform), dtype=DRAW)
    for name in DRAW.names:
        draws[name] = getattr(rows, name)
    ids, logprobs = load_library().sample(logits.numpy(), draws)
    return torch.from_numpy(ids).long(), torch.from_numpy(logprobs)


@pytest.fixture(params=["torch", "native"])
def sample(request):
    if request.param == "torch":
        return sampling.sample
    try:
        load_library()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    return native_sample


def draws(count, seed=0):
    return keyed_uniform(np.full(count, sequence_key(seed, GROUP, 0), dtype=np.uint64), np.arange(count))


def test_key_depends_on_every_part_and_is_stable():
    keys = [
        sequence_key(0, GROUP, 0),
        sequence_key(1, GROUP, 0),
        sequence_key(0, GROUP, 1),
        sequence_key(0, GROUP.next_attempt(), 0),
        sequence_key(0, GroupId("q"), 0),
    ]
    assert len(set(keys)) == 5
    assert keys[0] == 8349727730148762084


def test_uniforms_are_uniform_and_independent_of_the_batch():
    values = draws(20000)
    assert 0.0 <= values.min() < values.max() < 1.0
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 90  # chi-square, 49 degrees of freedom, p = 0.0003
    key = np.array([sequence_key(0, GROUP, 0)], dtype=np.uint64)
    assert keyed_uniform(key, np.array([777])) == values[777]


@pytest.mark.parametrize("vocabulary", [7, 300, 600])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.7)]
)
def test_sampled_frequencies_fit_the_distribution(sample, vocabulary, temperature, top_k, top_p):
    logits = 2.0 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    count = 20000
    ids, logprobs = sample(logits.expand(count, -1), rows(count, draws(count), temperature, top_k, top_p))
    expected = truncated(logits / temperature, top_k, top_p)
    observed = torch.bincount(ids, minlength=vocabulary).double()
    assert observed[expected == 0].sum() == 0
    torch.testing.assert_close(logprobs.double(), expected[ids].log(), atol=1e-5, rtol=0)
    likely = expected * count >= 5
    chi = ((observed - expected * count)[likely] ** 2 / (expected * count)[likely]).sum()
    freedom = int(likely.sum()) - 1
    assert chi < freedom + 4.5 * (2 * freedom) ** 0.5


def truncated(logits, top_k, top_p):
    mass = logits.double().softmax(-1)
    if top_k:
        mass = torch.where(mass >= mass.sort(descending=True).values[top_k - 1], mass, 0.0)
        mass /= mass.sum()
    order = mass.sort(descending=True)
    kept = order.indices[(order.values.cumsum(0) - order.values) < top_p]
    out = torch.zeros_like(mass)
    out[kept] = mass[kept]
    return out / out.sum()


def test_hand_computed_inverse_cdf(sample):
    mass = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.4])
    uniform = np.array([0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.6001, 0.9999999999])
    ids, logprobs = sample(mass.log().expand(7, -1), rows(7, uniform))
    assert ids.tolist() == [0, 0, 2, 2, 3, 4, 4]
    torch.testing.assert_close(logprobs, mass[ids].log())


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_top_k_comes_first(sample):
    mass = torch.tensor([0.4, 0.3, 0.2, 0.1])
    uniform = np.linspace(0, 0.999, 200)
    kept = {
        p: set(sample(mass.log().expand(200, -1), rows(200, uniform, top_p=p))[0].tolist()) for p in (0.3, 0.6, 0.95)
    }
    assert kept == {0.3: {0}, 0.6: {0, 1}, 0.95: {0, 1, 2, 3}}
    # within the top two the first has 4/7 of the mass, so that top_p = 0.57 keeps it alone
    assert set(sample(mass.log().expand(200, -1), rows(200, uniform, top_k=2, top_p=0.57))[0].tolist()) == {0}
    assert set(sample(mass.log().expand(200, -1), rows(200, uniform, top_k=2, top_p=0.58))[0].tolist()) == {0, 1}


def test_min_p_drops_what_is_unlikely_beside_the_likeliest_within_the_nucleus(sample):
    mass = torch.tensor([0.4, 0.3, 0.2, 0.1])
    uniform = np.linspace(0, 0.999, 200)

    def kept(**settings):
        return set(sample(mass.log().expand(200, -1), rows(200, uniform, **settings))[0].tolist())

    assert kept(min_p=0.4) == {0, 1, 2}
    assert kept(min_p=0.6) == {0, 1}
    assert kept(min_p=0.4, top_p=0.6) == {0, 1}
    logprobs = sample(mass.log().expand(1, -1), rows(1, np.array([0.5]), min_p=0.6))[1]
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.4 / 0.7]))


def test_a_flat_distribution_is_truncated_beyond_the_first_guess(sample):
    logits = torch.linspace(0, 0.1, 5000)[None]  # top_p = 0.9 needs thousands of entries
    ids = [int(sample(logits, rows(1, np.array([u]), top_p=0.9))[0]) for u in (0.0, 0.9999999)]
    expected = truncated(logits[0], 0, 0.9).nonzero()
    assert ids == [int(expected.min()), int(expected.max())]


def test_greedy_takes_the_largest_logit_at_temperature_one_logprob(sample):
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.0]])
    ids, logprobs = sample(logits, rows(2, np.array([0.99, 0.99]), temperature=0.0, top_k=1))
    assert ids.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_a_row_gives_the_same_bits_alone_and_in_a_mixed_batch(sample):
    logits = 3.0 * torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    pick = np.random.default_rng(0)
    mixed = SamplingRows(
        pick.choice([0.0, 0.7, 1.0], 64),
        pick.choice([0, 3, 50], 64),
        pick.choice([1.0, 0.9, 0.2], 64),
        np.zeros(64),
        draws(64),
    )
    ids, logprobs = sample(logits, mixed)
    for row in range(64):
        one = SamplingRows(
            *(part[row : row + 1] for part in (mixed.temperature, mixed.top_k, mixed.top_p, mixed.min_p, mixed.uniform))
        )
        alone = sample(logits[row : row + 1], one)
        assert (alone[0].item(), alone[1].item()) == (ids[row].item(), logprobs[row].item())


def test_non_finite_logits_give_nan(sample):
    logits = torch.zeros(3, 300)
    logits[0, 5], logits[1, 7] = torch.nan, torch.inf
    assert sample(logits, rows(3, draws(3)))[1].isnan().tolist() == [True, True, False]
