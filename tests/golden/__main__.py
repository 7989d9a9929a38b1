"""`python -m tests.golden FOLDER [--table]`: exit code 1 when a case fails."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .runner import run_folder, summary, table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description="Run golden vectors against quintet.")
    parser.add_argument("folder", type=Path, help="a folder of *.json files, see tests/data/golden")
    parser.add_argument("--table", action="store_true", help="also print cases used and left out by file (markdown)")
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is no folder")
    results = run_folder(options.folder)
    if options.table:
        print(table(results) + "\n")
    print(summary(results))
    return 1 if any(r.failed for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
