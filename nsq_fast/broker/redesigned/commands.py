"""The commands of the redesigned dialect."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from nsq_fast.broker.auth import require_permission
from nsq_fast.broker.client import TRACE_ID_KEY
from nsq_fast.broker.commands import (
    OF_BOTH_DIALECTS,
    CommandSet,
    Dialect,
    Handler,
    Incomplete,
    check_mpub_count,
    checked_size,
    read_bodies,
    required,
    sub_names,
)
from nsq_fast.broker.connection import OK, RESPONSE, Connection, frame
from nsq_fast.broker.go import as_int64, decode_json_header, parse_integer, quote, text
from nsq_fast.broker.identify import Negotiation, Profile, Request, Upgrades
from nsq_fast.broker.message import Exiting, FatalError
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.broker.redesigned.channel import (
    FilterRequest,
    decode_header,
    make_filter,
    missing_package,
)
from nsq_fast.broker.redesigned.log import Draft, PartitionLog, Record
from nsq_fast.broker.redesigned.partition import NO_PARTITION, Node, Partition
from nsq_fast.errors import (
    BadPartition,
    ExtNotSupported,
    HeaderInvalid,
    NotWritable,
    ServerError,
    TraceIdInvalid,
)
from nsq_fast.names import is_valid_name


def parse_partition(data: bytes) -> int:
    try:
        return parse_integer(data)
    except ValueError as error:
        raise FatalError("E_BAD_PARTITION", f"topic partition is not valid: {error}") from error


# --- the start position of a channel ---------------------------------------------------------------------------------
# ``type:value``, and the record that it names.


TIMESTAMP, OFFSET, COUNT, SPECIAL = "timestamp", "virtual_queue", "msgcount", "special"
_END = -1
_NANOSECONDS = 1_000_000_000
_SEGMENT = 500_000
"""Entries in a segment of the commit log (youzan/nsq: consistence/commitlog.go, LOGROTATE_NUM)."""


class Position(NamedTuple):
    """A position as it was written; a timestamp is in seconds."""

    kind: str
    value: int


def parse_position(text: str) -> Position:
    """Read ``type:value``; ValueError with the server's text."""
    kind, separator, value = text.partition(":")
    if not separator or ":" in value or kind not in (TIMESTAMP, OFFSET, COUNT, SPECIAL):
        raise ValueError(f"invalid consume offset:{text}")
    return Position(kind, parse_integer(value.encode(), "ParseInt"))


def sequence_of(position: Position, log: PartitionLog) -> int:
    """The record a position means; ValueError with the server's text when there is none.

    A position beyond the last record means the end. A log that nothing was ever written to has no position but its end
    (youzan/nsq: nsqdserver/context.go, SetChannelOffset; consistence/commitlog.go, SearchLogDataByComparator).
    """
    kind, value = position
    if kind == SPECIAL:
        if value != _END:
            raise ValueError("not supported offset type")
        return log.end
    if kind == TIMESTAMP:
        nanoseconds = as_int64(value * _NANOSECONDS)
        if nanoseconds < 0:
            raise ValueError(f"Invalid timestamp {value}")
    elif value <= -2 * _SEGMENT:
        raise ValueError("search commit log data not found")
    if not log.end:
        raise ValueError("commit log end of file")
    if kind == TIMESTAMP:
        return log.at_time(nanoseconds)
    # Messages are counted from 1.
    return log.at_offset(value) if kind == OFFSET else max(0, min(value - 1, log.end))


# --- IDENTIFY: ext support, tags and filters, and other limits -------------------------------------------------------
# youzan/nsq: nsqd/client_v2.go, Identify; nsqdserver/protocol_v2.go, IDENTIFY.


MAX_TAG = 100
DEFAULT_OUTPUT_BUFFER_SIZE = 100
_SHORTEST_BUFFER_TIMEOUT = 10
"""Milliseconds."""


class NodeRequest(Request):
    short_id: str | None = None
    long_id: str | None = None
    desired_tag: str | None = None
    extend_support: bool | None = None
    ext_filter: FilterRequest | None = None


class NodeProfile(Profile):
    desired_tag: str = ""
    extend_support: bool = False
    ext_filter: FilterRequest | None = None


