import random

import pytest

from rl_post_training_mini import Experience, ExperienceBuffer


def experience(version: int) -> Experience:
    return Experience((1,), [2], [-1.0], reward=0.0, advantage=0.0, weight_version=version)


def test_on_policy_hands_out_the_current_version_once_and_counts_the_rest():
    buffer = ExperienceBuffer()
    buffer.add([experience(v) for v in (2, 3, 3, 3)])
    assert [e.weight_version for e in buffer.take(2, current_version=3)] == [3, 3]
    assert (len(buffer), buffer.dropped) == (1, 1)
    assert buffer.take(5, current_version=4) == []
    assert (len(buffer), buffer.dropped) == (0, 2)


def test_staleness_bound_is_kept():
    buffer = ExperienceBuffer(max_staleness=2)
    buffer.add([experience(v) for v in range(6)])
    assert [e.weight_version for e in buffer.take(9, current_version=5)] == [3, 4, 5]


def test_replay_keeps_what_it_hands_out_until_it_is_too_old():
    buffer = ExperienceBuffer(max_staleness=1, replay=True)
    buffer.add([experience(v) for v in (0, 1, 1)])
    assert len(buffer.take(3, 1, random.Random(0))) == len(buffer) == 3
    assert [e.weight_version for e in buffer.take(3, 2, random.Random(0))] == [1, 1]
    with pytest.raises(ValueError, match="needs an rng"):
        buffer.take(1, 2)


def test_tool_tokens_are_context_and_not_loss():
    e = Experience((7,), [1, 2, 3], [-1.0, 0.0, -3.0], 0.0, 1.0, 0, loss_mask=[1, 0, 1])
    assert [(t.prev, t.token, t.old_logprob, t.weight) for t in e.own_tokens()] == [
        (7, 1, -1.0, 1.0),
        (2, 3, -3.0, 1.0),
    ]


def test_negative_bound_is_refused():
    with pytest.raises(ValueError, match="max_staleness"):
        ExperienceBuffer(max_staleness=-1)
