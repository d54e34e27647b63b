"""The commands of the redesigned dialect that publish: PUB and MPUB, plain, traced, and with ext headers.

Texts of errors, and which are fatal, are those of youzan/nsq: nsqdserver/protocol_v2.go
(preparePub, internalPubExtAndTrace, internalMPUBEXTAndTrace). One behaviour of the server
is a hazard and is kept: an error about a message of MPUB_EXT leaves the messages behind it
unread, and they are taken for the next command.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import cast

from nsq_fast.broker.client import TRACE_ID_KEY
from nsq_fast.broker.tcp.authorize import require_permission
from nsq_fast.broker.tcp.command_set import INCOMPLETE, Handler, has, size_at, text
from nsq_fast.broker.tcp.commands import bad_mpub_message, mpub_count
from nsq_fast.broker.tcp.connection import Connection
from nsq_fast.broker.tcp.frames import OK, RESPONSE, FatalError, frame
from nsq_fast.errors import (
    BadPartition,
    ExtNotSupported,
    HeaderInvalid,
    ServerError,
    TraceIdInvalid,
)

from . import fast_json
from .arguments import parse_partition
from .connection import NodeConnection
from .filters import decode_header
from .log import Draft, Record
from .node import NO_PARTITION, Node
from .state import Partition

_TRACE_SIZE = 8
_LENGTH_SIZE = 2
_TRACED = struct.Struct(">2sQQQI")
_DIGITS = re.compile(r"[0-9]+\Z")
_UINT64 = 1 << 64

MakeDraft = Callable[[bytes, Partition, int], Draft]
"""Makes a message of a body; the number is the one that the message has in its command."""

MakeReply = Callable[[Sequence[Draft], Sequence[Record]], bytes]


def _one(make: MakeDraft, reply: MakeReply) -> Handler:
    """A command with one message."""

    def handle(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
        conn = cast(NodeConnection, conn)
        size, partition = _prepare(conn, params, data, at, conn.nsqd.options.max_msg_size, "E_BAD_MESSAGE", "message")
        end = at + 4 + size
        if partition is None or not has(conn, data, end):
            return INCOMPLETE
        try:
            drafts = [make(data[at + 4 : end], partition, 0)]
            records = _store(conn, partition, drafts)
            if partition.log.has_traced or partition.trace.switches.is_on:
                partition.trace.answered(records[0], conn.remote_address)
            conn.send(reply(drafts, records))
        except ServerError as error:
            conn.send_error(error.code, error.detail.encode())
        return end

    return handle


def _several(make: MakeDraft, reply: MakeReply) -> Handler:
    """A command with several messages, all of which are stored, or none."""

    def handle(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
        conn = cast(NodeConnection, conn)
        size, partition = _prepare(conn, params, data, at, conn.nsqd.options.max_body_size, "E_BAD_BODY", "body")
        if partition is None:
            return INCOMPLETE
        count = mpub_count(conn, data, at + 4)
        if count is None:
            return INCOMPLETE
        drafts: list[Draft] = []
        read, have, largest, from_bytes = at + 8, len(data), conn.nsqd.options.max_msg_size, int.from_bytes
        try:
            # Their count says how many messages there are, not the size of the command: what is behind them is the
            # next command. The first of them that is at fault ends it, whether the others have come or not.
            for index in range(count):
                body_at = read + 4
                end = body_at + from_bytes(data[read:body_at], "big", signed=True)
                if not body_at < end <= body_at + largest or end > have:
                    if not has(conn, data, body_at) or body_at < end <= body_at + largest:
                        conn.needed = max(end, body_at, at + 4 + size)  # looked at again when all of it should be there
                        return INCOMPLETE
                    raise bad_mpub_message(index, end - body_at, largest)
                read = end
                drafts.append(make(data[body_at:end], partition, index))
            conn.send(reply(drafts, _store(conn, partition, drafts)))
        except ServerError as error:
            conn.send_error(error.code, error.detail.encode())
        return read

    return handle


def _prepare(
    conn: NodeConnection, params: list[bytes], data: bytes, at: int, largest: int, too_big: str, what: str
) -> tuple[int, Partition | None]:
    """The size of the body, and the partition; None for it when the size has not come yet. Raises FatalError."""
    if len(params) < 2:
        raise FatalError("E_INVALID", "insufficient number of parameters")
    # Exactly three words: with more of them the partition is not looked at, as on the real server.
    number = parse_partition(params[2]) if len(params) == 3 else NO_PARTITION
    size = size_at(conn, data, at)
    if size is None:
        return 0, None
    if size <= 0:
        raise FatalError("E_BAD_BODY", f"invalid body size {size}")
    if size > largest:
        raise FatalError(too_big, f"{what} too big {size} > {largest}")
    topic = text(params[1])
    try:
        partition = _find_partition(conn.node, topic, number)
    except ServerError as error:
        raise FatalError(error.code, error.detail) from error
    require_permission(conn, "PUB", topic, "")
    return size, partition


def _find_partition(node: Node, topic: str, number: int) -> Partition:
    if number != NO_PARTITION:
        return node.find(topic, number)
    partition = node.find(topic, node.default_partition(topic))
    if partition.meta.ordered:
        raise BadPartition(f"topic partition is not valid for multi partition: {NO_PARTITION}")
    return partition


def _store(conn: NodeConnection, partition: Partition, drafts: Sequence[Draft]) -> list[Record]:
    records = conn.node.publish(partition, drafts)
    conn.pub_counts[partition.topic] = conn.pub_counts.get(partition.topic, 0) + len(drafts)
    return records


# --- what a body holds -----------------------------------------------------------------------------------------------


def _plain(body: bytes, partition: Partition, index: int) -> Draft:
    return Draft(body)


def _traced(body: bytes, partition: Partition, index: int) -> Draft:
    if len(body) <= _TRACE_SIZE:
        raise FatalError("E_BAD_BODY", f"invalid body size {len(body)} with trace id enabled")
    return Draft(body[_TRACE_SIZE:], int.from_bytes(body[:_TRACE_SIZE], "big"))


def _traced_of_many(body: bytes, partition: Partition, index: int) -> Draft:
    if len(body) <= _TRACE_SIZE:
        raise FatalError("E_BAD_MESSAGE", f"MPUB invalid message({index}) body size {len(body)} for tracing")
    return _traced(body, partition, index)


def _with_header(body: bytes, partition: Partition, index: int) -> Draft:
    if len(body) <= _LENGTH_SIZE:
        raise FatalError("E_BAD_BODY", f"invalid body size {len(body)} with ext json header enabled")
    return checked_draft(*_split_header(body), partition)


def _with_header_of_many(body: bytes, partition: Partition, index: int) -> Draft:
    header, message = _split_header(body)
    if not header:
        return Draft(message)
    _require_ext(partition)
    return checked_draft(header, message, partition)


def _split_header(body: bytes) -> tuple[bytes, bytes]:
    end = _LENGTH_SIZE + int.from_bytes(body[:_LENGTH_SIZE], "big")
    if len(body) <= end:
        raise FatalError("E_BAD_BODY", f"invalid body size {len(body)} in ext json header content length")
    return body[_LENGTH_SIZE:end], body[end:]


def checked_draft(header: bytes, body: bytes, partition: Partition) -> Draft:
    """A message with a header. Raises HeaderInvalid, TraceIdInvalid, ExtNotSupported."""
    try:
        decoded = fast_json.decode(header)
    except ValueError as error:
        raise HeaderInvalid(f"fail to parse json header:{error}") from error
    trace_id = decoded.get(TRACE_ID_KEY, "0") if isinstance(decoded, dict) else "0"
    if not isinstance(trace_id, str):
        raise TraceIdInvalid("passin trace id should be string")
    trace_number = parse_trace_id(trace_id)
    _require_ext(partition)
    return Draft(body, trace_number, header)


def parse_trace_id(text: str) -> int:
    """A trace id in decimal digits. Raises TraceIdInvalid."""
    if not _DIGITS.match(text) or int(text) >= _UINT64:
        raise TraceIdInvalid("invalid trace id")
    return int(text)


def _require_ext(partition: Partition) -> None:
    if not partition.meta.ext:
        raise ExtNotSupported(f"ext content not supported in topic {partition.topic}")


# --- replies ---------------------------------------------------------------------------------------------------------


def _no_reply(drafts: Sequence[Draft], records: Sequence[Record]) -> bytes:
    return OK


def _receipt(drafts: Sequence[Draft], records: Sequence[Record]) -> bytes:
    return _traced_reply(records, drafts[0].trace_id)


def _receipt_if_traced(drafts: Sequence[Draft], records: Sequence[Record]) -> bytes:
    return _receipt(drafts, records) if TRACE_ID_KEY in decode_header(drafts[0].header) else OK


def _receipt_of_many(drafts: Sequence[Draft], records: Sequence[Record]) -> bytes:
    return _traced_reply(records, 0)


def _traced_reply(records: Sequence[Record], trace_id: int) -> bytes:
    size = sum(record.size for record in records)
    return frame(RESPONSE, _TRACED.pack(b"OK", records[0].internal_id, trace_id, records[0].offset, size))


HANDLERS: dict[bytes, Handler] = {
    b"PUB": _one(_plain, _no_reply),
    b"PUB_TRACE": _one(_traced, _receipt),
    b"PUB_EXT": _one(_with_header, _receipt_if_traced),
    b"MPUB": _several(_plain, _no_reply),
    b"MPUB_TRACE": _several(_traced_of_many, _receipt_of_many),
    b"MPUB_EXT": _several(_with_header_of_many, _no_reply),
}
