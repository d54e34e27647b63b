"""The commands of an nsqd: how they are read from bytes in all dialects, and those of the original."""

from __future__ import annotations

import functools
import itertools
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gevent import get_hub, getcurrent, spawn

from nsq_fast.broker.auth import authorize, require_permission
from nsq_fast.broker.connection import (
    CLOSE_WAIT,
    OK,
    RESPONSE,
    STATE_CLOSING,
    STATE_INIT,
    STATE_SUBSCRIBED,
    Connection,
    Dropped,
    frame,
)
from nsq_fast.broker.go import decode_json, quote, text
from nsq_fast.broker.identify import Negotiation
from nsq_fast.broker.message import ID_SIZE, Exiting, FatalError, NotOwner
from nsq_fast.broker.nsqd import Nsqd
from nsq_fast.broker.options import NsqdOptions
from nsq_fast.broker.topic import Topic
from nsq_fast.names import is_valid_name

# --- how commands are read from bytes, in all dialects ---------------------------------------------------------------
# nsqio/nsq: nsqd/protocol_v2.go, IOLoop and Exec
# A ``CommandSet`` takes all that has been read and executes every whole command in it. A handler gets the parameters
# of its line and where the line ended, and returns where the next command begins; None: there, as it has no body. It
# raises ``Incomplete`` when it has to wait for more bytes of its body. What the state refuses, by NotOwner and Exiting,
# is answered here. Ids are taken from fixed places, never by splitting: a dialect may have any byte in them.


class Incomplete(Exception):
    """A command has not come whole.

    Attributes:
        end: where what it waits for ends.
    """

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end


_FIN_SIZE = len("FIN ") + ID_SIZE + 1
_FIN_RUN = re.compile(rb"(?:FIN .{%d}\n)+" % ID_SIZE, re.DOTALL)
_FIN_RUN_OF_WORDS = re.compile(rb"(?:FIN [^ \r\n]{%d}\n)+" % ID_SIZE)
_WITH_ID = (b"FIN", b"REQ", b"TOUCH")

Handler = Callable[[Connection, list[bytes], bytes, int], int | None]


class CommandSet:
    """The commands of a dialect.

    Args:
        handlers: by name.
        show: an unknown command, from its words, as the error shows it.
        max_line: bytes of the longest line.
        has_binary_ids: whether an id may have any byte in it, also one that ends a line.
    """

    def __init__(
        self,
        handlers: Mapping[bytes, Handler],
        *,
        show: Callable[[list[bytes]], str],
        max_line: int,
        has_binary_ids: bool,
    ) -> None:
        self._handlers = handlers
        self._show = show
        self._max_line = max_line
        self.has_binary_ids = has_binary_ids
        self._with_id = _WITH_ID if has_binary_ids else ()

    def execute(self, conn: Connection, data: bytes) -> int:
        """Execute the whole commands ``data`` begins with; returns the bytes they took. Raises FatalError, Dropped."""
        at, end = 0, len(data)
        conn.needed = 0
        while (at := self.execute_known(conn, data, at)) < end:
            has_id = data.startswith(self._with_id, at)
            line_end = _line_end_behind_id(data, at) if has_id else data.find(b"\n", at)
            if (end if line_end < 0 else line_end) - at >= self._max_line:
                raise Dropped("command line is too long")
            if line_end < 0:
                break
            # After a binary id nothing is stripped: the server takes all of it for the next parameter.
            if has_id:
                params = _params_with_id(data[at : line_end + 1])
            else:
                params = data[at : line_end - (data[line_end - 1 : line_end] == b"\r")].split(b" ")
            try:
                after = self._handler(conn, params)(conn, params, data, line_end + 1)
            except Incomplete as error:
                conn.needed = error.end - at
                break
            except NotOwner as error:
                conn.refuse(text(params[0]), params[1], error)
                after = None
            except Exiting as error:
                name = text(params[0])
                raise FatalError(f"E_{name}_FAILED", f"{name} failed {error}") from error
            at = line_end + 1 if after is None else after
        return at

    def execute_known(self, conn: Connection, data: bytes, at: int = 0, *, may_wait: bool = True) -> int:
        """Execute commands whose words need no look, FINs and the last PUB again, from ``at`` on; where they end.

        ``may_wait=False`` leaves those that may wait for something.
        """
        end = len(data)
        while at < end:
            begin, known = at, conn.known
            if known is not None and data.startswith(known[0], at):
                at = _publish_again(conn, *known, data, at, may_wait=may_wait)
            elif data.startswith(b"FIN ", at) and conn.channel is not None:
                ids, stop = _fin_run(data, at, has_binary_ids=self.has_binary_ids)
                if ids:
                    finish(conn, ids)
                    at = stop
            if at == begin:
                break
        return at

    def _handler(self, conn: Connection, params: list[bytes]) -> Handler:
        name = params[0]
        is_tls_missing = conn.nsqd.options.tls_required != "false" and not conn.upgrades.tls
        if is_tls_missing and name != b"IDENTIFY":
            raise FatalError("E_INVALID", f"cannot {text(name)} in current state (TLS required)")
        handler = self._handlers.get(name)
        if handler is None:
            raise FatalError("E_INVALID", f"invalid command {self._show(params)}")
        return handler


