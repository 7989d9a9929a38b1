"""The rollout server as its clients see it: the official `openai` client, and those who send nonsense."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from quintet.weights.digest import digest as digest_of
from quintet.weights.file import FileStore, file_bytes
from tests.rollout.serving_models import (
    CALL,
    KEY,
    MODEL,
    chat_tokenizer,
    make_server,
    random_model,
    scripted_model,
    serving,
)

HELLO = [{"role": "user", "content": "hello"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
AUTH = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def weights_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def url(weights_root: Path) -> Iterator[str]:
    tokenizer = chat_tokenizer()
    with serving(make_server(random_model(tokenizer), tokenizer, weights_root=weights_root)) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def scripted() -> Iterator[openai.OpenAI]:
    """Answers with a tool call, or with "abc" where no tool is offered (the template then ends in another token)."""
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"\n": CALL})
    with serving(make_server(model, tokenizer)) as found:
        yield openai.OpenAI(base_url=f"{found}/v1", api_key=KEY, max_retries=0)


def post(url: str, path: str, **kwargs: object) -> httpx.Response:
    headers = kwargs.pop("headers", AUTH | {"Content-Type": "application/json"})
    return httpx.post(f"{url}{path}", headers=headers, timeout=30, **kwargs)  # type: ignore[arg-type]


# -- the official client -----------------------------------------------------------------------------


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_seeded_chat_is_repeated_exactly_and_its_samples_differ(client: openai.OpenAI) -> None:
    def ask() -> openai.types.chat.ChatCompletion:
        return client.chat.completions.create(model=MODEL, messages=HELLO, n=3, max_tokens=12, seed=5)

    first, second = ask(), ask()
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in second.choices]
    assert len(set(texts)) == 3
    assert first.usage is not None
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens


def test_without_a_seed_two_equal_requests_differ(client: openai.OpenAI) -> None:
    texts = {
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20).choices[0].message.content
        for _ in range(3)
    }
    assert len(texts) > 1


def test_logprobs_are_those_of_the_sampled_tokens(client: openai.OpenAI, url: str) -> None:
    found = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, seed=1, logprobs=True, extra_body={"return_token_ids": True}
    )
    choice = found.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    ids = choice.model_dump()["token_ids"]
    body = {
        "prompts": [{"group_id": "seeded/e0.o0.a0", "token_ids": found.model_dump()["prompt_token_ids"]}],
        "sampling": {"max_tokens": 8, "seed": 1},
    }
    rollout = post(url, "/generate", json=body).json()["rollouts"][0]
    assert rollout["response_ids"] == ids
    assert [entry.logprob for entry in choice.logprobs.content] == rollout["logprobs"]


def test_a_stream_carries_the_same_answer_as_a_whole_reply(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=30, seed=3, n=2, logprobs=True)
    texts, logprobs, reasons, usage = ["", ""], [[], []], {}, None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=HELLO,
        max_tokens=30,
        seed=3,
        n=2,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.logprobs is not None:
                logprobs[choice.index] += [entry.logprob for entry in choice.logprobs.content or []]
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage
    assert logprobs == [[e.logprob for e in choice.logprobs.content] for choice in whole.choices]


def test_a_tool_call_arrives_parsed_whole_and_streamed(scripted: openai.OpenAI) -> None:
    whole = scripted.chat.completions.create(model=MODEL, messages=HELLO, tools=[ADD]).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    call = whole.message.tool_calls[0].function
    assert (call.name, call.arguments) == ("add", '{"a": 1, "b": 2}')

    chunks = list(scripted.chat.completions.create(model=MODEL, messages=HELLO, tools=[ADD], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    streamed = [c for delta in deltas for c in delta.tool_calls or []]
    assert [(c.index, c.function.name, c.function.arguments) for c in streamed] == [(0, "add", '{"a": 1, "b": 2}')]
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_without_tools_the_same_words_are_text(scripted: openai.OpenAI) -> None:
    choice = scripted.chat.completions.create(model=MODEL, messages=HELLO).choices[0]
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_plain_completions_take_text_ids_and_several_prompts(client: openai.OpenAI) -> None:
    ids = chat_tokenizer().encode("hello")
    found = client.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=6, n=2, seed=2, logprobs=0)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    single = client.completions.create(model=MODEL, prompt="hello", max_tokens=6, n=2, seed=2)
    assert [c.text for c in single.choices] == [c.text for c in found.choices[:2]]
    assert found.choices[0].logprobs is not None
    assert len(found.choices[0].logprobs.token_logprobs or []) <= 6


def test_a_stop_string_ends_the_text_before_it_also_in_a_stream() -> None:
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"\n": "x", "x": "y", "y": "z", "z": "x"})
    with serving(make_server(model, tokenizer)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY)
        whole = client.chat.completions.create(model=MODEL, messages=HELLO, stop=["zx"], max_tokens=9)
        parts = client.chat.completions.create(model=MODEL, messages=HELLO, stop=["zx"], max_tokens=9, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
    assert whole.choices[0].message.content == streamed == "xy"
    assert whole.choices[0].finish_reason == "stop"


# -- control -----------------------------------------------------------------------------------------


def greedy_ids(url: str) -> list[int]:
    body = {
        "prompts": [{"group_id": "p/e0.o0.a0", "token_ids": [5, 6]}],
        "sampling": {"temperature": 0, "max_tokens": 9},
    }
    return post(url, "/generate", json=body).json()["rollouts"][0]["response_ids"]


def test_new_weights_are_served_after_an_update_and_a_wrong_digest_changes_nothing(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    other = random_model(tokenizer, seed=1)
    ref = FileStore(tmp_path).publish(other.state_dict(), 3)
    with serving(make_server(random_model(tokenizer), tokenizer, weights_root=tmp_path)) as url:
        before = greedy_ids(url)
        wrong = post(url, "/update_weights", json={"version": 3, "digest": "0" * 64, "path": ref.location})
        assert wrong.status_code == 400 and "digest" in wrong.json()["error"]["message"]
        assert greedy_ids(url) == before
        body = {"version": 3, "digest": ref.digest, "path": ref.location}
        assert post(url, "/update_weights", json=body).json() == {"version": 3}
        after = greedy_ids(url)
        assert httpx.get(f"{url}/health").json()["version"] == 3
    with serving(make_server(other, tokenizer)) as url:
        assert after == greedy_ids(url) != before


def test_weights_in_the_request_are_swapped_whole_or_not_at_all() -> None:
    tokenizer = chat_tokenizer()
    other = random_model(tokenizer, seed=1).state_dict()
    good, name = file_bytes(other), digest_of(other)
    limit = len(good) + 100
    broken = bytearray(good)
    broken[-5] ^= 1

    def send(content: object, version: int = 4, digest: str = name, **more: object) -> httpx.Response:
        params = {"version": version, "digest": digest}
        return post(url, "/update_weights/stream", content=content, params=params, **more)

    with serving(make_server(random_model(tokenizer), tokenizer, stream_limit=limit)) as url:
        before = greedy_ids(url)
        for content, status, code in (
            (bytes(broken), 400, "digest"),
            (good[:-40], 400, "damaged"),
            (b"no safetensors", 400, "damaged"),
            (good + bytes(200), 413, "larger than this server's limit"),
            (iter([good, bytes(200)]), 413, "larger than this server's limit"),  # no length is announced
        ):
            found = send(content)
            assert (found.status_code, code in found.json()["error"]["message"]) == (status, True), found.text
        assert send(good, digest="abc").status_code == send(good, version=-1).status_code == 400
        assert send(good, headers={"Authorization": "Bearer nope"}).status_code == 401
        assert greedy_ids(url) == before and httpx.get(f"{url}/health").json()["version"] == 0
        assert send(good).json() == {"version": 4}
        after = greedy_ids(url)
        assert httpx.get(f"{url}/health").json()["version"] == 4
    with serving(make_server(random_model(tokenizer, seed=1), tokenizer)) as url:
        assert after == greedy_ids(url) != before
        refused = send(good)
        assert (refused.status_code, "--weights-stream" in refused.text) == (403, True)


def test_a_client_that_breaks_off_its_weights_changes_nothing_and_another_may_send_its_own() -> None:
    tokenizer = chat_tokenizer()
    other = random_model(tokenizer, seed=1).state_dict()
    good = file_bytes(other)
    path = f"/update_weights/stream?version=2&digest={digest_of(other)}"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {len(good)}\r\n\r\n"
    with serving(make_server(random_model(tokenizer), tokenizer, stream_limit=len(good))) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.sendall(head.encode() + good[:1000])
            deadline = time.monotonic() + 20
            while post(url, path, content=good).status_code != 409:
                assert time.monotonic() < deadline
        while (last := post(url, path, content=good)).status_code == 409:
            assert time.monotonic() < deadline
        assert last.json() == {"version": 2}


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_a_paused_server_answers_after_resume(mode: str) -> None:
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"\n": "x", "x": "x"}, context=600)
    results: list[httpx.Response] = []
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 300}
    with serving(make_server(model, tokenizer)) as url:
        ask = threading.Thread(target=lambda: results.append(post(url, "/v1/chat/completions", json=body)))
        ask.start()
        while httpx.get(f"{url}/health").json()["running"] == 0:
            time.sleep(0.002)
        assert post(url, "/pause", json={"mode": mode}).status_code == 200
        frozen = httpx.get(f"{url}/health").json()
        late = threading.Thread(target=lambda: results.append(post(url, "/v1/chat/completions", json=body)))
        late.start()
        time.sleep(0.1)
        assert frozen["message"] == f"paused ({mode})"
        assert frozen["running"] == (1 if mode == "keep" else 0)
        assert httpx.get(f"{url}/health").json()["waiting"] == 0
        assert post(url, "/resume").status_code == 200
        ask.join(), late.join()
    statuses = sorted(r.status_code for r in results)
    assert statuses == ([200, 503] if mode == "abort" else [200, 200])


def test_metrics_count_requests_and_tokens(url: str, client: openai.OpenAI) -> None:
    client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4)
    text = httpx.get(f"{url}/metrics", headers=AUTH).text
    assert 'quintet_rollout_requests_total{route="chat"}' in text
    assert "quintet_rollout_healthy 1.0" in text


# -- wrong input -------------------------------------------------------------------------------------


CHAT = {"model": MODEL, "messages": HELLO}


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (CHAT | {"model": "gpt-9"}, 404, "no model"),
        (CHAT | {"messages": [{"role": "user", "content": "a" * 3000}]}, 400, "context"),
        (CHAT | {"max_tokens": 10**6}, 400, "context"),
        (CHAT | {"n": 10**9}, 400, "n:"),
        (CHAT | {"n": 0}, 400, "n:"),
        (CHAT | {"temperature": -1}, 400, "temperature"),
        (CHAT | {"messages": []}, 400, "messages"),
        (CHAT | {"messages": [{"content": "x"}]}, 400, "role"),
        (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text"),
        (CHAT | {"top_logprobs": 3, "logprobs": True}, 400, "top_logprobs"),
        (CHAT | {"tool_choice": "required"}, 400, "tool_choice"),
        (CHAT | {"tools": [{"type": "function"}]}, 400, "tools[0]"),
        (CHAT | {"response_format": {"type": "json_object"}}, 400, "response_format"),
        (CHAT | {"logit_bias": {"5": 10}}, 400, "logit_bias"),
        (CHAT | {"stop": [""]}, 400, "stop"),
        ({"messages": HELLO}, 400, "model"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_by_name(url: str, body: dict, status: int, word: str) -> None:
    found = post(url, "/v1/chat/completions", json=body)
    assert found.status_code == status
    assert set(found.json()["error"]) == {"message", "type", "param", "code"}
    assert word in found.json()["error"]["message"]


def test_the_official_client_raises_its_own_errors(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"


def test_broken_bodies_are_400_and_unknown_places_404(url: str) -> None:
    broken = post(url, "/v1/chat/completions", content=b'{"model": ')
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert post(url, "/v1/chat/completions", content=b"[1, 2]").status_code == 400
    assert post(url, "/v1/chat/completions", content=b"\xff\xfe").status_code == 400
    half = b'{"model": "tiny-chat", "messages": [{"role": "user", "content": "\\ud800"}]}'
    assert post(url, "/v1/chat/completions", content=half).status_code == 400
    assert post(url, "/v1/nothing", json={}).json()["error"]["message"] == "Not Found"
    assert httpx.get(f"{url}/generate", headers=AUTH).status_code == 405


@pytest.mark.parametrize("route", ["/generate", "/update_weights", "/pause", "/resume", "/abort", "/v1/completions"])
def test_every_route_wants_the_key(url: str, route: str) -> None:
    bodies = {
        "/generate": {"prompts": [{"group_id": "p/e0.o0.a0", "token_ids": [1]}]},
        "/update_weights": {"version": 1, "digest": "", "path": ""},
        "/pause": {"mode": "keep"},
        "/abort": {"group_ids": []},
        "/v1/completions": {"model": MODEL, "prompt": "x"},
    }
    for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "Basic eDp5"}):
        found = post(url, route, json=bodies.get(route), headers=headers)
        assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")


def test_weights_are_read_only_below_the_root(url: str, weights_root: Path, tmp_path: Path) -> None:
    outside = FileStore(tmp_path / "elsewhere").publish({}, 1)
    (weights_root / "link").symlink_to(tmp_path / "elsewhere")
    for path in (
        "/etc",
        f"{weights_root}/../{tmp_path.name}",
        outside.location,
        str(weights_root / "link" / Path(outside.location).name),
        "../../../etc/passwd",
    ):
        found = post(url, "/update_weights", json={"version": 1, "digest": outside.digest, "path": path})
        assert (found.status_code, found.json()["error"]["code"]) == (403, "outside_root"), path
    assert post(url, "/update_weights", json={"version": 1, "digest": "x", "path": "a\0b"}).status_code == 400


def test_token_ids_outside_of_the_vocabulary_are_refused_without_harm(url: str, client: openai.OpenAI) -> None:
    for ids in ([10**6], [-1], [2**70]):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt=ids, max_tokens=2)
    assert httpx.get(f"{url}/health").json()["ok"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_leaves_takes_its_sequence_out_of_the_batch(streamed: bool) -> None:
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"\n": "x", "x": "x"}, context=200_000)
    body = {"model": MODEL, "messages": HELLO, "stream": streamed, "max_tokens": 150_000}
    with serving(make_server(model, tokenizer)) as url:
        if streamed:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=AUTH) as reply:
                next(reply.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/chat/completions", json=body, headers=AUTH, timeout=0.5)
        deadline = time.monotonic() + 20
        while httpx.get(f"{url}/health").json()["running"]:
            assert time.monotonic() < deadline, "the sequence of a client that left still runs"
            time.sleep(0.02)
        short = post(url, "/v1/chat/completions", json=CHAT | {"max_tokens": 3})
        assert short.json()["choices"][0]["message"]["content"] == "xxx"


def test_a_slow_client_holds_nobody_up_and_leaves_nothing_behind() -> None:
    tokenizer = chat_tokenizer()
    model = scripted_model(tokenizer, {"\n": "x", "x": "x"}, context=200_000)
    body = json.dumps({"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 150_000}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving(make_server(model, tokenizer)) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as slow:  # asks, and reads not a byte
            slow.sendall(head.encode() + body)
            for _ in range(3):
                short = post(url, "/v1/chat/completions", json=CHAT | {"max_tokens": 3})
                assert short.json()["choices"][0]["message"]["content"] == "xxx"
            assert httpx.get(f"{url}/health").json()["running"] == 1
        deadline = time.monotonic() + 20
        while httpx.get(f"{url}/health").json()["running"]:
            assert time.monotonic() < deadline, "the sequence of a client that left still runs"
            time.sleep(0.02)


def test_streamed_completions_carry_the_whole_replys_logprobs_and_offsets(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": "hello", "max_tokens": 9, "seed": 4, "logprobs": 0}
    whole = client.completions.create(**options).choices[0]
    text, offsets, logprobs = "", [], []
    for chunk in client.completions.create(**options, stream=True):
        text += chunk.choices[0].text
        if (found := chunk.choices[0].logprobs) is not None:
            offsets += found.text_offset or []
            logprobs += found.token_logprobs or []
    assert (text, offsets, logprobs) == (whole.text, whole.logprobs.text_offset, whole.logprobs.token_logprobs)
