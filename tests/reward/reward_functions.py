"""User reward functions as a recipe would name them: `tests/reward/reward_functions.py:NAME`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def trl_length(completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(c)) for c in completions]


def trl_columns(
    prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], solution: list[str], level: list[int]
) -> list[float]:
    """Encodes everything it was given, so that a test can check it."""
    assert len(prompts) == len(completions) == len(completion_ids)
    return [
        float(c[0]["content"] == s and c[0]["role"] == "assistant" and p[-1]["content"] == "q?") + lev + len(ids) / 10
        for p, c, ids, s, lev in zip(prompts, completions, completion_ids, solution, level, strict=True)
    ]


async def trl_async(completions: list[str], answer: list[str], **kwargs: Any) -> list[float | None]:
    await asyncio.sleep(0.01)
    return [None if c == "" else float(c == a) for c, a in zip(completions, answer, strict=True)]


def verl_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    return {"score": float(solution_str == ground_truth), "source": data_source, "index": extra_info["index"]}


def verl_float(solution_str: str, ground_truth: str, bonus: float = 0.0) -> float:
    return float(solution_str == ground_truth) + bonus


def three_values(completions: list[str], **kwargs: Any) -> list[float]:
    return [1.0, 1.0, 1.0]


def bare_float(completions: list[str], **kwargs: Any) -> float:
    return 1.0


def raises(completions: list[str], **kwargs: Any) -> list[float]:
    raise ZeroDivisionError("no such luck")


def exits(solution_str: str, ground_truth: str) -> float:
    sys.exit(0)


def echo(completions: list[str], **kwargs: Any) -> list[float | None]:
    """`nan`, `inf`, numbers, or an empty completion for None."""
    return [float(c) if c else None for c in completions]


def dies_on_crash(completions: list[str], **kwargs: Any) -> list[float]:
    if "crash" in completions:
        os._exit(7)
    return [1.0] * len(completions)


def hangs_on_hang(completions: list[str], **kwargs: Any) -> list[float]:
    if "hang" in completions:
        time.sleep(1000)
    return [1.0] * len(completions)


def verl_hang(solution_str: str, ground_truth: str) -> float:
    """Hangs inside one C call that never gives the interpreter's lock back, with a child process of its own."""
    if solution_str == "hang":
        with open(ground_truth, "w") as file:
            file.write(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid))
        9**9**9**9
    return 1.0


def waits_for_peers(solution_str: str, ground_truth: str) -> float:
    """1 once all four calls have begun and somebody else has written `go`."""
    folder = Path(ground_truth)
    (folder / solution_str).touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    return 1.0


def positional(text: str, gold: str) -> float:
    return 1.0


def imported_modules(solution_str: str, ground_truth: str) -> float:
    return float("torch" in sys.modules)


def verl_sleeps(solution_str: str, ground_truth: str) -> float:
    if solution_str == "sleep":
        time.sleep(1000)
    return 1.0


def verl_computes(solution_str: str, ground_truth: str) -> float:
    """A quarter of a second of processor time; leaves its process id as a file."""
    (Path(ground_truth) / str(os.getpid())).touch()
    end = time.process_time() + 0.25
    while time.process_time() < end:
        pass
    return 1.0


def waits_for_others(solution_str: str, ground_truth: str) -> float:
    """`slow` waits until the seven others have been here, and a while longer."""
    folder = Path(ground_truth)
    if solution_str != "slow":
        (folder / solution_str).touch()
        return 1.0
    while len(list(folder.iterdir())) < 7:
        time.sleep(0.01)
    time.sleep(0.3)
    return 1.0


def dies_once(solution_str: str, ground_truth: str) -> float:
    """Ends its worker at the first call, or always."""
    tried = Path(ground_truth).exists()
    with open(ground_truth, "a") as file:
        file.write("x")
    if not tried or solution_str == "always":
        os._exit(9)
    return 1.0


def counts_and_fails(solution_str: str, ground_truth: str) -> float:
    with open(ground_truth, "a") as file:
        file.write("x")
    return float("nan")
