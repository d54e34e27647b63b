"""Message ids: where they come from.

A generator is an object with one method, ``take(count)``, that returns so many
fresh ids as bytes of 16. The original's ids are snowflakes in hex: time, node,
sequence (nsqio/nsq: nsqd/guid.go). They increase, also over a restart.
"""

from __future__ import annotations

import time
from typing import Protocol

_EPOCH = 1288834974288
_SEQUENCE_BITS = 12
_TIMESTAMP_SHIFT = 22
_SEQUENCE_MASK = (1 << _SEQUENCE_BITS) - 1
_LARGEST_TIMESTAMP = 1 << 41
"""Half of what an id has room for; it is reached in the year 2085."""


class IdGenerator(Protocol):
    """Whatever makes message ids for a topic."""

    def take(self, count: int) -> list[bytes]:
        """``count`` fresh ids, each greater than all before."""
        ...

    def skip(self, last: bytes) -> None:
        """Give out only ids greater than ``last``, which was given out in an earlier life."""
        ...


class SnowflakeIds:
    """Ids of the original: 16 lower-case hex digits of (milliseconds of 2**20 ns, node id, sequence).

    Never waits: when a millisecond's sequence is used up it borrows from the next one.
    """

    def __init__(self, node_id: int) -> None:
        self._node = node_id << _SEQUENCE_BITS
        self._next = 0

    def take(self, count: int) -> list[bytes]:
        """``count`` fresh ids, each greater than all before."""
        # The counter is (timestamp, sequence) in one number, so running over the sequence carries into the timestamp.
        first = max(self._next, ((time.time_ns() >> 20) - _EPOCH) << _SEQUENCE_BITS)
        self._next = first + count
        node = self._node
        return [
            b"%016x" % ((n >> _SEQUENCE_BITS) << _TIMESTAMP_SHIFT | node | n & _SEQUENCE_MASK)
            for n in range(first, first + count)
        ]

    def skip(self, last: bytes) -> None:
        """Give out only ids greater than ``last``, which was given out in an earlier life.

        Without effect when that cannot have been: it comes from a disk, which may have changed it.
        """
        try:
            timestamp = int(last, 16) >> _TIMESTAMP_SHIFT
        except ValueError:
            return
        if timestamp < _LARGEST_TIMESTAMP:
            # A new timestamp, because another node id in the same one could make the id smaller.
            self._next = max(self._next, (timestamp + 1) << _SEQUENCE_BITS)
