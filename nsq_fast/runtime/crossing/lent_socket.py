"""A socket of the hub thread that another thread watches while the hub thread sleeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

from nsq_fast.runtime.net.connection import Connection

READ = 1

try:
    new_epoll: Callable[[], Any] | None = get_original("select", "epoll")
except AttributeError:
    new_epoll = None  # only Linux has it


class LentSocket:
    """Says which of the two threads sees that there is something to read. In the hub thread.

    Each watches an epoll of its own that has the socket in it, or not: a system call moves it from one to the other,
    whatever the thread does just now. The loop of libev could not: it forgets a socket when it is readable next.

    Attributes:
        conn: the connection whose socket it is; None while it is none.
        number: of the socket.
    """

    def __init__(self, own: Any, others: Any) -> None:
        self._own = own
        self._others = others
        self._watcher: Any = None
        self._is_lent = False
        self.conn: Connection | None = None
        self.number = -1

    @property
    def descriptor(self) -> int:
        """What the other thread watches."""
        number: int = self._others.fileno()
        return number

    def begin(self, conn: Connection, loop: Any) -> bool:
        """Take the socket of this connection, if that can be lent; whether it can."""
        number = conn.lend()
        if number is None:
            return False
        self.conn, self.number = conn, number
        self._watcher = loop.io(self._own.fileno(), READ)
        try:
            self._own.register(number, READ)
            self._others.register(number, 0)
        except OSError:  # the system has a limit to what epolls watch
            self.end()
            return False
        self._watcher.start(conn.read_lent)
        return True

    def lend(self) -> None:
        """The other thread watches."""
        self._is_lent = True
        self._own.modify(self.number, 0)
        self._others.modify(self.number, READ)

    def take_back(self) -> None:
        """The hub thread does."""
        if self._is_lent:
            self._is_lent = False
            self._others.modify(self.number, 0)
            self._own.modify(self.number, READ)

    def end(self) -> None:
        """Give the socket back to the connection."""
        conn, self.conn = self.conn, None
        if conn is not None:
            self._watcher.close()
            for epoll in (self._own, self._others):
                with suppress(OSError):  # it was closed
                    epoll.unregister(self.number)
            conn.take_back()
