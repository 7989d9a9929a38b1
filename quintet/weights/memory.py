"""Weights published inside one process: a snapshot under a handle, only the newest kept.

The snapshot is whole before its reference exists, and it is never written again: the trainer's next
update touches other memory, and a reader that holds an old snapshot keeps it whole until it lets go.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from types import MappingProxyType
from weakref import WeakValueDictionary

from torch import Tensor

from quintet.types import QuintetError, WeightRef
from quintet.weights.digest import digest

# A `memory:` reference names a store of this process; the table finds it and keeps none alive.
_LIVE_STORES: WeakValueDictionary[str, MemoryStore] = WeakValueDictionary()


class MemoryStore:
    """Publishes snapshots of a model's tensors to readers of the same process. Thread-safe."""

    def __init__(self) -> None:
        self.key = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._newest: tuple[WeightRef, Mapping[str, Tensor]] | None = None
        _LIVE_STORES[self.key] = self

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> WeightRef:
        """Copy the tensors (dtype and device kept, shared storage stays shared) and make them the newest version."""
        snapshot = _snapshot(tensors)
        ref = WeightRef(version=version, location=f"memory:{self.key}", digest=digest(snapshot))
        with self._lock:
            self._newest = (ref, MappingProxyType(snapshot))
        return ref

    def open(self, ref: WeightRef) -> Mapping[str, Tensor]:
        """The snapshot of exactly this reference; raises `QuintetError` when a newer one has replaced it."""
        with self._lock:
            newest = self._newest
        if newest is None or newest[0] != ref:
            held = "none" if newest is None else f"{newest[0].version}"
            raise QuintetError(
                f"weight version {ref.version} is no longer in memory (held: {held})\n"
                "only the newest publication is kept: load each version before the next one is published"
            )
        return newest[1]


def open_memory(ref: WeightRef) -> Mapping[str, Tensor]:
    """Resolve a `memory:<key>` reference; raises `QuintetError` for a store that this process does not hold."""
    store = _LIVE_STORES.get(ref.location.removeprefix("memory:"))
    if store is None:
        raise QuintetError(
            f"weight reference {ref.location} belongs to another process or to a closed store\n"
            "publish to a folder (FileStore) to hand weights to another process"
        )
    return store.open(ref)


def _snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that never change again. Names of one tensor (tied weights) share one copy."""
    copies: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] = {}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        identity = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() == 0 or identity not in copies:
            copies[identity] = tensor.detach().clone()
        out[name] = copies[identity]
    return out
