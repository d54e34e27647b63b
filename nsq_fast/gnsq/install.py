"""install_as_gnsq: make ``import gnsq`` give this package, submodules and all."""

from __future__ import annotations

import importlib
import pkgutil
import sys

from nsq_fast.errors import ConfigError

from . import __name__ as _ROOT
from . import __path__ as _PATH


def install_as_gnsq() -> None:
    """Register every module of ``nsq_fast.gnsq`` as that of ``gnsq``, before anything imports gnsq.

    ``import gnsq.contrib.batch`` and ``from gnsq.errors import NSQInvalid`` then give the same modules and classes as
    ``nsq_fast.gnsq`` does, whether a gnsq is installed or not. Raises ConfigError when another gnsq was imported.
    """
    root = importlib.import_module(_ROOT)
    present = sys.modules.get("gnsq")
    if present is not None and present is not root and not getattr(present, "__nsq_fast_shim__", False):
        raise ConfigError("gnsq is imported already: call install_as_gnsq() before anything imports gnsq")
    for info in pkgutil.walk_packages(_PATH, f"{_ROOT}."):
        importlib.import_module(info.name)
    for name in [_ROOT, *(name for name in sys.modules if name.startswith(f"{_ROOT}."))]:
        sys.modules["gnsq" + name.removeprefix(_ROOT)] = sys.modules[name]
