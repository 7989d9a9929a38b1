"""Weights published as folders: `v-<version>-<digest>/` with `model.safetensors` and `manifest.json`.

A folder is written under another name, flushed to the disk and then renamed: a reader sees a version
whole or not at all. The digest is part of the name, so that publishing a version again (a step redone
after a crash) neither overwrites what a reader has open nor writes equal weights twice.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from quintet.types import QuintetError, WeightRef
from quintet.weights.digest import digest

WEIGHTS_NAME = "model.safetensors"
MANIFEST_NAME = "manifest.json"
_FOLDER = re.compile(r"v-(\d{8})-([0-9a-f]{16})")


class FileStore:
    """Publishes versions under `root`, keeping the newest `keep_last`. One process writes, any may read."""

    def __init__(self, root: str | os.PathLike[str], keep_last: int = 2) -> None:
        if keep_last < 1:
            raise ValueError("keep_last must be at least 1")
        self.root = Path(root)
        self.keep_last = keep_last
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for unfinished in self.root.glob(".v-*"):  # of a process that ended while it wrote
                shutil.rmtree(unfinished)
        except OSError as error:
            raise QuintetError(f"cannot create the weights folder {self.root}: {error.strerror}") from error

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> WeightRef:
        """Write, flush, rename; then remove versions older than the newest `keep_last`."""
        plain = _unshared(tensors)
        name = digest(plain)
        final = self.root / f"v-{version:08d}-{name[:16]}"
        ref = WeightRef(version=version, location=str(final), digest=name)
        if not final.exists():
            self._write(final, plain, ref)
        self._prune(keep=final)
        return ref

    def _write(self, final: Path, tensors: dict[str, Tensor], ref: WeightRef) -> None:
        beside = self.root / f".{final.name}.{uuid.uuid4().hex}"
        beside.mkdir()
        try:
            save_file(tensors, beside / WEIGHTS_NAME, metadata={"format": "pt"})
            (beside / MANIFEST_NAME).write_text(json.dumps({"version": ref.version, "digest": ref.digest}))
            for path in (beside / WEIGHTS_NAME, beside / MANIFEST_NAME, beside):
                _fsync(path)
            beside.rename(final)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        _fsync(self.root)

    def _prune(self, keep: Path) -> None:
        """Newest versions stay; another digest of the version just published is superseded and goes."""
        found = {path: int(m.group(1)) for path in self.root.iterdir() if (m := _FOLDER.fullmatch(path.name))}
        version = found[keep]
        stay = sorted({v for v in found.values() if v <= version}, reverse=True)[: self.keep_last]
        for path, v in found.items():
            if path != keep and (v == version or v not in stay):
                shutil.rmtree(path)


def file_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """What `model.safetensors` of a published folder holds, for a reader that shares no folder with us."""
    return save(_unshared(tensors), metadata={"format": "pt"})


def open_folder(path: Path, ref: WeightRef | None = None) -> Mapping[str, Tensor]:
    """Load a published folder and verify its digest (against `ref` too, where one is given)."""
    try:
        manifest = json.loads((path / MANIFEST_NAME).read_text())
        tensors = load_file(path / WEIGHTS_NAME)
    except FileNotFoundError as error:
        raise QuintetError(f"weights {path}: {Path(error.filename).name} is missing (version removed?)") from error
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise QuintetError(f"weights {path} are damaged: {error}\npublish the version again") from error
    expected = manifest["digest"] if ref is None else ref.digest
    found = digest(tensors)
    if found != expected or found != manifest["digest"]:
        raise QuintetError(
            f"weights {path} are damaged: digest {found[:16]}, expected {expected[:16]}\npublish the version again"
        )
    return tensors


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous host tensors, no two sharing memory: safetensors refuses aliases."""
    out: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        host = tensor.detach().to("cpu").contiguous()
        pointer = host.untyped_storage().data_ptr()
        out[name] = host.clone() if pointer in seen else host
        seen.add(pointer)
    return out


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
