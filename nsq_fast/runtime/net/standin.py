"""Reading in place of the reader: a caller that waits for one reply takes it from the socket itself.

Usually the reader greenlet wakes up for what came, and then wakes the caller: two
switches, and a turn of the hub between them. When only one reply is due its caller
can stand in: the hub wakes it and not the reader, and it reads once. Whatever it
does not understand it passes on, and everything else, such as being cancelled or
closed, comes to the reader as before.

Before it sleeps it tries to read a few times. A server nearby answers sooner than a
process falls asleep and wakes up again: publishing one at a time is a tenth faster
for it, for no more CPU time (nsq-fast bench publish). That is bounded in three ways:
TRIES tries, about 5 us; after HITS successes in a row the hub has its turn, so others
wait for 0.2 ms at most; and every miss that follows a miss makes it rest, twice as
long each time, so that a server far away costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gevent import get_hub, getcurrent

TRIES = 10
HITS = 16
LONGEST_REST = 1000  # replies
# Of a reply, 10 bytes; what else there is stays where it is.
READ_SIZE = 2048


class StandIn:
    """Takes the place of the greenlet that waits for a watcher.

    Args:
        recv: reads from the socket without blocking.
        readable: the watcher that the reader waits for, with ``hub.wait``.
    """

    __slots__ = ("_hits", "_hub", "_next_rest", "_passed_on", "_readable", "_reader", "_recv", "_rest", "is_barred")

    def __init__(self, recv: Callable[[int], bytes], readable: Any) -> None:
        self._recv = recv
        self._readable = readable
        self._hub = get_hub()
        self._reader: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._passed_on: bytes | None = None
        self._hits = self._rest = 0
        self._next_rest = 0
        self.is_barred = False

    def recv(self) -> bytes | None:
        """Read once in the calling greenlet, waiting for something to read. Raises OSError.

        What is returned must be dealt with at once, or passed on. None: there is no reader to stand in for; or
        nothing came, and this greenlet was woken by something else; or the stream has ended, which the reader
        will find.
        """
        waiting = self._readable.callback
        if waiting is None or self._reader is not None or self._passed_on is not None or self.is_barred:
            return None
        if self._rest:
            self._rest -= 1
        else:
            data = self._recv_at_once()
            if data is not None:
                return data
        self._wait(waiting)
        try:
            return self._recv(READ_SIZE) or None
        except BlockingIOError:
            return None

    def _recv_at_once(self) -> bytes | None:
        recv = self._recv
        for _ in range(TRIES):
            try:
                data = recv(READ_SIZE)
            except BlockingIOError:
                continue
            self._next_rest = 0
            self._hits += 1
            if self._hits == HITS:
                self._hits = 0
                self._rest = 1
            return data or None
        self._hits = 0
        self._rest = self._next_rest
        self._next_rest = min(2 * self._rest + 1, LONGEST_REST)
        return None

    def _wait(self, waiting: Callable[..., Any]) -> None:
        readable = self._readable
        self._reader = waiting, readable.args
        readable.callback, readable.args = getcurrent().switch, ()
        try:
            self._hub.switch()
        finally:
            self.give_back()

    def give_back(self) -> None:
        """From now on what happens to the watcher is for the reader again."""
        if self._reader is not None:
            self._readable.callback, self._readable.args = self._reader
            self._reader = None

    def pass_on(self, data: bytes) -> None:
        """Let the reader have what ``recv`` has returned: it wakes up, and finds it with ``take``."""
        self._passed_on = data
        self._hub.loop.run_callback(self._readable.callback, *self._readable.args)

    def take(self) -> bytes | None:
        """What was passed on, once."""
        data, self._passed_on = self._passed_on, None
        return data
