"""The sandbox of this machine: warm interpreters, one per core, and what crosses between them and the judge.

A run's program, input, output and results are files in memory (memfd) that the judge makes and the fork inherits. There
is nothing to pump, so a judge that is busy loses no output and mistakes nobody for slow, and the interpreter in between
holds nothing of one candidate that the next could read.
"""

from __future__ import annotations

import asyncio
import marshal
import os
import struct
from dataclasses import dataclass
from itertools import count
from pathlib import PurePosixPath
from signal import SIGKILL
from typing import Any

from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.jail.data import NotData, decode
from quintet.sandbox.jail.isolation import SNAPSHOT_BYTES
from quintet.sandbox.protocol import Limits, Outcome, Program, RunResult, SandboxFailure, Value, limits_of
from quintet.sandbox.snapshot import check_restorable
from quintet.sandbox.zygote import Jail, Zygote
from quintet.types import QuintetError

STATE_LIMITS = Limits(wall_s=60.0, cpu_s=60.0)  # for taking and loading a snapshot
RECORD_BYTES = 2048  # what a record may take beside its value
QUICK_BYTES = 100_000  # results that are read on the spot, within milliseconds
_REASONS = {"wall": Outcome.WALL_TIME, "cpu": Outcome.CPU_TIME}
_LENGTH = struct.Struct("<I")


@dataclass
class _Session:
    zygote: Zygote
    id: int
    lock: asyncio.Lock  # one run at a time


