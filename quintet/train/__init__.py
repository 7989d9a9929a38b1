"""Train Worker: gradients from experiences, and the weights they lead to.

`quintet.train(config, ...)` is the library's front door and `quintet.train` is this package: as soon as a
submodule is imported the name means the package. So the package can be called, and passes the call on to
`quintet.api.train`; that is the only thing it knows of a higher floor, and it looks it up when called.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("quintet.api").train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
