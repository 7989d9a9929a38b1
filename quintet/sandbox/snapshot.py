"""What is in a snapshot, without running any of it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from quintet.sandbox.jail.data import decode
from quintet.types import QuintetError

FORMAT = 1  # of jail.state


@dataclass(frozen=True)
class SnapshotInfo:
    """`missing`: variable -> why it could not be captured. `files`: paths in the scratch folder -> bytes."""

    python: str
    missing: dict[str, str]
    files: dict[str, int]


def describe(snapshot: bytes) -> SnapshotInfo:
    """Raises QuintetError for bytes that are not a snapshot."""
    try:
        parts = decode(snapshot)
        if parts["format"] != FORMAT:
            raise QuintetError(f"a snapshot of another format than {FORMAT}, the only one understood")
        files = {str(name): len(content) for name, content in parts["files"].items() if content is not None}
        missing = {str(name): str(reason) for name, reason in parts["missing"].items()}
        return SnapshotInfo(str(parts["python"]), missing, files)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise QuintetError("these bytes are not a snapshot of a session") from None


def check_restorable(snapshot: bytes) -> None:
    """Raises QuintetError where it cannot be restored here: functions travel as byte code."""
    here = "{}.{}".format(*sys.version_info)
    there = describe(snapshot).python
    if there != here:
        raise QuintetError(f"the snapshot was taken with Python {there}, and this is {here}")
