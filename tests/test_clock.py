import asyncio

import pytest

from quintet.clock import RealClock, VirtualClock, VirtualTimeDeadlock


def test_virtual_clock_runs_hours_at_once_and_in_timer_order() -> None:
    clock = VirtualClock()
    seen: list[tuple[str, float]] = []

    async def worker(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        seen.append((name, clock.now()))

    async def main() -> None:
        await asyncio.gather(worker("slow", 7200.0), worker("quick", 60.0))

    clock.run(main())
    assert seen == [("quick", 60.0), ("slow", 7200.0)]


def test_virtual_clock_honours_timeouts() -> None:
    clock = VirtualClock()

    async def main() -> float:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(clock.sleep(100.0), timeout=5.0)
        return clock.now()

    assert clock.run(main()) == 5.0


def test_waiting_for_ever_is_an_error_in_virtual_time() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(VirtualTimeDeadlock):
        VirtualClock().run(main())


def test_real_clock_never_goes_back() -> None:
    clock = RealClock()

    async def main() -> tuple[float, float]:
        first = clock.now()
        await clock.sleep(0.001)
        return first, clock.now()

    first, second = clock.run(main())
    assert second >= first + 0.001
