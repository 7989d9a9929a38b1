"""Small files that a reader sees whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | Path, text: str) -> Path:
    """Write beside the target, then rename over it (atomic on one file system). Returns the path."""
    target = Path(path)
    beside = target.with_name(target.name + ".tmp")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, target)
    return target
