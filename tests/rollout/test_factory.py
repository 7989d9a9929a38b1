"""`rollout.engine` to a worker, and refusals before anything is loaded."""

from __future__ import annotations

import asyncio
import sys
import types

import pytest
import torch

from quintet.rollout.config import RolloutConfig
from quintet.rollout.factory import check_rollout_config, make_rollout_worker
from quintet.types import FinishReason, Health, QuintetError, Rollout, SamplingParams, VersionRun
from tests.rollout.small_models import CPU, EOS, decode, generate, make_engine, make_group, make_model


def make(config):
    model = make_model()
    return make_rollout_worker(
        config,
        hf_config=model.config,
        weights=model.state_dict(),
        eos_ids=(EOS,),
        decode=decode,
        device=CPU,
        dtype=torch.float32,
        version=2,
    )


@pytest.mark.parametrize("engine", ["embedded", "transformers"])
def test_both_engines_give_the_same_greedy_rollout(engine):
    group, params = make_group("p", [4, 5, 6]), SamplingParams(temperature=0.0, max_tokens=12)

    async def main():
        worker = make(RolloutConfig(engine=engine))
        rollouts = await worker.generate([group], params, 2)
        await worker.close()
        return rollouts[0]

    rollout = asyncio.run(asyncio.wait_for(main(), 60))
    assert rollout.response_ids == generate(make_engine(make_model()), [group], params)[0].response_ids
    assert rollout.min_version == 2


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"engine": "tgi"}, "'tgi' is not an engine"),
        ({"engine": "vllm"}, "needs a server or an environment that has vLLM"),
        ({"engine": "vllm", "vllm": {"python": "/no/such/python"}}, "there is no file '/no/such/python'"),
        ({"engine": "vllm", "vllm": {"url": "http://h"}, "numerics": "reproducible"}, "embedded only"),
        ({"vllm": {"url": "http://h"}}, "rollout.vllm has no effect with rollout.engine: embedded"),
        ({"engine": "no_such_package.module:Engine"}, "there is no module 'no_such_package.module'"),
        ({"engine": "transformers", "numerics": "reproducible"}, "embedded only"),
        ({"engine": "transformers", "kv_pages": 10}, r"rollout\.kv_pages has no effect"),
        ({"page_size": 32}, r"rollout\.page_size has no effect with rollout\.numerics: fast"),
        ({"numerics": "reproducible", "kernels": "torch"}, r"rollout\.kernels has no effect"),
        ({"numerics": "reproducible", "prefix_cache_pages": 0}, r"rollout\.prefix_cache_pages has no effect"),
    ],
)
def test_wrong_settings_are_refused_early(options, named):
    with pytest.raises(QuintetError, match=named):
        check_rollout_config(RolloutConfig(**options))


class OwnWorker:
    """A user's engine; `logprobs` says whether it returns them."""

    logprobs = True

    def __init__(self, hf_config, weights, **options):
        self.options = options

    async def generate(self, prompts, sampling_params, weight_version):
        return [
            Rollout(
                group_id=group.group_id,
                sample_index=index,
                prompt_ids=group.prompt.token_ids,
                response_ids=[7, 8],
                text="",
                logprobs=[-1.0, -2.0] if self.logprobs else [],
                loss_mask=[1, 1],
                weight_versions=[VersionRun(weight_version, 2)],
                finish_reason=FinishReason.STOP,
            )
            for group in prompts
            for index in range(sampling_params.n)
        ]

    async def update_weights(self, weight_path, version): ...

    async def health_check(self):
        return Health(ok=True, version=self.options["version"])

    async def abort(self, group_ids): ...


@pytest.fixture
def own_module(monkeypatch):
    module = types.ModuleType("own_engine")
    module.__spec__ = types.SimpleNamespace(name="own_engine")
    module.Worker, module.number = OwnWorker, 3
    monkeypatch.setitem(sys.modules, "own_engine", module)
    return module


def test_a_class_of_the_users_own_is_served(own_module):
    worker = make(RolloutConfig(engine="own_engine:Worker"))
    rollouts = asyncio.run(worker.generate([make_group("p", [4])], SamplingParams(n=2), 2))
    assert [r.logprobs for r in rollouts] == [[-1.0, -2.0]] * 2
    assert asyncio.run(worker.health_check()).version == 2
    told = []
    asyncio.run(worker.generate([make_group("p", [4])], SamplingParams(), 2, on_token=told.append))
    assert [(t.token_id, t.logprob, t.version) for t in told] == [(7, -1.0, 2), (8, -2.0, 2)]


def test_an_engine_that_returns_no_logprobs_is_named(own_module, monkeypatch):  # ROL14
    monkeypatch.setattr(OwnWorker, "logprobs", False)
    worker = make(RolloutConfig(engine="own_engine:Worker"))
    with pytest.raises(QuintetError, match="own_engine:Worker: a response of 2 tokens came with 0 logprobs"):
        asyncio.run(worker.generate([make_group("p", [4])], SamplingParams(), 2))


@pytest.mark.parametrize(("name", "named"), [("Nothing", "has no 'Nothing'"), ("number", "is not a class")])
def test_a_name_that_is_not_a_worker_is_refused(own_module, name, named):
    with pytest.raises(QuintetError, match=named):
        make(RolloutConfig(engine=f"own_engine:{name}"))
