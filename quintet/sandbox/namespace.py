"""The `namespace` back end: bubblewrap around a warm interpreter, and a smaller jail around each fork of it.

The outer one (one per core): no network, a read-only system with nothing of the user's in it, PID, IPC, UTS and mount
namespaces of its own, an empty environment. The inner one, per program or session: see `jail.isolation`.

As root every fork has a user id of its own. Otherwise all forks share the caller's id inside a user namespace, in which
they have no capability: what then keeps two of them apart is their PID and mount namespaces and the filter alone.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
from pathlib import Path

from quintet.sandbox import launch
from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.jail.isolation import SCRATCH
from quintet.sandbox.jail.seccomp import MACHINE
from quintet.sandbox.zygote import try_out
from quintet.types import QuintetError

log = logging.getLogger(__name__)

MEND = "Install bubblewrap with `make sandbox-deps`, or use backend: remote (backend: process for code you trust)."
_OWN = "/quintet"
_PACKAGES = f"{_OWN}/packages"
_DEVICES = ("null", "zero", "full", "random", "urandom")
_CAP_SYS_ADMIN = 21


class NamespaceJail:
    """A warm interpreter inside bubblewrap; see `zygote.Jail`."""

    name = "namespace"
    sealed = True

    def __init__(self, config: SandboxConfig) -> None:
        """Tries one out, about 0.2 s. Raises QuintetError where the isolation cannot be had."""
        launch.check_system(config)
        if platform.machine() != MACHINE:
            raise QuintetError(f"sandbox.backend: namespace knows the system calls of {MACHINE} only.\n{MEND}")
        found = shutil.which("bwrap")
        if found is None:
            raise QuintetError(f"sandbox.backend: namespace needs bubblewrap (bwrap), which is not on PATH.\n{MEND}")
        self._bwrap = found
        self._config = config
        self._root = os.geteuid() == 0 and _has_capability(_CAP_SYS_ADMIN)
        problem = try_out(self)
        if problem is not None:
            raise QuintetError(f"sandbox.backend: namespace is not to be had on this system: {problem}\n{MEND}")
        if not self._root:
            log.warning(
                "sandbox.backend: namespace without root: programs share one user id, yours, without its rights"
            )

    def command(self, control: int) -> list[str]:
        packages = [f"{_PACKAGES}/{i}" for i in range(len(self._config.python_path))]
        inner = launch.command(self._config, control, [_OWN], packages, isolation="jailed", own_users=self._root)
        return [self._bwrap, *self._walls(), "--", *inner]

    def clean_up(self) -> None:
        """All it had were mounts, gone with its last process."""

    def _walls(self) -> list[str]:
        walls = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
        walls += ["--hostname", "sandbox", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
        capabilities = ["CAP_SYS_ADMIN", "CAP_SYS_CHROOT"]
        if self._root:
            capabilities += ["CAP_SETUID", "CAP_SETGID", "CAP_KILL"]
        else:
            walls += ["--unshare-user", "--uid", "0", "--gid", "0"]
        for capability in capabilities:
            walls += ["--cap-add", capability]
        walls += self._system()
        for device in _DEVICES:
            walls += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
        # Folders made on the way to a mount point would have the permissions of what is mounted there
        walls += ["--perms", "0755", "--dir", _OWN, "--perms", "0755", "--dir", _PACKAGES]
        walls += ["--ro-bind", str(launch.jail_folder()), f"{_OWN}/jail"]
        walls += ["--ro-bind", str(launch.cloudpickle_folder()), f"{_OWN}/cloudpickle"]
        for i, folder in enumerate(launch.package_folders(self._config)):
            walls += ["--ro-bind", str(folder), f"{_PACKAGES}/{i}"]
        return [*walls, "--proc", "/proc", "--dir", SCRATCH, "--remount-ro", "/", "--chdir", "/"]

    def _system(self) -> list[str]:
        """The read-only system: /usr and the interpreter."""
        binds = [
            "--ro-bind",
            "/usr",
            "/usr",
            "--perms",
            "0755",
            "--dir",
            "/etc",
            "--ro-bind-try",
            "/etc/ld.so.cache",
            "/etc/ld.so.cache",
        ]
        for name in ("bin", "sbin", "lib", "lib64"):
            path = Path("/", name)
            if path.is_symlink():
                binds += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                binds += ["--ro-bind", str(path), str(path)]
        prefix = launch.interpreter().parents[1]
        if not prefix.is_relative_to("/usr"):
            for parent in reversed(prefix.parents[:-1]):
                binds += ["--perms", "0755", "--dir", str(parent)]
            binds += ["--ro-bind", str(prefix), str(prefix)]
        return binds


def _has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
