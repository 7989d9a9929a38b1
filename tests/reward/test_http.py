"""The shared HTTP client against a server on a real socket that misbehaves."""

from __future__ import annotations

import asyncio
import email.utils
import math
import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest

from quintet.reward.errors import FunctionFailed
from quintet.reward.http import Batcher, Breaker, HttpOptions, JsonClient
from quintet.reward.options import parse_options
from quintet.types import FailureKind, QuintetError
from tests.reward.http_server import Answer, serving

OK = Answer({"ok": True})
QUICK = {"backoff_s": 0.01, "max_backoff_s": 0.02, "breaker_s": 0.05, "timeout_s": 20.0}


def ask(urls: list[str], *, times: int = 1, **options: Any) -> list[Any]:
    """The answers, or the faults, of `times` calls made at once."""

    async def run() -> list[Any]:
        client = JsonClient("f", HttpOptions.model_validate(QUICK | {"urls": urls} | options))
        await client.start()
        try:
            return await asyncio.gather(*(client.post("/x", {"n": i}) for i in range(times)), return_exceptions=True)
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    "fault",
    [
        Answer({"error": "slow down"}, 429),
        Answer({"error": "oops"}, 500),
        Answer(b"<html>bad gateway</html>", 502),
        Answer(status=0),
        Answer(b"{not json"),
        Answer({"ok": "late"}, after_s=30.0),
    ],
    ids=["429", "500", "502", "disconnect", "garbage", "slow"],
)
def test_what_may_pass_is_tried_again(fault: Answer) -> None:
    with serving(fault, fault, OK) as server:
        assert ask([server.url], timeout_s=1.0 if fault.after_s else 20.0) == [{"ok": True}]
        assert len(server.requests) == 3 and server.requests[0].body == {"n": 0}


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (
            Answer({"error": "oops"}, 500),
            FailureKind.TRANSPORT,
            r'answered 500: \{"error": "oops"\} \(attempt 3 of 3\)',
        ),
        (Answer(status=0), FailureKind.TRANSPORT, "RemoteProtocolError"),
        (Answer(b"hello"), FailureKind.TRANSPORT, "answered no JSON: hello"),
        (Answer({}, after_s=30.0), FailureKind.TIMEOUT, "did not answer within timeout_s 0.3"),
    ],
)
def test_what_does_not_pass_is_a_retryable_failure(fault: Answer, kind: FailureKind, words: str) -> None:
    with serving(fault) as server, pytest.raises(FunctionFailed, match=words) as caught:
        raise ask([server.url], attempts=3, timeout_s=0.3 if fault.after_s else 20.0)[0]
    assert caught.value.kind is kind and caught.value.retryable
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refused_request_is_not_tried_again(status: int) -> None:
    with serving(Answer({"detail": "no"}, status)) as server:
        [fault] = ask([server.url])
        assert len(server.requests) == 1
    assert isinstance(fault, FunctionFailed) and not fault.retryable and f"answered {status}" in fault.message


def test_nobody_there_is_a_retryable_failure() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    [fault] = ask([url], attempts=2)
    assert isinstance(fault, FunctionFailed) and fault.retryable and "ConnectError" in fault.message


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_respected(form: str) -> None:
    in_two_seconds = email.utils.formatdate(time.time() + 2, usegmt=True)  # cut to whole seconds
    asked = "1" if form == "seconds" else in_two_seconds
    with serving(Answer({}, 429, {"Retry-After": asked}), OK) as server:
        started = time.monotonic()
        assert ask([server.url]) == [{"ok": True}]
        assert 0.8 < time.monotonic() - started < 5.0


def test_a_call_ends_at_its_deadline_and_names_the_last_fault() -> None:
    with serving(Answer({}, 503, {"Retry-After": "60"})) as server:
        started = time.monotonic()
        [fault] = ask([server.url], deadline_s=0.3)
        assert time.monotonic() - started < 3.0
    assert isinstance(fault, FunctionFailed) and fault.kind is FailureKind.TIMEOUT and fault.retryable
    assert "deadline_s 0.3; the last fault:" in fault.message and "answered 503" in fault.message


def test_pauses_double_with_jitter_up_to_the_longest() -> None:
    options = HttpOptions.model_validate({"urls": "http://x", "backoff_s": 1, "max_backoff_s": 5})
    client = JsonClient("f", options)
    for attempt, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (9, 5.0)):
        pauses = [client._pause_s(attempt) for _ in range(200)]
        assert longest / 2 <= min(pauses) < 0.6 * longest and 0.9 * longest < max(pauses) <= longest


