"""The gradient of one optimizer step does not depend on how the step was cut, ordered, packed or padded."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quintet.algorithms.config import AlgorithmConfig
from quintet.algorithms.loss import TokenBatch, policy_objective
from quintet.algorithms.presets import resolve
from quintet.train.batching import counts, right_padded, token_sample
from quintet.types import Experience, ExperienceBatch
from tests.train.helpers import experiences, gradients, largest_relative_gap, make_worker, plain_logprobs, tiny_model

GROUPS = [(6, [4, 9, 2, 7]), (11, [3, 1, 12, 5]), (4, [8, 8, 2, 6])]
ALGORITHMS: dict[str, tuple[dict[str, Any], str]] = {
    "grpo": ({"preset": "grpo"}, "self"),
    "dapo-token-mean": ({"preset": "dapo"}, "trainer"),
    "grpo-kl-entropy": ({"preset": "grpo", "kl": {"name": "k3", "coef": 0.1}, "entropy_coef": 0.01}, "sampler"),
    "dr-grpo-tis": ({"preset": "dr_grpo", "correction": "tis"}, "trainer"),
    "gspo": ({"preset": "gspo"}, "trainer"),
}
SPLITS: dict[str, dict[str, Any]] = {
    "one micro-batch": {"micro_batch_tokens": 10_000},
    "one sample each": {"micro_batch_tokens": 1},
    "ragged micro-batches": {"micro_batch_tokens": 33},
    "prompts not shared": {"micro_batch_tokens": 50, "shared_prompt": False},
    "small head chunks": {"micro_batch_tokens": 10_000, "head_chunk_tokens": 3},
    "samples shuffled": {"micro_batch_tokens": 40, "shuffle": True},
    "activations recomputed": {"micro_batch_tokens": 60, "activation_checkpointing": True},
}


def step_gradient(
    model_type: str, algorithm: dict[str, Any], old: str, folder: Path, **split: Any
) -> dict[str, torch.Tensor]:
    """The gradient that AdamW saw: its first moment after one step with beta1 = 0."""
    samples = experiences(7, GROUPS)
    if split.pop("shuffle", False):
        random.Random(1).shuffle(samples)
    worker = make_worker(
        tiny_model(model_type), algorithm, old=old, lr=0.0, betas=(0.0, 0.999), max_grad_norm=0.0, **split
    )
    folder.mkdir()

    async def main() -> None:
        metrics = await worker.update(ExperienceBatch(step=0, version=3, experiences=samples))
        assert metrics.optimizer_steps == 1
        await worker.save_checkpoint(str(folder))
        await worker.close()

    asyncio.run(main())
    moments = load_file(folder / "optimizer.safetensors")
    return {name.removesuffix(".exp_avg"): m for name, m in moments.items() if name.endswith(".exp_avg")}


def plain_gradient(model_type: str, algorithm: dict[str, Any], old: str) -> dict[str, torch.Tensor]:
    """The reference: every sample alone through transformers, full logits, one call of the objective."""
    model, samples = tiny_model(model_type), experiences(7, GROUPS)
    width = max(len(e.response_ids) for e in samples)

    def column(name: str) -> torch.Tensor:
        return right_padded([getattr(e, name) for e in samples], width, name)

    rows = [plain_logprobs(model, token_sample(e), 0.7) for e in samples]
    logprobs = torch.stack([torch.nn.functional.pad(r, (0, width - len(r))) for r in rows])
    batch = TokenBatch(
        logprobs=logprobs,
        old_logprobs={"self": None, "trainer": column("proximal_logprobs"), "sampler": column("logprobs")}[old],
        sampler_logprobs=column("logprobs"),
        advantages=column("advantages"),
        mask=column("loss_mask"),
        ref_logprobs=column("ref_logprobs"),
        entropy=torch.stack([plain_entropy(model, e, width) for e in samples]),
        rewards=torch.tensor([e.reward for e in samples]),
    )
    loss, _ = policy_objective(resolve(AlgorithmConfig(**algorithm)), batch, counts(samples))
    loss.backward()
    return gradients(model)


def plain_entropy(model: Any, sample: Experience, width: int) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([[*sample.prompt_ids, *sample.response_ids]])).logits[0] / 0.7
    entropy = torch.distributions.Categorical(logits=logits[len(sample.prompt_ids) - 1 : -1]).entropy()
    return torch.nn.functional.pad(entropy, (0, width - len(entropy)))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["grpo", "dapo-token-mean"])
def test_every_split_gives_the_plain_gradient(name: str, split: str, tmp_path: Path) -> None:
    """ALG13, ALG15, ALG16: one division by the counts of the optimizer step, whatever is accumulated."""
    algorithm, old = ALGORITHMS[name]
    found = step_gradient("llama", algorithm, old, tmp_path / "found", **SPLITS[split])
    assert largest_relative_gap(found, plain_gradient("llama", algorithm, old)) <= 1e-5


@pytest.mark.parametrize("name", ["grpo-kl-entropy", "dr-grpo-tis", "gspo"])
def test_every_kind_of_loss_gives_the_plain_gradient(name: str, tmp_path: Path) -> None:
    algorithm, old = ALGORITHMS[name]
    found = step_gradient("qwen2", algorithm, old, tmp_path / "found", micro_batch_tokens=33)
    assert largest_relative_gap(found, plain_gradient("qwen2", algorithm, old)) <= 1e-5


def test_padded_rows_give_the_plain_gradient(tmp_path: Path) -> None:
    """An architecture that cannot be packed, in micro-batches of different widths."""
    algorithm, old = ALGORITHMS["dapo-token-mean"]
    found = step_gradient("falcon", algorithm, old, tmp_path / "found", micro_batch_tokens=60)
    assert largest_relative_gap(found, plain_gradient("falcon", algorithm, old)) <= 1e-5
