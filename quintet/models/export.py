"""Saving a model as a folder that AutoModelForCausalLM and AutoTokenizer load."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from quintet.models.lora import base_model, merged_state_dict
from quintet.models.quiet import quiet_transformers
from quintet.models.tokenizer import Tokenizer
from quintet.types import QuintetError


def save_hf_folder(model: nn.Module, tokenizer: Tokenizer, path: str | Path) -> None:
    """Write config, generation config, safetensors weights (LoRA merged) and tokenizer to the folder `path`.

    Raises QuintetError as `_write_folder`.
    """
    _write_folder(path, lambda folder: _write(model, tokenizer, folder))


def save_reward_folder(body: PreTrainedModel, head: nn.Linear, tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a sequence classifier with one label to the folder `path`: the decoder of `body`, and `head` as its score.

    `head` has no bias, as transformers' own classifiers. Raises QuintetError for an architecture that transformers has
    no such classifier of, and as `_write_folder`.
    """
    classifier = _classifier(body, head, tokenizer)

    def write(folder: Path) -> None:
        folder.chmod(0o755)  # mkdtemp makes a private folder
        with quiet_transformers():
            classifier.save_pretrained(folder)
            tokenizer.save(str(folder))

    _write_folder(path, write)


def _classifier(body: PreTrainedModel, head: nn.Linear, tokenizer: Tokenizer) -> PreTrainedModel:
    config = copy.deepcopy(body.config)
    config.num_labels = 1
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_id
    try:
        with quiet_transformers():
            model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    except ValueError as error:
        raise QuintetError(f"reward_model: {type(body).__name__} has no sequence classifier: {error}") from error
    model.base_model.load_state_dict(body.get_decoder().state_dict())
    model.score.load_state_dict(head.state_dict())
    return model.to(torch.float32)


def _write_folder(path: str | Path, write: Callable[[Path], None]) -> None:
    """Written beside and renamed: a reader sees the old folder or the new one. An earlier export (or an
    empty folder) at `path` is replaced; raises QuintetError when something else is there, or when the
    place cannot be written.
    """
    target = Path(path)
    if target.exists() and not _replaceable(target):
        raise QuintetError(f"Export: {str(target)!r} exists and is no Hugging Face folder. Choose another place.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise QuintetError(f"Export: {str(target)!r} cannot be written: {error.strerror}.") from error
    try:
        write(beside)
        _swap(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # gone already unless writing failed


def _write(model: nn.Module, tokenizer: Tokenizer, folder: Path) -> None:
    folder.chmod(0o755)  # mkdtemp makes a private folder
    base = base_model(model)
    with quiet_transformers():
        base.save_pretrained(folder, state_dict=merged_state_dict(model))
        tokenizer.save(str(folder))


def _swap(new: Path, target: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    old = new.with_name(new.name + "-old")
    target.rename(old)
    new.rename(target)
    shutil.rmtree(old)


def _replaceable(folder: Path) -> bool:
    return folder.is_dir() and ((folder / "config.json").is_file() or not any(folder.iterdir()))
