import pytest

from rl_post_training_mini import RolloutWorker, TinyPolicy
from rl_post_training_mini.agent import (
    AGENT_PROMPTS,
    AGENT_VOCAB_SIZE,
    ASK,
    CALL,
    GOOD_HABITS,
    MORE,
    RESULT_0,
    calculator,
    solved,
    trajectory_text,
)
from rl_post_training_mini.controller import make_experience
from rl_post_training_mini.model import EOS
from rl_post_training_mini.reward import RewardService
from rl_post_training_mini.trainer import loss_and_gradient


def expert() -> TinyPolicy:
    return TinyPolicy.create(0, 60.0, GOOD_HABITS, AGENT_VOCAB_SIZE)


def test_calculator_speaks_after_a_call_only():
    assert calculator((3, 4, 2, ASK), [5]) == []
    assert calculator((3, 4, 2, ASK), [CALL]) == [RESULT_0 + 7, MORE]
    assert calculator((3, 4, 2, ASK), [CALL, RESULT_0 + 7, MORE, CALL]) == [RESULT_0 + 9]
    assert calculator((3, 4, ASK), [CALL, RESULT_0 + 7, CALL]) == [RESULT_0 + 7]  # one call too many: the sum again


def test_trajectory_of_several_turns_and_its_mask():
    rollout = RolloutWorker(expert(), group_size=1, tool=calculator).generate([(3, 4, 2, ASK)])[0]
    assert rollout.response == [CALL, RESULT_0 + 7, MORE, CALL, RESULT_0 + 9, 9, EOS]
    assert rollout.loss_mask == [1, 0, 0, 1, 0, 1, 1]
    assert trajectory_text(rollout) == "CALL [=7] [MORE] CALL [=9] 9 ∎"
    assert solved(rollout.prompt, rollout.response) == 1.0


def test_only_the_right_sum_at_the_end_counts():
    assert solved((3, 4, ASK), [7, EOS]) == 1.0
    assert solved((3, 4, ASK), [6, EOS]) == solved((3, 4, ASK), [7]) == solved((3, 4, ASK), [7, 7]) == 0.0
    assert all(solved(r.prompt, r.response) for r in RolloutWorker(expert(), tool=calculator).generate(AGENT_PROMPTS))


def test_states_in_which_only_the_tool_spoke_get_no_gradient():
    policy = TinyPolicy.create(3, 3.0, GOOD_HABITS, AGENT_VOCAB_SIZE)
    rollouts = RolloutWorker(policy, group_size=1, tool=calculator).generate([(3, 4, 2, ASK), (1, 2, ASK)])
    for r in rollouts:  # CALL is followed by a token of the tool, never by one of the model's own
        assert all(mask == 0 for prev, mask in zip(r.response, r.loss_mask[1:], strict=False) if prev == CALL)
    batch = make_experience(rollouts, RewardService(rule=solved).score(rollouts))
    for e in batch:
        e.advantage = 1.0
    gradient = loss_and_gradient(policy, policy, batch).gradient
    assert any(CALL in r.response for r in rollouts)
    assert gradient[CALL] == [0.0] * AGENT_VOCAB_SIZE
    assert gradient[ASK] != [0.0] * AGENT_VOCAB_SIZE


def test_dropping_the_mask_would_train_on_the_tools_words():
    policy = expert()
    rollouts = RolloutWorker(policy, group_size=1, tool=calculator).generate([(3, 4, 2, ASK)])
    batch = make_experience(rollouts, RewardService(rule=solved).score(rollouts))
    batch[0].advantage, batch[0].loss_mask = 1.0, []
    assert loss_and_gradient(policy, policy, batch).gradient[CALL] != pytest.approx([0.0] * AGENT_VOCAB_SIZE)
