"""The commands of the redesigned dialect that have to do with consuming, and the set of all its commands.

Texts of errors, and which are fatal, are those of youzan/nsq: nsqdserver/protocol_v2.go
(internalSUB, FIN, REQ, TOUCH, internalCreateTopic).
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple, cast

from nsq_fast.broker.errors import Exiting, NotOwner
from nsq_fast.broker.tcp.authorize import Refusals, require_permission
from nsq_fast.broker.tcp.command_set import CommandSet, quote, text
from nsq_fast.broker.tcp.commands import auth, cls, go_delay, identify, message_id, nop, rdy, require_subscribed
from nsq_fast.broker.tcp.connection import STATE_INIT, Connection
from nsq_fast.broker.tcp.dialect import Dialect
from nsq_fast.broker.tcp.frames import OK, FatalError
from nsq_fast.errors import NotLeader, ServerError
from nsq_fast.names import is_valid_name

from . import publishing
from .arguments import parse_partition
from .channel import not_owner
from .connection import NodeConnection
from .identify import NodeNegotiation
from .node import NO_PARTITION
from .positions import Position, parse_position, sequence_of
from .state import Partition

MAX_LINE = 4 * 1024
_DIGITS = re.compile(rb"[0-9]*\Z")
_REFUSALS = Refusals("AUTH Already set", "AUTH Disabled", "AUTH No authorizations found")


class _Mode(NamedTuple):
    """What a way to subscribe asks for."""

    detail: bool = False
    ordered: bool = False


def sub(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """SUB <topic> <channel> [<partition>]: plain frames."""
    return _subscribe(_node_connection(conn), params, _Mode(), None, at)


def sub_advanced(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """SUB_ADVANCED <topic> <channel> [<partition> [<start>]]: frames with the detail header."""
    start = None
    if len(params) > 4 and params[4]:
        try:
            start = parse_position(text(params[4]))
        except ValueError as error:
            raise FatalError("E_INVALID", str(error)) from error
    return _subscribe(_node_connection(conn), params, _Mode(detail=True), start, at)


def sub_ordered(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """SUB_ORDERED <topic> <channel> [<partition>]: as SUB_ADVANCED, and one message at a time."""
    return _subscribe(_node_connection(conn), params, _Mode(detail=True, ordered=True), None, at)


def _subscribe(conn: NodeConnection, params: list[bytes], mode: _Mode, start: Position | None, at: int) -> int:
    topic, channel_name, number = _sub_arguments(conn, params)
    require_permission(conn, "SUB", topic, channel_name)
    try:
        partition = conn.node.find(topic, conn.node.default_partition(topic) if number == NO_PARTITION else number)
        _check_mode(conn, partition, mode)
        conn.node.require_leader(partition)
    except ServerError as error:
        raise FatalError(error.code, error.detail) from error
    if partition.meta.disable_channel_auto_create and channel_name not in partition.channels:
        raise FatalError("E_SUB_CHANNEL_NOT_REGISTERED", "channel is not registered under topic.")
    channel = partition.channel(channel_name)
    conn.prepare(partition, detail=mode.detail)
    try:
        channel.add_client(conn, conn.nsqd.options.max_channel_consumers)
    except Exiting as error:
        raise FatalError("E_FAILED_ON_NOT_WRITABLE", "") from error
    conn.subscribe(channel)
    if mode.ordered:
        if conn.profile.sample_rate:
            raise FatalError("E_INVALID", "order consume is not allowed while sample rate is not 0")
        channel.set_ordered(True)
    if start is not None and len(channel.clients) == 1:
        try:
            channel.set_position(sequence_of(start, partition.log))
        except ValueError as error:
            raise FatalError("E_INVALID", str(error)) from error
    conn.send(OK)
    return at


def _sub_arguments(conn: NodeConnection, params: list[bytes]) -> tuple[str, str, int]:
    if conn.state != STATE_INIT:
        raise FatalError("E_INVALID", "cannot SUB in current state")
    if not conn.profile.heartbeat_interval:
        raise FatalError("E_INVALID", "cannot SUB with heartbeats disabled")
    if len(params) < 3:
        raise FatalError("E_INVALID", "SUB insufficient number of parameters")
    topic, channel = text(params[1]), text(params[2])
    if not is_valid_name(topic):
        raise FatalError("E_BAD_TOPIC", f"SUB topic name {quote(params[1])} is not valid")
    if not is_valid_name(channel):
        raise FatalError("E_BAD_CHANNEL", f"SUB channel name {quote(params[2])} is not valid")
    # Exactly four words: with a start position the partition is not looked at, as on the real server.
    return topic, channel, parse_partition(params[3]) if len(params) == 4 else NO_PARTITION


def _check_mode(conn: NodeConnection, partition: Partition, mode: _Mode) -> None:
    if partition.meta.ordered and not mode.ordered:
        raise FatalError("E_SUB_ORDER_IS_MUST", "this topic is configured only allow ordered sub")
    has_support = conn.node_profile.extend_support
    if partition.meta.ext and not has_support:
        raise FatalError("E_SUB_EXTEND_NEED", "this topic is extended and should identify as extend support.")
    if has_support and not partition.meta.ext:
        raise FatalError(
            "E_SUB_EXTEND_FORBIDDON", "this topic is not extended and should not identify as extend support."
        )


# --- FIN, REQ, TOUCH -------------------------------------------------------------------------------------------------


def finish(conn: Connection, ids: list[bytes]) -> None:
    """FINs that follow each other, in one go."""
    conn = _node_connection(conn)
    _require_leader(conn)
    missing = conn.partition_channel.finish(conn, ids)
    conn.finish_count += len(ids) - len(missing)
    for id in missing:
        if int.from_bytes(id[:8], "big", signed=True) <= 0:
            raise FatalError("E_INVALID", "Invalid Message ID")
        reason = not_owner(conn.partition_channel, id)
        conn.send_error("E_FIN_FAILED", f"FIN {show(id)} failed ErrType:7 ErrCode:0 : {reason}".encode())
    conn.wake()


def fin(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """FIN <id>, where it is not one of a run."""
    require_subscribed(conn, "FIN")
    finish(conn, [message_id(params, 2, "FIN")])
    return at


def req(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """REQ <id> <delay ms>: the delay is clamped; an ordered channel ignores a REQ that has one."""
    require_subscribed(conn, "REQ")
    conn = _node_connection(conn)
    id = message_id(params, 3, "REQ")
    if not _DIGITS.match(params[2]):
        raise FatalError("E_INVALID", f"REQ could not parse timeout {text(params[1])}, {text(params[2])}")
    delay = min(max(0.0, go_delay(params[2])[1]), conn.nsqd.options.max_req_timeout)
    try:
        conn.partition_channel.requeue(conn, id, delay)
    except NotOwner as error:
        conn.send_error("E_REQ_FAILED", f"REQ {show(id)} failed {error}".encode())
    else:
        conn.requeue_count += 1
        conn.wake()
    return at


def touch(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """TOUCH <id>."""
    require_subscribed(conn, "TOUCH")
    conn = _node_connection(conn)
    id = message_id(params, 2, "TOUCH")
    try:
        conn.partition_channel.touch(conn, id, conn.nsqd.options.max_msg_timeout)
    except NotOwner as error:
        conn.send_error("E_TOUCH_FAILED", f"TOUCH {show(id)} failed {error}".encode())
    return at


def _require_leader(conn: NodeConnection) -> None:
    assert conn.partition is not None
    try:
        conn.node.require_leader(conn.partition)
    except NotLeader as error:
        raise FatalError(error.code, "") from error


# --- topics ----------------------------------------------------------------------------------------------------------


def internal_create_topic(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
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
    return at


_BAD = "invalid syntax"
_BOOLEANS = {b"1", b"t", b"T", b"TRUE", b"true", b"True", b"0", b"f", b"F", b"FALSE", b"false", b"False"}


def show(data: bytes) -> str:
    """Bytes as the server prints them: decimal numbers in brackets."""
    return f"[{' '.join(map(str, data))}]"


def _show_words(params: list[bytes]) -> str:
    return f"[{' '.join(map(show, params))}]"


def _node_connection(conn: Connection) -> NodeConnection:
    return cast(NodeConnection, conn)


COMMANDS = CommandSet(
    {
        b"IDENTIFY": identify,
        b"AUTH": functools.partial(auth, refusals=_REFUSALS),
        b"SUB": sub,
        b"SUB_ADVANCED": sub_advanced,
        b"SUB_ORDERED": sub_ordered,
        b"RDY": rdy,
        b"FIN": fin,
        b"REQ": req,
        b"TOUCH": touch,
        b"CLS": cls,
        b"NOP": nop,
        b"INTERNAL_CREATE_TOPIC": internal_create_topic,
        **publishing.HANDLERS,
    },
    finish=finish,
    show=_show_words,
    max_line=MAX_LINE,
    has_binary_ids=True,
)

REDESIGNED = Dialect(COMMANDS, NodeNegotiation(), NodeConnection)
