"""Workers that die in the middle: their samples go on elsewhere, token for token as if nothing had happened."""

from __future__ import annotations

import asyncio

import pytest

from quintet.clock import VirtualClock
from quintet.rollout.routed import RoutedRolloutWorker
from quintet.rollout.router import LoadBalancer
from quintet.rollout.streaming import OutdatedWeights
from quintet.types import (
    Failure,
    FailureKind,
    FinishReason,
    Group,
    GroupId,
    Health,
    Prompt,
    QuintetError,
    Rollout,
    SampledToken,
    SamplingParams,
    VersionRun,
    WeightRef,
)

EOS = 0


def decode(ids: list[int]) -> str:
    return "".join(chr(96 + i) for i in ids if i != EOS)


class FakeWorker:
    """Says the alphabet from the prompt's last token on (1 is "a"), one token a second. `dies_after`: tokens."""

    def __init__(self, clock: VirtualClock, *, dies_after: int | None = None, version: int = 0) -> None:
        self.clock, self.dies_after, self.version = clock, dies_after, version
        self.prompts: list[tuple[list[int], SamplingParams]] = []
        self.loaded: list[int] = []
        self.refuses_weights = False

    async def generate(self, prompts, sampling_params, weight_version, *, on_token=None):
        (group,) = prompts
        if self.version < weight_version:
            raise OutdatedWeights(f"version {weight_version} is not loaded yet")
        self.prompts.append((group.prompt.token_ids, sampling_params))
        indices = range(sampling_params.first_sample, sampling_params.first_sample + sampling_params.n)
        return [await self._one(group, sampling_params, i, on_token) for i in indices]

    async def _one(self, group, params, index, on_token) -> Rollout:
        ids: list[int] = []
        failure, reason = None, FinishReason.LENGTH
        for step in range(params.max_tokens):
            if self.dies_after is not None and step >= self.dies_after:
                failure, reason = Failure(FailureKind.TRANSPORT, "died", retryable=True), FinishReason.FAILED
                break
            await self.clock.sleep(1.0)
            ids.append([*group.prompt.token_ids, *ids][-1] + 1)
            if on_token is not None:
                on_token(SampledToken(index, ids[-1], -1.0, self.version))
            if any(stop in decode(ids) for stop in params.stop):
                reason = FinishReason.STOP
                break
        text = decode(ids)
        for stop in params.stop:
            text = text.partition(stop)[0]
        runs = [VersionRun(self.version, len(ids))] if ids else []
        return Rollout(
            group.group_id, index, group.prompt.token_ids, ids, text, [-1.0] * len(ids), [1] * len(ids), runs, reason,
            failure=failure,
        )  # fmt: skip

    async def update_weights(self, weight_path, version) -> None:
        if self.refuses_weights:
            raise RuntimeError("disk full")
        self.version = version
        self.loaded.append(version)

    async def health_check(self) -> Health:
        return Health(True, version=self.version)

    async def abort(self, group_ids) -> None: ...

    async def close(self) -> None: ...


def group(name: str = "p") -> Group:
    return Group(GroupId(name), Prompt(name, [1]))


def routed(clock: VirtualClock, workers: dict[str, FakeWorker], **options) -> RoutedRolloutWorker:
    return RoutedRolloutWorker(
        workers,
        LoadBalancer(clock=clock, retry_after_s=1000.0, patience_s=5.0),
        decode=decode,
        eos_ids=[EOS],
        clock=clock,
        **options,
    )


def test_a_sample_whose_worker_dies_goes_on_elsewhere_with_its_tokens_so_far() -> None:
    clock = VirtualClock()
    workers = {"a": FakeWorker(clock, dies_after=3), "b": FakeWorker(clock, version=0)}
    told: list[int] = []

    async def program() -> Rollout:
        worker = routed(clock, workers)
        (rollout,) = await worker.generate(
            [group()], SamplingParams(max_tokens=8), 0, on_token=lambda token: told.append(token.token_id)
        )
        await worker.close()
        return rollout

    rollout = clock.run(program())
    assert rollout.response_ids == [2, 3, 4, 5, 6, 7, 8, 9] == told  # no token twice, none lost
    assert rollout.prompt_ids == [1]
    assert (rollout.text, rollout.finish_reason, rollout.failure) == ("bcdefghi", FinishReason.LENGTH, None)
    assert rollout.weight_versions == [VersionRun(0, 8)]
    prompt, params = workers["b"].prompts[0]
    assert (prompt, params.first_position, params.max_tokens) == ([1, 2, 3, 4], 3, 5)


def test_each_sample_of_a_group_goes_on_under_its_own_index() -> None:
    clock = VirtualClock()
    workers = {"a": FakeWorker(clock, dies_after=2), "b": FakeWorker(clock)}

    async def program() -> list[Rollout]:
        worker = routed(clock, workers)
        rollouts = await worker.generate([group()], SamplingParams(max_tokens=4, n=3), 0)
        await worker.close()
        return rollouts

    rollouts = clock.run(program())
    assert [r.sample_index for r in rollouts] == [0, 1, 2]
    assert all(r.response_ids == [2, 3, 4, 5] for r in rollouts)
    assert sorted(p.first_sample for _, p in workers["b"].prompts) == [0, 1, 2]


