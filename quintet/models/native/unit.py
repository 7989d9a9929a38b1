"""What bf16 products of the C++ kernels run on."""

from __future__ import annotations

from enum import IntEnum


class Unit(IntEnum):
    """As `enum Unit` in simd.h."""

    PAIRS = 0
    TILES = 1
    WIDE = 2
    HALVES = 3

    def __str__(self) -> str:
        return ("AVX-512 bf16", "AMX bf16", "AVX-512, bf16 widened", "AVX-512 fp16")[self]
