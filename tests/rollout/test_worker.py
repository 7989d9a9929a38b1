"""The asyncio worker: shared batches, order, updates between steps, faults that never hang."""

from __future__ import annotations

import asyncio

import pytest
import torch

from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.worker import EmbeddedRolloutWorker
from quintet.types import FailureKind, FinishReason, GroupId, QuintetError, SamplingParams, expand_versions
from quintet.weights.memory import MemoryStore
from tests.rollout.small_models import (
    CPU,
    EOS,
    case,
    decode,
    generate,
    ids_and_bits,
    make_engine,
    make_group,
    make_model,
    random_prompts,
)


def make_worker(model=None, *, eos_ids=(EOS,), decode=decode, version=0, **options):
    model = model or make_model()
    return EmbeddedRolloutWorker(
        model.config,
        model.state_dict(),
        eos_ids=eos_ids,
        decode=decode,
        config=RolloutConfig(**({"max_running": 64} | options)),
        device=CPU,
        dtype=torch.float32,
        version=version,
    )


def run(scenario, *args, **options):
    """Run `scenario(worker)` with a worker that is closed afterwards, under a limit against hanging tests."""

    async def main():
        worker = make_worker(*args, **options)
        try:
            return await asyncio.wait_for(scenario(worker), 60)
        finally:
            await worker.close()

    return asyncio.run(main())


async def sampled(worker, tokens):
    """Wait until the engine has sampled so many."""
    while tokens > 0:
        await asyncio.sleep(0.001)
        tokens -= worker.metrics()["engine/sampled_tokens"]


def test_rollouts_come_in_the_order_of_groups_and_samples():  # ROL05
    given = case("ROL05")
    groups = [make_group(name, [10 + i] * 5) for i, name in enumerate(given["input"]["prompts"])]
    groups += random_prompts(6, 50)
    params = SamplingParams(n=given["input"]["n"], max_tokens=40)

    async def scenario(worker):
        return await worker.generate(groups, params, 0)

    rollouts = run(scenario)
    assert [r.group_id.prompt_id for r in rollouts[:4]] == given["expect"]["order"]
    assert [(r.group_id, r.sample_index) for r in rollouts] == [(g.group_id, i) for g in groups for i in range(2)]
    assert [r.prompt_ids for r in rollouts] == [g.prompt.token_ids for g in groups for _ in range(2)]
    assert len({len(r.response_ids) for r in rollouts}) > 3  # they did end out of order
    assert ids_and_bits(rollouts) == ids_and_bits(generate(make_engine(make_model()), groups, params))


def test_concurrent_calls_share_the_batch_and_get_their_own_results():
    groups = random_prompts(6, 30)
    params = SamplingParams(n=2, max_tokens=30)

    async def scenario(worker):
        calls = [asyncio.ensure_future(worker.generate([g], params, 0)) for g in groups]
        most = 0
        while not all(call.done() for call in calls):
            most = max(most, (await worker.health_check()).running)
            await asyncio.sleep(0.001)
        return most, [call.result() for call in calls]

    most, results = run(scenario, eos_ids=(), numerics="reproducible")
    assert most > 2
    expected = generate(make_engine(make_model(), eos_ids=(), numerics="reproducible"), groups, params)
    assert ids_and_bits([r for result in results for r in result]) == ids_and_bits(expected)


def test_an_update_during_generation_is_seen_between_tokens_only():  # WSY08, WSY06
    old, new = make_model(seed=0), make_model(seed=1)
    store = MemoryStore()
    group = make_group("p", list(range(4, 24)))
    params = SamplingParams(n=3, temperature=0.0, max_tokens=150)

    async def scenario(worker):
        call = asyncio.ensure_future(worker.generate([group], params, 0))
        await sampled(worker, 10)
        await worker.update_weights(store.publish(new.state_dict(), 1), 1)
        assert (await worker.health_check()).version == 1
        return await call

    by_version = (old, new)
    for rollout in run(scenario, old, eos_ids=(), numerics="reproducible"):
        versions = expand_versions(rollout.weight_versions)
        assert versions == sorted(versions)
        assert set(versions) == {0, 1}
        with torch.no_grad():
            logits = [m(torch.tensor([rollout.prompt_ids + rollout.response_ids])).logits[0] for m in by_version]
        for place, version in enumerate(versions):
            row = logits[version][len(rollout.prompt_ids) - 1 + place].log_softmax(-1)
            assert float(row[rollout.response_ids[place]]) == pytest.approx(rollout.logprobs[place], abs=1e-4)


def test_a_version_that_the_engine_does_not_have_yet_is_an_error():
    group = make_group("p", [4, 5])

    async def scenario(worker):
        with pytest.raises(QuintetError, match="asks for weight version 3, the engine has 2"):
            await worker.generate([group], SamplingParams(max_tokens=2), 3)
        return await worker.generate([group], SamplingParams(max_tokens=2), 1)

    assert expand_versions(run(scenario, version=2)[0].weight_versions) == [2, 2]


