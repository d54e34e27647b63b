"""How another thread wakes an event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from weakref import finalize


class LoopWakeup:
    """Has one function called in one loop. Made in that loop.

    ``call_soon_threadsafe`` of asyncio's own loop writes to a socket, which the loop reads until nothing is left. Where
    the system has eventfd the loop watches one instead: for publishing one at a time that is a tenth more messages
    a second (``nsq-fast bench publish --client "nsq_fast aio"``). uvloop has something like it of its own.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
        self._loop = loop
        self._function = function
        self._is_watched = False
        if isinstance(loop, asyncio.SelectorEventLoop) and hasattr(os, "eventfd"):
            with suppress(OSError):  # no descriptor is left: it works without
                self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                # Not closed before nobody has it any more: whoever wakes the loop just now would write elsewhere.
                finalize(self, os.close, self._descriptor).atexit = False
                # Without the context of the caller: what it calls runs for others, too.
                Context().run(loop.add_reader, self._descriptor, self._rung)
                self._is_watched = True

    def ring(self) -> None:
        """Have the function called soon. In any thread. Raises RuntimeError when the loop is closed."""
        if self._is_watched and not self._loop.is_closed():
            os.eventfd_write(self._descriptor, 1)
        else:
            self._loop.call_soon_threadsafe(self._function)

    def close(self) -> None:
        """Watch no more, soon. In any thread. It may still be rung."""
        if self._is_watched:
            with suppress(RuntimeError):  # the loop is closed, and watches nothing
                self._loop.call_soon_threadsafe(self._unwatch)

    # In the loop

    def _rung(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
        self._function()

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._descriptor)
            self._function()  # it may have been rung meanwhile
