"""The trainer's kernels, loaded; they run on torch's own threads."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quintet.models.native.compile import NativeUnavailable, loaded
from quintet.models.native.unit import Unit
from quintet.train.config import KernelChoice
from quintet.types import QuintetError

_log = logging.getLogger(__name__)

SOURCES = tuple(
    Path(__file__).parent / name for name in ("kernels.cpp", "segments.h", "adapters.h", "rows.h", "team.h")
)

_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class CHeads(ctypes.Structure):
    _fields_ = [("queries", ctypes.c_int32), ("keys", ctypes.c_int32), ("size", ctypes.c_int32), ("scale", _F)]


class CAdapter(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("down", "up", "grad_down", "grad_up")),
        *((name, ctypes.c_int32) for name in ("rank", "first", "outputs")),
        ("scale", _F),
    ]


class _Team(ctypes.Structure):
    _fields_ = [("parallel", _P), ("threads", _I)]


_SIGNATURES: dict[str, list[Any]] = {
    "norm": [_I, _I, _P, _P, _P, _P, _F, _P, _P],
    "norm_again": [_I, _I, _P, _P, _P, _P],
    "norm_backward": [_I, _I, _P, _P, _P, _P, _P, _P, _P],
    "add": [ctypes.c_int64, _P, _P, _P],
    "swiglu": [_I, _I, _P, _P],
    "swiglu_backward": [_I, _I, _P, _P, _P],
    "rotate": [_I, _I, _I, _I, _P, _P, _P, _F],
    "head_statistics": [_I, _I, _P, _F, _P, _P, _P, _P],
    "head_gradient": [_I, _I, _P, _F, _P, _P, _P, _P, _P],
    "adapters_backward": [_I, _I, _I, _P, _P, ctypes.POINTER(CAdapter), _I],
    "merge": [_I, _I, _P, ctypes.POINTER(CAdapter), _I, _P],
    "attention": [_I, CHeads, _P, _P, _P, _I, _P, _P],
    "attention_backward": [_I, CHeads, _P, _P, _P, _I, _P, _I, _P, _P, _P, _P, _P],
}


_LOW = {torch.float32: 0, torch.bfloat16: 1}


class Library:
    """`call(name, dtype, ...)` runs `quintet_<name>` on numbers of that dtype; tensors are passed as they are."""

    def __init__(self, path: Path) -> None:
        c = ctypes.CDLL(str(path))
        self._functions = {name: getattr(c, f"quintet_{name}") for name in _SIGNATURES}
        for name, function in self._functions.items():
            function.restype, function.argtypes = None, [_Team, _I, *_SIGNATURES[name]]
        self._parallel = _torch_parallel()
        self._low = bool(c.quintet_low())
        self.unit = Unit(c.quintet_unit())
        self.parts = int(c.quintet_parts())

    def computes(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32 or (dtype == torch.bfloat16 and self._low)

    def call(self, name: str, dtype: torch.dtype, *arguments: object) -> None:
        team = _Team(self._parallel, torch.get_num_threads())
        plain = [x.data_ptr() if isinstance(x, Tensor) else x for x in arguments]
        self._functions[name](team, _LOW[dtype], *plain)


def _torch_parallel() -> int | None:
    """Address of the `GOMP_parallel` that torch's loops run through (Intel's OpenMP has it too); None: one thread."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, _P).value
    except (OSError, AttributeError):
        return None


@functools.cache
def load_library() -> Library:
    """Built if need be, once per process. Raises NativeUnavailable with the reason."""
    return loaded(Library, "trainer", SOURCES)


def choose_library(choice: KernelChoice, dtype: torch.dtype) -> Library | None:
    """None: plain torch, as `choice` says, or as there is no other way (then the reason is logged).

    Raises QuintetError where `native` is asked for and impossible.
    """
    if choice == "torch":
        return None
    try:
        library = load_library()
        if not library.computes(dtype):
            raise NativeUnavailable(f"this processor has no {str(dtype).removeprefix('torch.')} products")
    except NativeUnavailable as reason:
        if choice == "native":
            raise QuintetError(
                f"train.kernels: native cannot run here: {reason}.\nSet train.kernels: auto or torch."
            ) from reason
        _log.warning("train worker: the slower torch path runs, because %s", reason)
        return None
    return library
