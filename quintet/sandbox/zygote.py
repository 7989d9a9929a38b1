"""The judge's end of one warm interpreter (`jail.zygote`): starts it, sends it runs, hears how they ended."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from typing import IO, Any, Protocol

from quintet.sandbox.launch import ENVIRONMENT
from quintet.sandbox.protocol import SandboxFailure
from quintet.types import QuintetError

START_S = 60.0  # the most that a warm interpreter may take to come up on a busy machine
SILENCE_S = 30.0  # beyond a run's wall time, before the interpreter is asked whether it still lives
PONG_S = 20.0
_MESSAGE_BYTES = 65536


class Jail(Protocol):
    """How a back end starts a warm interpreter."""

    name: str
    sealed: bool  # a program in it cannot kill itself with SIGKILL: whoever did, it was not the program

    def command(self, control: int) -> list[str]:
        """What to execute; it inherits the descriptor `control`."""
        ...

    def clean_up(self) -> None:
        """Removes what all its interpreters left on the host."""
        ...


class Zygote:
    """Of one event loop. `runs` counts those in flight."""

    def __init__(self, jail: Jail) -> None:
        self._name = jail.name
        self.runs = 0
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._unsent: list[tuple[bytes, Sequence[int]]] = []
        self._ids = 0
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._socket, self._process = _start(jail, self._stderr)
        self._socket.setblocking(False)
        self._ready: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._loop.add_reader(self._socket.fileno(), self._on_message)

    @property
    def alive(self) -> bool:
        return self._socket.fileno() >= 0

    async def ready(self) -> None:
        """Raises QuintetError with what it said when it did not come up."""
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), START_S)
        except TimeoutError:
            self._end(f"not ready within {START_S:g} s", kill=True)
            await self._ready

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def send(self, message: dict[str, Any], files: Sequence[int] = ()) -> None:
        """Without an answer to wait for. `files` must stay open until it is sent. Raises SandboxFailure."""
        if not self.alive:
            raise SandboxFailure(f"{self._name} sandbox: its interpreter has ended; the next run starts another")
        self._unsent.append((json.dumps(message).encode(), files))
        self._flush()

    async def run(self, message: dict[str, Any], files: Sequence[int]) -> dict[str, Any]:
        """How the run of `message["id"]` ended. Raises SandboxFailure when the interpreter is lost."""
        id = message["id"]
        answer = self._waiting[id] = self._loop.create_future()
        self.runs += 1
        try:
            self.send(message, files)
            while not answer.done():
                await asyncio.wait([answer], timeout=message["wall_s"] + SILENCE_S)
                if not answer.done():
                    await self._ping()
            return answer.result()
        except asyncio.CancelledError:
            if self.alive:
                self.send({"op": "kill", "id": id})
            raise
        finally:
            self.runs -= 1
            del self._waiting[id]
            # Its files are closed now: their numbers may soon belong to others
            self._unsent = [unsent for unsent in self._unsent if unsent[1] is not files]

    async def _ping(self) -> None:
        id = self.new_id()
        pong = self._waiting[id] = self._loop.create_future()
        try:
            self.send({"op": "ping", "id": id})
            await asyncio.wait([pong], timeout=PONG_S)
            if not pong.done():
                self._end(f"no sign of life for {PONG_S:g} s", kill=True)
        finally:
            del self._waiting[id]

    async def close(self) -> None:
        self._end("closed")
        try:
            await asyncio.to_thread(self._process.wait, 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._stderr.close()

    def _flush(self) -> None:
        while self._unsent:
            data, files = self._unsent[0]
            try:
                socket.send_fds(self._socket, [data], files)
            except BlockingIOError:
                self._loop.add_writer(self._socket.fileno(), self._flush)
                return
            except OSError as error:
                self._end(str(error))
                return
            self._unsent.pop(0)
        self._loop.remove_writer(self._socket.fileno())

    def _on_message(self) -> None:
        try:
            data = self._socket.recv(_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end(self._last_words())
            return
        message = json.loads(data)
        future = self._ready if "ready" in message else self._waiting.get(message["id"])
        if future is not None and not future.done():
            future.set_result(message)

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"

    def _end(self, reason: str, *, kill: bool = False) -> None:
        """Hangs up, at which the interpreter ends its forks and itself; one that does not listen is killed."""
        if not self.alive:
            return
        if kill:
            self._process.kill()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        what = f"{self._name} sandbox: its interpreter ended: {reason}"
        if not self._ready.done():
            self._ready.set_exception(QuintetError(what))
            self._ready.exception()  # seen, should nobody wait for it
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(SandboxFailure(what))


def _start(jail: Jail, stderr: IO[bytes]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            jail.command(theirs.fileno()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=ENVIRONMENT,
        )
    return ours, process


def try_out(jail: Jail) -> str | None:
    """Starts and ends one warm interpreter, blocking. What is wrong with it, or None."""
    with tempfile.TemporaryFile() as stderr:
        control, process = _start(jail, stderr)
        with control:
            control.settimeout(START_S)
            try:
                well = bool(control.recv(_MESSAGE_BYTES))
            except OSError:
                well = False
        process.terminate()
        process.wait()
        stderr.seek(0)
        lines = stderr.read().decode(errors="replace").strip().splitlines()
    return None if well else (lines[-1] if lines else f"exit status {process.returncode}")
