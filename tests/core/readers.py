"""What the tests of the core share: feeding in pieces, and both readers' results in the oracle's terms."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from struct import iter_unpack
from typing import Any, NamedTuple

from support.oracle import OracleFrame, OracleMessage, OracleTruncated

from nsq_fast._codec import Message, TruncatedMessage
from nsq_fast._frame import ColumnReader, Columns, FrameReader, Response
from nsq_fast.errors import LocalProtocolError, RemoteProtocolError

DATA = Path(__file__).parent.parent / "data"
LAYOUTS = [(False, False), (True, False), (False, True), (True, True)]


def layout_id(layout: tuple[bool, bool]) -> str:
    """Name of a (detail, ext) pair in a test's id."""
    return {(False, False): "plain", (True, False): "detail", (False, True): "ext"}.get(layout, "ext+detail")


class Conversation(NamedTuple):
    """A recorded conversation with a real server."""

    name: str
    dialect: str
    sent: list[bytes]
    received: list[bytes]
    detail: bool
    ext: bool


def conversations() -> Iterator[Conversation]:
    """Every recorded conversation, with the message layout that its subscription has."""
    for name in ("original", "redesigned"):
        for line in (DATA / f"{name}.jsonl").read_text().splitlines():
            record = json.loads(line)
            steps = [step for step in record.get("steps", []) if step[0] in ("send", "recv")]
            sent = [bytes.fromhex(data) for kind, data in steps if kind == "send"]
            received = [bytes.fromhex(data) for kind, data in steps if kind == "recv"]
            detail = any(data.startswith((b"SUB_ADVANCED ", b"SUB_ORDERED ")) for data in sent)
            ext = any(b"extend_support" in data for data in sent)
            if steps:
                yield Conversation(record["name"], record["dialect"], sent, received, detail, ext)


PASSED_OVER = b"passed over: %d"
OracleAny = OracleMessage | OracleFrame | OracleTruncated


def plain(frame: Any) -> OracleAny:
    """A frame of FrameReader as the oracle would give it."""
    if isinstance(frame, Message):
        message = OracleMessage(
            frame.timestamp, frame.attempts, frame.id, frame.ext_version, frame.ext,
            frame.offset, frame.raw_size, frame.body,
        )  # fmt: skip
        return OracleTruncated(message, frame.body_size) if isinstance(frame, TruncatedMessage) else message
    return OracleFrame(0 if isinstance(frame, Response) else 1, frame.data)


class Outcome(NamedTuple):
    """What a reader made of a stream."""

    frames: list[OracleAny]
    rest: bytes
    error: str | None


def read(chunks: Iterable[bytes], **options: Any) -> Outcome:
    """Feed a FrameReader until the chunks or its patience end."""
    reader = FrameReader(**options)
    frames: list[OracleAny] = []
    try:
        for chunk in chunks:
            got = reader.feed(chunk)
            assert reader.message_count == sum(type(frame) is Message for frame in got)
            frames += map(plain, got)
        reader.feed(b"")
    except RemoteProtocolError as error:
        return Outcome(frames, b"", str(error))
    return Outcome(frames, rest_of(reader), None)


def rest_of(reader: FrameReader | ColumnReader) -> bytes:
    """What the reader has of a frame that is not whole; how long that is when it is being passed over."""
    if not reader.skip_oversized:
        assert reader.buffered <= reader.max_frame_size + 4
    try:
        return reader.take_buffered()
    except LocalProtocolError:
        return PASSED_OVER % reader.buffered


def read_columns(chunks: Iterable[bytes], **options: Any) -> tuple[Outcome, list[OracleAny]]:
    """Feed a ColumnReader: the messages and what became of the stream, and the other frames."""
    reader = ColumnReader(**options)
    messages: list[OracleAny] = []
    others: list[OracleAny] = []
    try:
        for chunk in chunks:
            columns = reader.feed(chunk)
            messages += rows(columns)
            others += map(plain, columns.frames)
        reader.feed(b"")
    except RemoteProtocolError as error:
        return Outcome(messages, b"", str(error)), others
    return Outcome(messages, rest_of(reader), None), others


def rows(columns: Columns) -> Iterator[OracleMessage]:
    """Columns turned back into messages; asserts that the columns agree with each other."""
    ids = [columns.ids[at : at + 16] for at in range(0, len(columns.ids), 16)]
    assert _numbers("=Q", columns.internal_ids) == [int.from_bytes(id[:8], "big") for id in ids]
    assert _numbers("=Q", columns.trace_ids) == [int.from_bytes(id[8:], "big") for id in ids]
    nothing = [None] * columns.count
    ext_versions = [0] * columns.count if columns.ext_versions is None else list(columns.ext_versions)
    ext = nothing if columns.ext is None else _strings(columns.ext_offsets, columns.ext, columns.count)
    yield from map(
        OracleMessage,
        _numbers("=q", columns.timestamps),
        _numbers("=H", columns.attempts),
        ids,
        ext_versions,
        [header if version else None for header, version in zip(ext, ext_versions, strict=True)],
        nothing if columns.offsets is None else _numbers("=Q", columns.offsets),
        nothing if columns.sizes is None else _numbers("=I", columns.sizes),
        _strings(columns.body_offsets, columns.body, columns.count),
    )


def _numbers(format: str, column: bytes) -> list[int]:
    return [number for (number,) in iter_unpack(format, column)]


def _strings(offsets: bytes | None, data: bytes, count: int) -> list[bytes]:
    assert offsets is not None
    ends = _numbers("=i", offsets)
    assert len(ends) == count + 1
    assert (ends[0], ends[-1]) == (0, len(data))
    return [data[start:end] for start, end in pairwise(ends)]


def pieces(data: bytes, size: int) -> list[bytes]:
    """``data`` cut into pieces of ``size`` bytes."""
    return [data[at : at + size] for at in range(0, len(data), size)]
