"""`summary.json`: what a run was and what came of it, for machines."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quintet.files import write_whole
from quintet.types import QuintetError

VERSIONED = ("quintet", "torch", "transformers", "tokenizers", "safetensors", "peft", "numpy")


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB, macOS bytes


def library_versions() -> dict[str, str]:
    """Python and the libraries that decide what a run computes; those not installed are left out."""
    found = {"python": platform.python_version()}
    for name in VERSIONED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # an extra that is not installed, or quintet itself run from a source tree
    return found


def machine() -> dict[str, Any]:
    """Where a run took place: system, processor, cores that this process may use."""
    return {"system": platform.platform(terse=True), "processor": _processor(), "cores": _cores()}


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _processor() -> str:
    """The model's name where Linux tells it, else what `platform` knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def build_summary(
    *,
    recipe: str,
    seed: int,
    steps: int,
    seconds: float,
    evals: Mapping[str, float],
    config_digest: str,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The summary of a run so far.

    `steps`: controller steps done; `seconds`: wall time over all sittings; `evals`: `eval/n`,
    `eval/accuracy_untrained`, `eval/accuracy_before` (after the warm start, before RL),
    `eval/accuracy_after`, as far as they are known.
    """
    return {
        "recipe": recipe,
        "seed": seed,
        "steps": steps,
        "seconds": round(seconds, 3),
        **evals,
        **(extra or {}),
        "peak_rss_bytes": peak_rss_bytes(),
        "config_digest": config_digest,
        "versions": library_versions(),
    }


def write_summary(folder: str | Path, summary: Mapping[str, Any]) -> Path:
    """Write `<folder>/summary.json`, whole or not at all."""
    return write_whole(Path(folder) / "summary.json", json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def read_summary(folder: str | Path) -> dict[str, Any]:
    """The summary of a run folder. Raises FileNotFoundError where there is none yet, QuintetError for a damaged one."""
    path = Path(folder) / "summary.json"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise QuintetError(f"{path} cannot be read ({error}): delete it, a resumed run writes it anew") from None
    if not isinstance(summary, dict):
        raise QuintetError(f"{path} holds no summary of a run: delete it, a resumed run writes it anew")
    return summary
