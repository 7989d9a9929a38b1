"""From a fork of the zygote to a process that may be handed to a candidate, and back to nothing.

Two ways: `Plain` (limits only) and `Jailed`. In a jail a fork gets a PID namespace of its own, a mount namespace with a
scratch tmpfs of its own, a user of its own where the zygote is root, no capability and the seccomp filter.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .seccomp import Filter

SCRATCH = "/tmp"
FIRST_UID, UIDS = 1_900_000_000, 200_000_000  # above what login.defs, containers and systemd hand out
STACK_BYTES = 64 << 20
SNAPSHOT_BYTES = 64 << 20  # a session's results may hold a snapshot of it
OPEN_FILES = 256
INODES_PER_MB = 256
SHARED_PROCESSES = 256  # where all forks have one user id, the kernel counts them together

_NEWNS, _NEWPID = 0x20000, 0x20000000
_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_DETACH = 2
_PR_SET_PDEATHSIG = 1
_FORK = ctypes.PyDLL(None, use_errno=True).fork  # PyDLL: keeps the interpreter's lock, as os.fork does
_CAPABILITY_VERSION_3 = 0x20080522

Ceilings = tuple[tuple[int, tuple[int, int]], ...]  # resource -> soft and hard limit


@dataclass(frozen=True)
class ForkLimits:
    """The limits that hold for a fork's whole life. `file_bytes` is the largest file (output included)."""

    memory_mb: int
    scratch_mb: int
    file_bytes: int
    processes: int


@dataclass
class Place:
    """A scratch folder. `folder` is a path (Plain) or an open folder (Jailed); `mounts` the namespace that shows it."""

    folder: str | int
    scratch_mb: int = 0
    mounts: int = -1


class Isolation(Protocol):
    """What the zygote does to its forks. `proc`: an open /proc in which they are listed."""

    proc: int

    def take_place(self, limits: ForkLimits) -> Place: ...

    def fork(self) -> int: ...

    def ceilings(self, limits: ForkLimits) -> Ceilings:
        """Before the fork, where memory is not yet copied on writing."""
        ...

    def enter(self, place: Place, limits: ForkLimits, ceilings: Ceilings) -> None:
        """In the fork, before anything of the candidate is read. Raises OSError: then nothing may be run."""
        ...

    def give_back(self, place: Place) -> None:
        """Leaves no trace of what was in it."""
        ...

    def close(self) -> None:
        """No more forks."""
        ...


