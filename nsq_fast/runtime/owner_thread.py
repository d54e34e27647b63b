"""The one thread that may use an object: gevent's parts belong to the hub of the thread in which they were made.

A call from another thread would do half of what it should and leave the owner's
greenlets broken. So it raises WrongThread before it has done anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread
from typing import Any

from gevent import get_hub
from gevent.monkey import get_original

from nsq_fast.client.connection import QUEUED as QUEUED
from nsq_fast.client.connection import Queued as Queued
from nsq_fast.errors import WrongThread

get_ident = get_original("_thread", "get_ident")
"""The number of the native thread: what ``threading.get_ident`` returns names a greenlet after ``patch_all``."""


# Threads that run handlers for another one: by their number, that thread and what has it call a function.
_serving: dict[int, tuple[int, Callable[..., object]]] = {}

# Threads that take calls from every thread: by their number, what has them call a function.
_taking_calls: dict[int, Callable[..., object]] = {}


def take_calls(call: Callable[..., object]) -> None:
    """The calling thread takes calls from every thread: ``call(function, *arguments)`` has it make one soon."""
    _taking_calls[get_ident()] = call


def refuse_calls() -> None:
    """End ``take_calls``."""
    _taking_calls.pop(get_ident(), None)


def is_taking_calls() -> bool:
    """Whether the calling thread takes calls from every thread."""
    return get_ident() in _taking_calls


class OwnerThread:
    """Which thread an object belongs to, from the moment it begins to run there.

    What only reads (``stats()``, ``is_running`` and the like) is not checked: a monitoring thread may call it.

    Attributes:
        ident: of the thread; 0 while the object belongs to nobody and every thread may use it. A hot path compares
            it to ``get_ident()`` by itself.
    """

    __slots__ = ("_name", "ident")

    def __init__(self) -> None:
        self.release()

    def claim(self) -> None:
        """Belong to the calling thread from now on."""
        self.ident: int = get_ident()
        self._name = "the main thread" if get_hub().main_hub else f"thread {current_thread().name!r}"

    def release(self) -> None:
        """Belong to nobody: not started yet, or copied by a fork."""
        self.ident = 0
        self._name = ""

    def check(self, call: str) -> None:
        """Raise WrongThread when the object belongs to another thread. ``call`` is the method: ``Consumer.close()``."""
        if self.ident and get_ident() != self.ident:
            raise WrongThread(
                f"{call} was called in thread {current_thread().name!r}, but what it is called on runs in {self._name}"
                " and can only be used there; nothing was done. Use nsq_fast.threads, whose Producer and Consumer every"
                " thread may call, or nsq_fast.aio in asyncio. In a program on gevent use one for each thread, or hand"
                " the call over: hub.loop.run_callback_threadsafe(gevent.spawn, function, *arguments), where hub is"
                " what gevent.get_hub() returns in the thread in which it runs"
            )

    @contextmanager
    def served_by(self, call: Callable[..., object]) -> Iterator[None]:
        """The calling thread runs a handler for the owner meanwhile: ``call(function, *arguments)`` is made there."""
        ident = get_ident()
        _serving[ident] = self.ident, call
        try:
            yield
        finally:
            del _serving[ident]

    @property
    def is_served_here(self) -> bool:
        """Whether the calling thread runs a handler for the owner."""
        return _serving.get(get_ident(), (0, None))[0] == self.ident != 0

    @property
    def takes_calls(self) -> bool:
        """Whether the calling thread, which is another one, may ``hand_over`` calls."""
        return self.is_served_here or self.ident in _taking_calls

    def hand_over(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the owner call ``function`` soon, in order with what else the calling thread hands over."""
        call = _serving[get_ident()][1] if self.is_served_here else _taking_calls[self.ident]
        call(function, *arguments)