class ZygotePool:
    """Implements `Sandbox` with any `Jail`."""

    def __init__(self, config: SandboxConfig, jail: Jail) -> None:
        self._limits = limits_of(config.limits)
        self._jail = jail
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._zygotes: list[Zygote | None] = [None] * (config.workers or len(os.sched_getaffinity(0)))
        self._starting = asyncio.Lock()
        self._sessions: dict[str, _Session] = {}
        self._names = count(1)

    async def create(self) -> str:
        try:
            return await self._create()
        except SandboxFailure as error:
            if not error.retryable:
                raise
            return await self._create()  # the interpreter had been ended by an earlier program; this is another

    async def _create(self) -> str:
        zygote = await self._zygote()
        session = _Session(zygote, zygote.new_id(), asyncio.Lock())
        limits = _fork_limits(self._limits, session=True)
        self._check_fault(await zygote.run({"op": "start", "id": session.id, "limits": limits, "wall_s": 0.0}, ()))
        name = f"session-{next(self._names)}"
        self._sessions[name] = session
        return name

    async def run(self, program: Program, limits: Limits, session: str | None = None) -> RunResult:
        request = _program_request(program, limits)
        if session is not None:
            request["name"] = "__main__"
        async with self._places:
            with _Files(request, program.stdin) as files:
                answer = await self._answer(files, limits, session)
                reading = (answer, files, limits, len(program.calls) + len(program.expressions))
                if files.result_bytes() < QUICK_BYTES:
                    return _result(*reading)
                return await asyncio.to_thread(_result, *reading)  # large values take long to read

    async def snapshot(self, session: str) -> bytes:
        records = await self._state({"op": "snapshot", "value_bytes": SNAPSHOT_BYTES}, session)
        if records and records[0][:1] == ("snapshot",) and isinstance(records[0][-1], bytes):
            return records[0][-1]
        raise SandboxFailure(f"{session} cannot be captured: {_complaint(records)}", retryable=False)

    async def restore(self, snapshot: bytes) -> str:
        check_restorable(snapshot)
        session = await self.create()
        records = await self._state({"op": "restore", "snapshot": snapshot, "value_bytes": 4096}, session)
        if records == [("end",)]:
            return session
        await self.destroy(session)
        raise SandboxFailure(f"the snapshot cannot be restored: {_complaint(records)}", retryable=False)

    async def fork(self, session: str, n: int) -> list[str]:
        snapshot = await self.snapshot(session)
        made = await asyncio.gather(*(self.restore(snapshot) for _ in range(n)), return_exceptions=True)
        sessions = [session for session in made if isinstance(session, str)]
        for failure in (failure for failure in made if isinstance(failure, BaseException)):
            await asyncio.gather(*map(self.destroy, sessions))
            raise failure
        return sessions

    async def destroy(self, session: str) -> None:
        found = self._sessions.pop(session, None)
        if found is not None and found.zygote.alive:
            found.zygote.send({"op": "kill", "id": found.id})

    async def close(self) -> None:
        self._sessions.clear()
        zygotes, self._zygotes = self._zygotes, [None] * len(self._zygotes)
        await asyncio.gather(*(zygote.close() for zygote in zygotes if zygote is not None))
        self._jail.clean_up()

    async def _zygote(self) -> Zygote:
        """The one with the least to do; those that are missing are started."""
        if any(zygote is None or not zygote.alive for zygote in self._zygotes):
            async with self._starting:
                await self._start_missing()
        return min((z for z in self._zygotes if z is not None), key=lambda z: z.runs)

    async def _start_missing(self) -> None:
        for i, zygote in enumerate(self._zygotes):
            if zygote is not None and not zygote.alive:
                await zygote.close()
            if zygote is None or not zygote.alive:
                self._zygotes[i] = Zygote(self._jail)
        await asyncio.gather(*(zygote.ready() for zygote in self._zygotes if zygote is not None))

    async def _state(self, request: dict[str, Any], session: str) -> list[tuple[Any, ...]]:
        """The records of taking or loading a snapshot."""
        async with self._places:
            with _Files(request, "") as files:
                await self._answer(files, STATE_LIMITS, session)
                return files.records(SNAPSHOT_BYTES + 4096, 1)

    async def _answer(self, files: _Files, limits: Limits, session: str | None) -> dict[str, Any]:
        """Runs what is in `files`; how that ended. Raises SandboxFailure for what is not the program's doing."""
        times = {"wall_s": limits.wall_s, "cpu_s": limits.cpu_s}
        if session is None:
            zygote = await self._zygote()
            message = {"op": "start", "id": zygote.new_id(), "limits": _fork_limits(limits, session=False)}
            answer = await zygote.run(message | times, files.descriptors)
        else:
            answer = await self._session_answer(session, times, files)
        self._check_fault(answer)
        status = answer["status"] or 0
        if self._jail.sealed and os.WIFSIGNALED(status) and os.WTERMSIG(status) == SIGKILL and not answer["reason"]:
            raise SandboxFailure(
                f"{self._jail.name} sandbox: the host killed a run (out of memory?) or it was destroyed"
            )
        return answer

    def _check_fault(self, answer: dict[str, Any]) -> None:
        if answer.get("fault"):
            raise SandboxFailure(f"{self._jail.name} sandbox: {answer['fault']}")

    async def _session_answer(self, name: str, times: dict[str, float], files: _Files) -> dict[str, Any]:
        session = self._sessions.get(name)
        if session is not None and not session.zygote.alive:
            session = self._sessions.pop(name) and None
        if session is None:
            raise SandboxFailure(f"there is no session {name}, or it has ended", retryable=False)
        async with session.lock:
            answer = await session.zygote.run({"op": "run", "id": session.id} | times, files.descriptors)
        if answer.get("gone") or answer["status"] is not None:
            self._sessions.pop(name, None)
        if answer.get("gone"):
            raise SandboxFailure(f"{name} has ended", retryable=False)
        return answer


