"""The data of an environment of the verifiers package, read by the interpreter that has the package."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quintet.data import verifiers_program
from quintet.data.rows import Row, as_rows
from quintet.types import QuintetError

SOURCE = "verifiers:"


def verifiers_rows(env_id: str, args: Mapping[str, Any], split: str) -> list[Row]:
    """Rows with `prompt` (messages), `answer` and `verifiers`, the whole row as the environment wants it back. `split`
    train: its data set; else its data set for evaluation.

    `args` as `verifiers_command` takes them. Raises QuintetError when the package, the environment or its data are not
    to be had.
    """
    check_verifiers(args, "data.args")
    which = "train" if split == "train" else "eval"
    done = subprocess.run([*verifiers_command(env_id, args), "rows", which], capture_output=True, text=True)
    first, *lines = [json.loads(line) for line in done.stdout.splitlines()] or [{}]
    refused = [line["error"] for line in (first, *lines) if "error" in line]
    if refused or "ready" not in first or done.returncode:
        raise QuintetError(f"data.source: {SOURCE}{env_id}: {(refused or [done.stderr.strip()[-500:]])[0]}")
    return as_rows(f"{SOURCE}{env_id}", (_record(env_id, line["row"]) for line in lines))


def check_verifiers(args: Mapping[str, Any], option: str) -> None:
    """Raises QuintetError when there is no interpreter with the package, as far as that shows without running it."""
    python = args.get("python")
    if python is None and importlib.util.find_spec("verifiers") is None:
        raise QuintetError(
            f"{option}: the package verifiers is not installed in {sys.executable}.\n"
            f"Make it an environment of its own and name its interpreter with {option}.python; see docs/agents.md."
        )
    if python is not None and not Path(python).is_file():
        raise QuintetError(f"{option}.python: there is no file {python!r}.")


def verifiers_command(env_id: str, args: Mapping[str, Any]) -> list[str]:
    """The program of `verifiers_program.py`, without its mode. `args`: `python` is the interpreter (none: this one),
    the others go to the environment's `load_environment`."""
    own = {name: value for name, value in args.items() if name != "python"}
    # -P: the modules beside the program are none of the environment's
    return [args.get("python") or sys.executable, "-P", verifiers_program.__file__, env_id, json.dumps(own)]


def _record(env_id: str, row: dict[str, Any]) -> dict[str, Any]:
    prompt = row["prompt"]
    if not isinstance(prompt, list):
        raise QuintetError(
            f"data.source: {SOURCE}{env_id} has prompts in plain text; the gateway serves chat messages only."
        )
    # a data set's columns have every field that any of its messages has
    messages = [{name: value for name, value in message.items() if value is not None} for message in prompt]
    return {"prompt": messages, "answer": row.get("answer"), "verifiers": row | {"prompt": messages}}
