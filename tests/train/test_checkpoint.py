"""Weights, optimizer, schedule and random states come back bit for bit, or the load is refused as a whole."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quintet.models.config import LoraConfig
from quintet.models.lora import apply_lora
from quintet.train.worker import LocalTrainWorker
from quintet.types import ExperienceBatch, QuintetError
from tests.train.helpers import experiences, make_worker, tiny_model

GROUPS = [(6, [4, 9, 2]), (5, [3, 1, 7])]
KL = {"preset": "grpo", "kl": {"name": "k3", "coef": 0.1}}


def full(seed: int = 0) -> torch.nn.Module:
    return tiny_model(seed=seed, tie_word_embeddings=True)


def lora(seed: int = 0) -> torch.nn.Module:
    return apply_lora(tiny_model(seed=seed), LoraConfig(r=4, dropout=0.3), seed=0)


def worker_on(model: torch.nn.Module) -> LocalTrainWorker:
    return make_worker(
        model,
        KL,
        old="trainer",
        mini_batches=2,
        lr=1e-2,
        schedule="cosine",
        warmup_steps=3,
        weight_decay=0.1,
        total_steps=6,
    )


def steps(worker: LocalTrainWorker, numbers: range) -> list[dict[str, float]]:
    async def main() -> list[dict[str, float]]:
        out = []
        for n in numbers:
            batch = await worker.prepare(
                ExperienceBatch(step=n, version=n, experiences=experiences(n, GROUPS, version=n))
            )
            out.append((await worker.update(batch)).values)
        return out

    kept = ("actor/loss", "actor/grad_norm", "actor/lr", "kl/ref", "actor/entropy")
    return [{name: values[name] for name in kept} for values in asyncio.run(main())]


@pytest.mark.parametrize("make", [full, lora])
def test_six_steps_equal_three_resume_three(make: Any, tmp_path: Path) -> None:
    """CKP06: losses, rates and parameters equal bit for bit, LoRA's dropout included."""
    straight = make()
    worker = worker_on(straight)
    expected = steps(worker, range(6))
    first = worker_on(make())
    assert steps(first, range(3)) == expected[:3]
    asyncio.run(first.save_checkpoint(str(tmp_path)))
    random_before = (random.random(), float(np.random.rand()))
    torch.rand(17)
    # A new process has the same base; everything that was trained, and a full model's reference, comes from the folder.
    resumed = full(seed=5) if make is full else lora()
    second = worker_on(resumed)
    asyncio.run(second.load_checkpoint(str(tmp_path)))
    assert (random.random(), float(np.random.rand())) == random_before
    assert steps(second, range(3, 6)) == expected[3:]
    for (name, a), b in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_only_adapters_are_written_under_lora(tmp_path: Path) -> None:
    worker = worker_on(lora())
    asyncio.run(worker.save_checkpoint(str(tmp_path)))
    names = _names(tmp_path / "model.safetensors")
    assert names and all("lora_" in name for name in names)
    assert not (tmp_path / "reference.safetensors").exists()


def _names(path: Path) -> list[str]:
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    return [name for name in header if name != "__metadata__"]


def test_adapters_on_another_base_are_refused(tmp_path: Path) -> None:
    asyncio.run(worker_on(lora()).save_checkpoint(str(tmp_path)))
    with pytest.raises(QuintetError, match="trained on other base weights"):
        asyncio.run(worker_on(lora(seed=1)).load_checkpoint(str(tmp_path)))


def damage(folder: Path, how: str) -> None:
    if how == "missing":
        (folder / "optimizer.safetensors").unlink()
    elif how == "cut":
        data = (folder / "optimizer.safetensors").read_bytes()
        (folder / "optimizer.safetensors").write_bytes(data[: len(data) // 2])
    elif how == "json":
        (folder / "trainer.json").write_text("{")
    else:
        record = json.loads((folder / "trainer.json").read_text())
        (folder / "trainer.json").write_text(json.dumps(record | {"format": 99}))


@pytest.mark.parametrize(
    ("how", "message"),
    [("missing", "optimizer.safetensors is missing"), ("cut", "damaged"), ("json", "damaged"), ("format", "format 99")],
)
def test_a_damaged_checkpoint_is_refused_and_no_weight_is_touched(how: str, message: str, tmp_path: Path) -> None:
    saved = worker_on(full())
    steps(saved, range(1))
    asyncio.run(saved.save_checkpoint(str(tmp_path)))
    damage(tmp_path, how)
    model = full(seed=5)
    before = [p.detach().clone() for p in model.parameters()]
    worker = worker_on(model)
    with pytest.raises(QuintetError, match=message):
        asyncio.run(worker.load_checkpoint(str(tmp_path)))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    asyncio.run(worker_on(full()).save_checkpoint(str(tmp_path)))
    with pytest.raises(QuintetError, match="of another model"):
        asyncio.run(worker_on(tiny_model(num_hidden_layers=3)).load_checkpoint(str(tmp_path)))