class _Files:
    """The five files of a run: request, standard input, output and error, results."""

    def __init__(self, request: dict[str, Any], stdin: str) -> None:
        self.descriptors: list[int] = []
        self._request = request
        self._stdin = stdin

    def __enter__(self) -> _Files:
        try:
            request = marshal.dumps(self._request, 2)  # format 2: what is shared among arguments comes out apart
            stdin = self._stdin.encode("utf-8", "replace")
            for content in (request, stdin, b"", b"", b""):
                self.descriptors.append(_memory_file(content))
        except ValueError:
            self.__exit__()
            raise QuintetError("the program's arguments are not plain data: None, bool, int, float, str, ...") from None
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    def output(self, limit: int) -> tuple[bytes, bytes, bool]:
        """Standard output and error, at most `limit` bytes of each, and whether there was more in all."""
        _, _, out, err, _ = self.descriptors
        size = os.fstat(out).st_size + os.fstat(err).st_size
        return os.pread(out, limit, 0), os.pread(err, limit, 0), size > limit

    def result_bytes(self) -> int:
        return os.fstat(self.descriptors[-1]).st_size

    def records(self, limit: int, at_most: int) -> list[tuple[Any, ...]]:
        """What the fork wrote down, as far as it can be read: it may have written anything."""
        data = os.pread(self.descriptors[-1], limit, 0)
        found: list[tuple[Any, ...]] = []
        position = 0
        while position + _LENGTH.size <= len(data) and len(found) < at_most:
            (size,) = _LENGTH.unpack_from(data, position)
            position += _LENGTH.size + size
            try:
                record = decode(data[position - size : position])
            except NotData:
                break
            if type(record) is not tuple or not record:
                break
            found.append(record)
        return found


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("quintet", os.MFD_CLOEXEC)
    while content:
        content = content[os.write(descriptor, content) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _program_request(program: Program, limits: Limits) -> dict[str, Any]:
    for name in program.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise QuintetError(f"files: {name!r} is not a path within the scratch folder")
    return {
        "op": "run",
        "code": program.code,
        "name": program.name,
        "calls": [(call.function, tuple(call.args), call.kwargs) for call in program.calls],
        "expressions": list(program.expressions),
        "files": program.files,
        "value_bytes": limits.output_bytes,
    }


def _fork_limits(limits: Limits, *, session: bool) -> dict[str, int]:
    return {
        "memory_mb": limits.memory_mb,
        "scratch_mb": limits.scratch_mb,
        "file_bytes": max(_file_bytes(limits), SNAPSHOT_BYTES + 4096 if session else 0),
        "processes": limits.processes,
    }


def _file_bytes(limits: Limits) -> int:
    return max(limits.scratch_mb << 20, 2 * limits.output_bytes)


def _result(answer: dict[str, Any], files: _Files, limits: Limits, asked: int) -> RunResult:
    out, err, flooded = files.output(limits.output_bytes)
    records = files.records(limits.output_bytes + RECORD_BYTES * (asked + 1), asked + 1)
    values = [record for record in records if record[0] == "value" and len(record) == 5][:asked]
    final = next((record for record in records if record[0] in ("end", "error", "exit")), None)
    return RunResult(
        outcome=_outcome(answer, final, flooded),
        stdout=out.decode("utf-8", "replace"),
        stderr=err.decode("utf-8", "replace"),
        values=tuple(_value(record, out) for record in values),
        exit_code=_exit_code(answer["status"], final),
        wall_s=answer["wall_s"],
    )


def _outcome(answer: dict[str, Any], final: tuple[Any, ...] | None, flooded: bool) -> Outcome:
    status = answer["status"]
    if flooded:
        return Outcome.OUTPUT
    if answer["reason"] in _REASONS:
        return _REASONS[answer["reason"]]
    if status is not None and os.WIFSIGNALED(status):
        return Outcome.CRASHED
    if final is None or final[0] == "exit" or status:
        return Outcome.EXITED
    if final[0] == "end":
        return Outcome.FINISHED
    return Outcome.MEMORY if final[1:] == ("MemoryError",) else Outcome.ERROR


def _exit_code(status: int | None, final: tuple[Any, ...] | None) -> int | None:
    if status is not None and os.WIFSIGNALED(status):
        return None
    if final is not None and final[0] == "exit" and type(final[-1]) is int:
        return final[-1] & 0xFF
    if final is not None and final[0] == "error":
        return 1
    return os.WEXITSTATUS(status) if status else 0


def _value(record: tuple[Any, ...], out: bytes) -> Value:
    _, data, error, start, end = record
    printed = out[start:end].decode("utf-8", "replace") if type(start) is int and type(end) is int else ""
    if type(data) is not bytes:
        return Value(error=error if type(error) is str else "malformed", stdout=printed)
    try:
        return Value(value=decode(data), stdout=printed)
    except NotData as fault:
        return Value(error=f"not data: {fault}", stdout=printed)


def _complaint(records: list[tuple[Any, ...]]) -> str:
    reason = records[0][-1] if records else "its interpreter ended"
    return reason[:300] if type(reason) is str else "it wrote nonsense"
