"""A run folder as a reader sees it: each of its files may be missing, and the run may still go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from quintet.observe.doctor import Finding, diagnose
from quintet.observe.metrics import read_metrics
from quintet.observe.summary import read_summary
from quintet.types import QuintetError


@dataclass(frozen=True)
class Run:
    """`label` tells runs of one page apart; `rows` are the merged metrics of each step, ascending."""

    folder: Path
    label: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.config.get("name", self.folder.name))

    @property
    def steps_done(self) -> int:
        return int(self.rows[-1]["step"]) if self.rows else 0

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("finished"))


def read_run(folder: Path, label: str = "") -> Run:
    """Raises QuintetError when there is no such folder, it holds no run, or a file in it is damaged."""
    if not folder.is_dir():
        raise QuintetError(f"no run folder {folder}: give a folder that `quintet train` wrote, e.g. runs/first")
    metrics, summary, config = folder / "metrics.jsonl", folder / "summary.json", folder / "config.yaml"
    if not (metrics.exists() or config.exists()):
        raise QuintetError(f"{folder} holds no run (neither config.yaml nor metrics.jsonl)")
    rows = read_metrics(metrics) if metrics.exists() else []
    config_text = config.read_text(encoding="utf-8", errors="replace") if config.exists() else ""
    tree = _config_tree(config, config_text)
    return Run(
        folder=folder,
        label=label or folder.resolve().name,
        rows=rows,
        summary=read_summary(folder) if summary.exists() else {},
        config=tree,
        config_text=config_text,
        findings=diagnose(rows, tree),
    )


def _config_tree(path: Path, text: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise QuintetError(f"{path} is damaged: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise QuintetError(f"{path} is no recipe: it holds a {type(tree).__name__}")
    return tree


def read_runs(folders: list[Path]) -> list[Run]:
    """Runs with the shortest ends of their paths that tell them apart. Raises QuintetError for one given twice."""
    paths = [f.resolve() for f in folders]
    twice = next((f for f, p in zip(folders, paths, strict=True) if paths.count(p) > 1), None)
    if twice is not None:
        raise QuintetError(f"the run {twice} is given twice")
    depth = 1
    while len({p.parts[-depth:] for p in paths}) < len(paths):
        depth += 1
    return [read_run(f, "/".join(p.parts[-depth:])) for f, p in zip(folders, paths, strict=True)]