def _fin_run(data: bytes, at: int, *, has_binary_ids: bool) -> tuple[list[bytes], int]:
    """The ids of the FINs that follow each other from ``at`` on, and where they end. None if the first is not whole.

    Without binary ids one ends at a space and at the end of the line.
    """
    stop = data.rfind(b"\n", at) + 1
    ids = data[at + 4 : stop - 1].split(b"\nFIN ")
    if has_binary_ids:
        are_whole = len(ids) * _FIN_SIZE == stop - at and max(map(len, ids)) == ID_SIZE
    else:
        # Ids that nsqd has given are alphanumeric: the only line ends are those behind them, one for each. When these
        # are in their places, each id has its length.
        line_ends = data[at + _FIN_SIZE - 1 : stop : _FIN_SIZE]
        are_whole = b"".join(ids).isalnum() and line_ends == b"\n" * len(ids)
    if are_whole:
        return ids, stop
    run = (_FIN_RUN if has_binary_ids else _FIN_RUN_OF_WORDS).match(data, at)
    if run is None:
        return [], at
    return [data[n : n + ID_SIZE] for n in range(at + 4, run.end(), _FIN_SIZE)], run.end()


def _line_end_behind_id(data: bytes, at: int) -> int:
    """Where a line with an id ends, -1 if that has not come: the id has a place, whatever stands there.

    A line that ends before that goes on behind it; TOUCH ends with the byte after its id then, whatever that is
    (youzan/nsq: nsqdserver/protocol_v2.go, IOLoop).
    """
    line_end = data.find(b"\n", at)
    is_touch = data.startswith(b"TOUCH", at)
    id_end = at + (6 if is_touch else 4) + ID_SIZE
    if not 0 <= line_end < id_end:
        return line_end
    if is_touch:
        return id_end if len(data) > id_end else -1
    return data.find(b"\n", id_end)


def _params_with_id(line: bytes) -> list[bytes]:
    """The words of such a line, its last byte included; what stands between them is not looked at."""
    name = b"TOUCH" if line.startswith(b"TOUCH") else line[:3]
    id_end = len(name) + 1 + ID_SIZE
    params = [name, line[len(name) + 1 : id_end]]
    if name == b"REQ" and len(line) > id_end + 1:
        params.append(line[id_end + 1 : -1])
    return params


def required(data: bytes, end: int) -> int:
    """``end``, where what ends there has come whole. Raises Incomplete."""
    if len(data) < end:
        raise Incomplete(end)
    return end


def size_at(data: bytes, at: int) -> int:
    """The signed size of a body at ``at``. Raises Incomplete."""
    return int.from_bytes(data[at : required(data, at + 4)], "big", signed=True)


def checked_size(
    data: bytes,
    at: int,
    largest: int,
    code: str,
    name: str = "",
    what: str = "body",
    *,
    invalid: str = "invalid body size",
    too_big_code: str = "",
) -> int:
    """As ``size_at``; raises FatalError for one out of range, with the code and the words of the command."""
    size = size_at(data, at)
    prefix = f"{name} " if name else ""
    if size <= 0:
        raise FatalError(code, f"{prefix}{invalid} {size}")
    if size > largest:
        raise FatalError(too_big_code or code, f"{prefix}{what} too big {size} > {largest}")
    return size


