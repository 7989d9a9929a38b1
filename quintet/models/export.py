"""Saving a model as a folder that AutoModelForCausalLM and AutoTokenizer load."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from torch import nn

from quintet.models.lora import base_model, merged_state_dict
from quintet.models.quiet import quiet_transformers
from quintet.models.tokenizer import Tokenizer
from quintet.types import QuintetError


def save_hf_folder(model: nn.Module, tokenizer: Tokenizer, path: str | Path) -> None:
    """Write config, generation config, safetensors weights (LoRA merged) and tokenizer to the folder `path`.

    Written beside and renamed: a reader sees the old folder or the new one. An earlier export (or an
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
        _write(model, tokenizer, beside)
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
