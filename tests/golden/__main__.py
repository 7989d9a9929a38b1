"""`python -m tests.golden FOLDER`: exit code 1 when a case fails."""

from __future__ import annotations

import sys
from pathlib import Path

from .runner import run_folder, summary


def main(arguments: list[str]) -> int:
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python -m tests.golden FOLDER", file=sys.stderr)
        return 2
    results = run_folder(Path(arguments[0]))
    print(summary(results))
    return 1 if any(r.failed for r in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
