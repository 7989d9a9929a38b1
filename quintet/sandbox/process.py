"""The `process` back end: limits, and nothing else.

A program can read every file of the user, use the network, start processes and signal them: for code you trust.
`Limits.processes` is not enforced, and a program that starts a daemon leaves it behind.
"""

from __future__ import annotations

import logging
import shutil
import tempfile

from quintet.sandbox import launch
from quintet.sandbox.config import SandboxConfig

log = logging.getLogger(__name__)


class ProcessJail:
    """A warm interpreter as an ordinary process; see `zygote.Jail`."""

    name = "process"
    sealed = False

    def __init__(self, config: SandboxConfig) -> None:
        """Raises QuintetError where it cannot run; warns."""
        launch.check_system(config)
        self._config = config
        self._bases: list[str] = []
        log.warning(
            "sandbox.backend: process isolates NOTHING: programs can read your files, use the network and kill your "
            "processes. It is for code you trust; a model's code belongs in backend: namespace."
        )

    def command(self, control: int) -> list[str]:
        own_path = [str(launch.jail_folder().parent), str(launch.cloudpickle_folder().parent)]
        base = tempfile.mkdtemp(prefix="quintet-sandbox-")
        self._bases.append(base)
        packages = [str(folder) for folder in launch.package_folders(self._config)]
        return launch.command(self._config, control, own_path, packages, isolation="plain", base=base)

    def clean_up(self) -> None:
        for base in self._bases:  # each interpreter removes its own, unless it was killed
            shutil.rmtree(base, ignore_errors=True)
