"""A run's engine behind HTTP: the same rollouts as in process, weights by folder, faults typed."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quintet.rollout.config import RolloutConfig
from quintet.rollout.factory import KEY_VARIABLE, check_rollout_config, make_rollout_worker
from quintet.rollout.http import HttpRolloutWorker
from quintet.types import FailureKind, FinishReason, Group, GroupId, Prompt, QuintetError, SamplingParams, WeightRef
from quintet.weights.file import FileStore
from tests.rollout.serving_models import CPU, KEY, chat_tokenizer, make_server, make_worker, random_model, serving


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def url(root: Path) -> Iterator[str]:
    tokenizer = chat_tokenizer()
    server = make_server(
        random_model(tokenizer), tokenizer, weights_root=root, stream_limit=2**20, numerics="reproducible"
    )
    with serving(server) as found:
        yield found


def groups(count: int) -> list[Group]:
    return [Group(GroupId(f"p{i}", 1), Prompt(f"p{i}", [3 + i, 5, 7])) for i in range(count)]


async def through(url: str, work, key: str = KEY):
    worker = HttpRolloutWorker(url, key=key)
    try:
        return await work(worker)
    finally:
        await worker.close()


def test_rollouts_over_http_equal_those_of_the_engine_itself(url: str) -> None:
    tokenizer = chat_tokenizer()
    params = SamplingParams(n=3, max_tokens=12, seed=4, stop=("a",), first_sample=2, first_position=5)
    told: list[int] = []

    async def over_http(worker: HttpRolloutWorker):
        return await worker.generate(groups(2), params, 0, on_token=lambda token: told.append(token.token_id))

    async def in_process():
        worker = make_worker(random_model(tokenizer), tokenizer, numerics="reproducible")
        try:
            return await worker.generate(groups(2), params, 0)
        finally:
            await worker.close()

    here, there = asyncio.run(in_process()), asyncio.run(through(url, over_http))
    for a, b in zip(here, there, strict=True):
        a.timing = b.timing = {}
    assert here == there
    assert sorted(told) == sorted(i for r in there for i in r.response_ids)


def test_weights_reach_the_server_by_folder_and_older_ones_are_refused_by_version(url: str, root: Path) -> None:
    other = random_model(chat_tokenizer(), seed=3)
    ref = FileStore(root).publish(other.state_dict(), 7)

    async def work(worker: HttpRolloutWorker) -> None:
        with pytest.raises(QuintetError, match="weight version 7 is not loaded yet"):
            await worker.generate(groups(1), SamplingParams(max_tokens=2), 7)
        await worker.update_weights(ref, 7)
        (rollout,) = await worker.generate(groups(1), SamplingParams(max_tokens=2), 7)
        assert [run.version for run in rollout.weight_versions] == [7]
        assert (await worker.health_check()).version == 7
        with pytest.raises(QuintetError, match="another process or to a closed store"):
            await worker.update_weights(WeightRef(8, "memory:x", ""), 8)
        with pytest.raises(QuintetError, match="not below"):
            await worker.update_weights(WeightRef(8, "/etc", ""), 8)

    asyncio.run(through(url, work))


def test_a_wrong_key_ends_the_run_and_a_wrong_prompt_only_its_group(url: str) -> None:
    async def wrong_key(worker: HttpRolloutWorker):
        await worker.generate(groups(1), SamplingParams(), 0)

    with pytest.raises(QuintetError, match="wrong API key"):
        asyncio.run(through(url, wrong_key, key="nope"))

    async def wrong_prompt(worker: HttpRolloutWorker):
        bad = Group(GroupId("bad"), Prompt("bad", [10**6]))
        return await worker.generate([bad, *groups(1)], SamplingParams(max_tokens=2), 0)

    bad, good = asyncio.run(through(url, wrong_prompt))
    assert bad.failure is not None
    assert (bad.failure.kind, bad.failure.retryable) == (FailureKind.ENGINE, False)
    assert good.failure is None


def test_a_server_that_breaks_off_leaves_the_tokens_so_far() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve_half() -> None:
        connection, _ = listener.accept()
        connection.recv(65536)
        line = b'{"token": {"sample_index": 0, "token_id": 9, "logprob": -0.5, "version": 2}}\n'
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + line)
        connection.close()

    thread = threading.Thread(target=serve_half)
    thread.start()

    async def work(worker: HttpRolloutWorker):
        return await worker.generate(groups(1), SamplingParams(max_tokens=5), 0)

    (rollout,) = asyncio.run(through(f"http://127.0.0.1:{listener.getsockname()[1]}", work))
    thread.join()
    listener.close()
    assert (rollout.response_ids, rollout.logprobs, rollout.finish_reason) == ([9], [-0.5], FinishReason.FAILED)
    assert rollout.failure is not None
    assert (rollout.failure.kind, rollout.failure.retryable) == (FailureKind.TRANSPORT, True)


def test_no_server_at_all_is_a_transport_failure_and_unhealthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def work(worker: HttpRolloutWorker):
        return await worker.generate(groups(1), SamplingParams(), 0), await worker.health_check()

    (rollout,), health = asyncio.run(through(f"http://127.0.0.1:{port}", work))
    assert rollout.failure is not None and rollout.failure.kind is FailureKind.TRANSPORT
    assert not health and "ConnectError" in health.message


@pytest.mark.parametrize("by", ["folder", "stream"])
def test_a_recipes_http_engine_loads_its_own_weights_into_the_servers_first(
    url: str, root: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    tokenizer = chat_tokenizer()
    model = random_model(tokenizer, seed=5 if by == "folder" else 6)

    async def greedy(worker):
        try:
            return (await worker.generate(groups(1), SamplingParams(temperature=0.0, max_tokens=8), 0))[0].response_ids
        finally:
            await worker.close()

    config = RolloutConfig(engine="http", urls=[url], weights_dir=str(root) if by == "folder" else None)
    worker = make_rollout_worker(
        config,
        hf_config=model.config,
        weights=model.state_dict(),
        eos_ids=tokenizer.eos_ids,
        decode=tokenizer.decode,
        device=CPU,
        dtype=torch.float32,
    )
    assert asyncio.run(greedy(worker)) == asyncio.run(greedy(make_worker(model, tokenizer)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "http"}, "needs the servers' URLs"),
        ({"engine": "http", "urls": ["http://x"], "weights_dir": "w", "router": "best"}, "rollout.router"),
        ({"engine": "http", "urls": ["http://x"], "weights_dir": "w", "numerics": "reproducible"}, "servers decide"),
        ({"router": "prefix"}, "rollout.router has no effect"),
        ({"engine": "transformers", "urls": ["http://x"]}, "rollout.urls has no effect"),
    ],
)
def test_options_of_the_http_engine_are_checked(options: dict, said: str) -> None:
    with pytest.raises(QuintetError, match=said):
        check_rollout_config(RolloutConfig.model_validate(options))
