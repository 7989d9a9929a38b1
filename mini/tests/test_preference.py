import math

import pytest

from rl_post_training_mini import RolloutWorker, TinyPolicy
from rl_post_training_mini.controller import DIGIT_PROMPTS
from rl_post_training_mini.model import EOS
from rl_post_training_mini.preference import BradleyTerry, Pair, make_pairs
from rl_post_training_mini.reward import counting_rule


def pairs(n: int, seed: int = 0) -> list[Pair]:
    return make_pairs(RolloutWorker(TinyPolicy.create(0), seed=seed, group_size=2), DIGIT_PROMPTS, n, seed)


def test_the_chosen_response_is_the_one_the_rule_prefers():
    found = pairs(30)
    assert len(found) == 30
    assert all(counting_rule(p.prompt, p.chosen) > counting_rule(p.prompt, p.rejected) for p in found)


def test_untrained_model_is_indifferent():
    model = BradleyTerry()
    assert model.score((1,), [2, 3]) == 0.5
    assert model.accuracy(pairs(10)) == 0.5
    assert model.loss_and_gradient(pairs(10))[0] == pytest.approx(math.log(2.0))


def test_gradient_agrees_with_central_differences():
    model, data, h = BradleyTerry(), pairs(12), 1e-5
    model.fit(data, steps=2)
    gradient = model.loss_and_gradient(data)[1]
    largest = max(abs(g) for row in gradient for g in row)
    for prev in range(12):
        for tok in range(12):
            losses = []
            for step in (h, -2 * h):
                model.weights[prev][tok] += step
                losses.append(model.loss_and_gradient(data)[0])
            model.weights[prev][tok] += h
            slope = (losses[0] - losses[1]) / (2 * h)
            assert slope == pytest.approx(gradient[prev][tok], rel=1e-6, abs=1e-7 * largest)


def test_fit_lowers_the_loss_and_ranks_the_right_step_first():
    model = BradleyTerry()
    losses = model.fit(pairs(100), steps=20)
    assert losses[-1] < 0.6 * losses[0]
    assert model.score((8,), [9, EOS]) > 0.5 > model.score((8,), [3, 1])


def test_a_policy_whose_samples_never_differ_gives_no_pairs():
    worker = RolloutWorker(TinyPolicy.create(0, skill=60.0), group_size=2)
    with pytest.raises(ValueError, match="hardly differ"):
        make_pairs(worker, DIGIT_PROMPTS, 2, seed=0)
