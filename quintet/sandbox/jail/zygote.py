"""The warm interpreter: forks a process per program or session, keeps its time, says how it ended.

It never runs or reads anything of a candidate's: a program, its input, output and results are files that the judge
opens and that pass through here as descriptors to one fork. So its memory has nothing in it for a fork to find.

From the judge come JSON messages: `start` (a fork; with the five files of a run for a one-shot, without for a session),
`run` (the next one of a session), `kill`, `ping`. Each `start` and `run` is answered by one message: how it ended
(`status` as of `wait`, or null for a session that goes on), why it was ended (`reason`: wall, cpu, or channel for a
candidate that wrote nonsense to it), its seconds, and `fault` when the fork could not be locked up, in which case
nothing of the candidate's was read.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import site
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

from . import runner
from .isolation import Ceilings, ForkLimits, Isolation, Jailed, Place, Plain, self_test

MESSAGE_BYTES = 65536
CHANNEL = 3  # a fork's descriptor of its channel to here
CHECK_S = 0.005  # the least time between two looks at a running fork's clocks


@dataclass
class Timer:
    """The clocks of one run. Wall time leaves out what the fork spent waiting for a processor."""

    wall_s: float
    cpu_s: float
    started: float
    cpu_before: float
    queued_before: float
    check_at: float
    reason: str | None = None


@dataclass
class Fork:
    id: int
    pid: int
    channel: socket.socket
    place: Place
    limits: ForkLimits
    session: bool
    ready: bool = False
    fault: str | None = None
    timer: Timer | None = None


class Zygote:
    def __init__(self, control: socket.socket, isolation: Isolation) -> None:
        self._control = control
        self.isolation = isolation
        self.interpreter = runner.Interpreter()
        self._forks: dict[int, Fork] = {}  # by id
        self._by_pid: dict[int, Fork] = {}
        self._operations = {"start": self._start, "run": self._run_next, "kill": self._kill, "ping": self._ping}
        self._selector = selectors.EpollSelector()
        self._selector.register(control, selectors.EVENT_READ, self._on_control)
        waker, wakened = socket.socketpair()
        for end in (waker, wakened):
            end.setblocking(False)
        self._wakened = wakened
        self._waker = waker
        self._selector.register(wakened, selectors.EVENT_READ, self._on_child_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Until the judge hangs up."""
        while True:
            for key, _ in self._selector.select(self._patience()):
                key.data()
            now = time.monotonic()
            for fork in list(self._forks.values()):
                if fork.timer is not None and now >= fork.timer.check_at:
                    self._check(fork, fork.timer, now)

    def _patience(self) -> float | None:
        checks = [fork.timer.check_at for fork in self._forks.values() if fork.timer is not None]
        return max(0.0, min(checks) - time.monotonic()) if checks else None

    def _on_control(self) -> None:
        text, files, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, runner.FILES_OF_A_RUN)
        if not text:
            self._leave()
        message = json.loads(text)
        self._operations[message["op"]](message, files)
        for file in files:
            os.close(file)

    def _ping(self, message: dict[str, Any], files: list[int]) -> None:
        self._answer({"id": message["id"], "pong": True})

    def _kill(self, message: dict[str, Any], files: list[int]) -> None:
        fork = self._forks.get(message["id"])
        if fork is not None:
            _signal(fork, signal.SIGKILL)

    def _start(self, message: dict[str, Any], files: list[int]) -> None:
        limits = ForkLimits(**message["limits"])
        session = not files
        try:
            fork = self._fork(message["id"], limits, session)
        except OSError as error:
            self._answer({"id": message["id"], "status": None, "fault": str(error)})
            return
        self._forks[fork.id] = self._by_pid[fork.pid] = fork
        if session:
            self._selector.register(fork.channel, selectors.EVENT_READ, lambda: self._on_channel(fork))
        else:
            self._run(fork, message, files, runner.ONE_SHOT)

    def _run_next(self, message: dict[str, Any], files: list[int]) -> None:
        fork = self._forks.get(message["id"])
        if fork is None:
            self._answer({"id": message["id"], "gone": True})
        else:
            self._run(fork, message, files, runner.SESSION)

    def _fork(self, id: int, limits: ForkLimits, session: bool) -> Fork:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ceilings = self.isolation.ceilings(limits)
        place = self.isolation.take_place(limits)
        try:
            pid = self.isolation.fork()
        except OSError:
            self.isolation.give_back(place)
            raise
        if pid == 0:
            be_a_fork(theirs, self, place, limits, ceilings)
        theirs.close()
        ours.setblocking(False)
        return Fork(id, pid, ours, place, limits, session)

    def _run(self, fork: Fork, message: dict[str, Any], files: list[int], kind: bytes) -> None:
        now = time.monotonic()
        wall_s, cpu_s = message["wall_s"], message["cpu_s"]
        first_check = now + max(CHECK_S, min(wall_s, cpu_s / fork.limits.processes))
        used_s, queued_s = (_cpu_s(fork.pid), self._queued_s(fork.pid)) if fork.session else (0.0, 0.0)
        fork.timer = Timer(wall_s, cpu_s, now, used_s, queued_s, first_check)
        _signal(fork, signal.SIGCONT)
        try:
            socket.send_fds(fork.channel, [kind], files)
        except OSError:
            _signal(fork, signal.SIGKILL)  # it is gone or does not listen: its end will be reported

    def _check(self, fork: Fork, timer: Timer, now: float) -> None:
        used_s = _cpu_s(fork.pid) - timer.cpu_before
        passed_s = now - timer.started - (self._queued_s(fork.pid) - timer.queued_before)
        if used_s >= timer.cpu_s or passed_s >= timer.wall_s:
            timer.reason = timer.reason or ("cpu" if used_s >= timer.cpu_s else "wall")
            _signal(fork, signal.SIGKILL)
        left_s = min(timer.wall_s - passed_s, (timer.cpu_s - used_s) / fork.limits.processes)
        timer.check_at = now + max(CHECK_S, left_s)

    def _queued_s(self, pid: int) -> float:
        """Seconds that the process was ready to run and had no processor. 0 where the kernel does not say."""
        try:
            file = os.open(f"{pid}/schedstat", os.O_RDONLY, dir_fd=self.isolation.proc)
        except OSError:
            return 0.0
        try:
            return int(os.read(file, 100).split()[1]) / 1e9
        finally:
            os.close(file)

    def _on_channel(self, fork: Fork) -> None:
        message = _receive(fork.channel)
        if not fork.ready:
            self._hear(fork, message)
        elif message == runner.DONE and fork.timer is not None:
            _signal(fork, signal.SIGSTOP)  # a candidate has no business between two runs, whatever it left behind
            self._answer(self._account(fork, fork.timer, _cpu_s(fork.pid)))
            fork.timer = None
        else:  # its end, or the candidate closed the channel or wrote to it
            if not message:
                self._selector.unregister(fork.channel)
            if fork.timer is not None:
                fork.timer.reason = fork.timer.reason or "channel"
            if fork.timer is not None or not message:
                _signal(fork, signal.SIGKILL)

    def _on_child_end(self) -> None:
        self._wakened.recv(4096)
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            fork = self._by_pid.pop(ended.si_pid, None)
            if fork is not None:
                _signal(fork, signal.SIGKILL)  # its descendants, before its number can be given to another
            _, status, usage = os.wait4(ended.si_pid, 0)
            if fork is not None:
                self._bury(fork, status, usage.ru_utime + usage.ru_stime)

    def _bury(self, fork: Fork, status: int, cpu_s: float) -> None:
        del self._forks[fork.id]
        if not fork.ready and fork.fault is None:
            self._hear(fork, _receive(fork.channel))
        if fork.session and fork.channel in self._selector.get_map():
            self._selector.unregister(fork.channel)
        fork.channel.close()
        self.isolation.give_back(fork.place)
        if fork.timer is not None:
            self._answer(self._account(fork, fork.timer, cpu_s) | {"status": status, "fault": fork.fault})

    def _hear(self, fork: Fork, message: bytes) -> None:
        """The first word of a fork, before it is given to a candidate. What comes later is never a fault of ours."""
        fork.ready = message[:1] == runner.READY
        if not fork.ready:
            fork.fault = message[1:].decode(errors="replace") or "the fork ended before it was locked up"
        if fork.session:
            self._answer({"id": fork.id, "status": None, "fault": fork.fault})

    def _account(self, fork: Fork, timer: Timer, cpu_s: float) -> dict[str, Any]:
        return {
            "id": fork.id,
            "status": None,
            "reason": timer.reason,
            "wall_s": time.monotonic() - timer.started,
            "cpu_s": cpu_s - timer.cpu_before,
            "fault": None,
        }

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            self._control.send(json.dumps(message).encode())
        except OSError:
            self._leave()

    def _leave(self) -> None:
        for fork in self._forks.values():
            _signal(fork, signal.SIGKILL)
        for fork in self._forks.values():
            os.waitpid(fork.pid, 0)
            self.isolation.give_back(fork.place)
        self.isolation.close()
        os._exit(0)


