"""The load balancer in virtual time, and workers that die under the routed worker."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from quintet.clock import VirtualClock
from quintet.rollout.router import (
    LoadBalancer,
    NoWorker,
    PowerOfTwo,
    PrefixAware,
    RoundRobin,
    RouteRequest,
    Sticky,
    WorkerState,
    make_strategy,
)
from quintet.types import Health, QuintetError


def states(balancer: LoadBalancer) -> dict[str, WorkerState]:
    return {w.name: w.state for w in balancer.status()}


def make(strategy=None, clock=None, workers=("a", "b", "c"), **options) -> LoadBalancer:
    balancer = LoadBalancer(strategy, clock=clock or VirtualClock(), **options)
    for name in workers:
        balancer.add(name)
    return balancer


async def take(balancer: LoadBalancer, session: str, **kwargs) -> str:
    return (await balancer.acquire(RouteRequest(session, **kwargs))).worker


def run(clock: VirtualClock, program) -> object:
    return clock.run(program())


def test_sticky_keeps_a_session_and_spreads_new_ones() -> None:
    clock = VirtualClock()

    async def program() -> None:
        balancer = make(Sticky(), clock)
        homes = [await take(balancer, f"s{i}") for i in range(6)]
        assert Counter(homes) == {"a": 2, "b": 2, "c": 2}
        assert [await take(balancer, f"s{i}") for i in range(6)] == homes

    run(clock, program)


def test_sticky_moves_a_session_when_its_worker_fails_and_leaves_it_there() -> None:
    clock = VirtualClock()

    async def program() -> None:
        balancer = make(Sticky(), clock, retry_after_s=5.0)
        lease = await balancer.acquire(RouteRequest("s"))
        balancer.release(lease, error="gone")
        second = await take(balancer, "s")
        assert second != lease.worker
        await clock.sleep(6.0)
        assert await take(balancer, "s") == second

    run(clock, program)


def test_a_failed_worker_is_left_out_until_retry_after_s() -> None:
    clock = VirtualClock()

    async def program() -> None:
        balancer = make(RoundRobin(), clock, workers=("a", "b"), retry_after_s=5.0)
        lease = await balancer.acquire(RouteRequest("s"))
        balancer.release(lease, error="boom")
        assert {await take(balancer, "x") for _ in range(4)} == {"b"}
        assert balancer.status()[0].message == "boom"
        await clock.sleep(5.0)
        assert {await take(balancer, "x") for _ in range(4)} == {"a", "b"}

    run(clock, program)


def test_acquire_waits_for_a_worker_and_gives_up_after_its_patience() -> None:
    clock = VirtualClock()

    async def program() -> None:
        balancer = make(None, clock, workers=(), patience_s=30.0)

        async def later() -> None:
            await clock.sleep(12.0)
            balancer.add("late")

        helper = asyncio.ensure_future(later())
        assert await take(balancer, "s") == "late"
        assert clock.now() == 12.0
        await helper
        balancer.remove("late")
        with pytest.raises(NoWorker, match="within 30 s: there is none"):
            await take(balancer, "s")
        assert clock.now() == 42.0

    run(clock, program)


def test_older_weights_are_left_out_until_the_worker_has_new_ones() -> None:
    clock = VirtualClock()

    async def program() -> None:
        balancer = make(RoundRobin(), clock, workers=("a", "b"), patience_s=1.0)
        balancer.add("a", Health(True, version=4))
        balancer.add("b", Health(True, version=3))
        assert {await take(balancer, "s", min_version=4) for _ in range(4)} == {"a"}
        with pytest.raises(NoWorker, match="weight version 5"):
            await take(balancer, "s", min_version=5)
        balancer.add("b", Health(True, version=5))
        assert await take(balancer, "s", min_version=5) == "b"

    run(clock, program)


def test_drain_returns_when_the_last_request_is_back_and_nothing_new_was_sent() -> None:
    clock = VirtualClock()

    async def program() -> None:
        balancer = make(Sticky(), clock, workers=("a", "b"))
        leases = [await balancer.acquire(RouteRequest(f"s{i}")) for i in range(4)]
        mine = [lease for lease in leases if lease.worker == "a"]

        async def finish() -> None:
            for lease in mine:
                await clock.sleep(10.0)
                balancer.release(lease)

        helper = asyncio.ensure_future(finish())
        draining = asyncio.ensure_future(balancer.drain("a"))
        await clock.sleep(1.0)
        assert states(balancer)["a"] is WorkerState.DRAINING
        assert {await take(balancer, lease.request.session) for lease in leases} == {"b"}
        await draining
        assert clock.now() == 20.0
        await helper
        balancer.add("a", Health(True))  # a health report does not bring it back
        assert states(balancer)["a"] is WorkerState.DRAINING
        balancer.add("a")
        assert states(balancer)["a"] is WorkerState.UP

    run(clock, program)


def test_max_in_flight_makes_requests_wait() -> None:
    clock = VirtualClock()

    async def program() -> None:
        balancer = make(None, clock, workers=("a",), max_in_flight=2)

        async def request(index: int) -> float:
            lease = await balancer.acquire(RouteRequest(f"s{index}"))
            started = clock.now()
            await clock.sleep(3.0)
            balancer.release(lease)
            return started

        assert sorted(await asyncio.gather(*(request(i) for i in range(6)))) == [0.0, 0.0, 3.0, 3.0, 6.0, 6.0]

    run(clock, program)


def test_prefix_aware_sends_a_known_beginning_where_it_was_seen_unless_that_is_too_busy() -> None:
    clock = VirtualClock()

    async def program() -> None:
        balancer = make(PrefixAware(block=4, slack=3), clock)
        system, other = list(range(8)), list(range(100, 108))
        first = await take(balancer, "x", prompt_ids=system + [1] * 4)
        second = await take(balancer, "y", prompt_ids=other + [2] * 4)
        assert first != second
        assert await take(balancer, "z", prompt_ids=other + [3] * 4) == second
        for _ in range(3):
            assert await take(balancer, "w", prompt_ids=system + [9] * 4) == first
        assert await take(balancer, "w", prompt_ids=system + [9] * 4) != first  # 4 in flight against 0

    run(clock, program)


def test_power_of_two_choices_balances_better_than_chance() -> None:
    clock = VirtualClock()

    async def program() -> None:
        balancer = make(PowerOfTwo(seed=1), clock, workers=tuple("abcdefgh"))
        for i in range(400):
            await take(balancer, f"s{i}")
        loads = [w.in_flight for w in balancer.status()]
        assert sum(loads) == 400
        assert max(loads) - min(loads) <= 8  # about log log n apart; 400 balls at random are some 20 apart

    run(clock, program)


def test_avoided_workers_are_used_only_when_there_is_no_other() -> None:
    clock = VirtualClock()

    async def program() -> None:
        balancer = make(Sticky(), clock, workers=("a", "b"))
        assert await take(balancer, "s", avoid=frozenset({"a"})) == "b"
        assert await take(balancer, "s", avoid=frozenset({"a", "b"})) in ("a", "b")

    run(clock, program)


class First:
    def choose(self, candidates, request) -> str:
        return candidates[0].name

    def forget(self, worker: str) -> None: ...


def test_a_strategy_of_ones_own_is_found_by_its_path() -> None:
    assert make_strategy(f"{__name__}:First").choose(make().status(), RouteRequest("s")) == "a"
    for wrong, said in (
        ("stickie", "not one of"),
        ("no.such.module:X", "cannot be imported"),
        (f"{__name__}:make", "no class"),
    ):
        with pytest.raises(QuintetError, match=said):
            make_strategy(wrong)
