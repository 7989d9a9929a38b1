"""What runs outside this process: a template that loads the functions and forks, and workers that answer calls.

The template is a bare interpreter (not one of `multiprocessing`'s, which would run the user's main script again) that
inherits two descriptors: a control socket, and a lifeline that closes when the parent dies. Each worker gets a
connection and a lifeline of its own. Imports neither torch nor pydantic.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

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


def template_command(control_fd: int, lifeline_fd: int) -> list[str]:
    return _command("template", control_fd, lifeline_fd)


def template(control_fd: int, lifeline_fd: int) -> None:
    """Load the functions named on standard input, then fork a worker for every `fork`, with two descriptors, and say
    for every `ended PID` how that worker ended (once; what it started ends then too), or a blank while it runs. Returns
    when the parent closes the socket."""
    _die_with_parent(lifeline_fd)
    serialized = sys.stdin.buffer.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    functions = _load(pickle.loads(serialized))
    gc.freeze()  # so that the workers' collections leave shared memory shared
    control = socket.socket(fileno=control_fd)
    while True:
        request, fds, _, _ = socket.recv_fds(control, 64, 2)
        if request == b"fork":
            pid = _fork(serialized, functions, fds, [control_fd, lifeline_fd])
            for fd in fds:
                os.close(fd)
            control.send(b"%d" % pid)
        elif request:
            control.send(_ended(int(request.split()[1])))
        else:
            return


def worker(connection_fd: int, lifeline_fd: int) -> None:
    """For a worker that is not a fork: load the functions named on standard input, then serve."""
    serve(_load(pickle.load(sys.stdin.buffer)), connection_fd, lifeline_fd)


def serve(functions: list[GradingFunction] | QuintetError, connection_fd: int, lifeline_fd: int) -> None:
    """Answer until the parent closes the connection. The first message is a `Ready`."""
    _die_with_parent(lifeline_fd)
    connection = Connection(connection_fd)
    if isinstance(functions, QuintetError):
        connection.send(Ready(refused=str(functions)))
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


def _load(sources: list[FunctionSource]) -> list[GradingFunction] | QuintetError:
    try:
        return [source.load() for source in sources]
    except QuintetError as error:
        return error


def _fork(
    serialized: bytes, functions: list[GradingFunction] | QuintetError, fds: list[int], parents: list[int]
) -> int:
    """Returns the pid, in the parent only. `parents`: descriptors that are not the worker's.

    A module that has started threads cannot be forked (a lock one of them holds would never be released), nor can
    anything safely on macOS: there the worker becomes a new interpreter.
    """
    forkable = sys.platform == "linux" and threading.active_count() == 1
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        if not forkable:
            _become_new_interpreter(serialized, fds)
        for fd in parents:
            os.close(fd)
        serve(functions, *fds)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended(worker_pid: int) -> bytes:
    try:
        pid, status = os.waitpid(worker_pid, os.WNOHANG)
    except ChildProcessError:
        return b"?"  # a template before this one forked it
    if not pid:
        return b" "
    with contextlib.suppress(ProcessLookupError, PermissionError):  # nothing that it started is left
        os.killpg(worker_pid, signal.SIGKILL)
    return b"%d" % os.waitstatus_to_exitcode(status)


def _become_new_interpreter(serialized: bytes, fds: list[int]) -> NoReturn:
    with tempfile.TemporaryFile() as file:
        file.write(serialized)
        file.seek(0)
        os.dup2(file.fileno(), 0)
    for fd in fds:
        os.set_inheritable(fd, True)
    command = _command("worker", *fds)
    os.execv(command[0], command)


def _command(entry: str, *fds: int) -> list[str]:
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom quintet.reward import pool_worker\npool_worker.{entry}{fds}"
    return [sys.executable, "-c", code]


def _die_with_parent(lifeline_fd: int) -> None:
    """Ask the kernel for SIGIO, whose default action is to end the process, when the parent's end closes.

    A watching thread would not do: code that holds the interpreter's lock (a huge power) would keep it from running.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
