"""Publishing a version: whole or not at all, under a digest, in memory and in folders."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
import torch

from quintet.types import QuintetError, WeightRef
from quintet.weights import open_weights
from quintet.weights.digest import digest
from quintet.weights.file import FileStore
from quintet.weights.memory import MemoryStore


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((64, 8), value), "b": torch.full((3,), value, dtype=torch.bfloat16)}


def test_the_digest_is_sha256_of_name_dtype_shape_and_bytes() -> None:
    expected = hashlib.sha256(b"x\0torch.float32\0(2,)\0" + bytes.fromhex("0000803f00000040")).hexdigest()
    assert digest({"x": torch.tensor([1.0, 2.0])}) == expected


def test_the_digest_ignores_order_and_strides_and_sees_every_bit() -> None:
    a, b = torch.randn(4, 6), torch.randn(3)
    assert digest({"a": a, "b": b}) == digest({"b": b, "a": a.t().contiguous().t()})
    flipped = b.clone()
    flipped.view(torch.int32)[1] ^= 1
    assert digest({"a": a, "b": b}) != digest({"a": a, "b": flipped})
    assert digest({"a": a.view(6, 4)}) != digest({"a": a})
    assert digest({"s": torch.tensor(-0.0)}) != digest({"s": torch.tensor(0.0)})


def test_memory_is_a_snapshot_that_later_updates_do_not_reach() -> None:
    store, live = MemoryStore(), tensors(1.0)
    ref = store.publish(live, 4)
    live["a"].add_(1.0)
    opened = open_weights(ref)
    assert ref.version == 4
    assert torch.equal(opened["a"], torch.ones(64, 8)) and opened["b"].dtype == torch.bfloat16
    assert digest(opened) == ref.digest


def test_memory_keeps_tied_tensors_tied_and_only_the_newest_version() -> None:
    store, weight = MemoryStore(), torch.randn(5, 2)
    old = store.publish({"embed": weight, "head": weight}, 1)
    opened = open_weights(old)
    assert opened["embed"].data_ptr() == opened["head"].data_ptr()
    store.publish(tensors(2.0), 2)
    with pytest.raises(QuintetError, match="version 1 is no longer in memory"):
        open_weights(old)
    assert torch.equal(opened["head"], weight), "a reader that holds an old version keeps it whole"


def test_a_memory_reference_of_a_store_that_is_gone_is_refused() -> None:
    with pytest.raises(QuintetError, match="another process"):
        open_weights(WeightRef(version=0, location="memory:nowhere", digest=""))


def test_a_reader_never_sees_a_mix_of_two_versions() -> None:
    """WSY08: an update is made of many tensors; a reader gets all of one version or an error."""
    store, refs, seen = MemoryStore(), [], []
    refs.append(store.publish({f"t{i}": torch.zeros(2000) for i in range(20)}, 0))
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            ref = refs[-1]
            try:
                opened = open_weights(ref)
            except QuintetError:
                continue
            seen.append({float(t[i]) for t in opened.values() for i in (0, -1)} == {float(ref.version)})

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(1, 60):
        refs.append(store.publish({f"t{i}": torch.full((2000,), float(version)) for i in range(20)}, version))
    done.set()
    reader.join()
    assert seen and all(seen)


def test_a_folder_reads_back_bit_for_bit(tmp_path: Path) -> None:
    published = {"w": torch.randn(7, 3), "tied": torch.empty(0), "half": torch.randn(4, dtype=torch.bfloat16)}
    published["tied"] = published["w"]
    ref = FileStore(tmp_path / "weights").publish(published, 12)
    opened = open_weights(ref)
    assert ref.version == 12 and Path(ref.location).name == f"v-00000012-{ref.digest[:16]}"
    assert all(torch.equal(opened[name], t) and opened[name].dtype == t.dtype for name, t in published.items())
    assert [p.name for p in (tmp_path / "weights").iterdir()] == [Path(ref.location).name], (
        "nothing else is left behind"
    )


def test_the_newest_k_folders_are_kept(tmp_path: Path) -> None:
    store = FileStore(tmp_path, keep_last=2)
    refs = [store.publish(tensors(float(v)), v) for v in range(4)]
    for ref in refs[2:]:
        assert float(open_weights(ref)["a"][0, 0]) == ref.version
    with pytest.raises(QuintetError, match=r"missing \(version removed\?\)"):
        open_weights(refs[1])


def test_a_version_published_again_replaces_its_other_self(tmp_path: Path) -> None:
    store = FileStore(tmp_path, keep_last=2)
    first, second = store.publish(tensors(1.0), 1), store.publish(tensors(2.0), 2)
    again = store.publish(tensors(2.5), 2)
    assert store.publish(tensors(2.5), 2) == again
    assert float(open_weights(again)["a"][0, 0]) == 2.5 and float(open_weights(first)["a"][0, 0]) == 1.0
    with pytest.raises(QuintetError, match="missing"):
        open_weights(second)


@pytest.mark.parametrize("damage", ["flip", "cut", "manifest"])
def test_a_damaged_folder_is_detected(tmp_path: Path, damage: str) -> None:
    ref = FileStore(tmp_path).publish(tensors(3.0), 1)
    weights = Path(ref.location) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    if damage == "flip":
        data[-5] ^= 1
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(data[:-10])
    else:
        (Path(ref.location) / "manifest.json").write_text('{"version": 1, "dig')
    with pytest.raises(QuintetError, match="damaged"):
        open_weights(ref)


def test_a_failed_publication_leaves_nothing_that_looks_like_a_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    ref = store.publish(tensors(1.0), 1)

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quintet.weights.file.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        store.publish(tensors(2.0), 2)
    assert [p.name for p in tmp_path.iterdir()] == [Path(ref.location).name]


def test_what_a_dead_process_left_unfinished_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".v-00000007-aa.bb").mkdir()
    ref = FileStore(tmp_path).publish(tensors(1.0), 1)
    assert [p.name for p in tmp_path.iterdir()] == [Path(ref.location).name]


def test_a_run_that_goes_back_drops_the_versions_it_left_behind(tmp_path: Path) -> None:
    store = FileStore(tmp_path, keep_last=3)
    refs = [store.publish(tensors(float(v)), v) for v in range(4)]
    again = store.publish(tensors(9.0), 2)
    assert {p.name for p in tmp_path.iterdir()} == {Path(r.location).name for r in (refs[1], again)}


def test_a_weights_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(QuintetError, match=r"cannot create the weights folder .*taken/w"):
        FileStore(tmp_path / "taken" / "w")
