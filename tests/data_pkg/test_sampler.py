"""Each prompt once per epoch, in an order that is a function of seed and number of the draw."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.data.sampler import Draw, PromptSampler
from quintet.types import Prompt, QuintetError
from tests.data_pkg.helpers import load_cases, prompts

CASES = load_cases()


def draws(sampler: PromptSampler, indices: range) -> list[Draw]:
    """The draws before the end of the data."""
    return [draw for draw in map(sampler.draw, indices) if draw is not None]


def ids(sampler: PromptSampler, indices: range) -> list[str]:
    return [draw.prompt.id for draw in draws(sampler, indices)]


def test_ends_by_itself_after_its_epochs() -> None:
    """BUF04: two full batches, then the last two prompts, then nothing."""
    case = CASES["BUF04"]["input"]
    n, batch = case["prompts"], case["batch"]
    sampler = PromptSampler(prompts(n), seed=0, epochs=case["epochs"])
    assert [len(draws(sampler, range(i * batch, (i + 1) * batch))) for i in range(4)] == [4, 4, 2, 0]
    assert sampler.draw(n - 1) is not None
    assert sampler.draw(n) is None


def test_resumed_epoch_repeats_and_loses_nothing() -> None:
    """BUF06: a new sampler goes on at the number that was reached."""
    case = CASES["BUF06"]
    n, reached = len(case["input"]["dataset_ids"]), case["input"]["batch"] * case["input"]["stop_after_step"]
    before = ids(PromptSampler(prompts(n), seed=3), range(reached))
    after = ids(PromptSampler(prompts(n), seed=3), range(reached, n))
    assert (len(before), len(after)) == (case["expect"]["consumed_before"], case["expect"]["consumed_after_resume"])
    assert (len(set(before) & set(after)), len(set(before) | set(after))) == (0, 8)


@given(n=st.integers(1, 9), total=st.integers(1, 60), start=st.integers(0, 60), seed=st.integers(0, 5))
def test_every_epoch_is_whole_and_any_place_can_be_returned_to(n: int, total: int, start: int, seed: int) -> None:
    straight = draws(PromptSampler(prompts(n), seed=seed), range(total))
    assert [d.epoch for d in straight] == [i // n for i in range(total)]
    for epoch in range(total // n):
        drawn = [d.prompt.id for d in straight if d.epoch == epoch]
        assert sorted(drawn) == [str(i) for i in range(n)]
    assert draws(PromptSampler(prompts(n), seed=seed), range(start, total)) == straight[start:]


def test_going_back_gives_the_same_draws() -> None:
    sampler = PromptSampler(prompts(6), seed=0)
    first = draws(sampler, range(20))
    assert draws(sampler, range(20)) == first


def test_order_changes_with_epoch_and_seed_unless_shuffle_is_off() -> None:
    sampler = PromptSampler(prompts(50), seed=0)
    first, second = ids(sampler, range(50)), ids(sampler, range(50, 100))
    assert first != second
    assert ids(PromptSampler(prompts(50), seed=1), range(50)) != first
    plain = PromptSampler(prompts(3), seed=0, shuffle=False)
    assert ids(plain, range(7)) == ["0", "1", "2", "0", "1", "2", "0"]


def test_occurrence_tells_draws_of_one_id_apart() -> None:
    twice = [Prompt(id="a", token_ids=[1]), Prompt(id="a", token_ids=[1]), Prompt(id="b", token_ids=[2])]
    drawn = draws(PromptSampler(twice, seed=0, shuffle=False), range(4))
    assert [(d.epoch, d.occurrence, d.prompt.id) for d in drawn] == [(0, 0, "a"), (0, 1, "a"), (0, 0, "b"), (1, 0, "a")]


def test_length_is_the_prompts_of_an_epoch() -> None:
    assert len(PromptSampler(prompts(7), seed=0, epochs=2)) == 7


def test_no_prompts_are_refused() -> None:
    with pytest.raises(QuintetError, match="no prompt to draw from"):
        PromptSampler([], seed=0)