def test_a_refused_update_raises_and_generation_goes_on():
    store = MemoryStore()
    weights = dict(make_model(seed=1).state_dict())
    del weights["model.norm.weight"]

    async def scenario(worker):
        call = asyncio.ensure_future(worker.generate([make_group("p", [4, 5])], SamplingParams(max_tokens=60), 0))
        with pytest.raises(QuintetError, match=r"'model\.norm\.weight' is missing"):
            await worker.update_weights(store.publish(weights, 1), 1)
        with pytest.raises(QuintetError, match="holds version 2"):
            await worker.update_weights(store.publish(weights, 2), 3)
        return await call, await worker.health_check()

    rollouts, health = run(scenario, eos_ids=())
    assert set(expand_versions(rollouts[0].weight_versions)) == {0}
    assert (health.ok, health.version) == (True, 0)


def test_an_exception_in_the_engine_becomes_a_failure_and_the_next_call_is_served():
    broken = [True]

    def fragile(ids):
        if broken[0]:
            raise RuntimeError("the decoder broke")
        return decode(ids)

    async def scenario(worker):
        calls = [worker.generate([g], SamplingParams(n=2, max_tokens=4), 0) for g in random_prompts(2, 9)]
        failed = await asyncio.gather(*calls)
        sick = await worker.health_check()
        broken[0] = False
        good = await worker.generate([make_group("p", [4, 5])], SamplingParams(max_tokens=3), 0)
        return [r for rollouts in failed for r in rollouts], sick, good, await worker.health_check()

    failed, sick, good, well = run(scenario, eos_ids=(), decode=fragile)
    assert [r.finish_reason for r in failed] == [FinishReason.FAILED] * 4
    assert {r.failure.kind for r in failed} == {FailureKind.ENGINE}
    assert all("the decoder broke" in r.failure.message for r in failed)
    assert not sick
    assert "the decoder broke" in sick.message
    assert (good[0].finish_reason, well.ok, well.kv_used) == (FinishReason.LENGTH, True, 0.0)


def test_abort_returns_the_tokens_so_far():
    groups = [make_group("a", [4, 5]), make_group("b", [6, 7])]

    async def scenario(worker):
        calls = [asyncio.ensure_future(worker.generate([g], SamplingParams(n=2, max_tokens=300), 0)) for g in groups]
        await sampled(worker, 8)
        await worker.abort([GroupId("a")])
        return await asyncio.gather(*calls)

    first, second = run(scenario, eos_ids=())
    assert [r.finish_reason for r in first] == [FinishReason.ABORTED] * 2
    assert all(0 < len(r.response_ids) < 300 for r in first)
    assert [len(r.response_ids) for r in second] == [300, 300]


def test_a_cancelled_call_leaves_the_batch():
    async def scenario(worker):
        call = asyncio.ensure_future(worker.generate([make_group("p", [4, 5])], SamplingParams(n=4, max_tokens=300), 0))
        while not (await worker.health_check()).running:
            await asyncio.sleep(0.001)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        while (await worker.health_check()).running:
            await asyncio.sleep(0.001)
        return worker.metrics()["engine/sampled_tokens"]

    assert run(scenario, eos_ids=()) < 4 * 300


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_close_fails_what_is_in_flight_and_refuses_what_comes_later(kernels):
    async def scenario(worker):
        call = asyncio.ensure_future(worker.generate([make_group("p", [4, 5])], SamplingParams(max_tokens=300), 0))
        while not (await worker.health_check()).running:
            await asyncio.sleep(0.001)
        await worker.close()
        rollouts = await call
        assert not await worker.health_check()
        with pytest.raises(QuintetError, match="closed"):
            await worker.generate([make_group("p", [4, 5])], SamplingParams(), 0)
        return rollouts

    rollout = run(scenario, eos_ids=(), kernels=kernels)[0]
    assert rollout.finish_reason is FinishReason.FAILED
    assert rollout.failure.message == "the rollout worker was closed"


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SamplingParams(n=0), "n=0"),
        (SamplingParams(max_tokens=0), "max_tokens=0"),
        (SamplingParams(temperature=-1.0), r"temperature=-1\.0"),
        (SamplingParams(temperature=float("nan")), "temperature=nan"),
        (SamplingParams(top_p=0.0), r"top_p=0\.0"),
        (SamplingParams(top_k=-1), "top_k=-1"),
        (SamplingParams(stop=("",)), "empty stop string"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(params, named):
    async def scenario(worker):
        with pytest.raises(QuintetError, match=named):
            await worker.generate([make_group("p", [4, 5])], params, 0)

    run(scenario)


def test_metrics_count_since_the_last_call_and_timing_adds_up():
    async def scenario(worker):
        params = SamplingParams(n=4, max_tokens=10)
        rollouts = await worker.generate([make_group("p", [4] * 30)], params, 0)
        return rollouts, worker.metrics(), worker.metrics()

    rollouts, first, second = run(scenario, eos_ids=())
    assert first["engine/sampled_tokens"] == 40
    assert first["engine/tokens_per_s"] > 0
    assert first["engine/prefix_shared_frac"] == 0.75
    assert second["engine/sampled_tokens"] == second["engine/tokens_per_s"] == 0
    for rollout in rollouts:
        assert set(rollout.timing) == {"queue_s", "prefill_s", "decode_s"}
        assert rollout.timing["decode_s"] > 0
        assert rollout.timing["prefill_s"] > 0
