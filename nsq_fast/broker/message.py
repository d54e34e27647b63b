"""A message as the broker holds it: the frame that goes out, made once when it was published.

Most messages are delivered once, as they are. Only a redelivery makes a new
frame, for its attempts. A message belongs to one channel; channels of a topic
share the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

ID_SIZE = 16
"""Bytes of an id (nsqio/nsq: nsqd/message.go, MsgIDLength)."""

FRAME_HEAD = struct.Struct(f">iiqH{ID_SIZE}s")
"""What a frame begins with: size of what follows the size, type, timestamp in ns, attempts, id."""

_ATTEMPTS = struct.Struct(">H")
_ATTEMPTS_AT = 16
BODY_AT = FRAME_HEAD.size
"""Where the body begins in a frame."""

FRAME_TYPE = 2
"""The type of a MESSAGE frame (nsqio/nsq: nsqd/protocol_v2.go, frameTypeMessage)."""

_FIXED = BODY_AT - 4
MAX_ATTEMPTS = 65535


class Message:
    """One message in one channel.

    Attributes:
        id: ``ID_SIZE`` bytes.
        frame: the MESSAGE frame of the first delivery (attempts 1), plain layout.
        attempts: deliveries so far.
        sequence: number of the message in its topic's log; -1 when it is not there.
        priority: its time in the heap that it is in: in flight the deadline, monotonic; deferred ``due``.
        is_placed: see ``DueHeap``.
        delivered_at: when it was delivered, monotonic seconds.
        due: when a deferred message becomes ready, seconds since the epoch; 0.0 when not deferred.
    """

    __slots__ = ("attempts", "delivered_at", "due", "frame", "id", "is_placed", "priority", "sequence")

    def __init__(self, id: bytes, frame: bytes, sequence: int = -1, due: float = 0.0) -> None:
        self.id = id
        self.frame = frame
        self.sequence = sequence
        self.due = due
        self.attempts = 0
        self.priority = 0.0
        self.is_placed = False
        self.delivered_at = 0.0

    @property
    def body(self) -> bytes:
        """The body as published."""
        return self.frame[BODY_AT:]

    @property
    def timestamp(self) -> int:
        """When it was published, nanoseconds since the epoch."""
        return int.from_bytes(self.frame[8:16], "big")

    def copy(self) -> Message:
        """The message for another channel."""
        return Message(self.id, self.frame, self.sequence, self.due)

    def redelivery_frame(self) -> bytes:
        """The frame with the present attempts; they wrap at 16 bits (nsqio/nsq: nsqd/message.go, Attempts)."""
        attempts = _ATTEMPTS.pack(self.attempts & MAX_ATTEMPTS)
        return b"%b%b%b" % (self.frame[:_ATTEMPTS_AT], attempts, self.frame[_ATTEMPTS_AT + 2 :])


def encode_frames(ids: Sequence[bytes], bodies: Sequence[bytes], timestamp: int) -> list[bytes]:
    """The frames of a batch of bodies published at ``timestamp`` nanoseconds."""
    pack = FRAME_HEAD.pack
    return [pack(_FIXED + len(body), FRAME_TYPE, timestamp, 1, id) + body for id, body in zip(ids, bodies, strict=True)]
