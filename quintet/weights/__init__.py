"""Publishing a weight version and loading it: in memory, or as a folder of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.types import WeightRef

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["open_weights"]


def open_weights(ref: WeightRef) -> Mapping[str, Tensor]:
    """The tensors of a published version, by name; read-only by agreement (memory references share storage).

    Raises `QuintetError` when the version is gone, incomplete or does not match its digest.
    """
    if ref.location.startswith("memory:"):
        from quintet.weights.memory import open_memory

        return open_memory(ref)
    from quintet.weights.file import open_folder

    return open_folder(Path(ref.location), ref)
