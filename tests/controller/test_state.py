"""Checkpoint folders: whole or not there, the newest whole one found, the best one kept, a full disk survived."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quintet.controller.state import (
    Best,
    ControllerState,
    DiskFull,
    forget_best_after,
    is_best,
    mark_best,
    newest_checkpoint,
    oldest_kept,
    read_best,
    read_state,
    write_checkpoint,
)


def write(
    root: Path, step: int, keep_last: int = 2, wrecked: Callable[[Path], None] | None = None, text: str = ""
) -> Path:
    async def save_trainer(path: str) -> None:
        (Path(path) / "model.safetensors").write_text(text or f"weights {step} " * 50)
        if wrecked is not None:
            wrecked(Path(path))

    state = ControllerState(step=step, version=step, drawn=4 * step)
    return asyncio.run(write_checkpoint(root, state, save_trainer, keep_last=keep_last))


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def test_the_newest_ones_are_kept_and_what_was_saved_is_read_back(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        write(tmp_path, step)
    assert names(tmp_path) == ["step-12", "step-9"]
    newest, complaints = newest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-12" and complaints == []
    assert read_state(tmp_path / "step-12") == ControllerState(12, 12, 48)
    assert newest_checkpoint(tmp_path, up_to=11)[0] == tmp_path / "step-9"


def test_the_fallback_of_a_young_run_is_its_start(tmp_path: Path) -> None:
    write(tmp_path, 3)
    assert oldest_kept(tmp_path, keep_last=2) == 0
    write(tmp_path, 6)
    assert oldest_kept(tmp_path, keep_last=2) == 3


def test_one_cut_off_while_writing_is_passed_over_by_name(tmp_path: Path) -> None:
    """CKP04."""
    write(tmp_path, 10)
    write(tmp_path, 20)
    (tmp_path / "step-20").rename(tmp_path / "step-20.partial")
    newest, complaints = newest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-10"
    assert complaints == ["checkpoint step-20 is not whole (cut off while it was written); using an older one."]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]), "model.safetensors is missing or cut"),
        (lambda f: f.unlink(), "model.safetensors is missing or cut"),
        (lambda f: f.write_text(f.read_text().replace("2", "3", 1)), "model.safetensors is damaged"),
        (lambda f: (f.parent / "manifest.json").write_text('{"model'), "its manifest is missing or unreadable"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[Path], object], reason: str) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    damage(tmp_path / "step-2/model.safetensors")
    newest, complaints = newest_checkpoint(tmp_path)
    assert newest == tmp_path / "step-1" and reason in complaints[0]
    write(tmp_path, 2)  # the redone step writes it anew
    assert newest_checkpoint(tmp_path) == (tmp_path / "step-2", [])


def test_a_whole_one_is_never_replaced_so_that_there_is_no_moment_without_it(tmp_path: Path) -> None:
    write(tmp_path, 2, text="first")
    write(tmp_path, 2, text="second")
    assert (tmp_path / "step-2/model.safetensors").read_text() == "first"


def test_the_manifest_lists_every_file_with_size_and_digest(tmp_path: Path) -> None:
    write(tmp_path, 1, text="abc")
    manifest = json.loads((tmp_path / "step-1/manifest.json").read_text())
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest["model.safetensors"] == [3, sha256] and manifest.keys() == {"model.safetensors", "controller.json"}


def test_a_full_disk_leaves_the_older_one_whole_and_says_which(tmp_path: Path) -> None:
    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write(tmp_path, 3)
    with pytest.raises(DiskFull, match="no room on the disk for checkpoint step-6; step-3 is the newest whole one"):
        write(tmp_path, 6, wrecked=full)
    assert names(tmp_path) == ["step-3"]
    with pytest.raises(DiskFull, match="there is no older one"):
        write(tmp_path / "fresh", 1, wrecked=full)


def test_another_error_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    def broken(_path: Path) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        write(tmp_path, 1, wrecked=broken)


def test_the_best_is_kept_beside_the_newest_and_the_one_before_it_goes(tmp_path: Path) -> None:
    for step, accuracy in ((1, 0.2), (2, 0.6), (3, 0.6), (4, 0.1), (5, 0.8), (6, 0.3), (7, 0.3)):
        write(tmp_path, step, keep_last=1)
        if is_best(tmp_path, accuracy):
            mark_best(tmp_path, step, accuracy, keep_last=1)
        if step == 4:
            assert names(tmp_path) == ["best.json", "step-2", "step-4"]
    assert names(tmp_path) == ["best.json", "step-5", "step-7"]
    assert read_best(tmp_path) == Best(5, 0.8)


def test_a_best_one_later_than_the_point_of_resume_is_forgotten(tmp_path: Path) -> None:
    write(tmp_path, 4)
    mark_best(tmp_path, 4, 0.9, keep_last=2)
    forget_best_after(tmp_path, 4)
    assert not is_best(tmp_path, 0.9)
    forget_best_after(tmp_path, 3)
    assert is_best(tmp_path, 0.1)