# --- the commands of the original nsqd: their checks and what they do ------------------------------------------------
# The texts of errors, and which are fatal, are those of nsqio/nsq: nsqd/protocol_v2.go, where each command is a
# function of its name.


_DIGITS = re.compile(rb"[0-9]*\Z")
_SIZE = struct.Struct(">i")
_UINT64 = 1 << 64


# --- FIN, REQ, TOUCH -------------------------------------------------------------------------------------------------


def finish(conn: Connection, ids: list[bytes]) -> None:
    """FINs that follow each other, in one go."""
    conn.require_leader()
    channel: Any = conn.channel
    is_refused = conn.server.faults.tcp.fail_fin
    missing = ids if is_refused else channel.finish(conn, ids)
    conn.finish_count += len(ids) - len(missing)
    for id in missing:
        conn.refuse("FIN", id, "refused by the switch fail_fin" if is_refused else channel.not_owner(id))
    if conn.is_full:
        conn.wake()


def fin(conn: Connection, params: list[bytes], data: bytes, at: int) -> None:
    """FIN <id>, where it is not one of a run."""
    require_subscribed(conn, "FIN")
    finish(conn, [message_id(params, 2, "FIN")])


def req(conn: Connection, params: list[bytes], data: bytes, at: int) -> None:
    """REQ <id> <delay ms>: a delay out of range becomes the nearest one in range, max_req_timeout."""
    require_subscribed(conn, "REQ")
    id = message_id(params, 3, "REQ")
    if not _DIGITS.match(params[2]):
        shown = params[1:3] if conn.server.dialect.commands.has_binary_ids else params[2:3]
        raise FatalError("E_INVALID", f"REQ could not parse timeout {', '.join(map(text, shown))}")
    delay = min(max(0.0, go_delay(params[2])[1]), conn.nsqd.options.max_req_timeout)
    channel: Any = conn.channel
    channel.requeue(conn, id, delay)
    conn.requeue_count += 1
    conn.wake()


def touch(conn: Connection, params: list[bytes], data: bytes, at: int) -> None:
    require_subscribed(conn, "TOUCH")
    channel: Any = conn.channel
    channel.touch(conn, message_id(params, 2, "TOUCH"), conn.nsqd.options.max_msg_timeout)


def uint64(digits: bytes) -> int:
    """What Go's uint64 is after these digits; 0 where there are none."""
    # The last 64 of them say it, as 10**64 is a multiple of 2**64; more than 4300 are no number for Python.
    return int(digits[-64:] or 0) % _UINT64


