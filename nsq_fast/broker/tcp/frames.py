"""The frames that an nsqd sends (nsqio/nsq: internal/protocol/protocol.go, SendFramedResponse), and how one is refused.

A frame is ``int32 size | int32 type | data``; the size counts the type and the data.
"""

from __future__ import annotations

RESPONSE = b"\x00\x00\x00\x00"
ERROR = b"\x00\x00\x00\x01"


def frame(kind: bytes, data: bytes) -> bytes:
    """One frame of type ``kind``, which is RESPONSE or ERROR."""
    return b"%b%b%b" % ((len(data) + 4).to_bytes(4, "big"), kind, data)


OK = frame(RESPONSE, b"OK")
HEARTBEAT = frame(RESPONSE, b"_heartbeat_")
CLOSE_WAIT = frame(RESPONSE, b"CLOSE_WAIT")


class FatalError(Exception):
    """The client gets an ERROR frame, and its connection is closed.

    nsqio/nsq: internal/protocol/errors.go, FatalClientErr.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text

    def frame(self) -> bytes:
        """The ERROR frame that the client gets."""
        return frame(ERROR, f"{self.code} {self.text}".encode("utf-8", "surrogateescape"))


class Dropped(Exception):
    """The connection is closed without a reply."""


class Upgraded(Exception):
    """The stream was changed; what was read before belongs to the old one."""
