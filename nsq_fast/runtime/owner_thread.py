"""The one thread that may use an object: gevent's parts belong to the hub of the thread in which they were made.

A call from another thread would do half of what it should and leave the owner's
greenlets broken. So it raises WrongThread before it has done anything.
"""

from __future__ import annotations

from threading import current_thread

from gevent import get_hub
from gevent.monkey import get_original

from nsq_fast.errors import WrongThread

get_ident = get_original("_thread", "get_ident")
"""The number of the native thread: what ``threading.get_ident`` returns names a greenlet after ``patch_all``."""


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
                " and can only be used there; nothing was done. Use one for each thread, or hand the call over:"
                " hub.loop.run_callback_threadsafe(gevent.spawn, function, *arguments), where hub is what"
                " gevent.get_hub() returns in the thread in which it runs"
            )
