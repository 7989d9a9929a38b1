"""What `model.name` stands for, checked before anything heavy loads."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.models.config import ModelConfig
from quintet.types import QuintetError

TINY = "builtin:tiny"
SMOLLM2 = "builtin:smollm2-135m"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class Source:
    """Where weights and tokenizer are read from: a folder or a hub id; `adapter` is a PEFT folder merged on top."""

    path: str
    is_local: bool
    adapter: Path | None = None
    revision: str | None = None

    @property
    def hub_kwargs(self) -> dict[str, Any]:
        return {"local_files_only": True} if self.is_local else {"revision": self.revision}


def resolve_source(config: ModelConfig) -> Source:
    """Folder or hub id of any model but `builtin:tiny`, which is read from nowhere.

    Raises QuintetError for an unknown built-in, a missing folder, a folder that holds no model, and a
    name that can be neither a folder nor a hub id.
    """
    name = config.name
    if name.startswith("builtin:"):
        return _builtin(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _folder(folder, config)
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name.count("/") > 1
    if folder.exists() or looks_like_path or not _HUB_ID.fullmatch(name):
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise QuintetError(
            f"model.name: the folder {name!r} {what}.\n"
            f"Give a folder with config.json and *.safetensors, a hub id such as org/model, {TINY} or {SMOLLM2}."
        )
    return Source(name, is_local=False, revision=config.revision)


def _builtin(name: str) -> Source:
    from quintet.models.smollm2 import smollm2_folder

    if name != SMOLLM2:
        near = difflib.get_close_matches(name, (TINY, SMOLLM2), n=1, cutoff=0.0)[0]
        raise QuintetError(
            f"model.name: {name!r} is no built-in model. The nearest is {near}; there are {TINY} and {SMOLLM2}."
        )
    return Source(str(smollm2_folder()), is_local=True)


def _folder(folder: Path, config: ModelConfig) -> Source:
    if (folder / "adapter_config.json").is_file():
        return _adapter(folder, config)
    if not (folder / "config.json").is_file():
        raise QuintetError(
            f"model.name: the folder {str(folder)!r} holds no model: neither config.json nor adapter_config.json.\n"
            "Give the folder that save_pretrained wrote."
        )
    return Source(str(folder), is_local=True)


def _adapter(folder: Path, config: ModelConfig) -> Source:
    base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base or base == config.name:
        raise QuintetError(
            f"model.name: the adapter in {str(folder)!r} does not name its base model.\n"
            "Set base_model_name_or_path in its adapter_config.json."
        )
    source = resolve_source(config.model_copy(update={"name": base}))
    if source.adapter is not None:
        raise QuintetError(
            f"model.name: the base of the adapter {str(folder)!r} is an adapter too. Merge that one first."
        )
    return Source(source.path, source.is_local, adapter=folder, revision=source.revision)