def test_requests_in_flight_are_bounded_and_go_to_the_least_busy_server() -> None:
    slow = Answer({"ok": True}, after_s=0.1)
    with serving(slow) as a, serving(slow) as b:
        assert ask([a.url, b.url], times=12, concurrency=4) == [{"ok": True}] * 12
        assert (a.most_at_once, b.most_at_once) == (2, 2)
        assert len(a.requests) == len(b.requests) == 6


def test_a_dead_server_is_left_alone_and_the_other_one_does_the_work() -> None:
    with serving(Answer({}, 500)) as sick, serving(OK) as well:
        assert ask([sick.url, well.url], times=40, concurrency=1, breaker_faults=2, breaker_s=60) == [{"ok": True}] * 40
        assert len(sick.requests) == 2 and len(well.requests) == 40


def test_after_a_rest_one_probe_goes_out_and_closes_the_breaker() -> None:
    script = lambda n, _r: Answer({}, 500) if n < 3 else OK  # noqa: E731
    with serving(script) as server:
        answers = ask([server.url], times=8, attempts=6, breaker_faults=2, breaker_s=0.3, concurrency=8)
        assert answers == [{"ok": True}] * 8


def test_the_breakers_states() -> None:
    breaker = Breaker(faults=2, rest_s=10.0)
    breaker.begin()
    breaker.fail(0.0)
    assert breaker.wait_s(0.0) == 0.0
    breaker.succeed()
    breaker.fail(1.0)
    breaker.fail(2.0)  # two in a row: open
    assert breaker.wait_s(2.0) == 10.0 and breaker.wait_s(12.0) == 0.0
    breaker.begin()  # half open: one probe
    assert breaker.wait_s(12.0) == math.inf
    breaker.fail(13.0)  # the probe failed: open again after one fault
    assert breaker.wait_s(13.0) == 10.0
    breaker.begin()
    breaker.abandon()
    assert breaker.wait_s(23.0) == 0.0
    breaker.begin()
    breaker.succeed()
    breaker.fail(24.0)
    assert breaker.wait_s(24.0) == 0.0  # closed: the count begins anew


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with serving(OK) as server:
        ask([server.url], api_key_env="JUDGE_KEY")
        assert server.requests[0].headers["authorization"] == "Bearer s3cret"
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(QuintetError, match=r"JUDGE_KEY \(api_key_env\) is not set"):
        ask(["http://127.0.0.1:1"], api_key_env="JUDGE_KEY")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"urls": "localhost:8000"}, "option `urls`: .*does not begin with http"),
        ({"urls": []}, "option `urls`"),
        ({}, "option `urls`: Field required"),
        ({"urls": "http://x", "timeout": 3}, "has no option `timeout`; did you mean `timeout_s`"),
        ({"urls": "http://x", "attempts": 0}, "option `attempts`"),
    ],
)
def test_wrong_options_are_named(args: dict[str, Any], words: str) -> None:
    with pytest.raises(QuintetError, match=words):
        parse_options(HttpOptions, "judge", args)


# ---- the batching window -----------------------------------------------------------------------


def test_what_comes_within_the_window_goes_out_together() -> None:
    sent: list[list[int]] = []

    async def send(items: Sequence[int]) -> list[int | FunctionFailed]:
        sent.append(list(items))
        return [FunctionFailed("odd") if i == 3 else 10 * i for i in items]

    async def run() -> list[Any]:
        batcher: Batcher[int, int] = Batcher(send, window_s=0.02, max_batch=4)
        results = await asyncio.gather(*(batcher.submit(i) for i in range(6)), return_exceptions=True)
        return [*results, await batcher.submit(9)]

    results = asyncio.run(run())
    assert sent == [[0, 1, 2, 3], [4, 5], [9]]
    assert results[:3] == [0, 10, 20] and isinstance(results[3], FunctionFailed) and results[4:] == [40, 50, 90]


def test_a_fault_of_the_batch_reaches_all_of_it() -> None:
    async def send(items: Sequence[int]) -> list[int | FunctionFailed]:
        raise FunctionFailed("down")

    async def run() -> list[Any]:
        batcher: Batcher[int, int] = Batcher(send, window_s=0.0, max_batch=8)
        return await asyncio.gather(*(batcher.submit(i) for i in range(3)), return_exceptions=True)

    assert [str(r) for r in asyncio.run(run())] == ["down"] * 3
