"""The engine's kernels, loaded."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from quintet.models.native.compile import loaded
from quintet.models.native.unit import Unit

SOURCES = tuple(Path(__file__).parent / name for name in ("kernels.cpp", "model.h", "attention.h", "sampler.h"))


class Library:
    """The loaded kernels and what they can use on this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.c = ctypes.CDLL(str(path))
        self.c.quintet_open.restype = ctypes.c_void_p
        self.c.quintet_open.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.c.quintet_close.argtypes = [ctypes.c_void_p]
        self.c.quintet_load.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 3, ctypes.c_void_p, ctypes.c_int]
        self.c.quintet_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self.c.quintet_sample.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 3, *[ctypes.c_void_p] * 3]
        self.c.quintet_clear_pages.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        for function in (self.c.quintet_read_pages, self.c.quintet_write_pages):
            function.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_int, ctypes.c_void_p]
        for function in (self.c.quintet_weight_bytes, self.c.quintet_page_bytes):
            function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_void_p]
        self.c.quintet_products.restype = ctypes.c_double
        self.c.quintet_products.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self.c.quintet_read.restype = ctypes.c_double
        self.c.quintet_read.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
        self.level = int(self.c.quintet_level())
        self.unit = Unit(self.c.quintet_unit())
        self.page = int(self.c.quintet_page())

    @property
    def bf16(self) -> bool:
        return self.level >= 3

    def has(self, unit: Unit) -> bool:
        """Whether bf16 products can run on it here."""
        return bool(self.c.quintet_has_unit(int(unit)))

    @property
    def float32_unit(self) -> str:
        """The instructions that float32 products run on."""
        return "AVX-512" if self.level >= 2 else "AVX2"

    def sample(self, logits: np.ndarray, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One token per row of float32 logits [rows, vocabulary], as in a step: int32 ids, float32 log-probabilities.

        Raises MemoryError.
        """
        rows, vocabulary = logits.shape
        padded = np.pad(logits, ((0, 0), (0, 32)))
        ids, logprobs = np.empty(rows, dtype=np.int32), np.empty(rows, dtype=np.float32)
        arrays = (draws.ctypes.data, ids.ctypes.data, logprobs.ctypes.data)
        if not self.c.quintet_sample(padded.ctypes.data, rows, vocabulary + 32, vocabulary, *arrays):
            raise MemoryError(f"no memory to sample from {vocabulary} logits")
        return ids, logprobs


def load_library(folder: Path | None = None) -> Library:
    """Build if need be, then load. Raises NativeUnavailable with the reason."""
    return loaded(Library, "quintet", SOURCES, folder)
