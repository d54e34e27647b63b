"""What can be a handler, and what it may return: functions that have run when they return.

Calling an ``async def`` or a generator function runs nothing of its body. A message
whose handler is one would be finished without having been handled, so it is
refused when it is given, where that can be seen, and else when it returns.
"""

from __future__ import annotations

import functools
import inspect
from types import CoroutineType, GeneratorType
from typing import Any

from nsq_fast.errors import ConfigError, HandlerDeferred
from nsq_fast.runtime.owner_thread import Queued

REMEDY = "nsq_fast handlers are plain functions that run on gevent: use 'def', without 'yield'"
# What handlers return by the way, and is not worth a closer look.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict, set, Queued})


def check_handler(name: str, handler: Any) -> None:
    """Raise ConfigError unless ``handler`` is None, or a callable that has run when it returns."""
    if handler is None:
        return
    if not callable(handler):
        raise ConfigError(f"{name}={handler!r}: must be callable")
    kind = _deferred_kind(handler)
    if kind is not None:
        raise ConfigError(f"{name}={handler!r} is {kind}: calling it would not run its body. {REMEDY}")


def _deferred_kind(handler: Any) -> str | None:
    """What kind of function ``handler`` is, if calling it does not run its body."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004
        while isinstance(function, functools.partial | functools.partialmethod):
            function = function.func
        if inspect.iscoroutinefunction(function):
            return "an async function"
        if inspect.isgeneratorfunction(function):
            return "a generator function"
        if inspect.isasyncgenfunction(function):
            return "an async generator function"
    return None


def refuse_deferred(result: object) -> None:
    """Raise HandlerDeferred if what a handler has returned is work that has not been done."""
    if type(result) in _PLAIN:
        return
    if not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if isinstance(result, CoroutineType | GeneratorType):
        result.close()  # or Python would warn that it was never awaited
    raise HandlerDeferred(f"the handler returned {result!r}, which nobody runs, and has handled nothing. {REMEDY}")