def go_delay(digits: bytes) -> tuple[int, float]:
    """A delay in milliseconds, and in seconds: both overflow as Go's uint64 and time.Duration do.

    nsqio/nsq: internal/protocol/byte_base10.go, ByteToBase10.
    """
    delay_ms = uint64(digits)
    delay_ns = (delay_ms * 1_000_000 + _UINT64 // 2) % _UINT64 - _UINT64 // 2
    return delay_ms, delay_ns / 1e9


def require_subscribed(conn: Connection, name: str) -> None:
    if conn.state not in (STATE_SUBSCRIBED, STATE_CLOSING):
        raise FatalError("E_INVALID", f"cannot {name} in current state")


def message_id(params: list[bytes], count: int, name: str) -> bytes:
    if len(params) < count:
        raise FatalError("E_INVALID", f"{name} insufficient number of params")
    if len(params[1]) != ID_SIZE:
        raise FatalError("E_INVALID", "invalid message ID")
    return params[1]


# --- subscribing -----------------------------------------------------------------------------------------------------


def sub(conn: Connection, params: list[bytes], data: bytes, at: int) -> None:
    topic_name, channel_name = sub_names(conn, params)
    require_permission(conn, "SUB", topic_name, channel_name)
    conn.in_flight.timeout = conn.profile.msg_timeout
    channel = conn.nsqd.get_topic(topic_name).get_channel(channel_name)
    channel.add_client(conn, conn.nsqd.options.max_channel_consumers)
    conn.subscribe(channel)
    conn.send(OK)


def sub_names(conn: Connection, params: list[bytes]) -> tuple[str, str]:
    """The topic and the channel that a client wants to subscribe to, if it may now."""
    if conn.state != STATE_INIT:
        raise FatalError("E_INVALID", "cannot SUB in current state")
    if not conn.profile.heartbeat_interval:
        raise FatalError("E_INVALID", "cannot SUB with heartbeats disabled")
    if len(params) < 3:
        raise FatalError("E_INVALID", "SUB insufficient number of parameters")
    return _name(params[1], "E_BAD_TOPIC", "SUB topic"), _name(params[2], "E_BAD_CHANNEL", "SUB channel")


def rdy(conn: Connection, params: list[bytes], data: bytes, at: int) -> None:
    """RDY [<count>]: 1 if none is given; ignored after CLS."""
    if conn.state == STATE_CLOSING:
        return
    if conn.state != STATE_SUBSCRIBED:
        raise FatalError("E_INVALID", "cannot RDY in current state")
    count = 1
    if len(params) > 1:
        if not _DIGITS.match(params[1]):
            raise FatalError("E_INVALID", f"RDY could not parse count {text(params[1])}")
        count = uint64(params[1])
        count -= _UINT64 if count >= _UINT64 // 2 else 0
    if not 0 <= count <= conn.nsqd.options.max_rdy_count:
        raise FatalError("E_INVALID", f"RDY count {count} out of range 0-{conn.nsqd.options.max_rdy_count}")
    conn.set_rdy(count)


def cls(conn: Connection, params: list[bytes], data: bytes, at: int) -> None:
    """CLS: no more messages; those in flight may still be answered."""
    if conn.state != STATE_SUBSCRIBED:
        raise FatalError("E_INVALID", "cannot CLS in current state")
    conn.set_rdy(0)
    conn.state = STATE_CLOSING
    conn.send(CLOSE_WAIT)


def nop(conn: Connection, params: list[bytes], data: bytes, at: int) -> None:
    """It has come: that is all."""


@functools.lru_cache(maxsize=1024)
def _name(name: bytes, code: str, what: str) -> str:
    decoded = text(name)
    if not is_valid_name(decoded):
        raise FatalError(code, f"{what} name {quote(name)} is not valid")
    return decoded


# --- publishing ------------------------------------------------------------------------------------------------------


def pub(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    if len(params) < 2:
        raise FatalError("E_INVALID", "PUB insufficient number of parameters")
    topic_name = _name(params[1], "E_BAD_TOPIC", "PUB topic")
    end = _message_end(conn, data, at, "PUB")
    require_permission(conn, "PUB", topic_name, "")
    topic = conn.nsqd.get_topic(topic_name)
    _publish(conn, "PUB", topic, topic.put_many, [data[at + 4 : end]])
    conn.send(OK)
    conn.known = b" ".join(params) + b"\n", topic, conn.nsqd.options
    return end


def _publish_again(
    conn: Connection, line: bytes, topic: Topic, options: NsqdOptions, data: bytes, begin: int, *, may_wait: bool
) -> int:
    """Whole and faultless PUBs that follow each other, and have the line of one before; where they end.

    A client that does not wait for each reply sends them in long runs.
    """
    if topic.is_exiting or options is not conn.nsqd.options:
        conn.known = None
        return begin
    if options.auth_http_addresses:
        if not may_wait:
            return begin
        require_permission(conn, "PUB", topic.name, "")
    at, largest = begin, options.max_msg_size
    bodies: list[bytes] = []
    while data.startswith(line, at):
        body_at = at + len(line) + 4
        size = int.from_bytes(data[body_at - 4 : body_at], "big")
        if not 0 < size <= largest or body_at + size > len(data):
            break
        at = body_at + size
        bodies.append(data[body_at:at])
    if not bodies:
        return begin
    if may_wait:
        _publish(conn, "PUB", topic, topic.put_many, bodies)
        conn.send(OK * len(bodies))
        return at
    if at < len(data):
        return begin  # what follows would overtake it
    if not topic.gathered:
        get_hub().loop.run_callback(_publish_gathered, topic)
    topic.gathered.append((conn, bodies))
    return at


def _publish_gathered(topic: Topic) -> None:
    """Publish what connections have brought in one turn of the hub: with one write, and one look at each channel."""
    bodies = list(itertools.chain.from_iterable(bodies for _, bodies in topic.gathered))
    nsqd = topic.gathered[0][0].nsqd
    if getcurrent() is get_hub() and nsqd.waits_for_disk(topic, len(bodies)):
        spawn(_publish_gathered, topic)
        return
    gathered, topic.gathered = topic.gathered, []
    refused = None
    try:
        topic.put_many(bodies)
        nsqd.stored()
    except (Exiting, OSError) as error:
        refused = _refused(nsqd, "PUB", error)
    for conn, own in gathered:
        conn.published(topic.name, len(own), refused)


def dpub(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """DPUB <topic> <delay ms>, a body: a delay out of range is fatal, unlike REQ's."""
    if len(params) < 3:
        raise FatalError("E_INVALID", "DPUB insufficient number of parameters")
    topic_name = _name(params[1], "E_BAD_TOPIC", "DPUB topic")
    if not _DIGITS.match(params[2]):
        raise FatalError("E_INVALID", f"DPUB could not parse timeout {text(params[2])}")
    delay_ms, delay = go_delay(params[2])
    longest_ms = round(conn.nsqd.options.max_req_timeout * 1000)
    if not 0 <= delay <= conn.nsqd.options.max_req_timeout:
        raise FatalError("E_INVALID", f"DPUB timeout {delay_ms} out of range 0-{longest_ms}")
    end = _message_end(conn, data, at, "DPUB")
    require_permission(conn, "DPUB", topic_name, "")
    topic = conn.nsqd.get_topic(topic_name)
    _publish(conn, "DPUB", topic, lambda bodies: topic.put(bodies[0], round(delay * 1000)), [data[at + 4 : end]])
    conn.send(OK)
    return end


def mpub(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    if len(params) < 2:
        raise FatalError("E_INVALID", "MPUB insufficient number of parameters")
    topic_name = _name(params[1], "E_BAD_TOPIC", "E_BAD_TOPIC MPUB topic")
    require_permission(conn, "MPUB", topic_name, "")
    topic = conn.nsqd.get_topic(topic_name)
    size = checked_size(data, at, conn.nsqd.options.max_body_size, "E_BAD_BODY", "MPUB")
    check_mpub_count(conn, data, at + 4)
    required(data, at + 4 + size)
    bodies, end, fault = read_bodies(conn, data, at + 4)
    if fault is not None:
        raise fault
    _publish(conn, "MPUB", topic, topic.put_many, bodies)
    conn.send(OK)
    return end


def check_mpub_count(conn: Connection, data: bytes, at: int) -> None:
    """Raise FatalError where an MPUB says that it has a number of bodies that cannot be, Incomplete before it says."""
    count = size_at(data, at)
    if not 0 < count <= (conn.nsqd.options.max_body_size - 4) // 5:
        raise FatalError("E_BAD_BODY", f"MPUB invalid message count {count}")


def read_bodies(conn: Connection, data: bytes, at: int) -> tuple[list[bytes], int, FatalError | Incomplete | None]:
    """The bodies of an MPUB, which begin with their count; where they end, and what is wrong with the next one.

    It is their count that says where they end, not the size of the command: bytes behind them are the next command, and
    bodies may reach beyond the size (nsqio/nsq: nsqd/protocol_v2.go, readMPUB).
    """
    bodies: list[bytes] = []
    append, unpack = bodies.append, _SIZE.unpack_from
    largest, have = conn.nsqd.options.max_msg_size, len(data)
    count, at = int.from_bytes(data[at : at + 4], "big"), at + 4
    for index in range(count):
        body_at = at + 4
        if body_at > have:
            return bodies, at, Incomplete(body_at)
        [size] = unpack(data, at)
        at = body_at + size
        if size <= 0:
            return bodies, at, FatalError("E_BAD_MESSAGE", f"MPUB invalid message({index}) body size {size}")
        if size > largest:
            return bodies, at, FatalError("E_BAD_MESSAGE", f"MPUB message too big {size} > {largest}")
        if at > have:
            return bodies, at, Incomplete(at)
        append(data[body_at:at])
    return bodies, at, None


def _message_end(conn: Connection, data: bytes, at: int, name: str) -> int:
    """Where the body whose size is at ``at`` ends. Raises FatalError, Incomplete."""
    largest, invalid = conn.nsqd.options.max_msg_size, "invalid message body size"
    end = at + 4 + int.from_bytes(data[at : at + 4], "big")
    if at + 4 < end <= at + 4 + largest and end <= len(data):
        return end  # as nearly always
    size = checked_size(data, at, largest, "E_BAD_MESSAGE", name, "message", invalid=invalid)
    return required(data, at + 4 + size)


def _body_end(conn: Connection, data: bytes, at: int, name: str) -> int:
    """As ``_message_end``, for a body that is no message."""
    return required(data, at + 4 + checked_size(data, at, conn.nsqd.options.max_body_size, "E_BAD_BODY", name))


def _publish(
    conn: Connection, name: str, topic: Topic, put: Callable[[list[bytes]], None], bodies: list[bytes]
) -> None:
    try:
        if conn.server.faults.tcp.refuse_publishes:
            raise Exiting("refused by the switch refuse_publishes")
        put(bodies)
    except (Exiting, OSError) as error:
        raise _refused(conn.nsqd, name, error) from error
    conn.nsqd.stored()
    conn.count_published(topic.name, len(bodies))


def _refused(nsqd: Nsqd, name: str, error: Exception) -> FatalError:
    if isinstance(error, OSError):
        nsqd.refused(error)
    return FatalError(f"E_{name}_FAILED", f"{name} failed {error}")


# --- introducing oneself ---------------------------------------------------------------------------------------------


def identify(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """IDENTIFY, a JSON body; then the layers that were agreed on."""
    if conn.state != STATE_INIT:
        raise FatalError("E_INVALID", "cannot IDENTIFY in current state")
    end = _body_end(conn, data, at, "IDENTIFY")
    negotiation = conn.server.dialect.negotiation
    try:
        request = decode_json(data[at + 4 : end], negotiation.request_type)
    except ValueError as error:
        raise FatalError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from error
    options = conn.nsqd.options
    negotiation.apply(request, conn.profile, options)
    conn.apply_profile()
    if not request.feature_negotiation:
        conn.send(OK)
        return end
    upgrades = negotiation.choose_upgrades(request, options, has_tls=conn.server.context is not None)
    conn.send(frame(RESPONSE, negotiation.reply(conn.profile, upgrades, options)))
    if upgrades.tls or upgrades.snappy or upgrades.deflate:
        conn.upgrade(upgrades, data[end:])
    return end


def auth(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    if conn.state != STATE_INIT:
        raise FatalError("E_INVALID", "cannot AUTH in current state")
    if len(params) != 1:
        raise FatalError("E_INVALID", "AUTH invalid number of parameters")
    end = _body_end(conn, data, at, "AUTH")
    conn.send(frame(RESPONSE, authorize(conn, data[at + 4 : end])))
    return end


OF_BOTH_DIALECTS: dict[bytes, Handler] = {
    b"IDENTIFY": identify,
    b"AUTH": auth,
    b"RDY": rdy,
    b"FIN": fin,
    b"REQ": req,
    b"TOUCH": touch,
    b"CLS": cls,
    b"NOP": nop,
}
COMMANDS = CommandSet(
    {**OF_BOTH_DIALECTS, b"SUB": sub, b"PUB": pub, b"MPUB": mpub, b"DPUB": dpub},
    show=lambda params: text(params[0]),
    max_line=16 * 1024,
    has_binary_ids=False,
)


class Dialect(NamedTuple):
    """A way to speak: what clients may say, what IDENTIFY settles, and what serves each of them."""

    commands: CommandSet
    negotiation: Negotiation
    connection: type[Connection]


ORIGINAL = Dialect(COMMANDS, Negotiation(), Connection)
