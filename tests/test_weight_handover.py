"""Trainer to engine: after every publication the engine answers as a fresh one on the new weights would."""

from __future__ import annotations

import asyncio

import pytest
import torch

from quintet.models.config import LoraConfig
from quintet.models.lora import apply_lora, merged_state_dict
from quintet.rollout.config import RolloutConfig
from quintet.rollout.engine.worker import EmbeddedRolloutWorker
from quintet.train.packing import TokenSample
from quintet.types import ExperienceBatch, Group, GroupId, Prompt, Rollout, SamplingParams
from tests.train.helpers import experiences, make_worker, plain_logprobs, tiny_model
from tests.train.helpers import random_samples as samples

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def engine(model: torch.nn.Module, config: object, version: int) -> EmbeddedRolloutWorker:
    return EmbeddedRolloutWorker(
        config,
        merged_state_dict(model),
        eos_ids=(),
        decode=lambda ids: " ".join(map(str, ids)),
        config=RolloutConfig(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        version=version,
    )


async def answers(worker: EmbeddedRolloutWorker, version: int) -> list[Rollout]:
    prompts = [s.prompt_ids for s in samples(5, [(4, [1]), (7, [1]), (11, [1])])]
    groups = [Group(GroupId(f"q{i}"), Prompt(id=f"q{i}", token_ids=list(p))) for i, p in enumerate(prompts)]
    return await worker.generate(groups, GREEDY, version)


@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_after_every_update_greedy_equals_a_fresh_engine(kind: str) -> None:
    """ROL03, WSY01, WSY03: three updates, none of them served from old weights, an old head or an old cache."""

    async def main() -> None:
        base = tiny_model(tie_word_embeddings=kind != "untied")
        hf_config = base.config
        model = apply_lora(base, LoraConfig(r=4, alpha=16), seed=0) if kind == "lora" else base
        trainer = make_worker(model, lr=0.05)
        hot = engine(model, hf_config, version=0)
        before = [r.response_ids for r in await answers(hot, 0)]
        for version in (1, 2, 3):
            batch = ExperienceBatch(version, version - 1, experiences(version, [(6, [5, 7]), (9, [4, 8])]))
            await trainer.update(await trainer.prepare(batch))
            await hot.update_weights(await trainer.publish(version), version)
            fresh = engine(model, hf_config, version)
            old, new = await answers(hot, version), await answers(fresh, version)
            assert [r.response_ids for r in old] == [r.response_ids for r in new]
            assert [r.logprobs for r in old] == [r.logprobs for r in new]
            assert [r.response_ids for r in old] != before
            before = [r.response_ids for r in old]
            await fresh.close()
        await trainer.close()
        for rollout in old:  # and the trainer's own model agrees on the tokens and their log-probabilities
            sample = TokenSample(rollout.prompt_ids, rollout.response_ids, rollout.loss_mask)
            expected = plain_logprobs(model, sample, 1.0)
            assert torch.allclose(torch.tensor(rollout.logprobs), expected, atol=1e-4)
        await hot.close()

    asyncio.run(main())
