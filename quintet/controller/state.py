"""What the controller itself must remember across a restart, and the checkpoint folder around it.

A checkpoint is written into `step-N.partial/`, fsynced, given a manifest of sizes and sha256, and renamed
to `step-N/`: a folder without the suffix and with a matching manifest is whole, anything else is not.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from quintet.types import QuintetError

MANIFEST = "manifest.json"


class ControllerState(msgspec.Struct):
    """`step` steps are trained, `version` is published, `drawn` prompts were drawn from the data."""

    step: int = 0
    version: int = 0
    drawn: int = 0


async def write_checkpoint(
    root: Path, state: ControllerState, save_trainer: Callable[[str], Awaitable[None]], *, keep_last: int
) -> Path:
    """Write `root/step-N` atomically and delete all but the newest `keep_last`."""
    final = root / f"step-{state.step}"
    partial = root / f"step-{state.step}.partial"
    for stale in (partial, final):
        if stale.exists():
            shutil.rmtree(stale)
    partial.mkdir(parents=True)
    await save_trainer(str(partial))
    (partial / "controller.json").write_bytes(msgspec.json.encode(state))
    files = {str(p.relative_to(partial)): _fingerprint(p) for p in sorted(partial.rglob("*")) if p.is_file()}
    (partial / MANIFEST).write_text(json.dumps(files, indent=1))
    for path in [*(partial / name for name in files), partial / MANIFEST, partial]:
        _fsync(path)
    partial.rename(final)
    _fsync(root)
    _prune(root, keep_last)
    return final


def newest_checkpoint(root: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, and one sentence for each newer one that is damaged or incomplete."""
    complaints: list[str] = []
    for step, path in sorted(_steps(root), reverse=True):
        fault = _fault(path)
        if fault is None:
            return path, complaints
        complaints.append(f"checkpoint step-{step} is not whole ({fault}); using an older one.")
    return None, complaints


def read_state(checkpoint: Path) -> ControllerState:
    return msgspec.json.decode((checkpoint / "controller.json").read_bytes(), type=ControllerState)


def _steps(root: Path) -> list[tuple[int, Path]]:
    found = []
    for path in root.glob("step-*"):
        number = path.name.removeprefix("step-").removesuffix(".partial")
        if number.isdigit():
            found.append((int(number), path))
    return found


def _fault(path: Path) -> str | None:
    if path.name.endswith(".partial"):
        return "cut off while it was written"
    try:
        files: dict[str, list[int | str]] = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return "its manifest is missing or unreadable"
    for name, (size, sha256) in files.items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size:
            return f"{name} is missing or cut"
        if _fingerprint(file)[1] != sha256:
            return f"{name} is damaged"
    return None


def _fingerprint(path: Path) -> tuple[int, str]:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        raise QuintetError(f"cannot flush {path} to the disk: {error}. Free some space and resume.") from error
    finally:
        os.close(fd)


def _prune(root: Path, keep_last: int) -> None:
    whole = sorted((step, path) for step, path in _steps(root) if not path.name.endswith(".partial"))
    for _step, path in whole[:-keep_last]:
        shutil.rmtree(path)
