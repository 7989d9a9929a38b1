"""Compile C++ kernels once per machine, compiler and source.

The shared library is kept in quintet's cache folder under a name that hashes all three, written beside its place and
renamed, under a file lock that dies with its owner. Plain C functions called through ctypes: no Python or torch
headers are needed, and a change of torch needs no new build.

Left out on purpose: anything but Linux on x86-64 with AVX2; there the torch paths serve.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from quintet.models.smollm2 import cache_dir

_log = logging.getLogger(__name__)
T = TypeVar("T")

SHARED = Path(__file__).parent  # headers that every source may include
FLAGS = ("-O2", "-march=native", "-std=c++17", "-pthread", "-fPIC", "-shared")
BUILD_S = 600.0  # a build takes seconds; on a machine with far more to do than it can, minutes


class NativeUnavailable(Exception):
    """Why the kernels cannot run here, in words for the log."""


def loaded(make: Callable[[Path], T], name: str, sources: Sequence[Path], folder: Path | None = None) -> T:
    """`make` of the shared library of `sources[0]`, which includes the others; built if need be.

    Raises NativeUnavailable with the reason.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NativeUnavailable(
            f"the kernels are for Linux on x86-64, this is {platform.system()}/{platform.machine()}"
        )
    cpu = _cpu_flags()
    if not {"avx2", "fma"} <= set(cpu.split()):
        raise NativeUnavailable("this processor has no AVX2")
    compiler = _compiler()
    folder = cache_dir() / "kernels" if folder is None else folder
    path = folder / f"{name}-{_digest(compiler, cpu, sources)}.so"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _log.info("compiling kernels for this machine, once (some seconds): %s", path)
                _build(compiler, sources[0], path)
        return make(path)
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


def _digest(compiler: str, cpu: str, sources: Sequence[Path]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    digest = hashlib.sha256("\0".join([version, cpu, *FLAGS]).encode())
    for source in [*sources, *sorted(SHARED.glob("*.h"))]:
        digest.update(source.read_bytes())
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


def _build(compiler: str, source: Path, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as beside:
        target = Path(beside) / path.name
        try:
            done = subprocess.run(
                [compiler, *FLAGS, f"-I{SHARED}", str(source), "-o", str(target)],
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