class NodeNegotiation(Negotiation):
    """How a node of the cluster settles with a client what holds for its connection."""

    request_type: type[Request] = NodeRequest
    deflate_level = 0

    def default_profile(self, host: str, options: NsqdOptions) -> NodeProfile:
        defaults = msgspec.structs.asdict(super().default_profile(host, options))
        return NodeProfile(**{**defaults, "output_buffer_size": DEFAULT_OUTPUT_BUFFER_SIZE})

    def apply(self, request: Request, profile: Profile, options: NsqdOptions) -> None:
        """Change ``profile`` as the client asks; raises FatalError at the first value that is out of range."""
        assert isinstance(request, NodeRequest)
        assert isinstance(profile, NodeProfile)
        super().apply(request, profile, options)
        profile.client_id = profile.client_id or request.short_id or ""
        profile.hostname = profile.hostname or request.long_id or ""
        tag = request.desired_tag or ""
        if len(tag.encode()) > MAX_TAG:
            raise FatalError("E_BAD_BODY", f"IDENTIFY invalid tag len {len(tag.encode())}, exceed limit {MAX_TAG}")
        profile.desired_tag = tag or profile.desired_tag
        profile.extend_support = profile.extend_support or bool(request.extend_support)
        if problem := missing_package(request.ext_filter):
            raise FatalError("E_BAD_BODY", f"IDENTIFY {problem}")  # without its filter the client would get everything
        profile.ext_filter = request.ext_filter

    def reply(self, profile: Profile, upgrades: Upgrades, options: NsqdOptions) -> bytes:
        assert isinstance(profile, NodeProfile)
        tag = {"desired_tag": profile.desired_tag} if profile.desired_tag else {}
        return msgspec.json.encode({**self._fields(profile, upgrades, options), **tag})

    def _apply_output_buffer(self, size: int, timeout: int, profile: Profile, options: NsqdOptions) -> None:
        """As the original, but for a size that is too large, which is cut, and for -1, which keeps the timeout."""
        own_timeout = profile.output_buffer_timeout
        super()._apply_output_buffer(min(size, options.max_output_buffer_size), 0, profile, options)
        profile.output_buffer_timeout = own_timeout
        super()._apply_output_buffer(
            0, max(timeout, _SHORTEST_BUFFER_TIMEOUT) if timeout > 0 else timeout, profile, options
        )


LIMITED_RDY = 50000  # a client has no more in flight (youzan/nsq: nsqd/client_v2.go, defaultLimitedRdy)


class NodeConnection(Connection):
    """One client of a node, with what it has beyond a client of the original.

    Attributes:
        partition: the one it has subscribed to.
        tag: of the messages that it wants; empty for those without one.
        matches: its filter.
        gets_ext, gets_detail: whether its frames have the ext field, and the detail header.
    """

    silent_intervals = 3
    delays_messages = False
    capitalizes = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.partition: Partition | None = None
        self.tag: str = ""
        self.matches = make_filter(None)
        self.gets_ext: bool = False
        self.gets_detail: bool = False

    @property
    def node(self) -> Node:
        return cast(Node, self.nsqd)

    @property
    def node_profile(self) -> NodeProfile:
        return cast(NodeProfile, self.profile)

    def prepare(self, partition: Partition, *, detail: bool) -> None:
        """Get ready to subscribe to a partition: its frames depend on the topic."""
        self.partition = partition
        self.gets_detail = detail
        self.gets_ext = partition.meta.ext
        if partition.meta.ext:
            self.tag = self.node_profile.desired_tag
            self.matches = make_filter(self.node_profile.ext_filter)
        self.in_flight.timeout = self.profile.msg_timeout

    def set_rdy(self, count: int) -> None:
        super().set_rdy(count)
        self.max_in_flight: int = min(count, LIMITED_RDY)

    def refuse(self, command: str, id: bytes, reason: object) -> None:
        if command == "FIN":
            if int.from_bytes(id[:8], "big", signed=True) <= 0:
                raise FatalError("E_INVALID", "Invalid Message ID")
            reason = f"ErrType:7 ErrCode:0 : {reason}"
        self.send_error(f"E_{command}_FAILED", f"{command} {show(id)} failed {reason}".encode())

    def require_leader(self) -> None:
        assert self.partition is not None
        self.node.require_leader(self.partition)

    def stats(self) -> dict[str, Any]:
        """Figures under the server's JSON names; durations in nanoseconds (youzan/nsq: nsqd/stats.go, ClientStats)."""
        profile = self.node_profile
        shown = {key: value for key, value in super().stats().items() if not key.startswith("topology_")}
        return {
            **shown,
            "name": profile.client_id,
            "desired_tag": profile.desired_tag,
            "timeout_count": 0,
            "deferred_count": 0,
            "output_buffer_size": profile.output_buffer_size,
            "output_buffer_timeout": round(profile.output_buffer_timeout * 1e9),
            "msg_timeout": round(profile.msg_timeout * 1e9),
            "ext_filter": profile.ext_filter or {},
            "limited_rdy": LIMITED_RDY,
        }


