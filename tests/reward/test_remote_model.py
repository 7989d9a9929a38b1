"""A served reward model: the three routes, batches, conversations, and faults that are never 0."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quintet.reward.config import RewardConfig
from quintet.reward.errors import FunctionFailed
from quintet.reward.remote_model import RemoteModel
from quintet.reward.sample import Sample
from quintet.reward.service import LocalRewardService
from quintet.types import FailureKind, Prompt, QuintetError
from tests.reward.http_server import Answer, HttpServer, Request, serving

CHAT = [{"role": "user", "content": "hi"}]


def sample(text: str, *, truncated: bool = False, messages: list[dict[str, Any]] | None = None) -> Sample:
    return Sample("p", text, [1], truncated, messages=messages, prompt_text="Q: ")


def graded(server: HttpServer, *samples: Sample, **options: Any) -> list[Any]:
    """Values or faults, all graded at once."""

    async def run() -> list[Any]:
        args = {"urls": server.url, "model": "rm", "window_ms": 20, "backoff_s": 0.01, "max_backoff_s": 0.01}
        model = RemoteModel("rm", args | options, 5.0)
        assert model.reference_fault(Prompt("p", [1])) is None
        await model.start()
        try:
            results = await asyncio.gather(*(model.grade(s) for s in samples), return_exceptions=True)
        finally:
            await model.close()
        return [r if isinstance(r, BaseException) else r.value for r in results]

    return asyncio.run(run())


def by_length(_n: int, request: Request) -> Answer:
    """vLLM's three answers; the value is the length of the text, and the rows come in another order."""
    body = request.body
    if request.path == "/score":
        texts = [a + b for a, b in zip(body["queries"], body["documents"], strict=True)]
    elif "messages" in body:
        texts = ["".join(m["content"] for m in body["messages"])]
    else:
        texts = body["input"]
    if any("too long" in text for text in texts):
        return Answer({"error": {"message": "longer than the context"}}, 400)
    rows: list[dict[str, Any]] = []
    for i, text in enumerate(texts):
        n = float(len(text))
        kinds: dict[str, dict[str, Any]] = {"/classify": {"probs": [n, -n], "label": "A"}, "/score": {"score": n}}
        kinds["/pooling"] = {"data": [[0.0, 0.0], [n, -n]] if i % 2 else [n, -n]}
        rows.append({"index": i, **kinds[request.path]})
    return Answer({"object": "list", "model": "rm", "data": rows[::-1], "usage": {"prompt_tokens": 1}})


@pytest.mark.parametrize("api", ["classify", "pooling", "score"])
def test_each_route_gives_its_value_in_the_order_of_the_samples(api: str) -> None:
    with serving(by_length) as server:
        assert graded(server, sample("a"), sample("bcd"), sample(""), api=api) == [4.0, 6.0, 3.0]
        [request] = server.requests
    assert request.path == f"/{api}" and request.body["model"] == "rm" and request.body["use_activation"] is False


def test_samples_within_the_window_share_a_request_up_to_the_largest_batch() -> None:
    with serving(by_length) as server:
        graded(server, *(sample("x" * i) for i in range(7)), max_batch=3)
        assert sorted(len(r.body["input"]) for r in server.requests) == [1, 3, 3]


def test_the_label_and_the_suffix() -> None:
    with serving(by_length) as server:
        values = graded(server, sample("a"), sample("a", truncated=True), label=1, suffix="</s>")
        assert server.requests[0].body["input"] == ["Q: a</s>", "Q: a"]
    assert values == [-8.0, -4.0]


def test_a_conversation_goes_as_messages_for_the_servers_own_template() -> None:
    with serving(by_length) as server:
        assert graded(server, sample("yes", messages=CHAT), sample("no", messages=CHAT)) == [5.0, 4.0]
        sent = [r.body["messages"] for r in server.requests]
        assert [*CHAT, {"role": "assistant", "content": "yes"}] in sent and len(sent) == 2
    with serving(by_length) as server:  # a cross-encoder takes two texts
        assert graded(server, sample("yes", messages=CHAT), api="score") == [len("user: hi") + 3.0]


def test_one_sample_that_the_server_refuses_does_not_cost_the_others() -> None:
    with serving(by_length) as server:
        a, fault, b = graded(server, sample("a"), sample("too long"), sample("b"))
    assert (a, b) == (4.0, 4.0)
    assert isinstance(fault, FunctionFailed) and "longer than the context" in fault.message and not fault.retryable


@pytest.mark.parametrize(
    "body",
    [
        {"data": []},
        {"data": [{"index": 0, "probs": []}]},
        {"data": [{"index": 0, "probs": ["high"]}]},
        {"data": [{"index": 0, "probs": [None]}]},
        {"data": [{"index": 0}]},
        {"detail": "x"},
        [],
    ],
)
def test_an_answer_of_another_form_is_a_failure_and_no_zero(body: Any) -> None:
    with serving(Answer(body)) as server:
        [fault] = graded(server, sample("a"))
    assert isinstance(fault, FunctionFailed) and fault.kind is FailureKind.TRANSPORT


def test_several_servers_share_the_work_and_one_may_fail() -> None:
    with serving(Answer({}, 503)) as sick, serving(by_length) as well:
        urls = [sick.url, well.url]
        assert graded(well, *(sample("a") for _ in range(6)), urls=urls, max_batch=1) == [4.0] * 6
        assert len(well.requests) == 6


def test_wrong_options_are_refused_before_anything_is_asked() -> None:
    config = {"functions": [{"fn": "remote_model", "args": {"urls": "http://x", "model": "m", "api": "embed"}}]}
    with pytest.raises(QuintetError, match="reward function `remote_model`, option `api`"):
        LocalRewardService(RewardConfig.model_validate(config))
