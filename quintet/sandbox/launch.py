"""The command line of a warm interpreter, shared by the back ends that have one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from quintet.sandbox.config import SandboxConfig
from quintet.types import QuintetError

# What programs of tests and competitions import most: loaded once, free for every fork
PRELOAD = (
    "array", "bisect", "calendar", "cmath", "collections.abc", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "json", "math", "operator", "queue",
    "random", "re", "statistics", "string", "textwrap", "time", "typing",
)  # fmt: skip
# Sets of strings come out in the same order each time: the same program, the same verdict
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}

_BOOT = """
import json, sys
settings = json.loads(sys.argv.pop())
sys.path[:0] = settings["own_path"]
from jail.zygote import main
main(settings)
"""


def jail_folder() -> Path:
    return Path(__file__).parent / "jail"


def cloudpickle_folder() -> Path:
    return Path(cloudpickle.__file__).parent


def package_folders(config: SandboxConfig) -> list[Path]:
    return [Path(folder).resolve() for folder in config.python_path]


def interpreter() -> Path:
    """The interpreter itself, not a virtual environment's link to it."""
    return Path(os.path.realpath(sys.executable))


def command(
    config: SandboxConfig, control: int, own_path: list[str], python_path: list[str], **settings: Any
) -> list[str]:
    """`own_path`: folders with `jail` and cloudpickle in them, `python_path`: those of `config`, both as the
    interpreter will see them."""
    whole = {
        "control": control,
        "preload": [*PRELOAD, *config.preload],
        "python_path": python_path,
        "own_path": own_path,
        **settings,
    }
    return [str(interpreter()), "-s", "-S", "-P", "-B", "-c", _BOOT, json.dumps(whole)]


def check_system(config: SandboxConfig) -> None:
    """Raises QuintetError where no warm interpreter can run."""
    if sys.platform != "linux":
        raise QuintetError(
            f"sandbox.backend: {config.backend} needs Linux, not {sys.platform}.\n"
            "Use backend: remote with the url of a sandbox service on a Linux machine."
        )
    for folder in config.python_path:
        if not Path(folder).is_dir():
            raise QuintetError(f"sandbox.python_path: {folder} is not a folder")
