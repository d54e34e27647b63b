"""Handlers: what can be one, what it may return, and how long it takes.

Calling an ``async def`` or a generator function runs nothing of its body. A message
whose handler is one would be finished without having been handled, so it is
refused when it is given, where that can be seen, and else when it returns.

How long they take, and how old messages are then, is sampled where ``histograms`` asks for it: at most one message in
``EVERY`` seconds, the first one that a worker begins with. That is decided before anything is known of it, so slow
messages are as likely to be sampled as quick ones, and the others cost nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from time import monotonic, time
from types import CoroutineType, GeneratorType
from typing import Any

from nsq_fast._codec import Message
from nsq_fast.client.histogram import Histogram
from nsq_fast.errors import ConfigError, HandlerDeferred

from .connection import Queued

Handler = Callable[[Any, Message], object]
BatchHandler = Callable[[Any, list[Message]], object]

REMEDY = "nsq_fast handlers are plain functions that run on gevent: use 'def', without 'yield'"
# What handlers return by the way, and is not worth a closer look.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict, set, Queued})


def check_handler(name: str, handler: Any) -> None:
    """Raise ConfigError unless ``handler`` is None, or a callable that has run when it returns."""
    if handler is None:
        return
    if not callable(handler):
        raise ConfigError(f"{name}={handler!r}: must be callable")
    kind = deferred_kind(handler)
    if kind is not None:
        raise ConfigError(f"{name}={handler!r} is {kind}: calling it would not run its body. {REMEDY}")


def deferred_kind(handler: Any) -> str | None:
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


EVERY = 0.01
"""Seconds between two samples: about 10 us for each are a thousandth of the time."""


class Sample:
    """One message, or batch of messages, whose handler is timed; that may run in any thread.

    Args:
        timing: counts it.

    Attributes:
        age: seconds from the time that the message has from nsqd to the start of its handler; of a batch, its first.
        seconds: what the handler took; None before it has ended.
    """

    __slots__ = ("_began", "_timing", "age", "seconds")

    def __init__(self, timing: HandlerTiming) -> None:
        self._timing: HandlerTiming | None = timing
        self._began: float | None = None
        self.age: float = 0.0
        self.seconds: float | None = None

    def begin(self, item: Message | list[Message]) -> None:
        """The handler begins with a message, or a list of them. The first call counts."""
        if self._began is None:
            message = item[0] if isinstance(item, list) else item
            self.age = time() - 1e-9 * message.timestamp
            self._began = monotonic()

    def end(self) -> None:
        """The handler has ended, whatever came of it. The first call counts."""
        if self._began is not None and self.seconds is None:
            self.seconds = monotonic() - self._began

    def count(self) -> None:
        """Count it, unless no handler has ended. In the thread of the consumer; the first call counts."""
        if self._timing is not None and self.seconds is not None:
            self._timing.handler_time.observe(self.seconds)
            self._timing.message_age.observe(self.age)
            self._timing = None

    def timed(self, handler: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
        """A handler whose first call is timed."""

        def handle(consumer: Any, item: Any) -> object:
            self.begin(item)
            try:
                return handler(consumer, item)
            finally:
                self.end()

        return handle


class HandlerTiming:
    """What was sampled.

    Attributes:
        handler_time: seconds from the call of a handler to its end; of a coroutine function, to the end of its task.
        message_age: seconds from the timestamp of a message to the start of its handler.
        due: when the next sample may be taken, monotonic.
    """

    def __init__(self) -> None:
        self.handler_time: Histogram = Histogram()
        self.message_age: Histogram = Histogram()
        self.due: float = 0.0

    def sample(self, now: float) -> Sample:
        """A new sample, which is due. Call its ``count`` when its handler has ended."""
        self.due = now + EVERY
        return Sample(self)
