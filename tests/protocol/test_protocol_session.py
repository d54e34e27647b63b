"""The session against scripted bytes, of both families: handshake, commands, replies, messages, the end."""

from __future__ import annotations

import json
import pickle
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest

from nsq_fast import _codec, errors
from nsq_fast._codec import Message, encode_frame, encode_message
from nsq_fast._frame import ColumnReader
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import LocalProtocolError, NameInvalid, RemoteProtocolError, server_error
from nsq_fast.protocol.dialect import dialect_of
from nsq_fast.protocol.session import (
    MAX_HANDSHAKE_FRAME,
    AnswerFailed,
    Authenticating,
    CommandFailed,
    Disconnected,
    Heartbeat,
    Identified,
    MessageSkipped,
    Ready,
    Reply,
    ServerFailed,
    Session,
    UpgradeNeeded,
)
from nsq_fast.protocol.topology import parse_lookup

ID = b"0123456789abcdef"
RECORD = struct.pack(">QQ", (2 << 50) + 7, 99)  # the id of a message of a cluster
CLUSTER = "0.3.7-HA.1.13.0"

Say = Callable[[Session], bytes]


def response(data: bytes) -> bytes:
    return encode_frame(0, data)


def error(data: bytes) -> bytes:
    return encode_frame(1, data)


def message(body: bytes = b"body", id: bytes = ID, **layout: Any) -> bytes:
    return encode_message(1, 1, id, body, **layout)


def reply_json(**fields: Any) -> bytes:
    return response(json.dumps({"version": "1.3.0", "max_rdy_count": 2500, **fields}).encode())


OK = response(b"OK")
HEARTBEAT = response(b"_heartbeat_")


def new(**options: Any) -> Session:
    """Said IDENTIFY, and waits for the reply."""
    session = Session(ConnectionConfig(**options))
    session.connect()
    return session


def ready(version: str = "1.3.0", fields: dict[str, Any] | None = None, **options: Any) -> Session:
    session = new(**options)
    session.receive(reply_json(version=version, **(fields or {})))
    assert session.is_ready
    return session


def cluster(**options: Any) -> Session:
    return ready(CLUSTER, **options)


def subscribed(fields: dict[str, Any] | None = None, **options: Any) -> Session:
    session = ready(fields=fields, **options)
    session.sub("t", "c")
    session.receive(OK)
    return session


def kinds(events: list[Any]) -> list[type]:
    return [type(event) for event in events]


# The handshake


def identify_fields(**options: Any) -> dict[str, Any]:
    data = Session(ConnectionConfig(**options)).connect()
    assert data.startswith(b"  V2IDENTIFY\n")
    (size,) = struct.unpack_from(">I", data, 13)
    assert len(data) == 17 + size
    fields: dict[str, Any] = json.loads(data[17:])
    return fields


def test_identify_carries_every_field_that_is_set() -> None:
    ext_filter = {"type": 1, "filter_ext_key": "k", "filter_data": "v"}
    assert identify_fields(
        client_id="me", hostname="me.example", user_agent="agent/1", heartbeat_interval=2.5, output_buffer_size=1024,
        output_buffer_timeout=50, sample_rate=10, msg_timeout=1.5, tls_v1=True, deflate=True, deflate_level=3,
        topology_region="r", topology_zone="z", desired_tag="tag", extend_support=True, ext_filter=ext_filter,
    ) == {
        "client_id": "me", "hostname": "me.example", "user_agent": "agent/1", "feature_negotiation": True,
        "heartbeat_interval": 2500, "output_buffer_size": 1024, "output_buffer_timeout": 50, "sample_rate": 10,
        "msg_timeout": 1500, "tls_v1": True, "snappy": False, "deflate": True, "deflate_level": 3,
        "topology_region": "r", "topology_zone": "z", "desired_tag": "tag", "extend_support": True,
        "ext_filter": ext_filter,
    }  # fmt: skip
    fields = identify_fields(hostname="box.example")
    assert fields["client_id"] == "box"
    assert not {"msg_timeout", "topology_region", "desired_tag", "extend_support", "deflate_level"} & fields.keys()
    assert "hostname" not in identify_fields()


def number(field: bytes, value: object) -> bytes:
    return b'{"version":"1.3.0","%b":%b}' % (field, str(value).encode())


# Python 3.14 reads what fits into a reply, however deep
NESTED = [] if sys.version_info >= (3, 14) else [b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}"]


