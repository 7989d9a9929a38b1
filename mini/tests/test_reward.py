import pytest

from rl_post_training_mini import FakeClock, RewardService, Rollout
from rl_post_training_mini.model import EOS, FILLER
from rl_post_training_mini.reward import SCORE_S, counting_rule, right_answer


@pytest.mark.parametrize(
    ("prompt", "response", "reward"),
    [
        ((6,), [7, 8, 9, EOS], 1.0),
        ((1, 6), [7, 8, 9, EOS], 1.0),
        ((6,), [7, 8], 0.5),  # right so far, but cut off
        ((6,), [7, EOS], 0.25),  # too short
        ((8,), [9, 1, 2, EOS], 0.5),  # 9 and 1 → 2 are right steps; four tokens where two would do
        ((6,), [FILLER] * 4, 0.0),
    ],
)
def test_rule_is_the_share_of_right_steps(prompt, response, reward):
    assert counting_rule(prompt, response) == pytest.approx(reward)


def test_right_answer_counts_to_the_end():
    assert right_answer((6,)) == [7, 8, 9, EOS]
    assert right_answer((9,)) == [EOS]


@pytest.mark.parametrize(("alpha", "reward"), [(0.0, 1.0), (0.2, 0.9), (1.0, 0.5)])
def test_alpha_weighs_the_reward_model(alpha: float, reward: float):
    clock = FakeClock()
    rollouts = [Rollout(0, 0, (8,), 0, response=[9, EOS])] * 3
    scores = RewardService(alpha, clock=clock).score(rollouts)
    assert [s.reward for s in scores] == pytest.approx([reward] * 3)
    assert (scores[0].rule, scores[0].model) == (1.0, pytest.approx(0.5))
    assert clock.now() == pytest.approx(3 * SCORE_S)


def test_alpha_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="alpha"):
        RewardService(alpha=1.5)
