"""From a configuration to a sandbox."""

from __future__ import annotations

import importlib

from quintet.sandbox.config import SandboxConfig
from quintet.sandbox.namespace import NamespaceJail
from quintet.sandbox.pool import ZygotePool
from quintet.sandbox.process import ProcessJail
from quintet.sandbox.protocol import Sandbox
from quintet.types import QuintetError

REMOTE = "quintet.sandbox.remote:RemoteSandbox"


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """Raises QuintetError where the isolation asked for is not available: it is never weakened instead."""
    if config.backend == "namespace":
        return ZygotePool(config, NamespaceJail(config))
    if config.backend == "process":
        return ZygotePool(config, ProcessJail(config))
    return _class_backend(config, REMOTE if config.backend == "remote" else config.backend)


def _class_backend(config: SandboxConfig, path: str) -> Sandbox:
    """`module:Class`, called with the configuration."""
    module_name, _, class_name = path.partition(":")
    try:
        backend: type[Sandbox] = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise QuintetError(
            f"sandbox.backend: {config.backend}: {error}\nUse process, namespace, remote, or module:Class of your own."
        ) from None
    return backend(config)  # type: ignore[call-arg]  # the protocol cannot say how its classes are made
