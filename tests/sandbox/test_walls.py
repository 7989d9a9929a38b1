"""What must not be reached from inside: the network, the host's files, other processes, more rights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from quintet.sandbox.protocol import Outcome
from tests.sandbox.boxes import Box, assert_nothing_left, errors_of, make_box, within


@pytest.fixture(scope="module")
def jail() -> Iterator[Box]:
    """Of this file alone: what is left behind is looked for in it."""
    box = make_box("namespace", workers=2)
    yield box
    box.close()


def test_no_network(jail: Box) -> None:
    attempts = [
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1')",
    ]
    assert errors_of(jail, *attempts) == [*["PermissionError"] * 5, "URLError"]


def test_no_file_of_the_host_can_be_read(jail: Box, tmp_path: Path) -> None:
    secret = tmp_path / "expected.json"
    secret.write_text("42")
    paths = [str(secret), "/etc/passwd", "/etc/shadow", os.path.abspath(__file__), "/root/.bashrc", "/var/log"]
    assert set(errors_of(jail, *(f"open({path!r})" for path in paths))) == {"FileNotFoundError"}
    found = jail.run("import os; print(sorted(os.listdir('/home')) if os.path.exists('/home') else [])").stdout
    assert found == "[]\n"


def test_no_symlink_leads_out(jail: Box, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("42")
    code = f"""
import os
for target in ({str(secret)!r}, "../" * 20 + {str(secret)!r}, "/etc/passwd", "/proc/1/root" + {str(secret)!r}):
    os.symlink(target, "link")
    try:
        print(open("link").read())
    except OSError as error:
        print(type(error).__name__)
    os.unlink("link")
"""
    assert jail.run(code).stdout.split() == ["FileNotFoundError"] * 4


def test_proc_is_hidden_and_cannot_be_mounted(jail: Box) -> None:
    mount = "import ctypes; l = ctypes.CDLL(None, use_errno=True)\n"
    mount += "if l.mount(b'proc', b'/tmp', b'proc', 0, None): raise OSError(ctypes.get_errno(), '')"
    attempts = [f"open('/proc/{name}')" for name in ("self/maps", "self/mem", "1/environ", "cmdline", "meminfo")]
    assert errors_of(jail, *attempts, mount) == [*["FileNotFoundError"] * 5, "PermissionError"]


def test_neither_environment_nor_memory_of_the_judge(jail: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUINTET_SECRET", "expected-42")
    code = """
import gc, os
print(sorted(os.environ))
print(any("expected" + "-42" in text for text in gc.get_objects() if isinstance(text, str)))
"""
    fresh = make_box("namespace", workers=1)
    try:
        shown = fresh.run(code).stdout.splitlines()
    finally:
        fresh.close()
    assert shown == ["['HOME', 'LANG', 'PATH', 'PWD', 'PYTHONHASHSEED']", "False"]


def test_no_system_call_that_leads_to_other_processes_or_more_rights(jail: Box) -> None:
    """By number, past the C library: as machine code would."""
    numbers = {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434, "kcmp": 312,
        "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "fsopen": 430,
        "execve": 59, "execveat": 322, "fork": 57, "vfork": 58, "memfd_create": 319, "setuid": 105, "setgid": 106,
        "setresuid": 117, "capset": 126, "prctl": 157, "seccomp": 317, "chown": 92, "mknod": 133, "keyctl": 250,
        "add_key": 248, "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425, "userfaultfd": 323,
        "init_module": 175, "kexec_load": 246, "reboot": 169, "settimeofday": 164, "clock_settime": 227,
        "sethostname": 170, "syslog": 103, "personality": 135, "modify_ldt": 154, "shmget": 29, "msgget": 68,
        "semget": 64, "mq_open": 240, "inotify_init": 253, "open_by_handle_at": 304, "quotactl": 179, "swapon": 167,
        "socket": 41, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "setsockopt": 54, "setpgid": 109,
        "setsid": 112, "nice": 141, "sched_setaffinity": 203, "timer_create": 222, "mlock": 149, "pkey_alloc": 330,
    }  # fmt: skip
    code = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for name, number in {numbers!r}.items():
    ctypes.set_errno(0)
    if libc.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        print(name, errno.errorcode.get(ctypes.get_errno()))
print(libc.syscall(56, 0x11, 0, 0, 0, 0), libc.syscall(435, 0, 0), ctypes.get_errno() == errno.ENOSYS)
"""
    assert jail.run(code).stdout == "-1 -1 True\n"
    unshare = "import ctypes; l = ctypes.CDLL(None); print(l.syscall(56, 0x10000000 | 17, 0, 0, 0, 0))"
    assert jail.run(unshare, limits=within(processes=4)).stdout == "-1\n"


MACHINE_CODE = """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("{code}"))
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_long)(start)())
"""


@pytest.mark.parametrize(
    ("door", "code"),
    [
        ("none: 64-bit getpid", "b827000000 0f05 c3"),
        ("32-bit fork", "b802000000 cd80 c3"),
        ("32-bit execve", "b80b000000 cd80 c3"),
        ("x32 fork", "b839000040 0f05 c3"),
    ],
)
def test_the_32_bit_and_x32_doors_are_closed(jail: Box, door: str, code: str) -> None:
    result = jail.run(MACHINE_CODE.format(code=code.replace(" ", "")))
    if door.startswith("none"):
        assert result.stdout == "1\n"
    else:
        assert (result.outcome, result.stdout) == (Outcome.CRASHED, "")


def test_no_typing_into_the_terminal_and_no_other_ioctl(jail: Box) -> None:
    code = "import fcntl; fcntl.ioctl(0, {}, b'x')"
    assert errors_of(jail, code.format("0x5412"), code.format("0x8912")) == ["OSError", "OSError"]


def test_no_other_program_can_be_started(jail: Box) -> None:
    attempts = [
        "import os; os.execv('/bin/sh', ['sh'])",
        "import subprocess; subprocess.run(['/bin/true'])",
        "import os; assert os.system('true') == 0",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import pty; pty.fork()",
        "import multiprocessing; p = multiprocessing.Process(target=print); p.start()",
    ]
    assert "worked" not in errors_of(jail, *attempts)
    assert "worked" not in errors_of(jail, *attempts[:3], limits=within(processes=8))


def test_the_system_is_read_only(jail: Box) -> None:
    places = [
        "/usr/x",
        "/usr/lib/x",
        "/quintet/jail/x",
        "/quintet/jail/runner.py",
        "/dev/x",
        "/dev/shm/x",
        "/x",
        "/etc/x",
    ]
    assert "worked" not in errors_of(jail, *(f"open({place!r}, 'a')" for place in places))


def test_there_are_no_descriptors_but_its_own(jail: Box) -> None:
    code = """
import os
for fd in range(1024):
    try: print(fd, oct(os.fstat(fd).st_mode)[:-4])
    except OSError: pass
"""
    kinds = {line.split()[1] for line in jail.run(code).stdout.splitlines()}
    assert kinds == {"0o10"}  # regular files: the standard streams and the results; no socket, no folder, no pipe


def test_a_user_of_its_own_without_rights(jail: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("without root all programs share one user id")
    users = {
        jail.run("import os; print(os.getuid(), os.getgid(), os.getgroups(), os.getresuid())").stdout for _ in range(5)
    }
    assert len(users) == 5
    assert all(int(user.split()[0]) >= 1_900_000_000 and "[]" in user for user in users)


def test_nothing_is_left_on_the_host(jail: Box) -> None:
    assert_nothing_left(jail)
