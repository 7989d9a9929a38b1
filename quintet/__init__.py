"""quintet: RL post-training for language models in five replaceable modules.

Importing the package is cheap: nothing heavy (torch, transformers) loads until a run is built.
"""

import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# torch's tensors of 2 MiB and more in large pages, where Linux gives them on demand: products read packed weights a
# tenth faster, and new memory costs no page fault every 4 KiB. torch looks once, when it makes its first tensor.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

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
