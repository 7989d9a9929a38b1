"""Runs that die on purpose: a process that forks one child per run and kills it at a chosen call of a function.

Started by `test_durability.py`; reads one JSON request a line, answers with the child's exit code. The heavy
imports are paid once. A request: {"folder", "messages", "config", "at": [function, call, "before" | "after"] | null,
"act": what then happens}. `kill` is SIGKILL to itself, so that nothing is flushed, closed or told; `interrupt` is
Ctrl-C, `terminate` SIGTERM, `interrupt twice` two Ctrl-C in the middle of a computation that takes a minute more,
`fill disk` a file that takes all room left beside the run.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Runs:
    """The process that starts runs in children; `codes` are exit codes, -9 for SIGKILL."""

    def __init__(self, messages: Path) -> None:
        self._messages = messages
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.durability_runs"],
            cwd=Path(__file__).parents[1],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self, folder: Path, config: dict[str, Any], at: tuple[str, int, str] | None = None, act: str = "kill"
    ) -> int:
        request = {"folder": str(folder), "messages": str(self._messages), "config": config, "at": at, "act": act}
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def said(self) -> str:
        """Every message of the run before."""
        return self._messages.read_text()

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def low_digits(completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs within nearly every group: the share of characters among 0..4."""
    return [sum(c in "01234" for c in text) / 3 for text in completions]


def armed(target: str, call: int, when: str, act: Callable[[], None]) -> None:
    """Wrap `package.module:Class.method` (or `:function`) so that its `call`-th call triggers `act`."""
    module_name, _, qualified = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *path, name = qualified.split(".")
    for part in path:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    lock, calls = threading.Lock(), [0]

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with lock:
            calls[0] += 1
            mine = calls[0]
        if when == "before" and mine == call:
            act()
        result = original(*args, **kwargs)
        if when == "after" and mine == call:
            act()
        return result

    setattr(owner, name, wrapped)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(0.05)  # the main thread notices between two instructions of its own


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(0.05)


def interrupt_twice() -> None:
    interrupt()
    interrupt()
    time.sleep(60)


def fill_disk(folder: Path) -> None:
    with open(folder / "ballast", "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            with contextlib.suppress(OSError):
                while file.write(b"x" * size):
                    pass


def child(request: dict[str, Any]) -> int:
    """The run, as `quintet train` would do it. 130: ended by Ctrl-C."""
    import quintet
    from quintet.types import QuintetError

    acts: dict[str, Callable[[], None]] = {
        "kill": kill,
        "interrupt": interrupt,
        "terminate": terminate,
        "interrupt twice": interrupt_twice,
        "fill disk": functools.partial(fill_disk, Path(request["folder"]).parent),
    }
    if request["at"] is not None:
        target, call, when = request["at"]
        armed(target, call, when, acts[request["act"]])
    messages: list[str] = []

    def tell() -> None:
        Path(request["messages"]).write_text("\n".join(messages))

    def note(kind: str, payload: Any) -> None:
        if kind == "message":
            messages.append(payload["text"])

    try:
        quintet.train(
            request["config"],
            reward=low_digits,
            out=request["folder"],
            on_event=note,
            handle_signals=True,
            on_abort=tell,
        )
    except KeyboardInterrupt:
        return 130
    except QuintetError as error:
        messages.append(str(error))
        return 2
    finally:
        tell()
    return 0


def main() -> None:
    import torch

    import quintet.api
    import quintet.cluster.local  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                code = child(request)
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    main()
