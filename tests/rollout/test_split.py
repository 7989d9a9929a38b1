"""Prefill on one engine, decoding on another: the same rollouts as from one engine, over sockets and shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from quintet.rollout.config import Role, RolloutConfig
from quintet.rollout.engine.fast import FastEngine
from quintet.rollout.engine.handoff import Header, Prefilled, PrefillFailed, kv_bytes
from quintet.rollout.factory import KEY_VARIABLE, check_rollout_config, make_rollout_worker
from quintet.rollout.http import HttpRolloutWorker, request_body
from quintet.rollout.server import RolloutServer
from quintet.rollout.split import SplitRolloutWorker
from quintet.rollout.transfer import PrefillClient, SplitDecoder, shared_memory
from quintet.types import FailureKind, FinishReason, Group, GroupId, Prompt, QuintetError, Rollout, SamplingParams
from quintet.weights.file import FileStore
from tests.rollout.serving_models import CPU, KEY, MODEL, chat_tokenizer, make_worker, random_model, serving
from tests.rollout.small_models import (
    VOCABULARY,
    finish,
    generate,
    ids_and_bits,
    make_engine,
    make_group,
    make_model,
)

SMALL = make_model()
FAST = ("native", "torch")


def prompts(count: int, *, longest: int = 90, seed: int = 0) -> list[Group]:
    """No prompt is the beginning of another: what prefix caches share would depend on the order."""
    pick = random.Random(seed)
    sizes = [pick.randrange(8, longest) for _ in range(count)]
    return [make_group(f"p{i}", [pick.randrange(2, VOCABULARY) for _ in range(size)]) for i, size in enumerate(sizes)]


def engine(kernels: str, model=SMALL, **options) -> FastEngine:
    made = make_engine(model, numerics="fast", kernels=kernels, **options)
    assert isinstance(made, FastEngine)
    return made


def prefill(source: FastEngine, groups: list[Group], params: SamplingParams) -> list[Prefilled]:
    requests = [source.add_prefill(group, params) for group in groups]
    done: dict[int, list[Rollout]] = {request: [] for request in requests}
    while source.has_work:
        for request, rollout in source.step():
            done[request].append(rollout)
    return [source.take_prefilled(r, sorted(done[r], key=lambda rollout: rollout.sample_index)) for r in requests]


def pairs(one: Rollout, other: Rollout) -> Iterator[tuple[float, float]]:
    return zip(one.logprobs, other.logprobs, strict=True)


def split(source: FastEngine, target: FastEngine, groups: list[Group], params: SamplingParams) -> list[Rollout]:
    for group, found in zip(groups, prefill(source, groups, params), strict=True):
        target.add_prefilled(group, params, found)
    return finish(target)


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("kernels", FAST)
def test_split_rollouts_are_those_of_one_engine(kernels: str, count: int) -> None:
    params = SamplingParams(n=2, max_tokens=20, seed=5, stop=("cz",), top_p=0.95)
    groups = prompts(count)
    whole = generate(engine(kernels), groups, params)
    target = engine(kernels)
    halves = split(engine(kernels), target, groups, params)
    assert {r.finish_reason for r in whole} >= {FinishReason.STOP, FinishReason.LENGTH}
    if kernels == "native":
        assert ids_and_bits(halves) == ids_and_bits(whole)  # to the bit
    else:  # plain torch's products round by what is in the batch: 2 of 6,993 tokens are 1.5e-5 apart on Zen 4
        assert [r.response_ids for r in halves] == [r.response_ids for r in whole]
        gaps = [abs(a - b) for one, other in zip(halves, whole, strict=True) for a, b in pairs(one, other)]
        assert sum(gap > 1e-5 for gap in gaps) <= len(gaps) // 1000 and max(gaps) <= 2e-5
    assert [(r.text, r.finish_reason) for r in halves] == [(r.text, r.finish_reason) for r in whole]
    assert target.stats().computed_prompt_tokens == 0


@pytest.mark.parametrize(("source", "target"), [("native", "torch"), ("torch", "native")])
def test_the_kernels_read_each_others_keys_and_values(source: str, target: str) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    groups = prompts(3)
    whole = generate(engine(target), groups, greedy)
    halves = split(engine(source), engine(target), groups, greedy)
    assert [r.response_ids for r in halves] == [r.response_ids for r in whole]
    for a, b in zip(halves, whole, strict=True):
        torch.testing.assert_close(a.logprobs, b.logprobs, atol=1e-4, rtol=0)
    (native,), (plain,) = (prefill(engine(kernels), groups[:1], greedy) for kernels in FAST)
    torch.testing.assert_close(native.kv, plain.kv, atol=1e-4, rtol=1e-4)
    assert native.kv.shape == (2, 2, 2, len(groups[0].prompt.token_ids), 16)


def test_a_sample_that_ends_with_its_first_token_carries_no_pages() -> None:
    source, target = engine("native"), engine("native")
    (group,) = prompts(1)
    (found,) = prefill(source, [group], SamplingParams(n=3, max_tokens=1))
    assert found.kv is None
    target.add_prefilled(group, SamplingParams(n=3, max_tokens=1), found)
    rollouts = finish(target)
    assert ids_and_bits(rollouts) == ids_and_bits(
        generate(engine("native"), [group], SamplingParams(n=3, max_tokens=1))
    )
    assert [len(r.response_ids) for r in rollouts] == [1, 1, 1]


def test_pages_of_other_weights_are_refused_and_new_weights_take_over_what_waits() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    group, other = prompts(1)[0], make_model(seed=1)
    (found,) = prefill(engine("native", version=3), [group], params)
    target = engine("native", version=4)
    with pytest.raises(PrefillFailed, match="KV is of weight version 3, the decode worker has version 4"):
        target.add_prefilled(group, params, found)
    target = engine("native", version=3)
    target.add_prefilled(group, params, found)
    target.update_weights(other.state_dict(), 4)  # before its prompt has pages
    (rollout,) = finish(target)
    assert [(run.version, run.length) for run in rollout.weight_versions] == [(3, 1), (4, 11)]
    so_far = make_group("q", group.prompt.token_ids + rollout.response_ids[:1])
    alone = generate(engine("native", other), [so_far], SamplingParams(temperature=0.0, max_tokens=11))[0]
    assert rollout.response_ids[1:] == alone.response_ids


def test_another_models_pages_are_refused_in_one_sentence() -> None:
    params = SamplingParams(max_tokens=5)
    (group,) = prompts(1)
    (found,) = prefill(engine("native"), [group], params)
    target = engine("native", make_model("llama-3-heads-per-kv"))
    target.add_prefilled(group, params, found)
    (rollout,) = finish(target)
    assert rollout.failure is not None and not rollout.failure.retryable
    assert "KV is of 2 layers with 2 KV heads of 16 in float32" in rollout.failure.message
    assert "this engine's is of 2 layers with 1 KV heads of 32 in float32" in rollout.failure.message
    elsewhere = prompts(2, seed=9)[1]
    with pytest.raises(PrefillFailed, match="another request"):
        engine("native").add_prefilled(elsewhere, params, found)


def test_preempted_samples_of_a_split_request_are_computed_again() -> None:
    params = SamplingParams(n=3, max_tokens=80, seed=1)
    groups = prompts(6)
    whole = generate(engine("native", eos_ids=()), groups, params)
    tight = engine("native", eos_ids=(), kv_pages=24, prefix_cache_pages=0)
    halves = split(engine("native", eos_ids=(), max_running=2, prefix_cache_pages=0), tight, groups, params)
    assert [r.response_ids for r in halves] == [r.response_ids for r in whole]
    assert tight.stats().preemptions > 0


def test_the_wire_keeps_every_bit_and_counts_its_bytes() -> None:
    (group,) = prompts(1)
    (found,) = prefill(engine("native"), [group], SamplingParams(max_tokens=5))
    header = msgspec.json.decode(msgspec.json.encode(Header.of(found)), type=Header)
    numbers = bytearray(kv_bytes(found.kv))
    assert len(numbers) == header.kv_bytes == len(group.prompt.token_ids) * 2 * 2 * 2 * 16 * 4
    again = header.with_kv(numbers)
    assert torch.equal(again.kv, found.kv) and again.rollouts == found.rollouts
    with pytest.raises(PrefillFailed, match="bytes of KV"):
        header.with_kv(numbers[:-1])


# -- servers ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(
    role: Role, *prefill_urls: str, seed: int = 0, weights_root: Path | None = None, **options
) -> Iterator[tuple[str, RolloutServer]]:
    tokenizer = chat_tokenizer()
    made = RolloutServer(
        make_worker(random_model(tokenizer, seed=seed), tokenizer, **({"kernels": "native"} | options)),
        tokenizer,
        model=MODEL,
        key=KEY,
        context=512,
        weights_root=weights_root,
        role=role,
        prefill_urls=prefill_urls,
    )
    with serving(made) as url:
        yield url, made


def one_prompt(name: str = "p", size: int = 70) -> Group:
    pick = random.Random(name)
    return Group(GroupId(name), Prompt(name, [pick.randrange(90) for _ in range(size)]))


def test_servers_hand_over_by_socket_and_by_shared_memory() -> None:
    params = SamplingParams(n=3, max_tokens=12, seed=4, first_sample=2, first_position=5)
    groups, told = [one_prompt("a"), one_prompt("b")], list[int]()

    async def work(decoding: RolloutServer, prefill_url: str, *, shared: bool) -> list[Rollout]:
        decoder = SplitDecoder(decoding.worker, PrefillClient(prefill_url, key=KEY, shared=shared))
        try:
            return await decoder.generate(groups, params, 0, on_token=lambda token: told.append(token.token_id))
        finally:
            await decoder.close()

    with server(Role.PREFILL) as (prefill_url, source), server(Role.DECODE, prefill_url) as (_, decoding):
        alone = asyncio.run(source.worker.generate(groups, params, 0))
        for shared in (False, True):
            told.clear()
            there = asyncio.run(work(decoding, prefill_url, shared=shared))
            assert ids_and_bits(there) == ids_and_bits(alone)
            assert sorted(told) == sorted(i for r in there for i in r.response_ids)
        assert decoding.worker._engine.stats().computed_prompt_tokens == 0


def test_shared_memory_is_gone_with_its_last_user() -> None:
    with shared_memory(memoryview(b"x" * 10_000)) as path, open(path, "rb") as file:
        assert file.read() == b"x" * 10_000
    assert not os.path.exists(path)


def test_a_run_picks_a_prefill_and_a_decode_server_for_each_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    tokenizer = chat_tokenizer()
    model = random_model(tokenizer, seed=5)
    params = SamplingParams(n=2, temperature=0.0, max_tokens=6)
    newer = random_model(tokenizer, seed=6)

    def config(urls: list[str], prefill_urls: list[str]) -> RolloutConfig:
        return RolloutConfig(
            engine="http", urls=urls, prefill_urls=prefill_urls, weights_dir=str(tmp_path), router="round_robin"
        )

    async def work(made: RolloutConfig) -> tuple[list[Rollout], list[Rollout]]:
        worker = make_rollout_worker(
            made,
            hf_config=model.config,
            weights=model.state_dict(),
            eos_ids=tokenizer.eos_ids,
            decode=tokenizer.decode,
            device=CPU,
            dtype=torch.float32,
        )
        assert isinstance(worker, SplitRolloutWorker)
        before = [await worker.generate([one_prompt(name)], params, 0) for name in "abcd"]
        ref = FileStore(tmp_path).publish(newer.state_dict(), 1)
        await worker.update_weights(ref, 1)
        after = await worker.generate([one_prompt("e")], params, 1)
        assert await worker.health_check()
        await worker.close()
        return [r for rollouts in before for r in rollouts], after

    with (
        server(Role.PREFILL, weights_root=tmp_path) as (first, one),
        server(Role.PREFILL, weights_root=tmp_path) as (second, two),
        server(Role.DECODE, first, second, weights_root=tmp_path) as (decode_url, _),
    ):
        before, after = asyncio.run(work(config([decode_url], [first, second])))
        assert sorted(s.worker._engine.stats().sampled_tokens for s in (one, two)) == [4, 6]  # in turns
    alone = [generate_alone(model, tokenizer, name, params) for name in "abcd"]
    assert [r.response_ids for r in before] == [ids for group in alone for ids in group]
    assert [r.response_ids for r in after] == generate_alone(newer, tokenizer, "e", params)
    assert {run.version for r in after for run in r.weight_versions} == {1}


def generate_alone(model, tokenizer, name: str, params: SamplingParams) -> list[list[int]]:
    async def work() -> list[Rollout]:
        worker = make_worker(model, tokenizer, kernels="native")
        try:
            return await worker.generate([one_prompt(name)], params, 0)
        finally:
            await worker.close()

    return [r.response_ids for r in asyncio.run(work())]


async def asked(url: str, prefill_url: str | None, group: Group, version: int = 0) -> list[Rollout]:
    worker = HttpRolloutWorker(url, key=KEY)
    try:
        return await worker.generate([group], SamplingParams(max_tokens=3), version, prefill_url=prefill_url)
    finally:
        await worker.close()


def test_a_prefill_that_fails_is_told_apart_and_does_no_harm(tmp_path: Path) -> None:
    weights = random_model(chat_tokenizer(), seed=2).state_dict()

    def stop() -> None:
        raise RuntimeError("out of order")

    with (
        server(Role.PREFILL) as (prefill_url, source),
        server(Role.DECODE, prefill_url, "http://127.0.0.1:9", weights_root=tmp_path) as (url, decoding),
    ):
        with pytest.raises(PrefillFailed, match=r"prefill server http://127\.0\.0\.1:9: ConnectError"):
            asyncio.run(asked(url, "http://127.0.0.1:9", one_prompt()))
        for server_url, asked_url, said in (
            (url, "http://127.0.0.1:10", "not one of this server's --prefill-url"),
            (url, None, "say prefill_url"),
            (prefill_url, None, "only prefills"),
        ):
            with pytest.raises(QuintetError, match=said):
                asyncio.run(asked(server_url, asked_url, one_prompt()))
        (bad,) = asyncio.run(asked(url, prefill_url, Group(GroupId("bad"), Prompt("bad", [10**6]))))
        assert bad.failure is not None and (bad.failure.kind, bad.failure.retryable) == (FailureKind.ENGINE, False)
        asyncio.run(decoding.worker.update_weights(FileStore(tmp_path).publish(weights, 2), 2))
        with pytest.raises(PrefillFailed, match="weight version 2 is not loaded yet"):  # the prefill server is older
            asyncio.run(asked(url, prefill_url, one_prompt()))
        asyncio.run(decoding.worker.update_weights(FileStore(tmp_path).publish(weights, 0), 0))
        source.worker._engine.step = stop
        with pytest.raises(PrefillFailed, match="the engine stopped: RuntimeError: out of order"):
            asyncio.run(asked(url, prefill_url, one_prompt()))


def test_reproducible_numerics_refuse_to_be_split() -> None:
    tokenizer = chat_tokenizer()

    async def work() -> None:
        worker = make_worker(random_model(tokenizer), tokenizer, numerics="reproducible")
        try:
            await worker.prefill(one_prompt(), SamplingParams(), 0)
        finally:
            await worker.close()

    with pytest.raises(QuintetError, match=r"embedded and rollout\.numerics: fast only"):
        asyncio.run(work())


def test_a_server_of_both_kinds_is_refused() -> None:
    config = RolloutConfig(engine="http", urls=["http://x"], prefill_urls=["http://x/"], weights_dir="w")
    with pytest.raises(QuintetError, match="a server is one or the other"):
        check_rollout_config(config)


def test_an_abort_during_the_prefill_ends_the_group_as_aborted() -> None:
    group = one_prompt()
    prompt, _ = request_body(group, SamplingParams())

    class Slow:
        """A prefill server that is asked to abort while it answers."""

        def __init__(self, source) -> None:
            self.source, self.decoder, self.url = source, None, ""

        async def prefill(self, body: dict) -> Prefilled:
            assert body["prompt"] == prompt
            found = await self.source.prefill(group, SamplingParams(max_tokens=400), 0)
            self.decoder.abort([group.group_id])
            return found

    async def work() -> Rollout:
        tokenizer = chat_tokenizer()
        source, target = (make_worker(random_model(tokenizer), tokenizer) for _ in range(2))
        slow = Slow(source)
        slow.decoder = SplitDecoder(target, slow)
        (rollout,) = await slow.decoder.generate([group], SamplingParams(max_tokens=400), 0)
        await source.close()
        await target.close()
        return rollout

    rollout = asyncio.run(work())
    assert rollout.finish_reason is FinishReason.ABORTED
    assert 1 <= len(rollout.response_ids) < 400