@pytest.mark.parametrize(
    "data",
    [
        b"not json", b"[]", b"\xff\xfe", b'{"max_rdy_count":"2500"}', b'{"max_rdy_count":true}',
        b'{"max_rdy_count":-1}', b'{"max_rdy_count":1e400}', b'{"version":1}', b'{"tls_v1":"yes"}', b'{"version":null}',
        b"", *(number(b"msg_timeout", each) for each in (0, -1, "NaN", "1e300", 2**63)), number(b"max_msg_timeout", 0),
        *(number(b"max_rdy_count", each) for each in (0, 2**63)), number(b"deflate_level", 10**400),
        number(b"sample_rate", -(10**30)), number(b"output_buffer_timeout", "1" * 5000), *NESTED,
    ],
    ids=lambda data: repr(data[:40]),
)  # fmt: skip
def test_identify_reply_of_the_wrong_shape(data: bytes) -> None:
    session, fields = new(), re.findall(r'"(\w+)":', data.decode("latin-1"))
    said = "|".join(["malformed", "Expected", *fields]) if fields else ""
    for frame in (response(data), OK):  # the first one ends it
        with pytest.raises(RemoteProtocolError, match=rf"^IDENTIFY reply .*({said})"):
            session.receive(frame)
    assert kinds(session.receive(b"")) == [Disconnected]


def test_identify_reply_with_the_largest_numbers_a_server_can_send() -> None:
    longest = 2**63 // 10**6  # Go's longest duration in milliseconds
    session = ready(fields={"msg_timeout": longest, "max_msg_timeout": longest, "max_rdy_count": 2**63 - 1})
    assert session.info.msg_timeout == pytest.approx(longest / 1000)


@pytest.mark.parametrize(
    ("options", "data", "said"),
    [
        ({}, struct.pack(">II", MAX_HANDSHAKE_FRAME + 1, 0), "frame"),  # before any of it is stored
        ({"tls_v1": True}, reply_json(tls_v1=False), "TLS"),
        ({}, reply_json(tls_v1=True), "tls_v1"),
        ({}, reply_json(snappy=True), "snappy"),
        ({}, reply_json(deflate=True), "deflate"),
        ({}, message(), "before the handshake"),
    ],
    ids=["huge", "no tls", "tls", "snappy", "deflate", "message"],
)
def test_what_a_server_may_not_say_in_the_handshake(options: dict[str, Any], data: bytes, said: str) -> None:
    with pytest.raises(RemoteProtocolError, match=said):
        new(**options).receive(data)


def test_compression_that_the_server_does_not_offer_is_done_without() -> None:
    assert ready(fields={"snappy": False}, snappy=True).is_ready


def test_upgrades_come_in_order_and_hand_over_what_was_read_too_early() -> None:
    session = new(tls_v1=True, snappy=True)
    events = session.receive(reply_json(tls_v1=True, snappy=True) + b"early")
    assert kinds(events) == [Identified, UpgradeNeeded]
    assert (events[1].kind, events[1].leftover) == ("tls", b"early")
    with pytest.raises(LocalProtocolError):
        session.receive(b"more")
    session.upgraded()
    (upgrade,) = session.receive(OK + b"\xff\x06")
    assert (upgrade.kind, upgrade.leftover) == ("snappy", b"\xff\x06")
    session.upgraded()
    assert kinds(session.receive(OK)) == [Ready]
    with pytest.raises(LocalProtocolError):
        session.upgraded()


def test_anything_but_ok_inside_a_new_layer_is_an_error() -> None:
    session = new(deflate=True)
    session.receive(reply_json(deflate=True))
    session.upgraded()
    with pytest.raises(RemoteProtocolError, match="instead of OK"):
        session.receive(response(b"NO"))


def authenticating(secret: str | bytes = "geheim") -> tuple[Session, list[Any]]:
    session = new(auth_secret=secret)
    return session, session.receive(reply_json(auth_required=True))


def test_auth() -> None:
    session, events = authenticating()
    assert isinstance(events[-1], Authenticating)
    assert events[-1].send == b"AUTH\n" + struct.pack(">I", 6) + b"geheim"
    data = b'{"identity":"me","identity_url":"http://x","permission_count":2}'
    (done,) = session.receive(response(data))
    assert isinstance(done, Ready)
    assert done.auth is session.auth is not None
    assert done.auth_data == data
    assert (session.auth.identity, session.auth.permission_count) == ("me", 2)
    assert ready(auth_secret="x").auth is None, "it is not sent unasked"


