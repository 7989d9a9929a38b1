"""Worker processes that begin at once: forks of a template that has loaded the user's functions already.

A fresh interpreter takes half a second and more to import a grader, a tenth of a call's limit, and would take it in the
worst moment: when hanging calls hold the others up. A fork of a process that has only ever imported is there after some
milliseconds, and shares its memory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path

from quintet.reward.calling import Signature
from quintet.reward.errors import CallTimeout, WorkerDied
from quintet.reward.loading import FunctionSource
from quintet.reward.pool_worker import Call, Ready, Reply, template_command
from quintet.reward.sample import Sample
from quintet.types import QuintetError

IMPORT_LIMIT_S = 120.0  # for the template to start and to import the user's modules, and for a worker to say so
_END_LIMIT_S = 5.0  # for a worker whose connection has closed to end


class Template:
    """The process that forks. It starts when it is made, is awaited by the first fork, and is started again when it
    has died. Usable from several threads."""

    def __init__(self, sources: Sequence[FunctionSource]) -> None:
        self.names = ", ".join(f"`{source.name}`" for source in sources)
        self._sources = pickle.dumps(list(sources))
        self._lock = threading.Lock()
        self._closed = False
        self._loaded = False  # the present process has forked
        self._process: subprocess.Popen[bytes]
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self, connection: int, lifeline: int) -> int:
        """The pid of a new worker on these descriptors, which stay the caller's to close.

        Raises QuintetError when the template ends, or takes more than `IMPORT_LIMIT_S`, while it loads the functions;
        WorkerDied when the template is closed.
        """
        with self._lock:
            if self._closed:
                raise WorkerDied("the pool of reward workers is closed")
            while True:
                try:
                    pid = int(self._ask(b"fork", [connection, lifeline]))
                except TimeoutError as error:
                    self._process.kill()  # a late answer would be taken for the next one
                    limit = f"{IMPORT_LIMIT_S:.0f} s"
                    raise QuintetError(f"a reward worker took more than {limit} to import {self.names}") from error
                except OSError as error:
                    if not self._loaded:
                        raise QuintetError(died_importing(self._death(), self.names)) from error
                    self._end()
                    self._start()
                else:
                    self._loaded = True
                    return pid

    def ended(self, pid: int) -> str | None:
        """How a worker ended, told once: what it had started is ended then. None while it runs."""
        with self._lock:
            try:
                answer = self._ask(b"ended %d" % pid)
            except OSError:
                answer = b"?"  # the template has died, so that nobody waited for the worker
        if answer == b"?":
            return "not known"
        return exit_status(int(answer)) if answer else None

    def close(self) -> None:
        """Its workers go on."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._end()

    def _start(self) -> None:
        """A bare interpreter with this one's import path, in a process group of its own (so Ctrl-C is ours alone)."""
        self._control, theirs = socket.socketpair()
        self._control.settimeout(IMPORT_LIMIT_S)
        lifeline, self._lifeline = os.pipe()
        self._loaded = False
        with theirs:
            self._process = subprocess.Popen(
                template_command(theirs.fileno(), lifeline),
                pass_fds=(theirs.fileno(), lifeline),
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        os.close(lifeline)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # it died at once: `fork` says so
            pipe.write(self._sources)

    def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> bytes:
        """Raises TimeoutError, and OSError when the template has ended."""
        socket.send_fds(self._control, [request], descriptors)
        answer = self._control.recv(64)
        if not answer:
            raise ConnectionResetError
        return answer.strip()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()
        os.close(self._lifeline)

    def _death(self) -> str:
        try:
            return exit_status(self._process.wait(_END_LIMIT_S))
        except subprocess.TimeoutExpired:
            return "connection closed"


class WorkerProcess:
    """One worker at a time: a slot of the pool whose calls can be ended by force."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._lock = threading.Lock()  # close() comes from another thread than call()
        self._closed = False
        self._pid: int | None = None
        self._ended = True

    @property
    def pid(self) -> int | None:
        """None before the first call and after the end."""
        return self._pid

    def activity(self) -> Activity | None:
        """Read from /proc, so that it is not known outside Linux."""
        try:
            fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return Activity((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), fields[0] == "R")

    def prepare(self) -> None:
        if self._pid is None:
            self.signatures()

    def signatures(self) -> list[Signature]:
        """From a new worker. Raises QuintetError with the worker's own error when a function does not load."""
        with self._lock:
            self._start()
        try:
            if not self._connection.poll(IMPORT_LIMIT_S):
                raise QuintetError(f"a reward worker took more than {IMPORT_LIMIT_S:.0f} s to start")
            ready: Ready = self._connection.recv()
        except (EOFError, OSError) as error:
            raise QuintetError(died_importing(self._await_end(), self._template.names)) from error
        if ready.refused is not None:
            raise QuintetError(ready.refused)
        return ready.signatures

    def call(self, function: int, samples: list[Sample], limit_s: float) -> Reply:
        """Blocks at most about `limit_s`. Raises CallTimeout, WorkerDied."""
        self.prepare()
        try:
            self._connection.send(Call(function, samples))
            if not self._connection.poll(limit_s):
                self._restart()
                raise CallTimeout(f"did not return within {limit_s:g} s; its worker was killed")
            reply: Reply = self._connection.recv()
        except (EOFError, OSError) as error:
            ending = self._await_end()
            self._restart()
            raise WorkerDied(f"its worker ended in the middle of a call ({ending})") from error
        return reply

    def close(self) -> None:
        """The template stays."""
        with self._lock:
            self._closed = True
            self._kill()

    def _start(self) -> None:
        if self._closed:
            raise WorkerDied("the pool of reward workers is closed")
        self._kill()
        self._connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        try:
            self._pid = self._template.fork(theirs.fileno(), lifeline)
        except BaseException:
            self._connection.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        self._ended = False

    def _restart(self) -> None:
        with self._lock:
            self._kill()
        if not self._closed:
            self.prepare()

    def _kill(self) -> None:
        """The whole process group: what the function started ends with it."""
        if self._pid is None:
            return
        if not self._ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it ends in this moment
                os.killpg(self._pid, signal.SIGKILL)
            self._await_end()
        self._pid = None
        self._connection.close()
        os.close(self._lifeline)

    def _await_end(self) -> str:
        until = time.monotonic() + _END_LIMIT_S
        while self._pid is not None and time.monotonic() < until:
            if (ending := self._template.ended(self._pid)) is not None:
                self._ended = True
                return ending
            time.sleep(0.002)
        return "connection closed"


@dataclass(frozen=True)
class Activity:
    """`runnable`: computing, or kept from it by a busy machine; otherwise it sleeps."""

    cpu_s: float
    runnable: bool


def exit_status(code: int) -> str:
    """In words; a negative code is a signal's number."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def died_importing(how: str, names: str) -> str:
    return f"a reward worker ended ({how}) while importing {names}; its error is printed above"
