"""One name for a set of weights: sha256 over sorted names, dtypes, shapes and bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Hexadecimal sha256. Equal for equal names, dtypes, shapes and bits, whatever the order, device or strides."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data)
    return sha.hexdigest()
