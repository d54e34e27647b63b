"""The commands of the original nsqd: read from bytes, checked, obeyed.

A ``CommandSet`` takes all that has been read and obeys every whole command in it. A
handler gets the parameters of its line and where the line ended, and returns
where the next command begins, or ``INCOMPLETE`` after it has noted in
``conn.needed`` how many bytes of body it waits for. Ids are taken from fixed
places, never by splitting: a dialect may have any byte in them.

Texts of errors, and what is fatal, are the original's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from nsq_fast.names import is_valid_name

from . import identify as negotiation
from .authorize import authorize, require_permission
from .connection import (
    CLOSE_WAIT,
    OK,
    RESPONSE,
    STATE_CLOSING,
    STATE_INIT,
    STATE_SUBSCRIBED,
    Connection,
    Dropped,
    FatalError,
    frame,
)
from .errors import Exiting, NotOwner
from .topic import Topic

ID_SIZE = 16
MAX_LINE = 16 * 1024
INCOMPLETE = -1

_FIN_SIZE = len("FIN ") + ID_SIZE + 1
_FIN_RUN = re.compile(rb"(?:FIN .{16}\n)+", re.DOTALL)
_ID_ENDS = {b"FIN ": 4 + ID_SIZE, b"REQ ": 4 + ID_SIZE, b"TOUC": 6 + ID_SIZE}
_AFTER_ID = (b" ", b"\r", b"\n")
_DIGITS = re.compile(rb"[0-9]*\Z")
_UINT64 = 1 << 64

Handler = Callable[[Connection, list[bytes], bytes, int], int]


class CommandSet:
    """The commands of a dialect.

    Args:
        handlers: by name.
        has_binary_ids: whether an id may have any byte in it, also one that ends a line.
    """

    def __init__(self, handlers: dict[bytes, Handler], *, has_binary_ids: bool) -> None:
        self._handlers = handlers
        self._id_ends = _ID_ENDS if has_binary_ids else {}

    def execute(self, conn: Connection, data: bytes) -> int:
        """Obey the whole commands ``data`` begins with; how many bytes they took. Raises FatalError, Dropped."""
        at, end = 0, len(data)
        conn.needed = 0
        while at < end:
            if data.startswith(b"FIN ", at) and conn.channel is not None:
                used = _finish_run(conn, data, at)
                if used != at:
                    at = used
                    continue
            line_end = data.find(b"\n", at + self._id_ends.get(data[at : at + 4], 0))
            if line_end < 0:
                if end - at >= MAX_LINE:
                    raise Dropped("command line is too long")
                break
            params = _params(data, at, line_end - 1 if data[line_end - 1 : line_end] == b"\r" else line_end)
            after = self._handler(conn, params[0])(conn, params, data, line_end + 1)
            if after == INCOMPLETE:
                conn.needed = max(0, conn.needed - at)
                break
            at = after
        return at

    def _handler(self, conn: Connection, name: bytes) -> Handler:
        handler = self._handlers.get(name)
        if conn.is_tls_missing and handler is not identify:
            raise FatalError("E_INVALID", f"cannot {text(name)} in current state (TLS required)")
        if handler is None:
            raise FatalError("E_INVALID", f"invalid command {text(name)}")
        return handler


def _params(data: bytes, at: int, end: int) -> list[bytes]:
    """The words of a line, of which an id is one whatever bytes it has."""
    id_end = at + _ID_ENDS.get(data[at : at + 4], 0)
    if at < id_end <= end and data[id_end : id_end + 1] in _AFTER_ID:
        id_at = id_end - ID_SIZE
        rest = data[id_end + 1 : end].split(b" ") if id_end < end else ()
        return [data[at : id_at - 1], data[id_at:id_end], *rest]
    return data[at:end].split(b" ")


def text(data: bytes) -> str:
    """Bytes of a command as they may stand in an error."""
    return data.decode("utf-8", "surrogateescape")


def quote(data: bytes) -> str:
    """Bytes in quotes as the original prints names."""
    parts = []
    for char in text(data):
        if char in '"\\':
            parts.append("\\" + char)
        elif char.isprintable():
            parts.append(char)
        elif "\udc80" <= char <= "\udcff":
            parts.append(f"\\x{ord(char) - 0xDC00:02x}")
        else:
            parts.append(_ESCAPES.get(char) or (f"\\x{ord(char):02x}" if ord(char) < 0x80 else f"\\u{ord(char):04x}"))
    return '"' + "".join(parts) + '"'


_ESCAPES = {"\a": "\\a", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}


def _size_at(conn: Connection, data: bytes, at: int) -> int | None:
    """The signed size of a body at ``at``; None if it has not come yet."""
    if len(data) < at + 4:
        conn.needed = at + 4
        return None
    return int.from_bytes(data[at : at + 4], "big", signed=True)


def _has(conn: Connection, data: bytes, end: int) -> bool:
    if len(data) >= end:
        return True
    conn.needed = end
    return False


# --- answers to messages ---------------------------------------------------------------------------------------------


def _finish_run(conn: Connection, data: bytes, at: int) -> int:
    """Obey the FINs that follow each other from ``at`` on; where they end: at ``at`` if the first is not whole."""
    stop = data.rfind(b"\n", at) + 1
    ids = data[at + 4 : stop - 1].split(b"\nFIN ")
    if len(ids) * _FIN_SIZE != stop - at or max(map(len, ids)) != ID_SIZE:
        run = _FIN_RUN.match(data, at)
        if run is None:
            return at
        stop = run.end()
        ids = [data[n : n + ID_SIZE] for n in range(at + 4, stop, _FIN_SIZE)]
    pop = conn.in_flight.messages.pop
    missing = [id for id in ids if pop(id, None) is None]
    conn.finish_count += len(ids)
    for id in missing:
        conn.finish_count -= 1
        _finish(conn, id)
    conn.wake()
    return stop


def _finish(conn: Connection, id: bytes) -> None:
    try:
        _channel(conn).finish(conn, id)
    except NotOwner as error:
        conn.send_error("E_FIN_FAILED", b"FIN %b failed %b" % (id, str(error).encode()))
    else:
        conn.finish_count += 1


def fin(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """FIN <id>, where it is not one of a run."""
    _require_subscribed(conn, "FIN")
    _finish(conn, _message_id(params, 2, "FIN"))
    conn.wake()
    return at


def req(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """REQ <id> <delay ms>: the delay is clamped to max_req_timeout."""
    _require_subscribed(conn, "REQ")
    id = _message_id(params, 3, "REQ")
    if not _DIGITS.match(params[2]):
        raise FatalError("E_INVALID", f"REQ could not parse timeout {text(params[2])}")
    delay = min(int(params[2] or 0) / 1000, conn.nsqd.options.max_req_timeout)
    try:
        _channel(conn).requeue(conn, id, delay)
    except NotOwner as error:
        conn.send_error("E_REQ_FAILED", b"REQ %b failed %b" % (id, str(error).encode()))
    else:
        conn.requeue_count += 1
        conn.wake()
    return at


def touch(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """TOUCH <id>."""
    _require_subscribed(conn, "TOUCH")
    id = _message_id(params, 2, "TOUCH")
    try:
        _channel(conn).touch(conn, id, conn.nsqd.options.max_msg_timeout)
    except NotOwner as error:
        conn.send_error("E_TOUCH_FAILED", b"TOUCH %b failed %b" % (id, str(error).encode()))
    return at


def _require_subscribed(conn: Connection, name: str) -> None:
    if conn.state not in (STATE_SUBSCRIBED, STATE_CLOSING):
        raise FatalError("E_INVALID", f"cannot {name} in current state")


def _message_id(params: list[bytes], count: int, name: str) -> bytes:
    if len(params) < count:
        raise FatalError("E_INVALID", f"{name} insufficient number of params")
    if len(params[1]) != ID_SIZE:
        raise FatalError("E_INVALID", "invalid message ID")
    return params[1]


def _channel(conn: Connection) -> Any:
    return conn.channel


# --- subscribing -----------------------------------------------------------------------------------------------------


def sub(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """SUB <topic> <channel>."""
    if conn.state != STATE_INIT:
        raise FatalError("E_INVALID", "cannot SUB in current state")
    if not conn.profile.heartbeat_interval:
        raise FatalError("E_INVALID", "cannot SUB with heartbeats disabled")
    if len(params) < 3:
        raise FatalError("E_INVALID", "SUB insufficient number of parameters")
    topic_name = _name(params[1], "E_BAD_TOPIC", "SUB topic")
    channel_name = _name(params[2], "E_BAD_CHANNEL", "SUB channel")
    require_permission(conn, "SUB", topic_name, channel_name)
    conn.in_flight.timeout = conn.profile.msg_timeout
    try:
        channel = conn.nsqd.get_topic(topic_name).get_channel(channel_name)
        channel.add_client(conn, conn.nsqd.options.max_channel_consumers)
    except Exiting as error:
        raise FatalError("E_SUB_FAILED", f"SUB failed {error}") from error
    conn.subscribe(channel)
    conn.send(OK)
    return at


def rdy(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """RDY [<count>]: 1 if none is given; ignored after CLS."""
    if conn.state == STATE_CLOSING:
        return at
    if conn.state != STATE_SUBSCRIBED:
        raise FatalError("E_INVALID", "cannot RDY in current state")
    count = 1
    if len(params) > 1:
        if not _DIGITS.match(params[1]):
            raise FatalError("E_INVALID", f"RDY could not parse count {text(params[1])}")
        count = int(params[1] or 0) % _UINT64
        count -= _UINT64 if count >= _UINT64 // 2 else 0
    if not 0 <= count <= conn.nsqd.options.max_rdy_count:
        raise FatalError("E_INVALID", f"RDY count {count} out of range 0-{conn.nsqd.options.max_rdy_count}")
    conn.set_rdy(count)
    return at


def cls(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """CLS: no more messages; those in flight may still be answered."""
    if conn.state != STATE_SUBSCRIBED:
        raise FatalError("E_INVALID", "cannot CLS in current state")
    conn.set_rdy(0)
    conn.state = STATE_CLOSING
    conn.send(CLOSE_WAIT)
    return at


def nop(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """NOP: a sign of life."""
    return at


def _name(name: bytes, code: str, what: str) -> str:
    decoded = text(name)
    if not is_valid_name(decoded):
        raise FatalError(code, f"{what} name {quote(name)} is not valid")
    return decoded


# --- publishing ------------------------------------------------------------------------------------------------------


def pub(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """PUB <topic>, a body."""
    if len(params) < 2:
        raise FatalError("E_INVALID", "PUB insufficient number of parameters")
    topic_name = _name(params[1], "E_BAD_TOPIC", "PUB topic")
    end = _message_end(conn, data, at, "PUB")
    if end == INCOMPLETE:
        return INCOMPLETE
    require_permission(conn, "PUB", topic_name, "")
    topic = conn.nsqd.get_topic(topic_name)
    _publish(conn, "PUB", topic, 1, lambda: topic.put_many((data[at + 4 : end],)))
    return end


def dpub(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """DPUB <topic> <delay ms>, a body: a delay out of range is fatal, unlike REQ's."""
    if len(params) < 3:
        raise FatalError("E_INVALID", "DPUB insufficient number of parameters")
    topic_name = _name(params[1], "E_BAD_TOPIC", "DPUB topic")
    if not _DIGITS.match(params[2]):
        raise FatalError("E_INVALID", f"DPUB could not parse timeout {text(params[2])}")
    delay_ms = int(params[2] or 0)
    longest_ms = round(conn.nsqd.options.max_req_timeout * 1000)
    if delay_ms > longest_ms:
        raise FatalError("E_INVALID", f"DPUB timeout {delay_ms} out of range 0-{longest_ms}")
    end = _message_end(conn, data, at, "DPUB")
    if end == INCOMPLETE:
        return INCOMPLETE
    require_permission(conn, "DPUB", topic_name, "")
    topic = conn.nsqd.get_topic(topic_name)
    _publish(conn, "DPUB", topic, 1, lambda: topic.put(data[at + 4 : end], delay_ms))
    return end


