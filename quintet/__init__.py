"""quintet: RL post-training for language models in five replaceable modules.

Importing the package is cheap: nothing heavy (torch, transformers) loads until a run is built.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_API = {
    "train": "quintet.api",
    "sft": "quintet.api",
    "evaluate": "quintet.api",
    "generate": "quintet.api",
    "load_config": "quintet.config",
}

__all__ = ["__version__", *_API]


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(_API[name]), name)
    raise AttributeError(f"module 'quintet' has no attribute {name!r}")
