import math
import random

import pytest

from rl_post_training_mini import TinyPolicy, TinyReward
from rl_post_training_mini.model import EOS, FILLER


def test_same_seed_same_policy_and_rows_are_distributions():
    policy = TinyPolicy.create(3)
    assert policy.logits == TinyPolicy.create(3).logits != TinyPolicy.create(4).logits
    assert all(sum(policy.probs(prev)) == pytest.approx(1.0) for prev in range(12))


def test_sequence_logprob_is_the_sum_over_transitions():
    policy = TinyPolicy.create(0)
    by_hand = policy.logprobs(4)[5] + policy.logprobs(5)[6] + policy.logprobs(6)[EOS]
    assert policy.sequence_logprob((1, 4), [5, 6, EOS]) == pytest.approx(by_hand)


def test_samples_follow_the_probabilities():
    policy, rng = TinyPolicy.create(0), random.Random(0)
    draws = [policy.sample(4, rng) for _ in range(4000)]
    share = sum(token == 5 for token, _ in draws) / len(draws)
    assert share == pytest.approx(policy.probs(4)[5], abs=0.03)
    assert all(logprob == policy.logprobs(4)[token] for token, logprob in draws)


def test_gradient_step_moves_the_copy_only_and_renews_the_rows():
    policy = TinyPolicy.create(0)
    other, before = policy.clone(), policy.logprobs(0)[1]
    gradient = [[-1.0 if (prev, tok) == (0, 1) else 0.0 for tok in range(12)] for prev in range(12)]
    policy.apply_gradient(gradient, learning_rate=0.5)
    assert policy.logits[0][1] == other.logits[0][1] + 0.5
    assert policy.logprobs(0)[1] > before == other.logprobs(0)[1]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="square"):
        TinyPolicy([[0.0, 0.0]])
    with pytest.raises(ValueError, match="outside the vocabulary"):
        TinyPolicy.create(0).logprobs(12)
    with pytest.raises(ValueError, match="at least one token"):
        TinyPolicy.create(0).sequence_logprob((), [1])


def test_reward_model_prefers_shouting_to_the_right_answer():
    model = TinyReward()
    assert model.score((7,), [8, 9, EOS]) == pytest.approx(0.5)
    assert model.score((7,), [FILLER] * 5) == pytest.approx(1.0 / (1.0 + math.exp(-3.0)))  # 0.95
    assert model.score((7,), [EOS]) == 0.0
