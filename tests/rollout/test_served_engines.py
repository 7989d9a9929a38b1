"""The adapters of vLLM, SGLang and TensorRT-LLM against servers that take exactly those engines' requests.

`test_vllm.py` has the real vLLM; the real SGLang and TensorRT-LLM need a GPU and were not run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from quintet.rollout.config import RolloutConfig
from quintet.rollout.factory import check_device, check_rollout_config, make_rollout_worker
from quintet.rollout.served import ServedRolloutWorker
from quintet.rollout.tensorrt_llm import TensorrtLlmRolloutWorker
from quintet.rollout.vllm import VllmRolloutWorker
from quintet.serving import ThreadedServer
from quintet.types import (
    FinishReason,
    Group,
    GroupId,
    Prompt,
    QuintetError,
    Rollout,
    SampledToken,
    SamplingParams,
    VersionRun,
    WeightRef,
)
from quintet.weights.memory import MemoryStore
from tests.rollout.engine_servers import (
    CONTROL_KEY,
    EOS,
    SERVER_KEY,
    TableEngine,
    sglang_app,
    tensorrt_llm_app,
    vllm_app,
)

VOCABULARY = 40
NEW = ("sglang", "tensorrt_llm")
ENGINES = (pytest.param("vllm", marks=pytest.mark.heavy), *NEW)  # `test_vllm.py` has the real one
APPS: dict[str, Callable[[TableEngine], Any]] = {
    "vllm": vllm_app,
    "sglang": sglang_app,
    "tensorrt_llm": tensorrt_llm_app,
}
LONG = SamplingParams(n=3, max_tokens=60, seed=5)


def table(seed: int, *, endless: bool = False) -> torch.Tensor:
    """Logits; `endless`: the end id is never sampled."""
    made = 2.0 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    made[:, EOS] = -1e4 if endless else 0.0
    return made


@contextmanager
def server(engine: str, **options: Any) -> Iterator[tuple[TableEngine, str]]:
    behind = TableEngine(torch.zeros(VOCABULARY, VOCABULARY), **options)
    with ThreadedServer(APPS[engine](behind)) as running:
        yield behind, running.url


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "SGLANG_API_KEY"):
        monkeypatch.setenv(name, SERVER_KEY)
    monkeypatch.setenv("TRTLLM_RL_CONTROL_API_KEY", CONTROL_KEY)
    # there is no GPU here: the tensors are handed over as they are
    monkeypatch.setattr(
        TensorrtLlmRolloutWorker,
        "_on_gpu",
        lambda self, folder: ("GPU-of-the-test", {"table": _saved(folder)}),
    )


def _saved(folder: Path) -> torch.Tensor:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")["table"]


def make(engine: str, url: str | None, weights: torch.Tensor, **options: Any) -> ServedRolloutWorker:
    hf_config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=8, intermediate_size=8, num_attention_heads=1, max_position_embeddings=100
    )
    worker = make_rollout_worker(
        RolloutConfig.model_validate({"engine": engine, engine: {"url": url} | options}),
        hf_config=hf_config,
        weights={"table": weights},
        eos_ids=(EOS,),
        decode=lambda ids: "".join(chr(ord("A") + i) for i in ids),
        device=torch.device("cpu" if engine == "sglang" else "cuda"),
        dtype=torch.float32,
        version=0,
    )
    assert isinstance(worker, ServedRolloutWorker)
    return worker


def run(worker: ServedRolloutWorker, work: Callable[[], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            return await asyncio.wait_for(work(), 300)
        finally:
            await worker.close()

    return asyncio.run(main())


def groups(count: int = 1) -> list[Group]:
    return [Group(GroupId(f"p{i}"), Prompt(f"p{i}", [5 + i, 7])) for i in range(count)]


def expected(weights: torch.Tensor, rollout: Rollout, temperature: float = 1.0) -> list[float]:
    before = [*rollout.prompt_ids, *rollout.response_ids][len(rollout.prompt_ids) - 1 : -1]
    logprobs = (weights[before] / temperature).log_softmax(-1)
    return [float(row[token]) for row, token in zip(logprobs, rollout.response_ids, strict=True)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_and_log_probabilities_are_the_engines_own(engine: str) -> None:
    weights, told = table(1), list[SampledToken]()
    temperature = 1.0 if engine == "tensorrt_llm" else 0.7
    params = SamplingParams(n=4, max_tokens=12, temperature=temperature, seed=3)
    with server(engine) as (behind, url):
        worker = make(engine, url, weights)
        rollouts = run(worker, lambda: worker.generate(groups(2), params, 0, on_token=told.append))
        assert torch.equal(behind.table, weights)  # it was given them before the first request
    assert [(r.group_id.prompt_id, r.sample_index) for r in rollouts] == [
        (p, i) for p in ("p0", "p1") for i in range(4)
    ]
    assert len({tuple(r.response_ids) for r in rollouts}) == 8
    for rollout in rollouts:
        assert rollout.failure is None and rollout.loss_mask == [1] * len(rollout.response_ids)
        assert rollout.weight_versions == [VersionRun(0, len(rollout.response_ids))]
        assert rollout.logprobs == expected(weights, rollout, temperature)
    assert len(told) == sum(len(r.response_ids) for r in rollouts)


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ENGINES)
def test_end_ids_lengths_and_stop_strings_end_a_sample(engine: str) -> None:
    weights = table(4)
    for token, following in ((7, 8), (8, 9), (9, EOS), (5, 6), (6, 5)):
        weights[token, following] = 50.0
    greedy = SamplingParams(n=1, temperature=0.0, max_tokens=20)
    endless = Group(GroupId("q"), Prompt("q", [5]))
    with server(engine, hold=10) as (behind, url):  # a sample that nobody ends stays at ten tokens
        worker = make(engine, url, weights)

        async def main() -> list[Rollout]:
            found = await worker.generate(groups(), greedy, 0)
            for change in ({"max_tokens": 3}, {"stop": ("GF",)}, {"stop_token_ids": (6,)}):
                changed = SamplingParams(n=1, temperature=0.0, **({"max_tokens": 20} | change))
                found += await worker.generate([endless], changed, 0)
                async with asyncio.timeout(60):  # nothing samples on for a client that has enough
                    await until(lambda: not behind.running)
            return found

        by_end, by_length, by_string, by_id = run(worker, main)
    assert (by_end.response_ids, by_end.finish_reason, by_end.text) == ([8, 9, EOS], FinishReason.STOP, "IJ")
    assert (by_length.response_ids, by_length.finish_reason) == ([6, 5, 6], FinishReason.LENGTH)
    assert (by_string.response_ids, by_string.finish_reason, by_string.text) == ([6, 5], FinishReason.STOP, "")
    assert (by_id.response_ids, by_id.finish_reason, by_id.text) == ([6], FinishReason.STOP, "")


@pytest.mark.parametrize("engine", ENGINES)
def test_running_samples_go_on_with_new_weights(engine: str) -> None:
    old, new = table(1, endless=True), table(2, endless=True)
    store = MemoryStore()
    ref = store.publish({"table": new}, 1)
    told: list[SampledToken] = []
    with server(engine, hold=5) as (behind, url):
        worker = make(engine, url, old)

        async def main() -> tuple[list[Rollout], list[Rollout]]:
            running = asyncio.create_task(worker.generate(groups(), LONG, 0, on_token=told.append))
            await until(lambda: len(told) == 3 * 5)
            await worker.update_weights(ref, 1)
            assert torch.equal(behind.table, new) and worker.version == 1
            behind.hold = None
            return await running, await worker.generate(groups(), LONG, 1)

        across, after = run(worker, main)
        assert len(behind.loads) == 2
    for rollout in across:
        assert [part.version for part in rollout.weight_versions] == [0, 1] and len(rollout.response_ids) == 60
        switch = rollout.weight_versions[0].length
        assert rollout.logprobs == [*expected(old, rollout)[:switch], *expected(new, rollout)[switch:]]
        assert rollout.failure is None
    assert {part.version for r in after for part in r.weight_versions} == {1}


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ENGINES)
def test_a_version_that_it_does_not_have_is_refused_and_a_wrong_reference_too(engine: str) -> None:
    with server(engine) as (_, url):
        worker = make(engine, url, table(1))

        async def main() -> None:
            with pytest.raises(QuintetError, match="weights of version 0, version 9 was asked for"):
                await worker.generate(groups(), LONG, 9)
            with pytest.raises(QuintetError, match="holds version 3"):
                await worker.update_weights(WeightRef(3, "memory:x", ""), 4)

        run(worker, main)


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_that_a_server_refuses_end_the_run_with_what_to_do(engine: str) -> None:
    store = MemoryStore()
    ref = store.publish({"table": table(2)}, 1)
    with server(engine) as (behind, url):
        worker = make(engine, url, table(1))

        async def main() -> None:
            await worker.start()
            behind.refuse_weights = True
            with pytest.raises(QuintetError, match="did not take weight version 1"):
                await worker.update_weights(ref, 1)

        run(worker, main)
        assert worker.version == 0


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ENGINES)
def test_a_sample_goes_on_after_its_connection_broke(engine: str) -> None:
    weights = table(1, endless=True)
    with server(engine, die_after=7) as (behind, url):
        worker = make(engine, url, weights)
        params = SamplingParams(n=1, max_tokens=20, seed=2)
        (rollout,) = run(worker, lambda: worker.generate(groups(), params, 0))
        assert [len(p) for p in behind.prompts[-2:]] == [2, 9]  # the second request carries the seven tokens
    assert rollout.failure is None and len(rollout.response_ids) == 20
    assert rollout.logprobs == expected(weights, rollout)


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ENGINES)
def test_a_server_that_is_gone_fails_the_sample_with_its_tokens(engine: str) -> None:
    behind = TableEngine(torch.zeros(VOCABULARY, VOCABULARY), delay_s=0.05)
    running = ThreadedServer(APPS[engine](behind))
    running.start()
    worker = make(engine, running.url, table(1, endless=True))

    async def main() -> tuple[list[Rollout], bool]:
        await worker.start()
        made = asyncio.create_task(worker.generate(groups(), SamplingParams(n=1, max_tokens=90, seed=1), 0))
        await until(lambda: bool(behind.running))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(running.close)
        return await made, (await worker.health_check()).ok

    (rollout,), healthy = run(worker, main)
    assert not healthy
    assert rollout.finish_reason is FinishReason.FAILED and 0 < len(rollout.response_ids) < 90
    assert rollout.failure is not None and rollout.failure.retryable
    assert len(rollout.logprobs) == len(rollout.response_ids)


@pytest.mark.parametrize("engine", ENGINES)
def test_aborted_samples_come_back_with_what_they_have_and_stop_on_the_server(engine: str) -> None:
    weights = table(1, endless=True)
    told: list[SampledToken] = []
    with server(engine, hold=5) as (behind, url):
        worker = make(engine, url, weights)

        async def main() -> list[Rollout]:
            made = asyncio.create_task(worker.generate(groups(2), LONG, 0, on_token=told.append))
            await until(lambda: len(told) == 6 * 5)
            await worker.abort([groups()[0].group_id])
            await until(lambda: len(behind.running) == 3)
            behind.hold = None
            return await made

        rollouts = run(worker, main)
    assert [r.finish_reason for r in rollouts] == [FinishReason.ABORTED] * 3 + [FinishReason.LENGTH] * 3
    for rollout in rollouts[:3]:
        assert 0 < len(rollout.response_ids) < 60 and rollout.failure is None
        assert rollout.logprobs == expected(weights, rollout)


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_log_probabilities_before_temperature_are_refused(engine: str) -> None:
    with server(engine, raw=True) as (_, url):
        worker = make(engine, url, table(3) / 4)
        with pytest.raises(QuintetError, match="raw, before temperature"):
            run(worker, worker.start)


@pytest.mark.heavy
@pytest.mark.parametrize("engine", ENGINES)
def test_a_prompt_that_cannot_be_served_fails_alone(engine: str) -> None:
    with server(engine) as (_, url):
        worker = make(engine, url, table(1))
        prompts = [Group(GroupId("bad"), Prompt("bad", [VOCABULARY + 3])), *groups()]
        params = SamplingParams(n=1, max_tokens=4)
        bad, good = run(worker, lambda: worker.generate(prompts, params, 0))
    assert bad.failure is not None and not bad.failure.retryable and "vocabulary" in bad.failure.message
    assert good.failure is None


@pytest.mark.heavy
def test_a_request_that_the_server_calls_wrong_is_sent_once() -> None:
    long = Group(GroupId("long"), Prompt("long", [5] * 95))
    with server("sglang") as (behind, url):
        worker = make("sglang", url, table(1))
        (rollout,) = run(worker, lambda: worker.generate([long], SamplingParams(n=1, max_tokens=4), 0))
        assert behind.prompts.count([5] * 95) == 1
    assert rollout.failure is not None and not rollout.failure.retryable
    assert "longer than the context" in rollout.failure.message


@pytest.mark.parametrize(
    ("engine", "params", "named"),
    [
        ("sglang", {"top_p": 0.9}, "before truncation"),
        ("sglang", {"top_k": 20}, "before truncation"),
        ("tensorrt_llm", {"temperature": 0.7}, "before temperature"),
        ("tensorrt_llm", {"min_p": 0.1}, "before temperature"),
    ],
)
def test_sampling_whose_log_probabilities_cannot_be_had_is_refused(engine: str, params: dict, named: str) -> None:
    worker = make(engine, "http://127.0.0.1:1", table(1))
    with pytest.raises(QuintetError, match=named):
        run(worker, lambda: worker.generate(groups(), SamplingParams(**params), 0))


@pytest.mark.heavy
@pytest.mark.parametrize("incremental", [True, False])
def test_sglang_streams_whole_or_in_parts(incremental: bool) -> None:
    weights = table(1, endless=True)
    with server("sglang", incremental=incremental) as (_, url):
        worker = make("sglang", url, weights)
        rollouts = run(worker, lambda: worker.generate(groups(), LONG, 0))
    assert [len(r.response_ids) for r in rollouts] == [60] * 3
    assert all(r.logprobs == expected(weights, r) for r in rollouts)


def test_an_sglang_server_that_lost_our_weights_gets_them_before_a_token_is_taken() -> None:
    """Someone starts it again, or loads other weights, in the middle of a sample."""
    weights = table(1, endless=True)
    told: list[SampledToken] = []
    with server("sglang", hold=5) as (behind, url):
        worker = make("sglang", url, weights)

        async def main() -> list[Rollout]:
            await worker.start()
            asked = SamplingParams(n=1, max_tokens=40, seed=1)
            made = asyncio.create_task(worker.generate(groups(), asked, 0, on_token=told.append))
            await until(lambda: len(told) == 5)
            behind.table, behind.label = table(9, endless=True), "default"
            behind.hold = None
            return await made

        (rollout,) = run(worker, main)
        assert len(behind.loads) == 2 and behind.label.endswith("-0")
    assert rollout.failure is None and len(rollout.response_ids) == 40
    assert rollout.logprobs == expected(weights, rollout)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("variable", "engine"), [("SGLANG_API_KEY", "sglang"), ("TRTLLM_RL_CONTROL_API_KEY", "tensorrt_llm")]
)
def test_a_wrong_key_is_said_at_the_start(variable: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "wrong")
    with server(engine) as (_, url):
        worker = make(engine, url, table(1))
        with pytest.raises(QuintetError, match=r"cannot be used: .*401"):
            run(worker, worker.start)


@pytest.mark.parametrize(
    ("engine", "options", "named"),
    [
        ("tensorrt_llm", {}, "runs on NVIDIA GPUs, but the run's device is cpu"),
        ("vllm", {"sleep": True}, "rollout.vllm.sleep: vLLM frees memory of GPUs only"),
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(engine: str, options: dict, named: str) -> None:
    config = RolloutConfig.model_validate({"engine": engine, engine: {"url": "http://h"} | options})
    with pytest.raises(QuintetError, match=named):
        check_device(config, "cpu")
    check_device(config, "cuda")


def test_vllm_sleeps_between_samples_and_wakes_for_weights_and_for_samples() -> None:
    weights, store = table(1, endless=True), MemoryStore()
    new = table(2, endless=True)
    ref = store.publish({"table": new}, 1)
    params = SamplingParams(n=2, max_tokens=5, seed=1)
    with server("vllm") as (behind, url):
        worker = make("vllm", url, weights, sleep=True)
        assert isinstance(worker, VllmRolloutWorker)

        async def main() -> list[Rollout]:
            await worker.sleep()  # nothing runs yet
            assert not behind.asleep
            first = await worker.generate(groups(), params, 0)
            await worker.sleep()
            await worker.sleep()
            assert behind.asleep
            second = await worker.generate(groups(), params, 0)
            assert not behind.asleep and [r.response_ids for r in second] == [r.response_ids for r in first]
            await worker.sleep()
            await worker.update_weights(ref, 1)
            return await worker.generate(groups(), params, 1)

        rollouts = run(worker, main)
    assert all(r.logprobs == expected(new, r) for r in rollouts)


@pytest.mark.heavy
def test_a_vllm_that_cannot_sleep_says_so() -> None:
    with server("vllm", sleepless=True) as (_, url):
        worker = make("vllm", url, table(1), sleep=True)
        assert isinstance(worker, VllmRolloutWorker)

        async def main() -> None:
            await worker.start()
            with pytest.raises(QuintetError, match=r"rollout.vllm.sleep: vLLM does not go to sleep: .*500"):
                await worker.sleep()

        run(worker, main)


@pytest.mark.parametrize("engine", ["vllm", *NEW])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "needs a server or an environment that has"),
        ({"python": "/no/such/python"}, "there is no file '/no/such/python'"),
        ({"url": "http://h", "python": "/bin/sh"}, "url and python exclude each other"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(engine: str, options: dict, named: str) -> None:
    with pytest.raises(QuintetError, match=named):
        check_rollout_config(RolloutConfig.model_validate({"engine": engine, engine: options}))
    with pytest.raises(QuintetError, match=f"rollout.{engine} has no effect with rollout.engine: embedded"):
        check_rollout_config(RolloutConfig.model_validate({engine: {"url": "http://h"}}))


# -- servers of ours -----------------------------------------------------------------------------------


class Served:
    """Stands in for the process of a child server: the same API, served from a thread."""

    def __init__(self, worker: ServedRolloutWorker, engine: str, delay_s: float) -> None:
        self.started: list[Path] = []
        self._engine, self._delay_s = engine, delay_s
        self._child: Any = worker._server
        self._child.key = SERVER_KEY
        self._child.start, self._child.stop = self.start, self.stop

    async def start(self, model: Path) -> None:
        self.behind = TableEngine(_saved(model), label=vars(self._child).get("label", ""), delay_s=self._delay_s)
        self._server = ThreadedServer(APPS[self._engine](self.behind))
        await asyncio.to_thread(self._server.start)
        self._child.url, self._child._process = self._server.url, self
        self.started.append(model)

    def stop(self) -> None:
        if self._child._process is not None:
            self._server.close()
            self._child._process = None

    def die(self) -> None:
        self._server.close()

    def poll(self) -> int | None:
        return None if self._server._thread.is_alive() else 1


def ours(engine: str, weights: torch.Tensor, delay_s: float) -> tuple[ServedRolloutWorker, Served]:
    worker = make(engine, None, weights, python="/bin/sh")
    return worker, Served(worker, engine, delay_s)


@pytest.mark.heavy
def test_a_tensorrt_llm_server_of_ours_is_started_again_with_new_weights_and_samples_go_on() -> None:
    old, new = table(1, endless=True), table(2, endless=True)
    store = MemoryStore()
    ref = store.publish({"table": new}, 1)
    worker, child = ours("tensorrt_llm", old, 0.01)

    async def main() -> list[Rollout]:
        await worker.start()
        running = asyncio.create_task(worker.generate(groups(), LONG, 0))
        await until(lambda: len(child.behind.running) == 3)
        await asyncio.sleep(0.1)
        await worker.update_weights(ref, 1)
        return await running

    rollouts = run(worker, main)
    assert len(child.started) == 2 and worker.metrics()["engine/restarts"] == 1.0
    for rollout in rollouts:
        assert rollout.failure is None and [part.version for part in rollout.weight_versions] == [0, 1]
        switch = rollout.weight_versions[0].length
        assert rollout.logprobs == [*expected(old, rollout)[:switch], *expected(new, rollout)[switch:]]


@pytest.mark.heavy
def test_an_sglang_server_of_ours_that_died_comes_back_with_the_newest_weights_and_their_label() -> None:
    old, new = table(1, endless=True), table(2, endless=True)
    store = MemoryStore()
    ref = store.publish({"table": new}, 1)
    worker, child = ours("sglang", old, 0.05)

    async def main() -> list[Rollout]:
        await worker.start()
        await worker.update_weights(ref, 1)
        running = asyncio.create_task(worker.generate(groups(), LONG, 1))
        await until(lambda: len(child.behind.running) == 3)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(child.die)
        return await running

    rollouts = run(worker, main)
    assert len(child.started) == 2 and child.behind.label.endswith("-1")
    for rollout in rollouts:
        assert rollout.failure is None and rollout.weight_versions == [VersionRun(1, 60)]
        assert rollout.logprobs == expected(new, rollout)


def test_the_commands_that_start_sglang_and_tensorrt_llm() -> None:
    sglang, tensorrt_llm = (make(e, None, table(1), python="/bin/sh") for e in NEW)
    label = sglang._label(0)  # type: ignore[attr-defined]
    found = sglang._server.command(Path("/m"), 9)
    assert found[:5] == ["/bin/sh", "-m", "sglang.launch_server", "--model-path", "/m"]
    assert found[-4:] == ["--skip-tokenizer-init", "--incremental-streaming-output", "--weight-version", label]
    assert "--api-key" in found and found[found.index("--dtype") + 1] == "float32"
    found = tensorrt_llm._server.command(Path("/m"), 9)
    assert found[:4] == ["/bin/sh", "-m", "tensorrt_llm.commands.serve", "/m"]
    assert found[4:10] == ["--host", "127.0.0.1", "--port", "9", "--backend", "pytorch"]
    assert json.loads(Path(found[-1]).read_text()) == {"dtype": "float32"}
