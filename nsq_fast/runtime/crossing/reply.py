"""What one thread waits for while another works: it blocks the calling thread, or the calling greenlet on a hub."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gevent import getcurrent
from gevent._hub_local import get_hub_if_exists
from gevent.hub import Waiter
from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

from nsq_fast.errors import WrongThread
from nsq_fast.runtime.owner_thread import is_taking_calls
from nsq_fast.runtime.waiting import must_go_on

_new_lock = get_original("_thread", "allocate_lock")


class Reply:
    """The result of something, or its error; set once, in any thread, and waited for in the one that made it.

    Raises WrongThread in a callback of the hub thread, which would wait for itself.

    Args:
        blocks_thread: whether to block the thread even where it runs a hub of gevent: for who holds a lock of threads,
            at which the other greenlets of the thread would block it for ever.

    Attributes:
        error: what it ended with when it did not go well.
        is_set: whether it has ended.
    """

    __slots__ = ("_lock", "_value", "_wake", "error", "is_set")

    def __init__(self, *, blocks_thread: bool = False) -> None:
        self.error: BaseException | None = None
        self._value: Any = None
        self.is_set = False
        hub: Any = get_hub_if_exists()
        self._lock: Any = None  # what a thread waits for
        self._wake: Any = None  # what a greenlet waits for
        if is_taking_calls() and must_go_on():
            raise WrongThread(
                "a callback in the hub thread of nsq_fast (of a Future, for example) called what waits for that thread:"
                " it would wait for ever; nothing was done. Use publish_nowait() there, or hand the call over to a"
                " thread of yours"
            )
        if hub is None or getcurrent() is hub or blocks_thread:
            self._lock = _new_lock()
            self._lock.acquire()
        else:
            self._wake = hub.loop.async_()

    def set(self, value: Any = None) -> None:
        """It went well."""
        self._value = value
        self._set()

    def set_exception(self, error: BaseException) -> None:
        """It did not."""
        self.error = error
        self._set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it; whether it came within ``timeout`` seconds."""
        if self._lock is None:
            return self._wait_on_hub(timeout)
        # Once it is set nobody looks at the lock: whoever was interrupted between the next two lines still has it.
        if not self.is_set and self._lock.acquire(True, -1 if timeout is None else max(0.0, timeout)):
            self._lock.release()
        return self.is_set

    def get(self) -> Any:
        """Wait for it; return the value or raise the error."""
        self.wait()
        if self.error is not None:
            raise self.error
        return self._value

    def get_now(self) -> Any:
        """The value of one that is set."""
        return self._value

    def _set(self) -> None:
        self.is_set = True
        if self._lock is not None:
            self._lock.release()
        else:
            with suppress(ValueError):  # the hub there was destroyed: nobody waits any more
                self._wake.send()

    def _wait_on_hub(self, timeout: float | None) -> bool:
        hub: Any = get_hub_if_exists()
        waiter: Waiter[Any] = Waiter()
        timer = None
        self._wake.start(waiter.switch, None)
        try:
            if timeout is not None:
                timer = hub.loop.timer(max(0.0, timeout))
                timer.start(waiter.switch, None)
            if not self.is_set:  # one that is set from now on wakes the loop
                waiter.get()
        finally:
            self._wake.stop()  # not closed: who sets it may be about to use it
            if timer is not None:
                timer.stop()
                timer.close()
        return self.is_set
