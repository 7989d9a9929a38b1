"""math-verify as a reward function, for a process of its own. See `second.py`, which starts that process."""

from __future__ import annotations

import logging
import resource

from math_verify import parse, verify

MEMORY_BYTES = 2 << 30


def compare(solution_str: str, ground_truth: str) -> float:
    """1.0 where math-verify holds the two to be equal. Bounds the memory of the process it runs in."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)  # it logs every text that it cannot parse
    sides = [parse(f"${text}$", parsing_timeout=None) for text in (ground_truth, solution_str)]
    return float(all(sides) and verify(*sides, timeout_seconds=None))
