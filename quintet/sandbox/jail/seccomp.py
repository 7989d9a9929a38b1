"""The system calls that a program may make: an allow-list, written as a classic BPF filter.

What is not listed fails with EPERM, so that a program sees an ordinary Python error. Calls through the 32-bit and x32
doors end the process: they are how an allow-list by number is walked around.

Left out on purpose: anything that starts a program or a namespace, sockets (a *pair* of unnamed ones is allowed,
asyncio needs it and it leads nowhere), ioctl (but for non-blocking mode), ptrace, mounts, keys, bpf, perf, io_uring,
userfaultfd, shared memory by name, other processes' memory, and changing owners.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Iterable

MACHINE = "x86_64"  # the only one whose numbers are known here

_ALLOWED = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
    "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15,
    "pread64": 17, "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24,
    "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35, "getitimer": 36, "alarm": 37,
    "setitimer": 38, "getpid": 39, "sendfile": 40, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47,
    "shutdown": 48, "exit": 60, "wait4": 61, "kill": 62, "uname": 63, "fcntl": 72, "flock": 73, "fsync": 74,
    "fdatasync": 75, "truncate": 76, "ftruncate": 77, "getdents": 78, "getcwd": 79, "chdir": 80, "fchdir": 81,
    "rename": 82, "mkdir": 83, "rmdir": 84, "creat": 85, "link": 86, "unlink": 87, "symlink": 88, "readlink": 89,
    "chmod": 90, "fchmod": 91, "umask": 95, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "times": 100,
    "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110, "getpgrp": 111, "getgroups": 115,
    "getresuid": 118, "getresgid": 120, "getpgid": 121, "getsid": 124, "rt_sigpending": 127, "rt_sigtimedwait": 128,
    "rt_sigsuspend": 130, "sigaltstack": 131, "utime": 132, "statfs": 137, "fstatfs": 138, "getpriority": 140,
    "sched_getparam": 143, "sched_getscheduler": 145, "setrlimit": 160, "gettid": 186, "getxattr": 191,
    "lgetxattr": 192, "fgetxattr": 193, "listxattr": 194, "llistxattr": 195, "flistxattr": 196, "tkill": 200,
    "time": 201, "futex": 202, "sched_getaffinity": 204, "epoll_create": 213, "getdents64": 217, "set_tid_address": 218,
    "restart_syscall": 219, "fadvise64": 221, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "tgkill": 234, "utimes": 235, "waitid": 247, "openat": 257,
    "mkdirat": 258, "futimesat": 261, "newfstatat": 262, "unlinkat": 263, "renameat": 264, "linkat": 265,
    "symlinkat": 266, "readlinkat": 267, "fchmodat": 268, "faccessat": 269, "pselect6": 270, "ppoll": 271,
    "set_robust_list": 273, "utimensat": 280, "epoll_pwait": 281, "epoll_create1": 291, "dup3": 292, "pipe2": 293,
    "preadv": 295, "pwritev": 296, "prlimit64": 302, "getcpu": 309, "renameat2": 316, "getrandom": 318,
    "copy_file_range": 326, "preadv2": 327, "pwritev2": 328, "statx": 332, "rseq": 334, "close_range": 436,
    "faccessat2": 439,
}  # fmt: skip
_IOCTL, _SOCKETPAIR, _CLONE, _FORK, _VFORK, _CLONE3 = 16, 53, 56, 57, 58, 435
_FIONBIO, _AF_UNIX = 0x5421, 1
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW*: time, ns, cgroup, uts, ipc, user, pid, net

_AUDIT_X86_64 = 0xC000003E
_X32 = 0x40000000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24  # offsets in struct seccomp_data, low words

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


class Filter:
    """A filter made ready once, so that installing it in a fork is two system calls."""

    def __init__(self, *, threads: bool) -> None:
        """`threads`: the program may start threads and child processes (never other programs)."""
        code = b"".join(_instructions(threads))
        self._code = ctypes.create_string_buffer(code, len(code))
        self._program = _Program(len(code) // 8, ctypes.addressof(self._code))
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]

    def install(self) -> None:
        """From here on, for good, in this process and its children. Raises OSError."""
        self._call(_PR_SET_NO_NEW_PRIVS, 1, 0)
        self._call(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(self._program))

    def _call(self, option: int, a: int, b: int) -> None:
        if self._prctl(option, a, b, 0, 0):
            code = ctypes.get_errno()
            raise OSError(code, f"prctl({option}): {errno.errorcode.get(code, code)}")


def _step(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, k)


def _deny(code: int) -> bytes:
    return _step(_RETURN, _ERRNO | code)


def _instructions(threads: bool) -> Iterable[bytes]:
    yield _step(_LOAD, _ARCHITECTURE)
    yield from (_step(_EQUAL, _AUDIT_X86_64, 1, 0), _step(_RETURN, _KILL))
    yield _step(_LOAD, _NUMBER)
    yield from _search(list(_intervals(_actions(threads))))


def _actions(threads: bool) -> dict[int, bytes]:
    """Number -> what to do; what is not here is denied."""
    allow = _step(_RETURN, _ALLOW)
    actions = dict.fromkeys(_ALLOWED.values(), allow)
    actions[_IOCTL] = _if_argument(_ARGUMENT_1, _EQUAL, _FIONBIO, allow, _deny(errno.ENOTTY))
    actions[_SOCKETPAIR] = _if_argument(_ARGUMENT_0, _EQUAL, _AF_UNIX, allow, _deny(errno.EPERM))
    if threads:
        actions[_CLONE] = _if_argument(_ARGUMENT_0, _ANY_BIT, _NEW_NAMESPACES, _deny(errno.EPERM), allow)
        actions[_FORK] = actions[_VFORK] = allow
    # Its flags lie behind a pointer, where a filter cannot look: the C library takes ENOSYS as "use clone"
    actions[_CLONE3] = _deny(errno.ENOSYS)
    return actions


def _if_argument(offset: int, test: int, value: int, then: bytes, otherwise: bytes) -> bytes:
    return _step(_LOAD, offset) + _step(test, value, 0, 1) + then + otherwise


def _intervals(actions: dict[int, bytes]) -> Iterable[tuple[int, bytes]]:
    """(first number, what to do from there on), ascending, the first from 0."""
    previous = b""
    for number in sorted({0, _X32, *actions, *(number + 1 for number in actions)}):
        action = _step(_RETURN, _KILL) if number >= _X32 else actions.get(number, _deny(errno.EPERM))
        if action != previous:
            yield number, action
        previous = action


def _search(intervals: list[tuple[int, bytes]]) -> list[bytes]:
    """A binary search: the kernel walks the filter once for every number when it is installed, which a list of 150
    comparisons makes half a millisecond of."""
    if len(intervals) == 1:
        action = intervals[0][1]
        return [action[i : i + 8] for i in range(0, len(action), 8)]
    middle = len(intervals) // 2
    low, high = _search(intervals[:middle]), _search(intervals[middle:])
    return [_step(_AT_LEAST, intervals[middle][0], len(low), 0), *low, *high]
