"""An environment of the verifiers package, as its users write them; runs where that package is installed."""

import os
import time

import verifiers as vf
from datasets import Dataset


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second

    Returns:
        their sum
    """
    return a + b


def slow(a: int, b: int) -> int:
    """Add two numbers, slowly. A tool that blocks, as many do."""
    time.sleep(30)
    return a + b


def deadly(a: int, b: int) -> int:
    """Takes the process with it."""
    os._exit(3)


def answered(completion) -> float:
    """How many of the tool's answers were right."""
    return float(sum(m.role == "tool" and m.content == "3" for m in completion))


def length(completion) -> float:
    return len(completion[-1].content or "") / 100


def load_environment(kind: str = "tools", size: int = 6, tool: str = "add") -> vf.Environment:
    print("noise on the standard output")
    rows = [{"question": f"undo {i}", "answer": str(i), "info": {"number": i}} for i in range(size)]
    data = Dataset.from_list(rows)
    if kind == "single":
        return vf.SingleTurnEnv(dataset=data, system_prompt="be short", rubric=vf.Rubric(funcs=[length]))
    if kind == "broken":
        raise ValueError("no such map")
    chosen = {"add": add, "slow": slow, "deadly": deadly}[tool]
    chosen.__name__ = "add"
    rubric = vf.Rubric(funcs=[answered], weights=[0.5])
    return vf.ToolEnv(dataset=data, tools=[chosen], max_turns=3, rubric=rubric)
