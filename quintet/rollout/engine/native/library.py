"""Compile the kernels once per machine, compiler and source, and load them.

The shared library is kept in quintet's cache folder under a name that hashes all three, written beside its place and
renamed, under a file lock that dies with its owner. Plain C functions called through ctypes: no Python or torch
headers are needed, and a change of torch needs no new build.

Left out on purpose: anything but Linux on x86-64 with AVX2; there the torch path serves.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from quintet.models.smollm2 import cache_dir

SOURCES = ("kernels.cpp", "model.h", "attention.h", "sampler.h", "gemm.h", "pool.h", "simd.h")
FLAGS = ("-O2", "-march=native", "-std=c++17", "-pthread", "-fPIC", "-shared")
BUILD_S = 600.0  # a build takes seconds; on a machine with far more to do than it can, minutes
LEVELS = {1: "AVX2", 2: "AVX-512", 3: "AVX-512 bf16", 4: "AMX bf16"}


class NativeUnavailable(Exception):
    """Why the kernels cannot run here, in words for the log."""


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
        self.amx = bool(self.c.quintet_request_amx())
        self.page = int(self.c.quintet_page())

    @property
    def bf16(self) -> bool:
        return self.level >= 3

    def path_name(self, bf16: bool) -> str:
        """The instructions that matrix products run on, in words."""
        if not bf16:
            return LEVELS[min(self.level, 2)]
        return LEVELS[4 if self.amx else 3]

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
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NativeUnavailable(
            f"the kernels are for Linux on x86-64, this is {platform.system()}/{platform.machine()}"
        )
    cpu = _cpu_flags()
    if not {"avx2", "fma"} <= set(cpu.split()):
        raise NativeUnavailable("this processor has no AVX2")
    compiler = _compiler()
    folder = cache_dir() / "kernels" if folder is None else folder
    path = folder / f"quintet-{_digest(compiler, cpu)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _build(compiler, path)
        return Library(path)
    except OSError as error:
        raise NativeUnavailable(f"the kernels cannot be kept in or loaded from {folder}: {error}") from error


def _cpu_flags() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return " ".join(sorted(line.partition(":")[2].split()))
    return ""


def _compiler() -> str:
    name = os.environ.get("CXX") or "g++"
    found = shutil.which(name)
    if found is None:
        raise NativeUnavailable(f"there is no C++ compiler {name!r} on PATH")
    return found


def _digest(compiler: str, cpu: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    digest = hashlib.sha256("\0".join([version, cpu, *FLAGS]).encode())
    for name in SOURCES:
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:20]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process builds, the others wait for it. The system drops the lock when its owner dies."""
    deadline = time.monotonic() + BUILD_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise NativeUnavailable(f"another process has held {path} for {BUILD_S:.0f} s") from error
                time.sleep(0.1)
        yield


def _build(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        target = Path(beside) / path.name
        source = Path(__file__).parent / SOURCES[0]
        try:
            done = subprocess.run(
                [compiler, *FLAGS, str(source), "-o", str(target)],
                capture_output=True,
                text=True,
                timeout=BUILD_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailable(f"{compiler} was not done after {BUILD_S:.0f} s") from error
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise NativeUnavailable(f"{compiler} failed: {first}")
        os.replace(target, path)
