"""The loop on which graders wait."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from quintet.reward.background import BackgroundLoop


async def slow(ended: list[str], seconds: float = 60.0) -> str:
    try:
        await asyncio.sleep(seconds)
        ended.append("done")
    except asyncio.CancelledError:
        ended.append("cancelled")
        raise
    return threading.current_thread().name


def test_work_runs_elsewhere_and_side_by_side_while_the_callers_loop_goes_on() -> None:
    loop = BackgroundLoop()
    ended: list[str] = []

    async def caller() -> list[str]:
        return list(await asyncio.gather(*(loop.wait(slow(ended, 0.2)) for _ in range(50))))

    start = time.monotonic()
    names = asyncio.run(caller())
    assert set(names) == {"reward-loop"} and ended == ["done"] * 50
    assert time.monotonic() - start < 5  # not 50 x 0.2
    loop.close()


def test_a_wait_that_is_cancelled_cancels_the_work() -> None:
    loop = BackgroundLoop()
    ended: list[str] = []

    async def caller() -> None:
        async with asyncio.timeout(0.1):
            await loop.wait(slow(ended))

    with pytest.raises(TimeoutError):
        asyncio.run(caller())
    loop.close()
    assert ended == ["cancelled"]


def test_closing_cancels_what_still_runs_and_ends_the_thread() -> None:
    loop = BackgroundLoop()
    ended: list[str] = []
    future = loop.submit(slow(ended))
    loop.run(asyncio.sleep(0.01))
    loop.close()
    assert ended == ["cancelled"] and future.cancelled()
    assert "reward-loop" not in {thread.name for thread in threading.enumerate()}
