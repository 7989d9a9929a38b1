"""The trainer's state in a folder: safetensors and JSON only, nothing that runs code when it is read.

    model.safetensors      every parameter and persistent buffer; under LoRA only what is trained
    reference.safetensors  the frozen reference policy, where there is a copy of one
    optimizer.safetensors  moments
    critic.safetensors     the value model, where there is one, and its moments in critic_optimizer.safetensors
    trainer.json           optimizer steps, random states, adaptive KL coefficient, digest of the frozen base under LoRA

The folder is written and renamed by the caller; files are flushed to the disk here. A load checks every
file before it touches a weight.
"""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quintet.train.critic import Critic
from quintet.train.kl import KlCoefficient
from quintet.train.optimizer import Optimizer
from quintet.types import QuintetError
from quintet.weights.digest import digest

FORMAT = 1


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds: the objects that are saved from and restored into."""

    model: nn.Module
    optimizer: Optimizer
    reference: nn.Module | None = None  # None: no reference, or LoRA's own base
    critic: Critic | None = None
    kl: KlCoefficient | None = None  # an adaptive one


def save(state: TrainState, folder: str | os.PathLike[str]) -> None:
    """Write the state into an existing folder."""
    root = Path(folder)
    tensors, base = _saved_tensors(state.model)
    _save_tensors(tensors, root / "model.safetensors")
    _save_tensors(state.optimizer.state_tensors(), root / "optimizer.safetensors")
    if state.reference is not None:
        _save_tensors(_all_tensors(state.reference), root / "reference.safetensors")
    if state.critic is not None:
        _save_tensors(_all_tensors(state.critic.model), root / "critic.safetensors")
        _save_tensors(state.critic.optimizer.state_tensors(), root / "critic_optimizer.safetensors")
    record = {
        "format": FORMAT,
        "optimizer_steps": state.optimizer.steps,
        "critic_steps": None if state.critic is None else state.critic.optimizer.steps,
        "kl_coef": None if state.kl is None else state.kl.value,
        "base_digest": digest(base) if base else None,
        "random": random_states(),
    }
    with open(root / "trainer.json", "w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())


def load(state: TrainState, folder: str | os.PathLike[str]) -> None:
    """Restore bit for bit. Raises `QuintetError` for a damaged folder or one of another model, weights untouched."""
    root = Path(folder)
    record = _read_json(root / "trainer.json")
    if record.get("format") != FORMAT:
        raise QuintetError(f"checkpoint {root}: format {record.get('format')}, this version reads {FORMAT}")
    tensors, base = _saved_tensors(state.model)
    weights = _read_matching(root / "model.safetensors", tensors)
    reference = {} if state.reference is None else _all_tensors(state.reference)
    reference_weights = _read_matching(root / "reference.safetensors", reference) if reference else {}
    moments = _read_tensors(root / "optimizer.safetensors")
    critic = {} if state.critic is None else _all_tensors(state.critic.model)
    critic_weights = _read_matching(root / "critic.safetensors", critic) if critic else {}
    critic_moments = _read_tensors(root / "critic_optimizer.safetensors") if critic else {}
    if record["base_digest"] != (digest(base) if base else None):
        raise QuintetError(
            f"checkpoint {root}: its adapters were trained on other base weights\n"
            "set model.name to the model of that run"
        )
    _load_moments(state.optimizer, moments, record["optimizer_steps"], root / "optimizer.safetensors")
    if state.critic is not None:
        path = root / "critic_optimizer.safetensors"
        _load_moments(state.critic.optimizer, critic_moments, record["critic_steps"], path)
    if state.kl is not None:
        state.kl.value = record["kl_coef"]
    for targets, sources in ((tensors, weights), (reference, reference_weights), (critic, critic_weights)):
        for name, target in targets.items():
            target.copy_(sources[name])
    restore_random_states(record["random"])


def _load_moments(optimizer: Optimizer, moments: Mapping[str, Tensor], steps: int, path: Path) -> None:
    try:
        optimizer.load_state(moments, steps)
    except (ValueError, KeyError) as error:
        raise QuintetError(f"checkpoint {path.parent}: {path.name} is of another model: {error}") from error


def random_states() -> dict[str, Any]:
    """The global generators of torch (every device), python and numpy, as JSON."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(s) for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Inverse of `random_states`. Device states are restored where the number of devices is the same."""
    torch.set_rng_state(_decode(states["torch"]))
    if states["cuda"] and torch.cuda.device_count() == len(states["cuda"]):
        torch.cuda.set_rng_state_all([_decode(s) for s in states["cuda"]])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def _saved_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(to be saved, frozen base). A model with frozen and trained parameters is an adapter on a base."""
    everything = _all_tensors(model)
    if all(p.requires_grad for p in model.parameters()):
        return everything, {}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    kept = {name: t for name, t in everything.items() if name in trained}
    return kept, {name: t for name, t in everything.items() if name not in trained}


def _all_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (a tied one under one name) and persistent buffers, detached but not copied."""
    names = model.state_dict().keys()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    return parameters | {name: b for name, b in model.named_buffers() if name in names}


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise QuintetError(f"checkpoint {path.parent}: {path.name} is missing; resume from an older one") from error
    except (SafetensorError, OSError) as error:
        raise QuintetError(f"checkpoint {path} is damaged: {error}\nresume from an older one") from error


def _read_matching(path: Path, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = _read_tensors(path)
    odd = sorted(found.keys() ^ expected.keys())
    odd = odd or [n for n, t in found.items() if (t.shape, t.dtype) != (expected[n].shape, expected[n].dtype)]
    if odd:
        raise QuintetError(
            f"checkpoint {path} is of another model: {odd[0]} does not match\nuse the model settings of that run"
        )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise QuintetError(f"checkpoint {path.parent}: {path.name} is missing; resume from an older one") from error
    except json.JSONDecodeError as error:
        raise QuintetError(f"checkpoint {path} is damaged: {error}\nresume from an older one") from error


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
