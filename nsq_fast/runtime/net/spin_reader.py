"""Tries to read before the hub does the waiting, where an answer is microseconds away.

A server nearby answers sooner than a process falls asleep and wakes up again,
and than the hub gets round to it. So who waits for the answer to what it has
just sent tries to read it at once. Publishing one at a time is nearly twice as
fast for it, for the same CPU time (nsq-fast bench publish); so is consuming in
order, for a sixth more (nsq-fast bench ordered). Between two tries the core is
offered to other processes: where client and server share one, the server
answers then, and where they have one each the offer costs a system call.

It is bounded: ``LONGEST_REPLY`` or ``LONGEST_MESSAGE`` for one answer; and
where less than two of three tries succeed it rests, the longer the more often
that was so: a server far away costs next to nothing. It rests as well where
other processes want the core. The hub has its turns: a ``ReplyReader`` sees to
that by itself, for messages ``busy_poll`` does.
"""

from __future__ import annotations

from _socket import socket as CSocket
from collections.abc import Callable
from time import monotonic
from typing import TypeAlias

from nsq_fast._spin import recv_soon

Recv: TypeAlias = Callable[[int, int, int], bytes | None]

LONGEST_REPLY = 60
"""Microseconds. Most replies of a server on the same machine take 15 to 40."""

LONGEST_MESSAGE = 150
"""Microseconds. The next message comes after the FIN of the last, and others wait for a quick partition up to a
millisecond in any case."""

HITS = 4
"""Replies in a row that a ``ReplyReader`` reads before the hub has its turn."""

MISS, ENOUGH = 2, 8
"""A miss weighs as much as two hits; if misses outweigh hits by more than ``ENOUGH``, it rests."""

SHORTEST_REST, LONGEST_REST = 15, 240
"""So many answers are left to the hub then; each rest that follows another is twice as long."""

CROWDED = 0.0005
"""Seconds. Who gets the core back so late has offered it to a process that wants it, too, and rests: to try uses up the
time that the system gives a process, which then has to wait when the answer is there."""

CROWDED_RESTS, CALM = (240, 3840), 500
"""Such a rest is four times as long as the one before, within these; the shortest again after so many successes."""


class SpinReader:
    """Reads what comes soon, from a socket that does not block.

    Args:
        sock: the socket.
        recv: see ``_spin.recv_soon``.
        longest: microseconds for one answer.
    """

    __slots__ = ("_calm", "_crowded_rest", "_debt", "_longest", "_next_rest", "_recv", "_rest", "_socket")

    def __init__(self, sock: CSocket, recv: Recv = recv_soon, longest: int = LONGEST_MESSAGE) -> None:
        self._socket = sock
        self._recv = recv
        self._longest = longest
        self._debt = self._rest = self._calm = 0
        self._next_rest = SHORTEST_REST
        self._crowded_rest = CROWDED_RESTS[0]

    def recv(self, size: int) -> bytes | None:
        """What came, ``b""`` at the end of the stream; None when it is the hub that has to wait. Raises OSError."""
        if self._rest:
            self._rest -= 1
            return None
        began = monotonic()
        # Asked each time: a closed socket has -1, and its number may be another's by now.
        data = self._recv(self._socket.fileno(), size, self._longest)
        if data is None:
            self._missed(monotonic() - began)
            return None
        if self._debt:
            self._debt -= 1
        else:
            self._next_rest = SHORTEST_REST
        self._calm += 1
        if self._calm == CALM:
            self._crowded_rest = CROWDED_RESTS[0]
        return data

    def _missed(self, seconds: float) -> None:
        if seconds > CROWDED:
            self._rest = self._crowded_rest
            self._crowded_rest = min(4 * self._crowded_rest, CROWDED_RESTS[1])
            self._calm = 0
            return
        self._debt += MISS
        if self._debt > ENOUGH:
            self._debt = ENOUGH
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, LONGEST_REST)


class ReplyReader(SpinReader):
    """Reads replies, a few in a row: then the hub has a turn, in which it does not sleep, so timers and sockets wait
    for a quarter of a millisecond at most.

    Attributes:
        is_turn_due: nothing is read before the hub has had a turn, and this was set to False.
    """

    __slots__ = ("_hits", "is_turn_due")

    def __init__(self, sock: CSocket, recv: Recv = recv_soon) -> None:
        super().__init__(sock, recv, LONGEST_REPLY)
        self._hits = 0
        self.is_turn_due = False

    def recv(self, size: int) -> bytes | None:
        """As SpinReader has it; None, too, while a turn is due."""
        if self.is_turn_due:
            return None
        data = super().recv(size)
        if data is None:
            self._hits = 0
            return None
        self._hits += 1
        if self._hits == HITS:
            self._hits = 0
            self.is_turn_due = True
        return data