# --- the commands of the redesigned dialect that publish -------------------------------------------------------------
# PUB and MPUB, plain, traced, and with ext headers.
# Texts of errors, and which are fatal, are those of youzan/nsq: nsqdserver/protocol_v2.go (preparePub,
# internalPubExtAndTrace, internalMPUBEXTAndTrace). One behaviour of the server is a hazard and is kept: an error
# about a message of MPUB_EXT leaves the messages behind it unread, and they are taken for the next command.


_TRACE_SIZE = 8
_LENGTH_SIZE = 2
_TRACED = struct.Struct(">2sQQQI")
_TRACE_DIGITS = re.compile(r"0*([0-9]{1,20})\Z")
_UINT64 = 1 << 64

MakeDraft = Callable[[bytes, Partition, int], Draft]
"""Makes a message of a body; the number is the one that the message has in its command."""

MakeReply = Callable[[Sequence[Draft], Sequence[Record]], bytes]


def _one(make: MakeDraft, reply: MakeReply) -> Handler:

    def handle(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
        conn = cast(NodeConnection, conn)
        largest = conn.nsqd.options.max_msg_size
        size, partition = _prepare(conn, params, data, at, largest, "message", "E_BAD_MESSAGE")
        end = required(data, at + 4 + size)
        try:
            drafts = [make(data[at + 4 : end], partition, 0)]
            records = _store(conn, partition, drafts)
            if partition.log.has_traced or partition.trace.is_on:
                partition.trace.published(records, conn.remote_address)
            conn.send(reply(drafts, records))
        except ServerError as error:
            conn.send_error(error.code, error.detail.encode())
        return end

    return handle


def _several(make: MakeDraft, reply: MakeReply) -> Handler:
    """A command with several messages, all of which are stored, or none.

    The first of them that is at fault ends it, whether the others have come or not.
    """

    def handle(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
        conn = cast(NodeConnection, conn)
        largest = conn.nsqd.options.max_body_size
        size, partition = _prepare(conn, params, data, at, largest, "body", "E_BAD_BODY")
        check_mpub_count(conn, data, at + 4)
        bodies, end, fault = read_bodies(conn, data, at + 4)
        if isinstance(fault, Incomplete):
            fault.end = max(fault.end, at + 4 + size)  # looked at again when all of it should be there
        drafts: list[Draft] = []
        try:
            for index, body in enumerate(bodies):
                drafts.append(make(body, partition, index))
            if fault is not None:
                raise fault
            conn.send(reply(drafts, _store(conn, partition, drafts)))
        except ServerError as error:
            conn.send_error(error.code, error.detail.encode())
            if len(drafts) < len(bodies):  # those behind it are left unread
                end = at + 8 + sum(4 + len(body) for body in bodies[: len(drafts) + 1])
        return end

    return handle


def _prepare(
    conn: NodeConnection, params: list[bytes], data: bytes, at: int, largest: int, what: str, too_big_code: str
) -> tuple[int, Partition]:
    """The size of the body, and the partition. Raises FatalError, and Incomplete when the size has not come yet."""
    if len(params) < 2:
        raise FatalError("E_INVALID", "insufficient number of parameters")
    # Exactly three words: with more of them the partition is not looked at, as on the real server.
    number = parse_partition(params[2]) if len(params) == 3 else NO_PARTITION
    size = checked_size(data, at, largest, "E_BAD_BODY", "", what, too_big_code=too_big_code)
    topic = text(params[1])
    partition = _find_partition(conn.node, topic, number)
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
    if conn.server.faults.tcp.refuse_publishes:
        raise NotWritable
    records = conn.node.publish(partition, drafts)
    conn.count_published(partition.topic, len(drafts))
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
        decoded = decode_json_header(header)
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
    found = _TRACE_DIGITS.match(text)
    if found is None or int(found[1]) >= _UINT64:
        raise TraceIdInvalid("invalid trace id")
    return int(found[1])


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


PUBLISHING: dict[bytes, Handler] = {
    b"PUB": _one(_plain, _no_reply),
    b"PUB_TRACE": _one(_traced, _receipt),
    b"PUB_EXT": _one(_with_header, _receipt_if_traced),
    b"MPUB": _several(_plain, _no_reply),
    b"MPUB_TRACE": _several(_traced_of_many, _receipt_of_many),
    b"MPUB_EXT": _several(_with_header_of_many, _no_reply),
}


# --- the commands of the redesigned dialect that have to do with consuming, and the set of all its -------------------
# Texts of errors, and which are fatal, are those of youzan/nsq: nsqdserver/protocol_v2.go (internalSUB, FIN, REQ,
# TOUCH, internalCreateTopic).


MAX_LINE = 4 * 1024


def _subscribing(*, detail: bool = False, ordered: bool = False, has_start: bool = False) -> Handler:
    """SUB <topic> <channel> [<partition>]: plain frames. SUB_ADVANCED: frames with the detail header, and a start
    position as one more word. SUB_ORDERED: with that header, and one message at a time.
    """

    def handle(conn: Connection, params: list[bytes], data: bytes, at: int) -> None:
        start = None
        if has_start and len(params) > 4 and params[4]:
            try:
                start = parse_position(text(params[4]))
            except ValueError as error:
                raise FatalError("E_INVALID", str(error)) from error
        _subscribe(cast(NodeConnection, conn), params, start, detail=detail, ordered=ordered)

    return handle


def _subscribe(
    conn: NodeConnection, params: list[bytes], start: Position | None, *, detail: bool, ordered: bool
) -> None:
    topic, channel_name = sub_names(conn, params)
    # Exactly four words: with a start position the partition is not looked at, as on the real server.
    number = parse_partition(params[3]) if len(params) == 4 else NO_PARTITION
    require_permission(conn, "SUB", topic, channel_name)
    partition = conn.node.find(topic, conn.node.default_partition(topic) if number == NO_PARTITION else number)
    _check_mode(conn, partition, ordered)
    conn.node.require_leader(partition)
    if partition.meta.disable_channel_auto_create and channel_name not in partition.channels:
        raise FatalError("E_SUB_CHANNEL_NOT_REGISTERED", "channel is not registered under topic.")
    channel = partition.channel(channel_name)
    conn.prepare(partition, detail=detail)
    try:
        channel.add_client(conn, conn.nsqd.options.max_channel_consumers)
    except Exiting as error:
        raise FatalError("E_FAILED_ON_NOT_WRITABLE", "") from error
    conn.subscribe(channel)
    if ordered:
        if conn.profile.sample_rate:
            raise FatalError("E_INVALID", "order consume is not allowed while sample rate is not 0")
        channel.set_ordered(True)
    if start is not None and len(channel.clients) == 1:
        try:
            channel.set_position(sequence_of(start, partition.log))
        except ValueError as error:
            raise FatalError("E_INVALID", str(error)) from error
    conn.send(OK)


def _check_mode(conn: NodeConnection, partition: Partition, ordered: bool) -> None:
    if partition.meta.ordered and not ordered:
        raise FatalError("E_SUB_ORDER_IS_MUST", "this topic is configured only allow ordered sub")
    has_support = conn.node_profile.extend_support
    if partition.meta.ext and not has_support:
        raise FatalError("E_SUB_EXTEND_NEED", "this topic is extended and should identify as extend support.")
    if has_support and not partition.meta.ext:
        raise FatalError(
            "E_SUB_EXTEND_FORBIDDON", "this topic is not extended and should not identify as extend support."
        )


# --- topics ----------------------------------------------------------------------------------------------------------


def internal_create_topic(conn: Connection, params: list[bytes], data: bytes, at: int) -> None:
    """INTERNAL_CREATE_TOPIC <topic> <partition> [<ext>]: always refused, because this is a cluster."""
    if len(params) < 3:
        raise FatalError("E_INVALID", "CREATE_TOPIC insufficient number of parameters")
    topic = text(params[1])
    if not is_valid_name(topic):
        raise FatalError("E_BAD_TOPIC", f"topic name {quote(params[1])} is not valid")
    number = parse_partition(params[2])
    require_permission(conn, "CREATE_TOPIC", topic, "")
    if number < 0:
        raise FatalError("E_BAD_PARTITION", "partition should not less than 0")
    if len(params) > 3 and params[3] not in _BOOLEANS:
        raise FatalError("E_BAD_EXT", f"topic ext is not valid: strconv.ParseBool: parsing {quote(params[3])}: {_BAD}")
    conn.send_error("E_CREATE_TOPIC_FAILED", b"CREATE_TOPIC is not allowed here while cluster feature enabled.")


_BAD = "invalid syntax"
_BOOLEANS = {b"1", b"t", b"T", b"TRUE", b"true", b"True", b"0", b"f", b"F", b"FALSE", b"false", b"False"}


def show(data: bytes) -> str:
    """Bytes as the server prints them: decimal numbers in brackets."""
    return f"[{' '.join(map(str, data))}]"


def _show_words(params: list[bytes]) -> str:
    return f"[{' '.join(map(show, params))}]"


COMMANDS = CommandSet(
    {
        **OF_BOTH_DIALECTS,
        b"SUB": _subscribing(),
        b"SUB_ADVANCED": _subscribing(detail=True, has_start=True),
        b"SUB_ORDERED": _subscribing(detail=True, ordered=True),
        b"INTERNAL_CREATE_TOPIC": internal_create_topic,
        **PUBLISHING,
    },
    show=_show_words,
    max_line=MAX_LINE,
    has_binary_ids=True,
)

REDESIGNED = Dialect(COMMANDS, NodeNegotiation(), NodeConnection)