class Plain:
    """Resource limits and a process group. Not a wall: the code sees the file system, the network and every process."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._libc = ctypes.CDLL(None)
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._idle_bytes = _address_space(self.proc)

    def ceilings(self, limits: ForkLimits) -> Ceilings:
        return _ceilings(limits, self._idle_bytes, None)  # the kernel would count all the user's processes

    def take_place(self, limits: ForkLimits) -> Place:
        return Place(tempfile.mkdtemp(dir=self._base))

    def fork(self) -> int:
        return quick_fork()

    def enter(self, place: Place, limits: ForkLimits, ceilings: Ceilings) -> None:
        os.setsid()
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.chdir(place.folder)
        set_limits(ceilings)

    def give_back(self, place: Place) -> None:
        assert isinstance(place.folder, str)
        shutil.rmtree(place.folder, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self._base, ignore_errors=True)


class Jailed:
    """For use inside bubblewrap, with CAP_SYS_ADMIN in the jail's user namespace.

    Making and tearing down a mount namespace costs more than all else together, so scratch folders come from a pool:
    one that was not written to is used again, any other is thrown away.
    """

    def __init__(self, *, own_users: bool) -> None:
        """`own_users`: the zygote is root and gives every fork a user id of its own."""
        self.proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._idle_bytes = _address_space(self.proc)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._own_users = own_users
        self._user = int.from_bytes(os.urandom(4)) % UIDS  # two jails' users differ: the kernel counts their processes
        self._pids = os.open("self/ns/pid", os.O_RDONLY, dir_fd=self.proc)
        self._mounts = os.open("self/ns/mnt", os.O_RDONLY, dir_fd=self.proc)
        self._filters = {threads: Filter(threads=threads) for threads in (False, True)}
        self._capability_header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
        self._no_capability = (ctypes.c_uint32 * 6)()
        self._free: list[Place] = []
        self._check(self._libc.umount2(b"/proc", _DETACH), "hide /proc")

    def ceilings(self, limits: ForkLimits) -> Ceilings:
        shared = 0 if self._own_users else SHARED_PROCESSES
        return _ceilings(limits, self._idle_bytes, limits.processes + shared)

    def take_place(self, limits: ForkLimits) -> Place:
        for i, place in enumerate(self._free):
            if place.scratch_mb == limits.scratch_mb:
                return self._free.pop(i)
        return self._new_place(limits.scratch_mb)

    def _new_place(self, scratch_mb: int) -> Place:
        self._check(self._libc.unshare(_NEWNS), "make a mount namespace")
        try:
            options = f"size={scratch_mb}m,nr_inodes={INODES_PER_MB * scratch_mb},mode=1777".encode()
            mounted = self._libc.mount(b"tmpfs", SCRATCH.encode(), b"tmpfs", _NOSUID_NODEV_NOEXEC, options)
            self._check(mounted, "mount the scratch folder")
            mounts = os.open("self/ns/mnt", os.O_RDONLY, dir_fd=self.proc)
            folder = os.open(SCRATCH, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            self._check(self._libc.setns(self._mounts, _NEWNS), "return to the jail's mounts")
        return Place(folder, scratch_mb, mounts)

    def fork(self) -> int:
        self._check(self._libc.unshare(_NEWPID), "make a PID namespace")
        self._user = (self._user + 1) % UIDS
        pid = -1
        try:
            pid = quick_fork()
        finally:
            if pid:
                self._check(self._libc.setns(self._pids, _NEWPID), "return to the jail's processes")
        return pid

    def enter(self, place: Place, limits: ForkLimits, ceilings: Ceilings) -> None:
        self._check(self._libc.setns(place.mounts, _NEWNS), "enter the scratch folder's mounts")
        os.chdir(SCRATCH)
        os.setsid()
        set_limits(ceilings)
        if self._own_users:
            user = FIRST_UID + self._user
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        self._check(self._libc.capset(self._capability_header, self._no_capability), "give up capabilities")
        self._filters[limits.processes > 1].install()

    def give_back(self, place: Place) -> None:
        assert isinstance(place.folder, int)
        if stat.S_IMODE(os.fstat(place.folder).st_mode) == 0o1777 and not os.listdir(place.folder):
            self._free.append(place)
            return
        os.close(place.mounts)
        os.close(place.folder)

    def close(self) -> None:
        """Its mounts go with the jail."""

    def _check(self, status: int, what: str) -> None:
        if status:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot {what}: {os.strerror(code)}")


def quick_fork() -> int:
    """`fork` without Python's hooks in the child, which copy two hundred pages and take a quarter of a run's time.

    They reset locks that other threads may hold, and there are none here; and they seed `random` anew, while here every
    program is to start from the same state, so that the same program gets the same verdict.
    """
    pid = _FORK()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "cannot fork")
    return pid


@functools.cache
def _ceilings(limits: ForkLimits, idle_bytes: int, processes: int | None) -> Ceilings:
    """Hard and soft alike, but for the stack: programs raise it themselves, and `memory_mb` bounds it anyway."""
    both = {
        resource.RLIMIT_AS: idle_bytes + (limits.memory_mb << 20),
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: OPEN_FILES,
    }
    if processes is not None:
        both[resource.RLIMIT_NPROC] = processes
    stack = (resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    return (*((kind, (value, value)) for kind, value in both.items()), stack)


def set_limits(ceilings: Ceilings) -> None:
    for kind, values in ceilings:
        resource.setrlimit(kind, values)


def self_test(*, own_user: bool) -> None:
    """In a locked fork, before the first program: raises RuntimeError when it can do what it must not, and OSError
    when it cannot read what it must."""
    attempts: dict[str, Callable[[], object]] = {
        "open a socket": lambda: socket.socket(socket.AF_INET),
        "start a process": _fork_and_leave,
        "write outside the scratch folder": lambda: os.close(os.open("/quintet", os.O_CREAT | os.O_WRONLY)),
        "read /proc": lambda: os.stat("/proc/self"),
    }
    for what, attempt in attempts.items():
        try:
            attempt()
        except OSError:
            continue
        raise RuntimeError(f"a program in the jail can {what}")
    for folder in sys.path:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # python3.zip, which need not exist
            os.listdir(folder)  # what programs will import is theirs to read
    if own_user and os.getuid() < FIRST_UID:
        raise RuntimeError("a program in the jail has no user of its own")


def _fork_and_leave() -> None:
    if os.fork() == 0:
        os._exit(0)


def _address_space(proc: int) -> int:
    with open(os.open("self/statm", os.O_RDONLY, dir_fd=proc)) as file:
        return int(file.read().split()[0]) * resource.getpagesize()
