"""What runs inside a pool worker: load the functions, then answer one call after the other.

Started as a bare interpreter (not by `multiprocessing`, which would run the user's main script again), with
two inherited descriptors: the connection, and a lifeline that closes when the parent dies.
Imports neither torch nor pydantic.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from multiprocessing.connection import Connection

import msgspec

from quintet.reward.calling import GradingFunction, Signature
from quintet.reward.errors import FunctionFailed
from quintet.reward.loading import FunctionSource
from quintet.reward.sample import Sample, Verdict
from quintet.types import QuintetError


class Ready(msgspec.Struct, frozen=True):
    """The signatures found, in the order of the sources; or why a function did not load."""

    signatures: list[Signature] = []
    refused: str | None = None


class Call(msgspec.Struct, frozen=True):
    function: int
    samples: list[Sample]


class Reply(msgspec.Struct, frozen=True):
    """`failed` says why there are no verdicts. `seconds`: how long the function took."""

    verdicts: list[Verdict] = []
    failed: FunctionFailed | None = None
    seconds: float = 0.0


def main(connection_fd: int, lifeline_fd: int) -> None:
    """Serve until the parent closes the connection."""
    _die_with_parent(lifeline_fd)
    connection = Connection(connection_fd)
    sources: list[FunctionSource] = connection.recv()
    try:
        functions = [source.load() for source in sources]
    except QuintetError as error:
        connection.send(Ready(refused=str(error)))
        return
    connection.send(Ready([function.signature for function in functions]))
    while True:
        try:
            call: Call = connection.recv()
        except EOFError:
            return
        connection.send(answer(functions[call.function], call.samples))


def answer(function: GradingFunction, samples: list[Sample]) -> Reply:
    """One call, its failure as data, without the traceback (which may hold what cannot be pickled)."""
    start = time.perf_counter()
    try:
        verdicts = function(samples)
    except FunctionFailed as error:
        error.__cause__ = error.__context__ = None
        return Reply(failed=error.with_traceback(None), seconds=time.perf_counter() - start)
    return Reply(verdicts, seconds=time.perf_counter() - start)


def _die_with_parent(lifeline_fd: int) -> None:
    """Ask the kernel for SIGIO, whose default action is to end the process, when the parent's end closes.

    A watching thread would not do: code that holds the interpreter's lock (a huge power) would keep it from running.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
