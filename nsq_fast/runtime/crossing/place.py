"""Where a client of the hub thread is, for those who hold it in another thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

from nsq_fast.runtime.fork import tell_forks

from .hub_thread import HubThread, hub_thread

ClientT = TypeVar("ClientT")


class Place(Generic[ClientT]):
    """A client, made in the hub thread. In a child of a fork it is made again, in a thread of the child.

    It is also made again when the hub thread has failed.

    Args:
        make: called in the hub thread, with that.
        renewed: called there with what was made again, before anybody uses it.
    """

    def __init__(self, make: Callable[[HubThread], ClientT], renewed: Callable[[ClientT], object]) -> None:
        self._make = make
        self._renewed = renewed
        self.thread = hub_thread()
        self._client = self.thread.call(make, self.thread)
        self.forked()
        tell_forks(self)

    def get(self) -> ClientT:
        """The client. ``thread`` is where it is, from then on."""
        if self._is_left_behind:
            with self._lock:  # blocks greenlets, too: who holds it must not let others of its thread run
                if self._is_left_behind:
                    thread = hub_thread()
                    self._client = thread.call(self._make_again, thread, blocks_thread=True)
                    self.thread = thread
        return self._client

    def _make_again(self, thread: HubThread) -> ClientT:
        client = self._make(thread)
        self._renewed(client)
        return client

    @property
    def _is_left_behind(self) -> bool:
        return self.thread.is_over and not self.thread.is_stopped

    def forked(self) -> None:
        """In the child of a fork: who held the lock is the parent's."""
        self._lock: Any = get_original("_thread", "allocate_lock")()