def mpub(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """MPUB <topic>, several bodies."""
    if len(params) < 2:
        raise FatalError("E_INVALID", "MPUB insufficient number of parameters")
    topic_name = _name(params[1], "E_BAD_TOPIC", "E_BAD_TOPIC MPUB topic")
    require_permission(conn, "MPUB", topic_name, "")
    topic = conn.nsqd.get_topic(topic_name)
    size = _size_at(conn, data, at)
    if size is None:
        return INCOMPLETE
    if size <= 0:
        raise FatalError("E_BAD_BODY", f"MPUB invalid body size {size}")
    if size > conn.nsqd.options.max_body_size:
        raise FatalError("E_BAD_BODY", f"MPUB body too big {size} > {conn.nsqd.options.max_body_size}")
    count = _mpub_count(conn, data, at + 4)
    end = at + 4 + size
    if count is None or not _has(conn, data, end):
        return INCOMPLETE
    bodies = _mpub_bodies(data, at + 8, end, count, conn.nsqd.options.max_msg_size)
    _publish(conn, "MPUB", topic, count, lambda: topic.put_many(bodies))
    return end


def _mpub_count(conn: Connection, data: bytes, at: int) -> int | None:
    count = _size_at(conn, data, at)
    if count is not None and not 0 < count <= (conn.nsqd.options.max_body_size - 4) // 5:
        raise FatalError("E_BAD_BODY", f"MPUB invalid message count {count}")
    return count


def _mpub_bodies(data: bytes, at: int, end: int, count: int, largest: int) -> list[bytes]:
    """The bodies between ``at`` and ``end``. Stricter than the original: they must end where the command does."""
    bodies: list[bytes] = []
    append, from_bytes = bodies.append, int.from_bytes
    for index in range(count):
        body_at = at + 4
        size = from_bytes(data[at:body_at], "big", signed=True)
        at = body_at + size
        if not 0 < size <= largest or at > end:
            raise _bad_mpub_message(index, size, largest)
        append(data[body_at:at])
    if at != end:
        raise FatalError("E_BAD_BODY", f"MPUB body has {end - at} bytes after its messages")
    return bodies


def _bad_mpub_message(index: int, size: int, largest: int) -> FatalError:
    if size <= 0:
        return FatalError("E_BAD_MESSAGE", f"MPUB invalid message({index}) body size {size}")
    if size > largest:
        return FatalError("E_BAD_MESSAGE", f"MPUB message too big {size} > {largest}")
    return FatalError("E_BAD_MESSAGE", "MPUB failed to read message body")


def _message_end(conn: Connection, data: bytes, at: int, name: str) -> int:
    """Where the body whose size is at ``at`` ends; INCOMPLETE if it has not come yet."""
    size = _size_at(conn, data, at)
    if size is None:
        return INCOMPLETE
    if size <= 0:
        raise FatalError("E_BAD_MESSAGE", f"{name} invalid message body size {size}")
    if size > conn.nsqd.options.max_msg_size:
        raise FatalError("E_BAD_MESSAGE", f"{name} message too big {size} > {conn.nsqd.options.max_msg_size}")
    end = at + 4 + size
    return end if _has(conn, data, end) else INCOMPLETE


def _publish(conn: Connection, name: str, topic: Topic, count: int, put: Callable[[], None]) -> None:
    try:
        put()
    except Exiting as error:
        raise FatalError(f"E_{name}_FAILED", f"{name} failed {error}") from error
    except OSError as error:
        conn.nsqd.error = error
        raise FatalError(f"E_{name}_FAILED", f"{name} failed {error}") from error
    conn.pub_counts[topic.name] = conn.pub_counts.get(topic.name, 0) + count
    conn.send(OK)


# --- introducing oneself ---------------------------------------------------------------------------------------------


def identify(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """IDENTIFY, a JSON body; then the layers that were agreed on."""
    if conn.state != STATE_INIT:
        raise FatalError("E_INVALID", "cannot IDENTIFY in current state")
    end = _body_end(conn, data, at, "IDENTIFY")
    if end == INCOMPLETE:
        return INCOMPLETE
    try:
        request = msgspec.json.decode(data[at + 4 : end], type=negotiation.Request)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FatalError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from error
    options = conn.nsqd.options
    try:
        negotiation.apply(request, conn.profile, options)
    except negotiation.IdentifyError as error:
        raise FatalError("E_BAD_BODY", f"IDENTIFY {error}") from error
    conn.start_heartbeat()
    if not request.feature_negotiation:
        conn.send(OK)
        return end
    try:
        upgrades = negotiation.choose_upgrades(request, options, has_tls=conn.server.context is not None)
    except negotiation.IdentifyError as error:
        raise FatalError("E_IDENTIFY_FAILED", str(error)) from error
    conn.send(frame(RESPONSE, negotiation.reply(conn.profile, upgrades, options)))
    if upgrades.tls or upgrades.snappy or upgrades.deflate:
        conn.upgrade(upgrades, data[end:])
    return end


def auth(conn: Connection, params: list[bytes], data: bytes, at: int) -> int:
    """AUTH, a secret."""
    if conn.state != STATE_INIT:
        raise FatalError("E_INVALID", "cannot AUTH in current state")
    if len(params) != 1:
        raise FatalError("E_INVALID", "AUTH invalid number of parameters")
    end = _body_end(conn, data, at, "AUTH")
    if end == INCOMPLETE:
        return INCOMPLETE
    conn.send(frame(RESPONSE, authorize(conn, data[at + 4 : end])))
    return end


def _body_end(conn: Connection, data: bytes, at: int, name: str) -> int:
    size = _size_at(conn, data, at)
    if size is None:
        return INCOMPLETE
    if size > conn.nsqd.options.max_body_size:
        raise FatalError("E_BAD_BODY", f"{name} body too big {size} > {conn.nsqd.options.max_body_size}")
    if size <= 0:
        raise FatalError("E_BAD_BODY", f"{name} invalid body size {size}")
    return at + 4 + size if _has(conn, data, at + 4 + size) else INCOMPLETE


ORIGINAL = CommandSet(
    {
        b"IDENTIFY": identify,
        b"AUTH": auth,
        b"SUB": sub,
        b"RDY": rdy,
        b"FIN": fin,
        b"REQ": req,
        b"TOUCH": touch,
        b"CLS": cls,
        b"NOP": nop,
        b"PUB": pub,
        b"MPUB": mpub,
        b"DPUB": dpub,
    },
    has_binary_ids=False,
)
