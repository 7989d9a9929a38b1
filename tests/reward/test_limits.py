"""What slow, hanging and failing graders cost: their own limit, never the sum; retries; what is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quintet.reward.config import RewardConfig
from quintet.reward.failures import Timings
from quintet.reward.service import LocalRewardService
from quintet.types import FailureKind, FinishReason, Group, GroupId, Prompt, Rollout

FUNCTIONS = Path(__file__).with_name("reward_functions.py")


def group(texts: list[str], answer: str = "7") -> Group:
    gid = GroupId("p")
    rollouts = [Rollout(gid, i, [1], [2], text, [0.0], [1], [], FinishReason.STOP) for i, text in enumerate(texts)]
    return Group(gid, Prompt("p", [1], None, "question", answer=answer), rollouts)


@contextmanager
def service(function: str, **options: Any) -> Iterator[LocalRewardService]:
    """Started, so that times do not count the workers' own start."""
    config = {"functions": [{"fn": f"{FUNCTIONS}:{function}"}], "max_failure_frac": 1.0} | options
    service = LocalRewardService(RewardConfig.model_validate(config))
    try:
        service.start()
        yield service
    finally:
        service.close()


def test_hanging_samples_cost_a_step_one_limit_not_their_sum() -> None:
    # one sample of five sleeps past its limit: on two workers 12 of them would take 6 limits one after the other
    texts = ["sleep" if i % 5 == 4 else "fine" for i in range(60)]
    with service("verl_sleeps", workers=2, timeout_s=4.0) as reward:
        start = time.monotonic()
        [scores] = asyncio.run(reward.score([group(texts)]))
        elapsed = time.monotonic() - start
    assert [s.reward for s in scores] == [None if text == "sleep" else 1.0 for text in texts]
    assert {s.failure.kind for s in scores if s.failure is not None} == {FailureKind.TIMEOUT}
    assert elapsed < 1.75 * 4.0  # one limit, a quarter of a second to see it, and room for a busy machine


def test_the_fifth_sample_is_graded_while_four_workers_hang() -> None:
    # PRF06
    async def main(reward: LocalRewardService) -> float:
        hanging = asyncio.create_task(reward.score([group(["sleep"] * 4)]))
        await asyncio.sleep(0.05)
        start = time.monotonic()
        [[fifth]] = await reward.score([group(["fine"])])
        assert fifth.reward == 1.0
        elapsed = time.monotonic() - start
        await hanging
        return elapsed

    with service("verl_sleeps", workers=4, timeout_s=3.0) as reward:
        assert asyncio.run(main(reward)) < 3.0 + 1.0


def test_a_busy_grader_gets_no_more_processes_than_workers(tmp_path: Path) -> None:
    # each call computes for a while, well within its limit: more processes would only slow it down
    with service("verl_computes", workers=1, timeout_s=60.0) as reward:
        [scores] = asyncio.run(reward.score([group(["x"] * 4, str(tmp_path))]))
    assert [s.reward for s in scores] == [1.0] * 4
    assert len(list(tmp_path.iterdir())) == 1  # process ids


def test_others_are_scored_while_a_slow_sample_runs_and_the_metric_shows_it(tmp_path: Path) -> None:
    # PRF05: the slow sample waits until the seven others have been scored
    with service("waits_for_others", workers=2, timeout_s=60.0) as reward:
        [scores] = asyncio.run(reward.score([group(["slow", *"abcdefg"], str(tmp_path))]))
        metrics = reward.take_metrics()
    assert [s.reward for s in scores] == [1.0] * 8
    assert metrics["reward/grade_s_max"] > 0.3
    assert metrics["reward/slowest_share"] > 0.5
    assert reward.take_metrics() == {}


def test_timings_are_means_maxima_and_shares() -> None:
    timings = Timings()
    for seconds in (1.0, 1.0, 1.0, 5.0):
        timings.note(seconds)
    assert timings.take() == {"reward/grade_s_mean": 2.0, "reward/grade_s_max": 5.0, "reward/slowest_share": 0.625}


def test_a_sample_whose_worker_dies_is_tried_once_more(tmp_path: Path) -> None:
    with service("dies_once", workers=1) as reward:
        [scores] = asyncio.run(reward.score([group(["a"], str(tmp_path / "once"))]))
        assert scores[0].reward == 1.0
        [scores] = asyncio.run(reward.score([group(["always"], str(tmp_path / "tries"))]))
    assert scores[0].failure is not None and scores[0].failure.retryable
    assert (tmp_path / "tries").read_text() == "xx"


def test_a_wrong_return_is_not_tried_again(tmp_path: Path) -> None:
    with service("counts_and_fails", workers=1) as reward:
        [scores] = asyncio.run(reward.score([group(["a"], str(tmp_path / "calls"))]))
    assert scores[0].failure is not None and not scores[0].failure.retryable
    assert (tmp_path / "calls").read_text() == "x"
