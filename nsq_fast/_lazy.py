"""Where names come from: those of a package that are imported when they are first used, the build of the core that an
interpreter can use, and what a program may have patched.

``nsq_fast._codec`` and ``_frame``, the compiled modules that ``nsq_fast.protocol`` needs, are built twice from the same
sources. The build beside the sources keeps its types and constants in variables of C: reading them costs nothing, and
all interpreters of a process share them. So it is the main interpreter's. The build in ``_per_interpreter`` keeps them
in the state of the module, of which each interpreter has one, and looks them up: a message takes a fifth more
instructions to decode. So each interpreter may have a lock of its own (PEP 684). More is in docs/internals.md.
"""

from __future__ import annotations

import _thread
import importlib
import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

_is_main: Callable[[], bool] = getattr(_thread, "_is_main_interpreter", lambda: True)  # CPython has it from 3.12 on


def search_path(path: list[str]) -> list[str]:
    """Where this interpreter looks for our modules: in ``_per_interpreter`` first, unless it is the main one."""
    return path if _is_main() else [*(f"{folder}/_per_interpreter" for folder in path), *path]


def require_main_interpreter() -> None:
    """Raise ImportError, saying what to do, in an interpreter that is not the main one of its process."""
    if not _is_main():
        raise ImportError(
            "the client of nsq_fast (Consumer, Producer, and all else that connects) runs in the main interpreter of a"
            " process only, and this is another one. Use it in the main interpreter, or in a process of its own; here,"
            " nsq_fast._codec, nsq_fast._frame and nsq_fast.protocol can be imported"
        )


_ANYWHERE = frozenset({"_codec", "config", "errors", "names", "protocol"})
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


def get_original(module: str, name: str) -> Any:
    """The attribute of a module as it was before ``gevent.monkey`` patched it, if it did.

    For what native threads need, where a program may run without gevent.
    """
    monkey = sys.modules.get("gevent.monkey")
    return getattr(importlib.import_module(module), name) if monkey is None else monkey.get_original(module, name)


being_logged: set[Any] = set()
"""Greenlets that hand a record to its handlers: see ``get_logger``."""


def get_logger(name: str) -> logging.Logger:
    """As ``logging.getLogger``, for what may log in a callback of gevent's hub, and must go on whatever handlers do."""
    logger = logging.getLogger(name)
    logger.addFilter(_outside_the_hub)
    if "handle" not in vars(logger):
        logger.handle = partial(_handle, logger.handle)  # type: ignore[method-assign]
    return logger


def _handle(handle: Callable[[logging.LogRecord], None], record: logging.LogRecord) -> None:
    """What a program's handler or filter raises is shown as ``logging`` shows what fails in writing: a connection must
    not fail with a record of it."""
    try:
        handle(record)
    except Exception:
        _SHOWS_ERRORS.handleError(record)


_SHOWS_ERRORS = logging.NullHandler()


def _outside_the_hub(record: logging.LogRecord) -> bool:
    """Have a greenlet handle a record that comes from the hub itself, where handlers may wait for greenlets.

    The hub cannot wait, but in a patched program every handler may have to: for its lock, which gevent has made one for
    greenlets, or for a socket. The record would be lost, and what the callback was about to do.
    """
    gevent, monkey = sys.modules.get("gevent"), sys.modules.get("gevent.monkey")
    if gevent is None or monkey is None or not isinstance(gevent.getcurrent(), sys.modules["gevent.hub"].Hub):
        return True
    if not (monkey.is_module_patched("_thread") or monkey.is_module_patched("socket")):
        return True
    handling = gevent.spawn(logging.getLogger(record.name).handle, record)
    being_logged.add(handling)
    handling.rawlink(being_logged.discard)
    return False