def test_no_event_shows_the_secret() -> None:
    session, events = authenticating()
    assert b"geheim" in events[-1].send
    assert "geheim" not in repr([session, session.config, *events])


def test_auth_refused_or_answered_with_something_else() -> None:
    session, _ = authenticating(b"wrong")
    (failed,) = session.receive(error(b"E_AUTH_FAILED AUTH failed"))
    assert isinstance(failed.error, errors.AuthFailed)
    assert (failed.command, failed.fatal) == ("AUTH", True)
    for data in (b'{"permission_count":"all"}', b'{"identity":"i","more":"\xff"}', *NESTED):
        session, _ = authenticating()
        with pytest.raises(RemoteProtocolError, match="AUTH reply"):
            session.receive(response(data))


# Commands


def test_a_subscription_is_the_only_one_and_its_reply_has_its_token() -> None:
    """What the other forms are, and what publishes are, is in recordings: test_protocol_conversations.py."""
    session = cluster()
    assert session.sub("t", "c", token="mine", ordered=True, advanced=True) == b"SUB_ORDERED t c\n"
    assert session.receive(OK) == [Reply(command="SUB_ORDERED", data=b"OK", token="mine")]
    with pytest.raises(LocalProtocolError, match="has a subscription already"):
        session.sub("t", "c")


def test_publishes_of_several_name_their_partition() -> None:
    session = cluster()
    assert session.mpub("t", [b"x"], partition=3) == _codec.mpub("t", [b"x"], 3)
    assert session.mpub_trace("t", [(7, b"x")], partition=3) == _codec.mpub_trace("t", [(7, b"x")], 3)
    assert session.mpub_ext("t", [(b"{}", b"x")], partition=3) == _codec.mpub_ext("t", [(b"{}", b"x")], 3)
    assert session.pending_count == 3


@pytest.mark.parametrize(
    ("version", "say", "advice"),
    [
        ("1.3.0", lambda session: session.sub("t", "c", ordered=True), "leave ordered and advanced"),
        ("1.3.0", lambda session: session.sub("t", "c", advanced=True), "leave ordered and advanced"),
        ("1.3.0", lambda session: session.sub("t", "c", partition=0), "leave partition=0 out"),
        ("1.3.0", lambda session: session.pub("t", b"x", partition=1), "leave partition=1 out"),
        ("1.3.0", lambda session: session.mpub("t", [b"x"], partition=1), "leave partition=1 out"),
        ("1.3.0", lambda session: session.pub_trace("t", 1, b"x"), "leave trace_id out"),
        ("1.3.0", lambda session: session.mpub_trace("t", [(1, b"x")]), "leave trace_id out"),
        ("1.3.0", lambda session: session.pub_ext("t", b"{}", b"x"), "leave headers and tag out"),
        ("1.3.0", lambda session: session.mpub_ext("t", [(b"{}", b"x")]), "leave headers and tag out"),
        ("1.3.0", lambda session: session.expect("PUB_TRACE"), "leave trace_id out"),
        (CLUSTER, lambda session: session.dpub("t", 100, b"x"), "leave defer out"),
        (CLUSTER, lambda session: session.expect("DPUB"), "leave defer out"),
    ],
)
def test_servers_are_told_nothing_they_do_not_know(version: str, say: Say, advice: str) -> None:
    session = ready(version)
    with pytest.raises(LocalProtocolError, match=advice) as caught:
        say(session)
    assert version in str(caught.value)
    assert session.pending_count == 0
    assert session.sub("t", "c") == b"SUB t c\n"