def be_a_fork(channel: socket.socket, zygote: Zygote, place: Place, limits: ForkLimits, ceilings: Ceilings) -> None:
    """Locks itself up, says so, and runs what it is sent. Never returns, whatever happens."""
    try:
        locked = _locked(channel, zygote.isolation, place, limits, ceilings)
        runner.serve(locked, zygote.interpreter, threads=limits.processes > 1)
    finally:
        os._exit(1)  # our own code failed, which a candidate may have brought about: the run has no end record


def _locked(
    channel: socket.socket, isolation: Isolation, place: Place, limits: ForkLimits, ceilings: Ceilings
) -> socket.socket:
    """The channel, the only descriptor left but for the standard ones, once everything else is out of reach."""
    try:
        signal.set_wakeup_fd(-1)
        isolation.enter(place, limits, ceilings)
    except BaseException as error:
        channel.send(runner.FAULT + f"{type(error).__name__}: {error}".encode())
        raise
    os.dup2(channel.fileno(), CHANNEL)
    os.closerange(CHANNEL + 1, 1 << 20)
    gc.enable()
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=CHANNEL)
    channel.send(runner.READY)
    return channel


def _signal(fork: Fork, number: int) -> None:
    """To the fork and its descendants, which cannot leave its group in a jail."""
    try:
        os.killpg(fork.pid, number)
    except ProcessLookupError:
        os.kill(fork.pid, number)  # not the leader of a group yet; still a child of ours, as it is not waited for


