"""A message as the broker holds it, its id, and what the state of the servers refuses."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Sequence

import msgspec

from nsq_fast.errors import NsqError

# --- what the broker's state refuses, for its TCP and HTTP servers to put into their words ---------------------------


class NotFound(NsqError):
    """There is no such topic or channel; the text is what HTTP answers."""


class Exiting(NsqError):
    """The topic, channel or nsqd is closing, or takes no more clients."""


class NotOwner(NsqError):
    """The message is not in flight, or not with this client."""


class ClusterError(NsqError):
    """The cluster refuses what an administrator asks for; the text is what the server would answer."""


class FatalError(Exception):
    """The client gets an ERROR frame, and its connection is closed; so it is with a ServerError that nobody answers.

    nsqio/nsq: internal/protocol/errors.go, FatalClientErr.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code} {detail}")
        self.code = code
        self.detail = detail


class DataPathError(NsqError, OSError):
    """The data path cannot be used, or what is in it cannot be read."""


ID_SIZE = 16
"""Bytes of an id (nsqio/nsq: nsqd/message.go, MsgIDLength)."""

FRAME_HEAD = struct.Struct(f">iiqH{ID_SIZE}s")
"""What a frame begins with: size of what follows the size, type, timestamp in ns, attempts, id."""

_SAME = struct.Struct(">iqH")
"""What the frames of a batch have in common: type, timestamp, attempts."""

_ATTEMPTS = struct.Struct(">H")
_ATTEMPTS_AT = 16
BODY_AT = FRAME_HEAD.size
"""Where the body begins in a frame."""

FRAME_TYPE = 2
"""The type of a MESSAGE frame (nsqio/nsq: nsqd/protocol_v2.go, frameTypeMessage)."""

_FIXED = BODY_AT - 4
MAX_ATTEMPTS = 65535


class Message(msgspec.Struct, eq=False, gc=False):
    """One message in one channel, and the frame that goes out, made once when it was published.

    Most messages are delivered once, as they are. Only a redelivery makes a new frame, for its attempts. It is a Struct
    because one is made for each that is published: in Python alone that was half of the CPU of an MPUB, and most of
    that for the collector, which goes over all that wait.

    Attributes:
        id: ``ID_SIZE`` bytes.
        frame: the MESSAGE frame of the first delivery (attempts 1), plain layout.
        sequence: number of the message in its topic's log; -1 when it is not there.
        due: when a deferred message becomes ready, seconds since the epoch; 0.0 when not deferred.
        attempts: deliveries so far.
        is_placed: see ``DueHeap``.
        is_shared: whether it waits in the memory of several channels; each has a copy of its own once it delivers it.
        priority: its time in the heap that it is in: in flight the deadline, monotonic; deferred ``due``.
        delivered_at: when it was delivered, monotonic seconds.
    """

    id: bytes
    frame: bytes
    sequence: int = -1
    due: float = 0.0
    attempts: int = 0
    is_placed: bool = False
    is_shared: bool = False
    priority: float = 0.0
    delivered_at: float = 0.0

    @property
    def body(self) -> bytes:
        return self.frame[BODY_AT:]

    @property
    def timestamp(self) -> int:
        return int.from_bytes(self.frame[8:16], "big")

    def copy(self) -> Message:
        return Message(self.id, self.frame, self.sequence, self.due)

    def redelivery_frame(self) -> bytes:
        """The frame with the present attempts; they wrap at 16 bits (nsqio/nsq: nsqd/message.go, Attempts)."""
        attempts = _ATTEMPTS.pack(self.attempts & MAX_ATTEMPTS)
        return b"%b%b%b" % (self.frame[:_ATTEMPTS_AT], attempts, self.frame[_ATTEMPTS_AT + 2 :])


def id_of(frame: bytes) -> bytes:
    return frame[BODY_AT - ID_SIZE : BODY_AT]


def encode_frames(ids: Sequence[bytes], bodies: Sequence[bytes], timestamp: int) -> list[bytes]:
    """The frames of a batch of bodies published at ``timestamp`` nanoseconds."""
    count = len(bodies)
    if count == 1:  # as most publishes are
        return [FRAME_HEAD.pack(_FIXED + len(bodies[0]), FRAME_TYPE, timestamp, 1, ids[0]) + bodies[0]]
    # Columns that are put together in C: a third of what a loop takes.
    sizes = struct.pack(f">{count}I", *[_FIXED + len(body) for body in bodies])
    same = _SAME.pack(FRAME_TYPE, timestamp, 1)
    columns = struct.unpack("4s" * count, sizes), itertools.repeat(same), ids, bodies
    return list(map(b"".join, zip(*columns, strict=False)))  # one of them has no end


_EPOCH = 1288834974288
_SEQUENCE_BITS = 12
_TIMESTAMP_SHIFT = 22
_NODE_BITS = _TIMESTAMP_SHIFT - _SEQUENCE_BITS
_SEQUENCE_MASK = (1 << _SEQUENCE_BITS) - 1
_LAST_DIGITS = [b"%03x" % number for number in range(_SEQUENCE_MASK + 1)]
_LARGEST_TIMESTAMP = 1 << 41
"""Half of what an id has room for; it is reached in the year 2085."""


class SnowflakeIds:
    """Ids of the original: 16 lower-case hex digits of (milliseconds of 2**20 ns, node id, sequence).

    nsqio/nsq: nsqd/guid.go. They increase, also over a restart. Never waits: when a millisecond's
    sequence is used up it borrows from the next one.
    """

    def __init__(self, node_id: int) -> None:
        self._node = node_id
        self._next = 0

    def take(self, count: int) -> list[bytes]:
        """``count`` fresh ids, each greater than all before."""
        # The counter is (timestamp, sequence) in one number, so running over the sequence carries into the timestamp.
        at = max(self._next, ((time.time_ns() >> 20) - _EPOCH) << _SEQUENCE_BITS)
        self._next = end = at + count
        if count == 1:  # as most publishes are
            timestamp = (at >> _SEQUENCE_BITS) << _NODE_BITS | self._node
            return [b"%016x" % (timestamp << _SEQUENCE_BITS | at & _SEQUENCE_MASK)]
        ids: list[bytes] = []
        while at < end:
            # Those of one timestamp differ in their last digits, which cost a third of an MPUB when each was formatted.
            stop = min(end, (at | _SEQUENCE_MASK) + 1)
            prefix = b"%013x" % ((at >> _SEQUENCE_BITS) << _NODE_BITS | self._node)
            ids += [prefix + digits for digits in _LAST_DIGITS[at & _SEQUENCE_MASK : (stop - 1 & _SEQUENCE_MASK) + 1]]
            at = stop
        return ids

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