@pytest.mark.parametrize(
    "say",
    [
        lambda session: session.pub("no topic!", b"x"),
        lambda session: session.pub("t", "text"),
        lambda session: session.mpub("t", [b"x", None]),
        lambda session: session.pub("t", b"x", partition=-3),
        lambda session: session.pub_trace("t", 2**64, b"x"),
        lambda session: session.pub_ext("t", b"{" * 70_000, b"x"),
        lambda session: session.sub("t", "c", partition="0", ordered=True),
    ],
)
def test_a_bad_argument_leaves_nothing_behind(say: Say) -> None:
    session = cluster()
    with pytest.raises((NameInvalid, ValueError, TypeError)):
        say(session)
    assert not session.is_subscribed
    session.pub("t", b"good", token="good")
    assert [event.token for event in session.receive(OK)] == ["good"]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda session: session.req(b"0123456789abcdef", 0), "message must be Message"),
        (lambda session: session.touch(b"0123456789abcdef"), "message must be Message"),
        (lambda session: session.set_rdy("5"), "count must be int"),
        (lambda session: session.receive(None), "data must be bytes-like"),
        (lambda session: Session(None), "config must be ConnectionConfig"),
        (lambda session: parse_lookup("{}"), "body must be bytes"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(call: Callable[[Any], object], argument: str) -> None:
    session = ready()
    session.sub("t", "c")
    with pytest.raises(TypeError, match=argument):
        call(session)


def test_ordered_messages_are_not_sampled() -> None:
    session = cluster(sample_rate=10)
    with pytest.raises(LocalProtocolError, match="sample_rate=0"):
        session.sub("t", "c", ordered=True)
    assert not session.is_subscribed
    assert session.sub("t", "c")


def test_what_consumers_say_is_bounded_by_the_server_and_needs_a_subscription() -> None:
    session = subscribed({"max_rdy_count": 100})
    session.set_rdy(100)
    for count in (101, -1):
        with pytest.raises(LocalProtocolError, match="0 to 100"):
            session.set_rdy(count)
    assert session.rdy == 100
    with pytest.raises(LocalProtocolError, match="CLS"):
        ready().cls()
    with pytest.raises(LocalProtocolError, match="columns"):
        ready().column_reader()


# Replies


def publishing(*tokens: Any) -> Session:
    session = ready()
    for token in tokens:
        session.pub("t", b"x", token=token)
    return session


def test_oks_and_nothing_else_give_the_tokens_of_their_publishes() -> None:
    session = publishing("a", "b", "c")
    assert session.receive_oks(OK * 2) == ["a", "b"]
    assert session.receive_oks(OK) == ["c"]
    assert not session.pending
    session = publishing("a", "b")
    for data in (b"", OK * 3, OK[:-1], OK + OK[:4], OK + HEARTBEAT, OK + message(), error(b"E_X x"), response(b"no")):
        assert session.receive_oks(data) is None
        assert session.tokens() == ["a", "b"]
    assert session.receive(OK[:5]) == []
    assert session.receive_oks(OK) is None, "half a frame is before it"
    assert [each.token for each in session.receive(OK[5:] + OK)] == ["a", "b"]
    session = publishing("a")
    session.sub("t", "c", token="b")
    assert session.receive_oks(OK * 2) is None, "one is the reply to another command"
    assert [each.token for each in session.receive(OK * 2)] == ["a", "b"]


@pytest.mark.parametrize("data", [b"O", b"", b"CLOSE_WAIT", b"OK" + bytes(27), b"OK" + bytes(29), b"KO" + bytes(28)])
def test_a_publish_whose_reply_cannot_be_read_is_still_pending(data: bytes) -> None:
    session = cluster()
    session.pub_trace("t", 5, b"x", token="mine")
    with pytest.raises(RemoteProtocolError):
        session.receive(response(data))
    (end,) = session.receive(b"")
    assert end.pending == (("PUB_TRACE", "mine"),)


def test_a_reply_nobody_waits_for_loses_nothing_before_it() -> None:
    session = subscribed()
    session.pub("t", b"x", token=1)
    assert kinds(session.receive(OK + OK + message())) == [Reply]
    assert session.message_count == 0
    with pytest.raises(RemoteProtocolError, match="no command waits"):
        session.receive(OK)


def test_a_refused_publish_fails_alone() -> None:
    session = cluster()
    session.pub("t", b"x", partition=0)
    session.pub("t", b"next", token="next")
    failed, reply = session.receive(error(b"E_FAILED_ON_NOT_LEADER ") + OK)
    assert isinstance(failed, CommandFailed)
    assert not failed.fatal
    assert reply.token == "next"


def test_what_follows_a_broken_mpub_ext_answers_nothing() -> None:
    session = cluster()
    session.sub("t", "c")
    session.mpub_ext("t", [(b"{}", b"x"), (b"{}", b"y")], token="ext")
    session.pub("t", b"behind", token="behind")
    stream = OK + message(id=RECORD) + error(b"E_EXT_NOT_SUPPORT x") + error(b"E_INVALID invalid command") + message()
    reply, first, failed = session.receive(stream)
    assert (reply.command, first.body, failed.token) == ("SUB", b"body", "ext")
    assert (session.message_count, session.in_flight) == (1, 1)
    assert session.receive(message() + error(b"E_INVALID")) == []
    with pytest.raises(LocalProtocolError):
        session.pub("t", b"x")
    (end,) = session.receive(b"")
    assert end.pending == (("PUB", "behind"),)
    assert session.receive(b"") == []


INVALID = [b"Invalid Message ID", b"invalid message ID", b"No channel", b"cannot REQ in current state"]


@pytest.mark.parametrize(
    ("version", "said", "text", "event", "kind", "left", "executed"),
    [
        ("1.3.0", "pub pub", b"E_PUB_FAILED PUB failed disk", CommandFailed, errors.PubFailed, "PUB", False),
        # After the last message's header the body was read to its end: what came behind it was carried out.
        (CLUSTER, "mpub_ext pub", b"E_EXT_NOT_SUPPORT x", CommandFailed, errors.ExtNotSupported, "PUB", None),
        (CLUSTER, "mpub_ext pub", b"E_INVALID_JSON_HEADER x", CommandFailed, errors.HeaderInvalid, "PUB", None),
        (CLUSTER, "mpub_ext pub", b"INVALID_TRACE_ID x", CommandFailed, errors.TraceIdInvalid, "PUB", None),
        (CLUSTER, "mpub_ext pub", b"E_TOPIC_NOT_EXIST ", CommandFailed, errors.TopicNotExist, "PUB", False),
        # What no command waits for: it is blamed on none.
        ("1.3.0", "sub pub", b"E_INVALID RDY count 5000 out of range", ServerFailed, errors.Invalid, "PUB", False),
        *(("1.3.0", "sub cls", b"E_INVALID " + each, ServerFailed, errors.Invalid, "CLS", False) for each in INVALID),
        (CLUSTER, "sub", b"E_FAILED_ON_NOT_LEADER ", ServerFailed, errors.NotLeader, "", False),  # in answer to a FIN
        (CLUSTER, "sub cls", b"E_FAILED_ON_NOT_WRITABLE ", ServerFailed, errors.NotWritable, "CLS", False),
    ],
)  # fmt: skip
def test_an_error_that_ends_a_connection_is_blamed_on_whom_it_is_of_and_the_rest_is_told(
    version: str, said: str, text: bytes, event: type, kind: type, left: str, executed: bool | None
) -> None:
    session = ready(version)
    say: dict[str, Say] = {
        "sub": lambda session: session.sub("t", "c"),
        "pub": lambda session: session.pub("t", b"x", token=said),
        "mpub_ext": lambda session: session.mpub_ext("t", [(b"{}", b"x")], token="ext"),
        "cls": lambda session: session.cls(token=said),
    }
    for command in said.split():
        say[command](session)
        assert command != "sub" or session.receive(OK)
    (failed,) = session.receive(error(text))
    assert (type(failed), type(failed.error), failed.fatal) == (event, kind, True)
    (end,) = session.receive(b"")
    assert (end.pending, end.executed) == (((left, said),) if left else (), executed)


@pytest.mark.parametrize(
    ("text", "kind", "id"),
    [
        (b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight", errors.FinFailed, ID),
        (b"E_REQ_FAILED REQ 0123456789abcdef failed client does not own message", errors.ReqFailed, ID),
        (b"E_TOUCH_FAILED TOUCH 0123456789abcdef failed ID not in flight", errors.TouchFailed, ID),
        (
            b"E_FIN_FAILED FIN [0 0 0 0 0 0 0 0 10 10 10 10 10 10 10 255] no",
            errors.FinFailed,
            bytes(8) + b"\n" * 7 + b"\xff",
        ),
        (b"E_FIN_FAILED FIN [0 0 0 0 0 0 0 1 10 10 10 10 10 10 10 256] no", errors.FinFailed, None),
        (b"E_FIN_FAILED ", errors.FinFailed, None),
    ],
)
def test_failed_answers_belong_to_no_pending_command(text: bytes, kind: type, id: bytes | None) -> None:
    session = subscribed()
    session.pub("t", b"x", token=1)
    failed, reply = session.receive(error(text) + OK)
    assert isinstance(failed, AnswerFailed)
    assert isinstance(failed.error, kind)
    assert failed.message_id == id
    assert reply.token == 1


# Messages


@pytest.mark.parametrize("is_ext", [False, True])
@pytest.mark.parametrize("form", ["ordered", "advanced", None])
def test_the_first_message_is_read_in_the_layout_of_the_subscription(form: str | None, is_ext: bool) -> None:
    session = cluster(extend_support=is_ext)
    session.sub("t", "c", partition=2, **({form: True} if form else {}))
    layout: dict[str, Any] = {"ext_version": 4, "ext": b'{"k":"v"}'} if is_ext else {}
    if form:
        layout |= {"offset": 640, "raw_size": 44}
    _, got = session.receive(OK + message(id=RECORD, **layout))  # in one read
    assert (got.body, got.internal_id, got.trace_id) == (b"body", (2 << 50) + 7, 99)
    assert got.headers == ({"k": "v"} if is_ext else {})
    assert (got.offset, got.raw_size) == ((640, 44) if form else (None, None))


def test_frames_keep_their_order() -> None:
    session = subscribed(extend_support=True)  # original servers send no headers, whatever was asked for
    got = session.receive(message(b"\x04\x00\x01x") + message(b"2"), 12.5)
    assert [(item.body, item.ext, item.received_at) for item in got] == [
        (b"\x04\x00\x01x", None, 12.5),
        (b"2", None, 12.5),
    ]
    assert session.message_count == len(got)
    session.pub("t", b"x", token=1)
    got = session.receive(message(b"1") + OK + message(b"2") + HEARTBEAT)
    assert kinds(got) == [Message, Reply, Message, Heartbeat]
    assert session.message_count == 2


def test_messages_after_cls_are_messages() -> None:
    session = subscribed()
    session.cls(token="bye")
    assert session.is_closing
    assert session.nop() == b"NOP\n"
    late, closed = session.receive(message() + response(b"CLOSE_WAIT"))
    assert isinstance(late, Message)
    assert (closed.command, closed.data, closed.token) == ("CLS", b"CLOSE_WAIT", "bye")
    assert session.fin(late)
    with pytest.raises(LocalProtocolError):
        session.cls()


def oversized(body: bytes = bytes(2048)) -> bytes:
    return message(body, b"fedcba9876543210")


@pytest.mark.parametrize("size", [7, 10_000])
def test_a_message_above_the_limit_passes_and_can_be_answered(size: int) -> None:
    session = subscribed(max_frame_size=1024)
    stream = message(b"before") + oversized() + message(b"after") + HEARTBEAT
    got: list[Any] = []
    for start in range(0, len(stream), size):
        got += session.receive(stream[start : start + size])
    before, skipped, after, heartbeat = got
    assert (before.body, after.body, type(heartbeat)) == (b"before", b"after", Heartbeat)
    assert isinstance(skipped, MessageSkipped)
    assert (skipped.message.id, skipped.message.body) == (b"fedcba9876543210", b"")
    assert (skipped.error.message_id, skipped.error.attempts, skipped.error.body_size) == (skipped.message.id, 1, 2048)
    assert "message fedcba9876543210 (attempt 1) has a body of 2048 bytes" in str(skipped.error)
    assert "max_frame_size=1024" in str(skipped.error)
    assert pickle.loads(pickle.dumps(skipped.error)).body_size == 2048
    assert session.in_flight == 3
    assert session.req(skipped.message, 5) == b"REQ fedcba9876543210 5\n"
    assert session.in_flight == 2
    with pytest.raises(RemoteProtocolError):  # what is no message, and too large
        session.receive(struct.pack(">II", 2049, 0))


# The end


def test_end_of_stream_with_commands_pending() -> None:
    session = subscribed()
    session.pub("t", b"1", token="a")
    session.mpub("t", [b"2"], token="b")
    (end,) = session.receive(b"")
    assert end == Disconnected(pending=(("PUB", "a"), ("MPUB", "b")), executed=None, truncated=False)
    assert session.receive(b"") == []
    with pytest.raises(LocalProtocolError):
        session.pub("t", b"x")
    session = ready()
    session.receive(OK[:5])
    (end,) = session.receive(b"")
    assert end.truncated


def test_garbage_after_good_frames_loses_none_of_them() -> None:
    session = subscribed()
    got = session.receive(message(b"good") + b"\xff" * 16)
    assert [item.body for item in got] == [b"good"]
    assert isinstance(session.failure, RemoteProtocolError)
    with pytest.raises(RemoteProtocolError):
        session.receive(message())
    assert kinds(session.receive(b"")) == [Disconnected]


def test_garbage_behind_a_fatal_error_is_not_looked_at() -> None:
    """Also where the error comes with the handshake."""
    for session, stream in ((subscribed(), error(b"E_BAD_TOPIC no")), (new(), OK + error(b"E_INVALID no"))):
        *_, failed = session.receive(stream + b"\xff" * 16)
        assert (type(failed), failed.fatal, session.failure) == (ServerFailed, True, None)
        assert session.receive(b"more") == []


# Columns


def test_columns_go_on_where_the_session_has_stopped() -> None:
    session = subscribed()
    stream = message(b"one") + HEARTBEAT + error(b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight")
    assert session.receive(stream[:10]) == []
    reader = session.column_reader()
    columns = reader.feed(stream[10:])
    assert (columns.count, columns.body) == (1, b"one")
    beat, failed = session.interpret(columns.frames)
    assert beat == Heartbeat(send=b"NOP\n")
    assert isinstance(failed, AnswerFailed)
    assert session.in_flight == 0


def test_frames_of_columns_mean_what_they_mean_elsewhere() -> None:
    session = subscribed(max_frame_size=1024)
    reader = session.column_reader()
    columns = reader.feed(message(b"before") + oversized() + message(b"after"))
    assert columns.body == b"beforeafter"
    (skipped,) = session.interpret(columns.frames)
    assert isinstance(skipped, MessageSkipped)
    assert session.fin(skipped.message) == b"FIN fedcba9876543210\n"
    assert session.in_flight == 0
    session.cls(token="bye")
    frames = reader.feed(message() + response(b"CLOSE_WAIT")).frames
    assert session.interpret(frames) == [Reply(command="CLS", data=b"CLOSE_WAIT", token="bye")]
    (failed,) = session.interpret(reader.feed(error(b"E_INVALID RDY out of range")).frames)
    assert (type(failed), failed.fatal) == (ServerFailed, True)
    with pytest.raises(RemoteProtocolError, match="no command waits"):
        subscribed().interpret(ColumnReader().feed(OK).frames)


# Which errors end a connection, by server family and command.


@pytest.mark.parametrize(
    ("text", "command", "original", "redesigned"),
    [
        (b"E_PUB_FAILED x", "PUB", True, False),
        (b"E_MPUB_FAILED x", "MPUB", True, False),
        (b"E_FAILED_ON_NOT_LEADER ", "PUB", True, False),
        (b"E_FAILED_ON_NOT_LEADER ", "SUB", True, True),
        (b"E_FAILED_ON_NOT_LEADER ", "SUB_ORDERED", True, True),
        (b"E_FAILED_ON_NOT_WRITABLE ", None, True, True),  # in answer to a FIN
        (b"E_FIN_FAILED x", None, False, False),
        (b"E_REQ_FAILED x", None, False, False),
        (b"E_TOUCH_FAILED x", None, False, False),
        (b"E_EXT_NOT_SUPPORT x", "PUB_EXT", False, False),
        (b"E_FAILED_ON_NOT_LEADER ", "CLS", True, True),  # in answer to a FIN before it
        (b"E_FAILED_ON_NOT_LEADER ", "MPUB_TRACE", True, False),
        (b"E_INVALID_JSON_HEADER x", "PUB_EXT", False, False),
        (b"INVALID_TRACE_ID x", "PUB_EXT", False, False),
        (b"E_CREATE_TOPIC_FAILED x", "INTERNAL_CREATE_TOPIC", False, False),
        (b"E_TOPIC_NOT_EXIST ", "PUB", True, True),
        (b"E_BAD_PARTITION x", "PUB", True, True),
        (b"E_PUB_TOO_MUCH_WAITING x", "PUB_TRACE", True, True),
        (b"E_SUB_ORDER_IS_MUST x", "SUB", True, True),
        (b"E_EXT_NOT_SUPPORT x", "MPUB_EXT", False, True),  # the rest of the body is taken for a command
        (b"E_BAD_TOPIC x", "PUB", True, True),
        (b"E_INVALID x", None, True, True),
        (b"too much client connections", "IDENTIFY", True, True),
    ],
)
def test_fatality(text: bytes, command: str | None, original: bool, redesigned: bool) -> None:
    for versions, fatal in ((("1.3.0", "0.3.8", ""), original), (("0.3.7-HA.1.13.0",), redesigned)):
        assert {dialect_of(version).is_fatal(server_error(text), command) for version in versions} == {fatal}
