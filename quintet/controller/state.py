"""What the controller itself must remember across a restart, and the checkpoint folders around it.

A checkpoint is written into `step-N.partial/`, fsynced, given a manifest of sizes and sha256, and renamed
to `step-N/`: a folder without the suffix and with a matching manifest is whole, anything else is not.
`best.json` names the step with the highest evaluation, where that one is kept.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from quintet.files import write_whole
from quintet.types import QuintetError

MANIFEST = "manifest.json"
BEST = "best.json"


class DiskFull(QuintetError):
    """There is no room left where the run writes. What was finished before is kept, and the run can go on later."""


class ControllerState(msgspec.Struct):
    """`step` steps are trained, `version` is published, `drawn` prompts were drawn from the data."""

    step: int = 0
    version: int = 0
    drawn: int = 0


class Best(msgspec.Struct, frozen=True):
    """The step with the highest `eval/accuracy` so far."""

    step: int
    accuracy: float


Save = Callable[[str], Awaitable[None]]


async def write_checkpoint(
    root: Path,
    state: ControllerState,
    save_trainer: Save,
    *,
    keep_last: int,
    extra: dict[str, msgspec.Struct] | None = None,
) -> Path:
    """Write `root/step-N` atomically and delete all but the newest `keep_last` and the best one.

    `extra` maps a file name to a record to be kept beside the state. A whole checkpoint of this step is left
    as it is: a step is trained once. Raises DiskFull when there is no room; the older ones are then untouched.
    """
    final, partial = root / f"step-{state.step}", root / f"step-{state.step}.partial"
    if final.exists() and _fault(final) is None:
        return final
    root.mkdir(parents=True, exist_ok=True)
    for stale in (*root.glob("step-*.partial"), final):
        if stale.exists():
            shutil.rmtree(stale)
    try:
        partial.mkdir()
        await save_trainer(str(partial))
        await asyncio.to_thread(_seal, partial, {"controller.json": state, **(extra or {})})
        partial.rename(final)
        _fsync(root)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)  # it takes the room that the run needs to end in order
        if is_disk_full(error):
            raise DiskFull(_no_room(root, state.step)) from error
        raise
    _prune(root, keep_last)
    return final


def newest_checkpoint(root: Path, *, up_to: int | None = None) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint, of step `up_to` at most, and one sentence for each newer one that is not whole."""
    complaints: list[str] = []
    for step, path in sorted(_steps(root), reverse=True):
        if up_to is not None and step > up_to:
            continue
        fault = _fault(path)
        if fault is None:
            return path, complaints
        complaints.append(f"checkpoint step-{step} is not whole ({fault}); using an older one.")
    return None, complaints


def oldest_kept(root: Path, keep_last: int) -> int:
    """The step of the oldest checkpoint that a resume may fall back to; 0 when that is the start of the run."""
    kept = [step for step, path in sorted(_steps(root)) if not path.name.endswith(".partial")][-keep_last:]
    return kept[0] if len(kept) == keep_last else 0


def read_state(checkpoint: Path) -> ControllerState:
    return msgspec.json.decode((checkpoint / "controller.json").read_bytes(), type=ControllerState)


def is_best(root: Path, accuracy: float) -> bool:
    """Whether an evaluation beats every earlier one (an equal one does not)."""
    best = read_best(root)
    return best is None or accuracy > best.accuracy


def read_best(root: Path) -> Best | None:
    path = root / BEST
    try:
        return msgspec.json.decode(path.read_bytes(), type=Best) if path.exists() else None
    except msgspec.DecodeError as error:
        raise QuintetError(f"{path} is damaged ({error}): delete it, and the next evaluation is the best") from None


def mark_best(root: Path, step: int, accuracy: float, *, keep_last: int) -> None:
    """Keep the checkpoint of `step`, which must exist, in place of the best one before it."""
    write_whole(root / BEST, msgspec.json.encode(Best(step, accuracy)).decode())
    _prune(root, keep_last)


def forget_best_after(root: Path, step: int) -> None:
    """A best one later than the step that a run goes on from will be found again."""
    best = read_best(root)
    if best is not None and best.step > step:
        (root / BEST).unlink()


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of the operating system, of safetensors or of SQLite says that there is no room."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return True
    text = str(error)
    return any(said in text for said in ("No space left on device", "os error 27)", "database or disk is full"))


def _no_room(root: Path, step: int) -> str:
    whole, _ = newest_checkpoint(root, up_to=step - 1)
    last = "there is no older one" if whole is None else f"{whole.name} is the newest whole one"
    return f"{root}: no room on the disk for checkpoint step-{step}; {last}.\nFree some space and run the same command."


def _seal(partial: Path, records: dict[str, msgspec.Struct]) -> None:
    """Add the records and the manifest, and force everything to the disk."""
    for name, record in records.items():
        (partial / name).write_bytes(msgspec.json.encode(record))
    files = {str(p.relative_to(partial)): _fingerprint(p) for p in sorted(partial.rglob("*")) if p.is_file()}
    (partial / MANIFEST).write_text(json.dumps(files, indent=1))
    for path in [*(partial / name for name in files), partial / MANIFEST, partial]:
        _fsync(path)


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
    finally:
        os.close(fd)


def _prune(root: Path, keep_last: int) -> None:
    best = read_best(root)
    kept = None if best is None else best.step
    whole = sorted((step, path) for step, path in _steps(root) if not path.name.endswith(".partial"))
    for step, path in whole[:-keep_last]:
        if step != kept:
            shutil.rmtree(path)
