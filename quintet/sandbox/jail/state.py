"""A session's state as bytes and back: variables, functions, classes, the scratch folder.

Variables are pickled by cloudpickle, functions and classes of the session by value. Both directions run inside a fork,
never in the process that keeps the bytes. Not captured: what has no pickle (open files, sockets, threads, generators,
coroutines, locks), changes to imported modules (but for `random`'s state), signal handlers, and the permissions of
files. The names left out are in the snapshot, each with its reason.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import sys
import types
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from .data import decode, encode
from .isolation import SNAPSHOT_BYTES

FORMAT = 1


def capture(namespace: dict[str, Any], cells: int) -> bytes:
    """Raises NotData when it is larger than SNAPSHOT_BYTES."""
    variables, missing = _pickle_variables(namespace)
    parts = {
        "format": FORMAT,
        "python": "{}.{}".format(*sys.version_info),
        "variables": variables,
        "missing": missing,
        "random": pickle.dumps(random.getstate()),
        "files": _read_folder(),
        "cells": cells,
    }
    return encode(parts, SNAPSHOT_BYTES)


def restore(namespace: dict[str, Any], snapshot: bytes) -> int:
    """The number of cells so far. Raises whatever unpickling raises."""
    parts = decode(snapshot, trusted=True)
    write_files(parts["files"])
    random.setstate(pickle.loads(parts["random"]))
    namespace.update(_Unpickler(io.BytesIO(parts["variables"]), namespace).load())
    cells: int = parts["cells"]
    return cells


def write_files(files: dict[str, bytes | None]) -> None:
    """`files`: path within the scratch folder -> content, or None for a folder."""
    for name, content in files.items():
        path = Path(name)
        (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
        if content is not None:
            path.write_bytes(content)


def _read_folder() -> dict[str, bytes | None]:
    """Regular files and folders; links and pipes are left out."""
    found: dict[str, bytes | None] = {}
    for folder, folders, names in os.walk("."):
        found.update({str(Path(folder, name)): None for name in folders})
        for path in (Path(folder, name) for name in names):
            if path.is_file() and not path.is_symlink():
                found[str(path)] = path.read_bytes()
    return found


class _Pickler(cloudpickle.Pickler):
    """Functions of the session keep the session's namespace as their globals, which is written as a reference."""

    def __init__(self, file: io.BytesIO, namespace: dict[str, Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._namespace = namespace
        self._stand_in = self.globals_ref[id(namespace)] = {"session": True}

    def persistent_id(self, value: Any) -> str | None:
        return "namespace" if value is self._stand_in or value is self._namespace else None

    def reducer_override(self, value: Any) -> Any:
        reduced = super().reducer_override(value)
        if type(value) is types.FunctionType and value.__globals__ is self._namespace and reduced is not NotImplemented:
            reduced[2][1]["__globals__"] = {}  # they are variables in their own right
        return reduced


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, namespace: dict[str, Any]) -> None:
        super().__init__(file)
        self._namespace = namespace

    def persistent_load(self, name: str) -> dict[str, Any]:
        return self._namespace


def _pickle_variables(namespace: dict[str, Any]) -> tuple[bytes, dict[str, str]]:
    """All together, so that what two variables share stays shared; without those that cannot be pickled alone."""
    variables = {name: value for name, value in namespace.items() if not (name[:2] == name[-2:] == "__")}
    try:
        return _dumps(variables, namespace), {}
    except Exception:  # any class may refuse in its own way
        missing = _refused(variables, namespace)
    return _dumps({name: value for name, value in variables.items() if name not in missing}, namespace), missing


def _refused(variables: dict[str, Any], namespace: dict[str, Any]) -> dict[str, str]:
    missing = {}
    for name, value in variables.items():
        try:
            _dumps(value, namespace)
        except Exception as error:
            missing[name] = f"{type(error).__name__}: {error}"[:200]
    return missing


def _dumps(value: Any, namespace: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, namespace).dump(value)
    return file.getvalue()
