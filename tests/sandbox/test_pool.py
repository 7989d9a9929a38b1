"""Faults of ours: they are told from what programs do, and the next run finds a new interpreter."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest

from quintet.sandbox.process import ProcessJail
from quintet.sandbox.protocol import Limits, Outcome, Program, SandboxFailure
from quintet.sandbox.zygote import Zygote
from quintet.types import QuintetError
from tests.sandbox.boxes import LIMITS, Box, assert_sound, descendants, make_box

IMPOSSIBLE = {"memory_mb": -(2**50), "scratch_mb": 1, "file_bytes": 1, "processes": 1}


@pytest.fixture(params=["process", "namespace"])
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """A fresh one for each test: its interpreters are killed."""
    box = make_box(request.param, workers=1)
    assert_sound(box)
    yield box
    box.close()


def interpreter(box: Box) -> Zygote:
    zygote: Zygote = box.sandbox._zygotes[0]  # type: ignore[attr-defined]
    return zygote


async def killed_meanwhile(box: Box, victim: str) -> None:
    run = asyncio.ensure_future(box.sandbox.run(Program("import time; time.sleep(30)"), LIMITS))
    await asyncio.sleep(0.5)
    process = interpreter(box)._process.pid
    below = list(descendants(process))
    os.kill(process if victim == "interpreter" else below[-1], signal.SIGKILL)
    await run


def test_a_lost_interpreter_is_our_fault_and_replaced(box: Box) -> None:
    session = box.wait(box.sandbox.create())
    with pytest.raises(SandboxFailure, match="interpreter ended") as caught:
        box.wait(killed_meanwhile(box, "interpreter"))
    assert caught.value.retryable
    assert_sound(box)
    with pytest.raises(SandboxFailure, match="ended") as caught:
        box.run("1", session=session)
    assert not caught.value.retryable


def test_a_session_begins_in_a_new_interpreter_where_the_old_one_is_gone(box: Box) -> None:
    box.wait(box.sandbox.create())
    os.kill(interpreter(box)._process.pid, signal.SIGKILL)
    session = box.wait(box.sandbox.create())
    assert box.run("x = 2", session=session, expressions=("x + 1",)).values[0].value == 3


def test_a_program_that_the_host_kills_is_our_fault_in_a_jail() -> None:
    """It cannot have done it itself, and must not be given a 0 for it."""
    box = make_box("namespace", workers=1)
    try:
        assert_sound(box)
        with pytest.raises(SandboxFailure, match="the host killed") as caught:
            box.wait(killed_meanwhile(box, "program"))
        assert caught.value.retryable
        assert_sound(box)
    finally:
        box.close()


@pytest.mark.parametrize("limit", [{"wall_s": 0}, {"cpu_s": math.inf}, {"wall_s": math.nan}, {"scratch_mb": 0}])
def test_limits_that_limit_nothing_are_refused(limit: dict[str, float]) -> None:
    with pytest.raises(QuintetError, match="is not a positive number"):
        Limits(**limit)  # type: ignore[arg-type]


def test_a_fork_that_cannot_be_locked_up_is_our_fault(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.sandbox.pool._fork_limits", lambda *_, **__: IMPOSSIBLE)
    with pytest.raises(SandboxFailure, match="OverflowError") as caught:
        box.run("1")
    assert caught.value.retryable
    with pytest.raises(SandboxFailure, match="OverflowError"):
        box.wait(box.sandbox.create())
    monkeypatch.undo()
    assert_sound(box)


def test_a_frozen_interpreter_is_given_up(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.sandbox.zygote.SILENCE_S", -LIMITS.wall_s + 0.3)
    monkeypatch.setattr("quintet.sandbox.zygote.PONG_S", 0.3)
    process = interpreter(box)._process.pid
    for pid in (*descendants(process), process):
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(SandboxFailure, match="no sign of life"):
        box.run("1")
    monkeypatch.undo()
    assert_sound(box)


def test_a_slow_run_is_not_taken_for_a_frozen_interpreter(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quintet.sandbox.zygote.SILENCE_S", -LIMITS.wall_s + 0.1)
    assert box.run("import time; time.sleep(0.6)").outcome is Outcome.FINISHED


def test_closing_ends_what_runs(box: Box) -> None:
    async def close_meanwhile() -> float:
        run = asyncio.ensure_future(box.sandbox.run(Program("import time; time.sleep(60)"), LIMITS))
        await asyncio.sleep(0.3)
        started = time.monotonic()
        await box.sandbox.close()
        with pytest.raises(SandboxFailure):
            await run
        return time.monotonic() - started

    process = interpreter(box)._process.pid
    assert box.wait(close_meanwhile()) < 8
    assert not os.path.exists(f"/proc/{process}")


def test_programs_and_their_files_die_with_the_judge(box: Box) -> None:
    """The control socket is all that keeps the interpreter alive."""
    asyncio_task = box.wait(_start_sleeper(box))
    process = interpreter(box)._process.pid
    programs = list(descendants(process))
    assert programs
    jail = box.sandbox._jail  # type: ignore[attr-defined]
    left = [f"/proc/{pid}" for pid in programs] + (jail._bases if isinstance(jail, ProcessJail) else [])
    interpreter(box)._socket.shutdown(2)
    deadline = time.monotonic() + 10
    while any(map(os.path.exists, left)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(os.path.exists, left))
    with pytest.raises(SandboxFailure):
        box.wait(_result_of(asyncio_task))


async def _start_sleeper(box: Box) -> asyncio.Future[object]:
    run: asyncio.Future[object] = asyncio.ensure_future(box.sandbox.run(Program("import time; time.sleep(60)"), LIMITS))
    await asyncio.sleep(0.3)
    return run


async def _result_of(future: asyncio.Future[object]) -> object:
    return await future


def test_files_of_a_cancelled_run_that_was_not_sent_are_not_sent_later(box: Box) -> None:
    """Their numbers may belong to other files by then."""
    zygote = interpreter(box)

    async def cancel_unsent() -> None:
        full = zygote._socket
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # nobody reads the other end
        ours.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                ours.send(bytes(10_000))
        zygote._socket = ours
        run = asyncio.ensure_future(box.sandbox.run(Program("1"), LIMITS))
        await asyncio.sleep(0.1)
        assert [len(files) for _, files in zygote._unsent] == [5]
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert [len(files) for _, files in zygote._unsent] == [0]  # what remains is the order to end it
        zygote._unsent.clear()
        zygote._loop.remove_writer(ours.fileno())
        zygote._socket = full
        ours.close()
        theirs.close()

    box.wait(cancel_unsent())
    assert_sound(box)
