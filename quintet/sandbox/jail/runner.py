"""Runs programs in a fork and writes down what came of them.

By now the interpreter is the candidate's as much as ours: it may patch whatever we use, find our file descriptors and
write records of its own. All it can say that way is "my function returned X", which it could have returned; the right
answers are not here, and how the fork ended is seen by its parent.

Records in the result file, each a length and `data.encode` of a tuple, in this order:
`("value", encoded or None, error, stdout_start, stdout_end)` per call and expression, then one of `("end",)`,
`("error", name)`, `("exit", code)`. A snapshot's is `("snapshot", bytes)`.
"""

from __future__ import annotations

import atexit
import linecache
import marshal
import os
import socket
import struct
import sys
import threading
import traceback
import types
from io import TextIOWrapper
from typing import Any, TextIO

from . import state
from .data import NotData, encode

ONE_SHOT, SESSION = b"1", b"S"
READY, FAULT, DONE = b"R", b"F", b"D"
FILES_OF_A_RUN = 5  # request, stdin, stdout, stderr, result
_LENGTH = struct.Struct("<I")
Streams = tuple[TextIOWrapper, TextIOWrapper, TextIOWrapper]


class Interpreter:
    """What stays between the runs of a session. Made once, before all forks: each has its own copy."""

    def __init__(self) -> None:
        self.module = types.ModuleType("__main__")
        self.cells = 0
        self._streams: Streams | None = _open_streams()

    def namespace(self, name: str) -> dict[str, Any]:
        self.module.__name__ = name
        sys.modules[name] = self.module
        return self.module.__dict__

    def streams(self) -> Streams:
        """Standard input, output and error on their descriptors, without anything left from an earlier run."""
        streams = self._streams or _open_streams()
        self._streams = None
        sys.stdin, sys.stdout, sys.stderr = streams
        vars(sys).update(__stdin__=streams[0], __stdout__=streams[1], __stderr__=streams[2])
        return streams


def serve(channel: socket.socket, interpreter: Interpreter, *, threads: bool) -> None:
    """Takes requests from the zygote until the first one-shot. Never returns."""
    _exit = os._exit
    while True:
        kind, files, _, _ = socket.recv_fds(channel, 1, FILES_OF_A_RUN)
        if not kind:
            _exit(0)
        if kind == ONE_SHOT:
            channel.close()
        request_file, *streams, result_file = files
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        size = os.lseek(request_file, 0, os.SEEK_END)
        request = marshal.loads(os.pread(request_file, size, 0))  # from the judge, of the same Python
        os.close(request_file)
        results = Results(result_file, request["value_bytes"])
        run = Run(request, results, interpreter, session=kind == SESSION, threads=threads)
        {"run": run.run, "snapshot": run.snapshot, "restore": run.restore}[request["op"]]()
        if kind == ONE_SHOT:
            _exit(0)
        os.close(result_file)
        channel.send(DONE)


class Results:
    """The result file. Everything it needs is at hand before a candidate runs."""

    def __init__(self, file: int, limit: int) -> None:
        self._file = file
        self._limit = self._room = limit
        self._write = os.write

    def put(self, *record: Any) -> None:
        """Raises NotData."""
        data = _record(record, self._limit)
        while data:
            data = data[self._write(self._file, data) :]

    def put_value(self, value: Any, start: int, end: int) -> None:
        """Raises NotData, also when the values of a run are too large together."""
        data = encode(value, self._room)
        self._room -= len(data)
        self.put("value", data, None, start, end)

    def put_memory_error(self) -> None:
        self._write(self._file, _MEMORY_RECORD)


def _record(record: tuple[Any, ...], limit: int) -> bytes:
    data = encode(record, limit + 4096)
    return _LENGTH.pack(len(data)) + data


_MEMORY_RECORD = _record(("error", "MemoryError"), 0)  # made while there is memory for it


class Run:
    """One request. The public methods are its operations."""

    def __init__(
        self, request: dict[str, Any], results: Results, interpreter: Interpreter, *, session: bool, threads: bool
    ) -> None:
        self._request = request
        self._results = results
        self._interpreter = interpreter
        self._session = session
        self._threads = threads
        self._streams = interpreter.streams()

    def run(self) -> None:
        """A program, its calls and expressions."""
        namespace = self._interpreter.namespace(self._request["name"])
        state.write_files(self._request["files"])
        try:
            self._execute(namespace)
            for function, args, kwargs in self._request["calls"]:
                self._value(namespace, function, (args, kwargs))
            for expression in self._request["expressions"]:
                self._value(namespace, expression, None)
            if not self._session:
                atexit._run_exitfuncs()
            self._flush()
        except SystemExit as end:
            self._flush()
            self._results.put("exit", _exit_code(end, self._streams[2]))
        except BaseException as error:
            self._report(error)
        else:
            self._results.put("end")

    def snapshot(self) -> None:
        namespace = self._interpreter.namespace("__main__")
        try:
            self._results.put("snapshot", state.capture(namespace, self._interpreter.cells))
        except (NotData, OSError, MemoryError) as error:
            self._results.put("error", f"{type(error).__name__}: {error}")

    def restore(self) -> None:
        try:
            self._interpreter.cells = state.restore(self._interpreter.namespace("__main__"), self._request["snapshot"])
        except BaseException as error:  # whatever the snapshot's own classes raise
            self._results.put("error", _say(error))
        else:
            self._results.put("end")

    def _execute(self, namespace: dict[str, Any]) -> None:
        source = self._request["code"]
        self._interpreter.cells += 1
        name = f"<cell {self._interpreter.cells}>" if self._session else "main.py"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec", dont_inherit=True), namespace)
        if self._threads and not self._session:
            threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end: waits for threads that are not daemons

    def _value(self, namespace: dict[str, Any], expression: str, call: tuple[Any, Any] | None) -> None:
        self._flush()
        start = os.lseek(1, 0, os.SEEK_CUR)
        value, error = None, None
        try:
            value = eval(compile(expression, "<expression>", "eval", dont_inherit=True), namespace)
            if call is not None:
                value = value(*call[0], **call[1])
            self._flush()
            self._results.put_value(value, start, os.lseek(1, 0, os.SEEK_CUR))
            return
        except NotData as fault:
            error = f"not data: {fault}"
        except BaseException as fault:
            error = _say(fault)
        self._flush()
        self._results.put("value", None, error, start, os.lseek(1, 0, os.SEEK_CUR))

    def _report(self, error: BaseException) -> None:
        if isinstance(error, MemoryError):
            self._interpreter.module.__dict__.clear()
            self._results.put_memory_error()
            return
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals is globals():
            frames = frames.tb_next
        try:
            traceback.print_exception(type(error), error, frames, file=self._streams[2])
        finally:  # an exception's own __str__ may raise anything
            self._flush()
            self._results.put("error", type(error).__name__)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr, self._streams[1], self._streams[2]):
            if isinstance(stream, TextIOWrapper) and not stream.closed:
                stream.flush()


def _open_streams() -> Streams:
    return (
        TextIOWrapper(open(0, "rb", closefd=False), encoding="utf-8"),
        TextIOWrapper(open(1, "wb", closefd=False), encoding="utf-8"),
        TextIOWrapper(open(2, "wb", closefd=False), encoding="utf-8", errors="backslashreplace"),
    )


def _exit_code(end: SystemExit, stderr: TextIO) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=stderr, flush=True)
    return 1


def _say(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error}"[:500]
    except BaseException:  # the candidate's own __str__
        return name