@pytest.mark.parametrize("dies_after", [1, 2, 3, 4])
def test_a_stop_string_across_the_seam_still_stops(dies_after: int) -> None:
    clock = VirtualClock()
    workers = {"a": FakeWorker(clock, dies_after=dies_after), "b": FakeWorker(clock)}

    async def program() -> Rollout:
        worker = routed(clock, workers)
        (rollout,) = await worker.generate([group()], SamplingParams(max_tokens=9, stop=("def",)), 0)
        await worker.close()
        return rollout

    rollout = clock.run(program())
    assert (decode(rollout.response_ids), rollout.text) == ("bcdef", "bc")
    assert rollout.finish_reason is FinishReason.STOP
    assert len(rollout.logprobs) == len(rollout.loss_mask) == 5


def test_when_every_worker_dies_the_sample_fails_with_the_reason_and_may_be_tried_again() -> None:
    clock = VirtualClock()
    workers = {name: FakeWorker(clock, dies_after=1) for name in "ab"}

    async def program() -> Rollout:
        worker = routed(clock, workers)
        (rollout,) = await worker.generate([group()], SamplingParams(max_tokens=8), 0)
        await worker.close()
        return rollout

    failure = clock.run(program()).failure
    assert failure is not None
    assert (failure.kind, failure.retryable) == (FailureKind.TRANSPORT, True)


def test_a_worker_that_missed_an_update_gets_it_before_it_is_used_again() -> None:
    clock = VirtualClock()
    workers = {"a": FakeWorker(clock), "b": FakeWorker(clock)}

    async def program() -> None:
        worker = routed(clock, workers, initial=WeightRef(0, "/w/0", ""), poll_s=2.0)
        await worker.generate([group()], SamplingParams(max_tokens=1), 0)
        assert workers["a"].loaded == workers["b"].loaded == [0]
        workers["b"].refuses_weights = True
        await worker.update_weights(WeightRef(1, "/w/1", ""), 1)
        rollouts = await worker.generate([group(f"q{i}") for i in range(6)], SamplingParams(max_tokens=1), 1)
        assert {run.version for r in rollouts for run in r.weight_versions} == {1}
        assert all(len(p) == 1 for p, _ in workers["b"].prompts) and workers["b"].version == 0
        workers["b"].refuses_weights = False
        await clock.sleep(3.0)
        assert workers["b"].version == 1
        workers["a"].refuses_weights = workers["b"].refuses_weights = True
        with pytest.raises(QuintetError, match="no rollout worker took weight version 2: disk full"):
            await worker.update_weights(WeightRef(2, "/w/2", ""), 2)
        await worker.close()

    clock.run(program())


def test_a_worker_that_was_started_again_with_old_weights_is_passed_over_until_it_has_the_newest() -> None:
    clock = VirtualClock()
    workers = {"a": FakeWorker(clock), "b": FakeWorker(clock)}

    async def program() -> None:
        worker = routed(clock, workers, initial=WeightRef(4, "/w/4", ""), poll_s=2.0)
        await worker.generate([group()], SamplingParams(max_tokens=1), 4)
        workers["a"].version = 0  # started again; the balancer does not know yet
        rollouts = await worker.generate([group(f"q{i}") for i in range(4)], SamplingParams(max_tokens=1), 4)
        assert [r.failure for r in rollouts] == [None] * 4
        assert {run.version for r in rollouts for run in r.weight_versions} == {4}
        await clock.sleep(3.0)
        assert workers["a"].version == 4
        await worker.close()

    clock.run(program())


def test_three_hundred_sessions_lose_nothing_when_one_worker_dies_and_one_is_drained() -> None:
    clock = VirtualClock()
    workers = {name: FakeWorker(clock) for name in "abc"}

    async def session(worker: RoutedRolloutWorker, index: int) -> list[int]:
        ids, turns = [1], []
        for turn in range(5):
            params = SamplingParams(max_tokens=4, first_sample=index, first_position=4 * turn)
            (rollout,) = await worker.generate([Group(GroupId("p"), Prompt("p", ids))], params, 0)
            assert rollout.failure is None
            ids = [*ids, *rollout.response_ids]
            turns += rollout.response_ids
        return turns

    async def program() -> list[list[int]]:
        balancer = LoadBalancer(clock=clock, retry_after_s=1000.0)
        worker = RoutedRolloutWorker(workers, balancer, decode=decode, eos_ids=[EOS], clock=clock)

        async def disturb() -> None:
            await clock.sleep(6.5)
            workers["a"].dies_after = 0
            await balancer.drain("b")

        disturbing = asyncio.ensure_future(disturb())
        done = await asyncio.gather(*(session(worker, i) for i in range(300)))
        await disturbing
        states = {w.name: (w.state.value, w.in_flight) for w in balancer.status()}
        assert states == {"a": ("down", 0), "b": ("draining", 0), "c": ("up", 0)}
        await worker.close()
        return done

    assert clock.run(program()) == [list(range(2, 22))] * 300
