import random
import time

import pytest

from rl_post_training_mini import FakeClock, RealClock


def chorus(seed: int) -> list[tuple[str, float]]:
    clock, log, rng = FakeClock(), [], random.Random(seed)
    naps = {name: [rng.choice((0.1, 0.2, 0.3)) for _ in range(20)] for name in "abc"}

    def body(name: str) -> None:
        for nap in naps[name]:
            clock.sleep(nap)
            log.append((name, clock.now()))

    tasks = [clock.spawn(name, lambda name=name: body(name)) for name in "abc"]
    for task in tasks:
        clock.join(task)
    return log


def test_threads_interleave_the_same_way_every_time_and_in_order_of_time():
    logs = [chorus(seed=5) for _ in range(10)]
    assert all(log == logs[0] for log in logs)
    assert [t for _, t in logs[0]] == sorted(t for _, t in logs[0])
    assert {name for name, _ in logs[0][:6]} == {"a", "b", "c"}


def test_sleeping_threads_share_virtual_time_and_no_real_time():
    clock, start = FakeClock(), time.perf_counter()
    tasks = [clock.spawn(str(s), lambda s=s: clock.sleep(s)) for s in (1000.0, 3000.0, 2000.0)]
    for task in tasks:
        clock.join(task)
    assert clock.now() == 3000.0
    assert time.perf_counter() - start < 1.0


def test_a_waiting_thread_goes_on_when_its_condition_holds():
    clock, box = FakeClock(), []

    def producer() -> None:
        clock.sleep(2.0)
        box.append(1)

    clock.spawn("producer", producer)
    clock.wait_until(lambda: bool(box))
    assert clock.now() == 2.0


def test_deadlock_is_an_error_and_not_a_hang():
    clock = FakeClock()
    clock.spawn("stuck", lambda: clock.wait_until(lambda: False))
    with pytest.raises(RuntimeError, match="deadlock"):
        clock.wait_until(lambda: False)


@pytest.mark.parametrize("clock", [FakeClock(), RealClock()])
def test_join_raises_what_the_thread_raised(clock):
    def body() -> None:
        clock.sleep(0.001)
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        clock.join(clock.spawn("thread", body))


def test_spans_are_recorded():
    clock = FakeClock()
    clock.sleep(1.0)
    with clock.span("train", "update"):
        clock.sleep(0.5)
    assert clock.timeline == [("train", "update", 1.0, 1.5)]


def test_time_does_not_run_backwards():
    with pytest.raises(ValueError, match="cannot sleep"):
        FakeClock().sleep(-1.0)