def _receive(channel: socket.socket) -> bytes:
    """One message; empty when there is none."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(ConnectionResetError):  # said once when it left without reading, before its last words
            return channel.recv(1000)
        return channel.recv(1000)
    return b""


def _cpu_s(pid: int) -> float:
    """Seconds of processor time of a child, by the kernel's clock for it; 0 once it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:
        return 0.0


def main(settings: dict[str, Any]) -> None:
    """`control`: the socket to the judge. `isolation`: plain, with `base` to make scratch folders in, or jailed, with
    `own_users` where this is root. `own_path`: the first entries of sys.path, which lead to our own modules."""
    control = socket.socket(fileno=settings["control"])
    sys.path[:] = sys.path[len(settings["own_path"]) :] + settings["python_path"]
    site.setquit()  # exit() and quit(), which many programs call
    for name in settings["preload"]:
        importlib.import_module(name)
    isolation: Isolation
    if settings["isolation"] == "jailed":
        isolation = Jailed(own_users=settings["own_users"])
        try_lock(isolation, own_users=settings["own_users"])
    else:
        isolation = Plain(settings["base"])
    package = __name__.partition(".")[0]
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    gc.collect()
    gc.disable()
    gc.freeze()
    zygote = Zygote(control, isolation)
    control.send(json.dumps({"ready": True}).encode())
    zygote.serve()


def try_lock(isolation: Jailed, *, own_users: bool) -> None:
    """Raises RuntimeError when a fork that should be locked up is not."""
    limits = ForkLimits(memory_mb=64, scratch_mb=1, file_bytes=1 << 20, processes=1)
    place, ceilings = isolation.take_place(limits), isolation.ceilings(limits)
    reader, writer = os.pipe()
    pid = isolation.fork()
    if pid == 0:
        try:
            isolation.enter(place, limits, ceilings)
            self_test(own_user=own_users)
        except BaseException as error:
            os.write(writer, f"{error}".encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    if os.waitpid(pid, 0)[1] != 0:
        raise RuntimeError(said or "a locked fork died")
    isolation.give_back(place)
