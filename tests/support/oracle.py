"""The wire format of what servers send, once more: with ``struct``, slowly, and without looking at the package.

The compiled reader is compared with it, in the tests for what it says and in the benchmarks for how long it takes.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

FRAME = Struct(">II")
FIXED = Struct(">qH16s")
EXT_LENGTH = Struct(">H")
DETAIL = Struct(">QI")


class Malformed(Exception):
    """The bytes are not NSQ's."""


class OracleMessage(NamedTuple):
    """A message frame."""

    timestamp: int
    attempts: int
    id: bytes
    ext_version: int
    ext: bytes | None
    offset: int | None
    raw_size: int | None
    body: bytes


class OracleTruncated(NamedTuple):
    """A message frame above the limit: the message with an empty body, and how long its body is."""

    message: OracleMessage
    body_size: int


class OracleFrame(NamedTuple):
    """A response frame, of type 0, or an error frame, of type 1."""

    type: int
    data: bytes


class Decoded(NamedTuple):
    """The frames up to the first bad or incomplete one, the bytes from there on, and whether it was a bad one."""

    frames: list[OracleMessage | OracleFrame | OracleTruncated]
    rest: bytes
    malformed: bool


def decode(
    data: bytes, *, detail: bool = False, ext: bool = False, max_frame_size: int = 8 << 20, skip_oversized: bool = False
) -> Decoded:
    """Decode a whole stream at once."""
    frames: list[OracleMessage | OracleFrame | OracleTruncated] = []
    at = 0
    while True:
        try:
            end = _frame_end(data, at, max_frame_size, skip_oversized)
            if end is None:
                return Decoded(frames, data[at:], False)
            found = _frame(data, at, end, detail, ext)
            if end - at > 4 + max_frame_size and isinstance(found, OracleMessage):
                frames.append(OracleTruncated(found._replace(body=b""), len(found.body)))
            else:
                frames.append(found)
        except Malformed:
            return Decoded(frames, data[at:], True)
        at = end


def _frame_end(data: bytes, at: int, max_frame_size: int, skip_oversized: bool) -> int | None:
    if len(data) - at < 4:
        return None
    size = int.from_bytes(data[at : at + 4], "big")
    if not 4 <= size <= (2**31 - 1 if skip_oversized else max_frame_size):
        raise Malformed
    if len(data) - at >= 8:
        kind = FRAME.unpack_from(data, at)[1]
        if size > max_frame_size and kind != 2:
            raise Malformed
        if kind > 2 or (kind == 2 and size < 4 + FIXED.size):
            raise Malformed
    end = at + 4 + size
    return end if end <= len(data) else None


def _frame(data: bytes, at: int, end: int, detail: bool, ext: bool) -> OracleMessage | OracleFrame:
    kind = FRAME.unpack_from(data, at)[1]
    if kind != 2:
        return OracleFrame(kind, data[at + 8 : end])
    return decode_message(data, at + 8, end, detail, ext)


def decode_message(data: bytes, at: int, end: int, detail: bool, ext: bool) -> OracleMessage:
    """Decode the message that lies in ``data[at:end]``."""
    timestamp, attempts, id = FIXED.unpack_from(data, at)
    at += FIXED.size
    ext_version, header = 0, None
    if ext:
        ext_version, header, at = _ext(data, at, end)
    offset = raw_size = None
    if detail:
        if end - at < DETAIL.size:
            raise Malformed
        offset, raw_size = DETAIL.unpack_from(data, at)
        at += DETAIL.size
    return OracleMessage(timestamp, attempts, id, ext_version, header, offset, raw_size, data[at:end])


def _ext(data: bytes, at: int, end: int) -> tuple[int, bytes | None, int]:
    if at >= end:
        raise Malformed
    version = data[at]
    if version == 0:
        return 0, None, at + 1
    start = at + 1 + EXT_LENGTH.size
    if start > end:
        raise Malformed
    stop = start + EXT_LENGTH.unpack_from(data, at + 1)[0]
    if stop > end:
        raise Malformed
    return version, data[start:stop], stop


class PlainMessage:
    """What a client without a compiled core would make of a message: the object that the benchmarks compare with."""

    __slots__ = ("attempts", "body", "id", "responder", "timestamp")

    def __init__(self, timestamp: int, attempts: int, id: bytes, body: bytes, responder: object) -> None:
        self.timestamp = timestamp
        self.attempts = attempts
        self.id = id
        self.body = body
        self.responder = responder


def decode_plain(chunk: bytes, responder: object = None) -> tuple[list[PlainMessage], bytes]:
    """Decode the whole messages of a chunk of nothing else, as fast as Python and struct go."""
    out: list[PlainMessage] = []
    append = out.append
    size_of, fixed = Struct(">I").unpack_from, FIXED.unpack_from
    at, length = 0, len(chunk)
    while length - at >= 4:
        end = at + 4 + size_of(chunk, at)[0]
        if end > length:
            break
        timestamp, attempts, id = fixed(chunk, at + 8)
        append(PlainMessage(timestamp, attempts, id, chunk[at + 34 : end], responder))
        at = end
    return out, chunk[at:]
