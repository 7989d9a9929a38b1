import pytest


def test_reward_increases(make_run):
    run = make_run(learning_rate=16.0, group_size=8)
    before = run.evaluate()["reward"]
    for _ in range(8):
        run.step()
    assert run.evaluate()["reward"] > before + 0.2


def test_without_a_learning_rate_nothing_changes(make_run):
    run = make_run(learning_rate=0.0)
    before = run.evaluate()
    for _ in range(3):
        run.step()
    assert run.evaluate() == before


@pytest.mark.parametrize("beta", [0.0, 10.0])
def test_a_strong_kl_penalty_returns_to_the_reference(make_run, beta: float):
    """With no reward to gain, only the penalty acts: the exact KL pulls the policy home; without it nothing does."""
    run = make_run(learning_rate=1.0)
    object.__setattr__(run.trainer.config, "beta", beta)
    for row in run.trainer.policy.logits:
        row[3] += 2.0
    run.trainer.policy.apply_gradient([[0.0] * 12] * 12, 0.0)  # renews the cached rows
    run.sync_weights()
    run.reward.rule = lambda prompt, response: 1.0
    start = run.evaluate()["kl"]
    for _ in range(20):
        run.step()
    end = run.evaluate()["kl"]
    assert start > 0.1
    assert end == start if beta == 0.0 else end < 0.2 * start
