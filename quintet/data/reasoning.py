"""Any reasoning-gym task by name, and its own grader.

Each row keeps its entry as a Python literal in the column `reasoning_gym_entry`: JSON would lose the tuples, sets and
integer keys that some graders compare with. Making the entry anew from its index is no way either:
several generators depend on the process's string hashing.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from typing import Any

from quintet.data.rows import Row, as_rows
from quintet.types import QuintetError

DEFAULT_SIZE = 500


def reasoning_gym_rows(name: str, args: Mapping[str, Any], seed: int) -> list[Row]:
    """Rows with `prompt`, `answer`, `metadata` (the entry's), `reasoning_gym` (the name) and `reasoning_gym_entry`.

    `args` go to the task's config class; `size` is 500 and `seed` the run's unless given. `answer` is
    "" where any of several answers is right: only `score_answer` can grade those.
    Raises QuintetError when the package is missing, or the name or an argument is wrong.
    """
    dataset = _create(name, {"size": DEFAULT_SIZE, "seed": seed} | dict(args))
    return as_rows(f"reasoning_gym:{name}", (_record(name, entry) for entry in dataset))


def score_answer(metadata: Mapping[str, Any], answer: str | None) -> float:
    """reasoning-gym's own score, 0 to 1, of an extracted `answer` to the prompt whose `Prompt.metadata` this is.

    Raises QuintetError when the prompt is not of a reasoning-gym task.
    """
    if "reasoning_gym" not in metadata:
        raise QuintetError("The reasoning_gym grader needs prompts of data.source reasoning_gym:NAME.")
    dataset = _create(metadata["reasoning_gym"], {"size": 1, "seed": 0})
    return float(dataset.score_answer(answer, entry=ast.literal_eval(metadata["reasoning_gym_entry"])))


def _create(name: str, args: dict[str, Any]) -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise QuintetError(
            f"data.source: reasoning_gym:{name} needs reasoning-gym.\n"
            "Install with: pip install 'quintet[reasoning-gym]'"
        )
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.0)
        raise QuintetError(f"data.source: reasoning-gym has no task {name!r}; the nearest are {', '.join(near)}.")
    try:
        return reasoning_gym.create_dataset(name, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise QuintetError(f"data.args: reasoning_gym:{name} refuses {args}: {error}.") from error


def _record(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    plain = _plain(dict(entry))
    return {
        "prompt": plain["question"],
        "answer": "" if plain["answer"] is None else plain["answer"],
        "metadata": plain["metadata"],
        "reasoning_gym": name,
        "reasoning_gym_entry": repr(plain),
    }


def _plain(value: Any) -> Any:
    """numpy scalars and arrays become Python numbers, strings and lists; containers keep their kind."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_plain(item) for item in value)
    if type(value).__module__ == "numpy":
        return value.tolist()
    return value
