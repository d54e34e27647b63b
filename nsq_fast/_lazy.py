"""Names of a package that are imported when they are first used, so that importing the package stays cheap."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ._per_interpreter import require_main_interpreter

_ANYWHERE = frozenset({"_codec", "config", "config_source", "errors", "names", "protocol"})
"""Modules of nsq_fast, and a package, that need no client and so may be imported in any interpreter of a process."""


def lazy_names(package: str, home: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``: each name of ``home`` stands in the module that it maps to."""

    def resolve(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home[name].partition(".")[0] not in _ANYWHERE:
            require_main_interpreter()  # first: to try gevent in another one ends the process, on CPython 3.13.0
        try:
            module = importlib.import_module(f".{home[name]}", package)
        except ImportError:
            require_main_interpreter()  # in another one msgspec refuses to be imported, without saying what to do
            raise
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return resolve
