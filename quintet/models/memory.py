"""Memory in large pages."""

from __future__ import annotations

import mmap
import sys

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_MAP_NORESERVE = 0x4000  # of Linux on x86-64 and arm64; Python names it from 3.13 on


def huge_pages(n_bytes: int) -> Tensor:
    """At least `n_bytes` of zeros as uint8, in pages of 2 MiB where Linux gives them, which are taken as they are first
    touched. Raises OSError when the address space does not hold them."""
    n_bytes = max(1, -(-n_bytes // _HUGE_PAGE)) * _HUGE_PAGE
    if sys.platform != "linux":
        return torch.frombuffer(mmap.mmap(-1, n_bytes), dtype=torch.uint8)
    # private: memory shared with child processes, Python's default, is left in small pages by most systems
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, n_bytes, flags=flags)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
