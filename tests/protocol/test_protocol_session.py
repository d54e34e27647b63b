"""The session against scripted bytes: handshake, replies, the in-flight count, the end of the stream."""

from __future__ import annotations

import json
import pickle
import re
import struct
import sys
from typing import Any

import pytest

from nsq_fast._codec import Message, encode_frame, encode_message
from nsq_fast._frame import ColumnReader
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    AuthFailed,
    BadBody,
    FinFailed,
    Invalid,
    LocalProtocolError,
    NameInvalid,
    PubFailed,
    RemoteProtocolError,
    ReqFailed,
    SubFailed,
    TouchFailed,
)
from nsq_fast.protocol.dialect import ORIGINAL, REDESIGNED
from nsq_fast.protocol.events import (
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
    UpgradeNeeded,
)
from nsq_fast.protocol.session import MAX_HANDSHAKE_FRAME, Session

ID = b"0123456789abcdef"


def response(data: bytes) -> bytes:
    return encode_frame(0, data)


def error(data: bytes) -> bytes:
    return encode_frame(1, data)


def message(body: bytes = b"body", id: bytes = ID) -> bytes:
    return encode_message(1, 1, id, body)


def reply_json(**fields: Any) -> bytes:
    return response(json.dumps({"version": "1.3.0", "max_rdy_count": 2500, **fields}).encode())


OK = response(b"OK")
HEARTBEAT = response(b"_heartbeat_")


def ready(fields: dict[str, Any] | None = None, **options: Any) -> Session:
    session = Session(ConnectionConfig(**options))
    session.connect()
    session.receive(reply_json(**(fields or {})))
    assert session.is_ready
    return session


def subscribed(**fields: Any) -> Session:
    options = {name: fields.pop(name) for name in ("max_frame_size", "heartbeat_interval") if name in fields}
    session = ready(fields, **options)
    session.sub("t", "c")
    session.receive(OK)
    return session


def identify_fields(**options: Any) -> dict[str, Any]:
    data = Session(ConnectionConfig(**options)).connect()
    assert data.startswith(b"  V2IDENTIFY\n")
    (size,) = struct.unpack_from(">I", data, 13)
    assert len(data) == 17 + size
    fields: dict[str, Any] = json.loads(data[17:])
    return fields


FILTER = {"type": 1, "filter_ext_key": "k", "filter_data": "v"}


def test_identify_carries_every_field() -> None:
    assert identify_fields(
        client_id="me", hostname="me.example", user_agent="agent/1", heartbeat_interval=2.5, output_buffer_size=1024,
        output_buffer_timeout=50, sample_rate=10, msg_timeout=1.5, tls_v1=True, deflate=True, deflate_level=3,
        topology_region="r", topology_zone="z", desired_tag="tag", extend_support=True, ext_filter=FILTER,
    ) == {
        "client_id": "me", "hostname": "me.example", "user_agent": "agent/1", "feature_negotiation": True,
        "heartbeat_interval": 2500, "output_buffer_size": 1024, "output_buffer_timeout": 50, "sample_rate": 10,
        "msg_timeout": 1500, "tls_v1": True, "snappy": False, "deflate": True, "deflate_level": 3,
        "topology_region": "r", "topology_zone": "z", "desired_tag": "tag", "extend_support": True,
        "ext_filter": FILTER,
    }  # fmt: skip


def test_identify_leaves_out_what_is_not_set() -> None:
    fields = identify_fields(hostname="box.example")
    assert fields["client_id"] == "box"
    assert not {"msg_timeout", "topology_region", "desired_tag", "extend_support", "deflate_level"} & fields.keys()
    assert "hostname" not in identify_fields()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_handshake_in_pieces(size: int) -> None:
    session = Session(ConnectionConfig())
    session.connect()
    data = reply_json(topology_region="eu", unknown_field=[1, 2]) + HEARTBEAT
    events: list[Any] = []
    for start in range(0, len(data), size):
        events += session.receive(data[start : start + size])
    assert [type(event) for event in events] == [Identified, Ready, Heartbeat]
    assert session.info.topology_region == "eu"
    assert session.dialect is ORIGINAL


def test_plain_ok_means_that_nothing_was_negotiated() -> None:
    session = Session(ConnectionConfig())
    session.connect()
    assert [type(event) for event in session.receive(OK)] == [Identified, Ready]
    assert session.info.max_rdy_count == 2500


def test_dialect_is_learnt_from_the_version() -> None:
    assert ready({"version": "0.3.7-HA.1.13.0"}).dialect is REDESIGNED


@pytest.mark.parametrize(
    "data",
    [
        b"not json", b"[]", b"\xff\xfe", b'{"max_rdy_count":"2500"}', b'{"max_rdy_count":true}',
        b'{"max_rdy_count":-1}',
        b'{"max_rdy_count":1e400}', b'{"version":1}', b'{"tls_v1":"yes"}', b'{"version":null}', b"",
    ],
)  # fmt: skip
def test_identify_reply_of_the_wrong_shape(data: bytes) -> None:
    session = Session(ConnectionConfig())
    session.connect()
    with pytest.raises(RemoteProtocolError):
        session.receive(response(data))
    with pytest.raises(RemoteProtocolError):
        session.receive(OK)
    assert [type(event) for event in session.receive(b"")] == [Disconnected]


@pytest.mark.parametrize(
    ("field", "number"),
    [
        ("msg_timeout", "0"), ("msg_timeout", "-1"), ("msg_timeout", "NaN"), ("msg_timeout", "1e300"),
        ("msg_timeout", str(2**63)), ("max_msg_timeout", "0"), ("max_rdy_count", "0"), ("max_rdy_count", str(2**63)),
        ("deflate_level", str(10**400)), ("sample_rate", str(-(10**30))), ("output_buffer_timeout", "1" * 5000),
    ],
)  # fmt: skip
def test_identify_reply_with_a_number_that_makes_no_sense(field: str, number: str) -> None:
    session = Session(ConnectionConfig())
    session.connect()
    with pytest.raises(RemoteProtocolError, match=rf"^IDENTIFY reply .*({re.escape(field)}|malformed)"):
        session.receive(response(b'{"version":"1.3.0","%b":%b}' % (field.encode(), number.encode())))


def test_identify_reply_with_the_largest_numbers_a_server_can_send() -> None:
    longest = 2**63 // 10**6  # Go's longest duration in milliseconds
    session = ready({"msg_timeout": longest, "max_msg_timeout": longest, "max_rdy_count": 2**63 - 1})
    assert session.info.msg_timeout == pytest.approx(longest / 1000)


NESTED = b'{"x":' + b"[" * 30_000 + b"]" * 30_000 + b"}"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 reads what fits into a reply, however deep")
def test_a_deeply_nested_reply_is_a_mistake_of_the_server() -> None:
    session = Session(ConnectionConfig())
    session.connect()
    with pytest.raises(RemoteProtocolError, match="IDENTIFY reply"):
        session.receive(response(NESTED))
    session = Session(ConnectionConfig(auth_secret="s"))
    session.connect()
    session.receive(reply_json(auth_required=True))
    with pytest.raises(RemoteProtocolError, match="AUTH reply"):
        session.receive(response(NESTED))


def test_no_event_shows_the_secret() -> None:
    session = Session(ConnectionConfig(auth_secret="geheim"))
    session.connect()
    events = session.receive(reply_json(auth_required=True))
    assert b"geheim" in events[-1].send
    assert "geheim" not in repr([session, session.config, *events])


def test_huge_identify_reply_is_refused_before_it_is_stored() -> None:
    session = Session(ConnectionConfig())
    session.connect()
    with pytest.raises(RemoteProtocolError):
        session.receive(struct.pack(">II", MAX_HANDSHAKE_FRAME + 1, 0))


def test_tls_that_the_server_does_not_offer_is_an_error() -> None:
    session = Session(ConnectionConfig(tls_v1=True))
    session.connect()
    with pytest.raises(RemoteProtocolError, match="TLS"):
        session.receive(reply_json(tls_v1=False))


@pytest.mark.parametrize("feature", ["tls_v1", "snappy", "deflate"])
def test_upgrade_nobody_asked_for_is_an_error(feature: str) -> None:
    session = Session(ConnectionConfig())
    session.connect()
    with pytest.raises(RemoteProtocolError, match=feature):
        session.receive(reply_json(**{feature: True}))


def test_compression_that_the_server_does_not_offer_is_done_without() -> None:
    assert ready({"snappy": False}, snappy=True).is_ready


def test_upgrades_come_in_order_and_hand_over_what_was_read_too_early() -> None:
    session = Session(ConnectionConfig(tls_v1=True, snappy=True))
    session.connect()
    events = session.receive(reply_json(tls_v1=True, snappy=True) + b"early")
    assert [type(event) for event in events] == [Identified, UpgradeNeeded]
    assert (events[1].kind, events[1].leftover) == ("tls", b"early")
    with pytest.raises(LocalProtocolError):
        session.receive(b"more")
    session.upgraded()
    (upgrade,) = session.receive(OK + b"\xff\x06")
    assert (upgrade.kind, upgrade.leftover) == ("snappy", b"\xff\x06")
    session.upgraded()
    assert [type(event) for event in session.receive(OK)] == [Ready]
    with pytest.raises(LocalProtocolError):
        session.upgraded()


def test_anything_but_ok_inside_a_new_layer_is_an_error() -> None:
    session = Session(ConnectionConfig(deflate=True))
    session.connect()
    session.receive(reply_json(deflate=True))
    session.upgraded()
    with pytest.raises(RemoteProtocolError, match="instead of OK"):
        session.receive(response(b"NO"))


def test_auth() -> None:
    session = Session(ConnectionConfig(auth_secret="geheim"))
    session.connect()
    *_, authenticating = session.receive(reply_json(auth_required=True))
    assert isinstance(authenticating, Authenticating)
    assert authenticating.send == b"AUTH\n" + struct.pack(">I", 6) + b"geheim"
    data = b'{"identity":"me","identity_url":"http://x","permission_count":2}'
    (done,) = session.receive(response(data))
    assert isinstance(done, Ready)
    assert done.auth is session.auth
    assert done.auth_data == data
    assert session.auth is not None
    assert (session.auth.identity, session.auth.permission_count) == ("me", 2)


def test_auth_refused() -> None:
    session = Session(ConnectionConfig(auth_secret=b"wrong"))
    session.connect()
    session.receive(reply_json(auth_required=True))
    (failed,) = session.receive(error(b"E_AUTH_FAILED AUTH failed"))
    assert isinstance(failed, CommandFailed)
    assert failed.command == "AUTH"
    assert failed.fatal
    assert isinstance(failed.error, AuthFailed)


def test_auth_reply_of_the_wrong_shape() -> None:
    session = Session(ConnectionConfig(auth_secret="x"))
    session.connect()
    session.receive(reply_json(auth_required=True))
    with pytest.raises(RemoteProtocolError):
        session.receive(response(b'{"permission_count":"all"}'))


def test_auth_is_not_sent_unasked() -> None:
    assert ready(auth_secret="x").auth is None


def test_identify_refused() -> None:
    session = Session(ConnectionConfig())
    session.connect()
    (failed,) = session.receive(error(b"E_BAD_BODY IDENTIFY heartbeat interval (10) is invalid"))
    assert isinstance(failed.error, BadBody)
    assert failed.command == "IDENTIFY"
    (end,) = session.receive(b"")
    assert end.pending == ()


def test_message_before_the_handshake_is_over() -> None:
    session = Session(ConnectionConfig())
    session.connect()
    with pytest.raises(RemoteProtocolError, match="before the handshake"):
        session.receive(message())


def test_replies_match_commands_in_order() -> None:
    session = ready()
    first, second, third = object(), object(), object()
    session.pub("t", b"1", token=first)
    session.mpub("t", [b"2"], token=second)
    session.dpub("t", 100, b"3", token=third)
    events = session.receive(OK + OK + OK)
    assert [(event.command, event.token) for event in events] == [("PUB", first), ("MPUB", second), ("DPUB", third)]
    assert all(event.data == b"OK" for event in events)
    assert session.pending_count == 0


def test_oks_and_nothing_else_give_the_tokens_of_their_publishes() -> None:
    session = ready()
    for token in "abc":
        session.pub("t", b"x", token=token)
    assert session.receive_oks(OK * 2) == ["a", "b"]
    assert session.receive_oks(OK) == ["c"]
    assert not session.pending


@pytest.mark.parametrize(
    "data",
    [b"", OK * 3, OK[:-1], OK + OK[:4], OK + HEARTBEAT, OK + message(), error(b"E_PUB_FAILED x"), response(b"no")],
)
def test_whatever_else_comes_is_left_to_receive(data: bytes) -> None:
    session = ready()
    session.pub("t", b"x", token="a")
    session.pub("t", b"x", token="b")
    assert session.receive_oks(data) is None
    assert session.tokens() == ["a", "b"]


def test_oks_that_are_no_answers_to_publishes_are_left_to_receive() -> None:
    session = ready()
    session.pub("t", b"x", token="a")
    session.sub("t", "c", token="b")
    assert session.receive_oks(OK * 2) is None
    assert [each.token for each in session.receive(OK * 2)] == ["a", "b"]


def test_oks_behind_the_beginning_of_a_frame_are_left_to_receive() -> None:
    session = ready()
    session.pub("t", b"x", token="a")
    session.pub("t", b"x", token="b")
    assert session.receive(OK[:5]) == []
    assert session.receive_oks(OK) is None
    assert [each.token for each in session.receive(OK[5:] + OK)] == ["a", "b"]


def test_commands_are_the_wire_format() -> None:
    session = ready()
    assert session.pub("t", b"x") == b"PUB t\n\0\0\0\1x"
    assert session.sub("t", "c") == b"SUB t c\n"
    assert session.set_rdy(5) == b"RDY 5\n"
    (got,) = session.receive(message())
    assert session.touch(got) == b"TOUCH " + ID + b"\n"
    assert session.req(got, 7) == b"REQ " + ID + b" 7\n"
    assert session.fin(got) == b"FIN " + ID + b"\n"
    assert session.cls() == b"CLS\n"
    assert session.nop() == b"NOP\n"


def test_rejected_argument_leaves_the_replies_in_step() -> None:
    session = ready()
    with pytest.raises(NameInvalid):
        session.pub("bad topic!", b"x")
    with pytest.raises(TypeError):
        session.pub("t", "text")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        session.mpub("t", [b"x", None])  # type: ignore[list-item]
    session.pub("t", b"good", token="good")
    assert [event.token for event in session.receive(OK)] == ["good"]


def test_failed_command_fails_alone_when_it_is_not_fatal() -> None:
    session = ready({"version": "0.3.7-HA.1.13.0"})
    session.pub("t", b"1", token=1)
    session.pub("t", b"2", token=2)
    failed, reply = session.receive(error(b"E_FAILED_ON_NOT_WRITABLE ") + OK)
    assert (failed.token, failed.fatal) == (1, False)
    assert isinstance(reply, Reply)
    assert reply.token == 2


def test_commands_behind_a_fatal_error_were_not_executed() -> None:
    session = ready()
    session.pub("t", b"1", token=1)
    session.pub("t", b"2", token=2)
    (failed,) = session.receive(error(b"E_PUB_FAILED PUB failed disk"))
    assert (failed.token, failed.fatal) == (1, True)
    assert isinstance(failed.error, PubFailed)
    (end,) = session.receive(b"")
    assert end.pending == (("PUB", 2),)
    assert end.executed is False


def test_end_of_stream_with_commands_pending() -> None:
    session = subscribed()
    session.pub("t", b"1", token="a")
    session.mpub("t", [b"2"], token="b")
    (end,) = session.receive(b"")
    assert isinstance(end, Disconnected)
    assert end.pending == (("PUB", "a"), ("MPUB", "b"))
    assert end.executed is None
    assert not end.truncated
    assert session.receive(b"") == []
    with pytest.raises(LocalProtocolError):
        session.pub("t", b"x")


def test_end_of_stream_inside_a_frame() -> None:
    session = ready()
    session.receive(OK[:5])
    (end,) = session.receive(b"")
    assert end.truncated


def test_reply_nobody_waits_for() -> None:
    with pytest.raises(RemoteProtocolError, match="no command waits"):
        ready().receive(OK)


def test_close_wait_for_a_publish_is_an_error() -> None:
    session = ready()
    session.pub("t", b"x")
    with pytest.raises(RemoteProtocolError, match="CLOSE_WAIT"):
        session.receive(response(b"CLOSE_WAIT"))


def test_heartbeat_wants_a_nop() -> None:
    (event,) = ready().receive(HEARTBEAT)
    assert isinstance(event, Heartbeat)
    assert event.send == b"NOP\n"


def test_messages_only_come_as_the_list_of_the_reader() -> None:
    session = subscribed()
    got = session.receive(message(b"1") + message(b"2"), 12.5)
    assert [type(item) for item in got] == [Message, Message]
    assert [item.body for item in got] == [b"1", b"2"]
    assert got[0].received_at == 12.5
    assert session.message_count == len(got)


def test_mixed_frames_keep_their_order() -> None:
    session = subscribed()
    session.pub("t", b"x", token=1)
    got = session.receive(message(b"1") + OK + message(b"2") + HEARTBEAT)
    assert [type(item) for item in got] == [Message, Reply, Message, Heartbeat]
    assert session.message_count == 2


def test_in_flight_counts_what_was_not_answered() -> None:
    session = subscribed()
    got = session.receive(b"".join(message(id=b"%016x" % number) for number in range(6)))
    assert session.in_flight == 6
    session.touch(got[0])
    assert session.in_flight == 6
    session.fin(got[0])
    session.req(got[1], 0)
    assert session.in_flight == 4
    session.fin_many(got[2:])
    assert session.in_flight == 0
    session.fin(got[0])
    assert session.in_flight == 0


def test_messages_after_cls_are_messages() -> None:
    session = subscribed()
    session.cls(token="bye")
    assert session.is_closing
    late, closed = session.receive(message() + response(b"CLOSE_WAIT"))
    assert isinstance(late, Message)
    assert (closed.command, closed.data, closed.token) == ("CLS", b"CLOSE_WAIT", "bye")
    assert session.fin(late)
    with pytest.raises(LocalProtocolError):
        session.cls()


def test_rdy_is_bounded_by_the_server() -> None:
    session = subscribed(max_rdy_count=100)
    session.set_rdy(100)
    with pytest.raises(LocalProtocolError, match="0 to 100"):
        session.set_rdy(101)
    with pytest.raises(LocalProtocolError):
        session.set_rdy(-1)
    assert session.rdy == 100


@pytest.mark.parametrize("command", ["RDY", "FIN", "REQ", "TOUCH", "CLS"])
def test_consumer_commands_need_a_subscription(command: str) -> None:
    session = ready()
    item = Message(1, 1, ID, b"")
    calls = {
        "RDY": lambda: session.set_rdy(1),
        "FIN": lambda: session.fin(item),
        "REQ": lambda: session.req(item, 0),
        "TOUCH": lambda: session.touch(item),
        "CLS": lambda: session.cls(),
    }
    with pytest.raises(LocalProtocolError, match=command):
        calls[command]()


def test_one_subscription_per_connection() -> None:
    session = subscribed()
    with pytest.raises(LocalProtocolError):
        session.sub("t", "c2")


def test_no_commands_before_the_handshake_is_over() -> None:
    session = Session(ConnectionConfig())
    with pytest.raises(LocalProtocolError):
        session.receive(OK)
    session.connect()
    with pytest.raises(LocalProtocolError):
        session.connect()
    with pytest.raises(LocalProtocolError):
        session.pub("t", b"x")
    with pytest.raises(LocalProtocolError):
        session.sub("t", "c")
    session.receive(reply_json())
    assert session.sub("t", "c")


def test_commands_of_the_other_dialect_are_refused() -> None:
    with pytest.raises(LocalProtocolError, match="DPUB"):
        ready({"version": "0.3.7-HA.1.13.0"}).dpub("t", 1, b"x")
    with pytest.raises(LocalProtocolError, match="PUB_TRACE"):
        ready().expect("PUB_TRACE")


@pytest.mark.parametrize(
    ("text", "kind", "id"),
    [
        (b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight", FinFailed, ID),
        (b"E_REQ_FAILED REQ 0123456789abcdef failed client does not own message", ReqFailed, ID),
        (b"E_TOUCH_FAILED TOUCH 0123456789abcdef failed ID not in flight", TouchFailed, ID),
        (b"E_FIN_FAILED FIN [0 0 0 0 0 0 0 0 10 10 10 10 10 10 10 255] no", FinFailed, bytes(8) + b"\n" * 7 + b"\xff"),
        (b"E_FIN_FAILED FIN [0 0 0 0 0 0 0 1 10 10 10 10 10 10 10 256] no", FinFailed, None),
        (b"E_FIN_FAILED ", FinFailed, None),
    ],
)  # fmt: skip
def test_failed_answers_belong_to_no_pending_command(text: bytes, kind: type, id: bytes | None) -> None:
    session = subscribed()
    session.pub("t", b"x", token=1)
    failed, reply = session.receive(error(text) + OK)
    assert isinstance(failed, AnswerFailed)
    assert isinstance(failed.error, kind)
    assert failed.message_id == id
    assert reply.token == 1


def test_errors_that_answer_no_command() -> None:
    session = subscribed()
    (failed,) = session.receive(error(b"E_INVALID RDY count 5000 out of range 0-2500"))
    assert isinstance(failed, ServerFailed)
    assert failed.fatal


def test_invalid_rdy_is_not_blamed_on_a_pending_publish() -> None:
    session = subscribed()
    session.pub("t", b"x", token=1)
    (failed,) = session.receive(error(b"E_INVALID RDY count 5000 out of range 0-2500"))
    assert isinstance(failed, ServerFailed)
    assert isinstance(failed.error, Invalid)
    assert session.receive(b"")[0].pending == (("PUB", 1),)


def test_refused_subscription() -> None:
    session = ready()
    session.sub("t", "c", token="sub")
    (failed,) = session.receive(error(b"E_SUB_FAILED SUB failed too many consumers"))
    assert (failed.command, failed.token, failed.fatal) == ("SUB", "sub", True)
    assert isinstance(failed.error, SubFailed)


def test_garbage_after_good_frames_loses_none_of_them() -> None:
    session = subscribed()
    got = session.receive(message(b"good") + b"\xff" * 16)
    assert [item.body for item in got] == [b"good"]
    assert isinstance(session.failure, RemoteProtocolError)
    with pytest.raises(RemoteProtocolError):
        session.receive(message())
    (end,) = session.receive(b"")
    assert isinstance(end, Disconnected)


def test_unexpected_reply_after_good_events_loses_none_of_them() -> None:
    session = subscribed()
    session.pub("t", b"x", token=1)
    events = session.receive(OK + OK + message())
    assert [type(event) for event in events] == [Reply]
    assert session.message_count == 0
    with pytest.raises(RemoteProtocolError):
        session.receive(OK)


def test_frames_above_the_limit_are_refused() -> None:
    session = ready(max_frame_size=2048)
    with pytest.raises(RemoteProtocolError):
        session.receive(struct.pack(">II", 2049, 0))


def test_garbage_behind_a_fatal_error_is_not_looked_at() -> None:
    session = subscribed()
    (failed,) = session.receive(error(b"E_BAD_TOPIC no") + b"\xff" * 16)
    assert (type(failed), failed.fatal, session.failure) == (ServerFailed, True, None)
    assert session.receive(b"more") == []


def test_garbage_behind_a_fatal_error_that_comes_with_the_handshake() -> None:
    session = Session(ConnectionConfig())
    session.connect()
    *_, failed = session.receive(OK + error(b"E_INVALID no") + b"\xff" * 16)
    assert (type(failed), failed.fatal, session.failure) == (ServerFailed, True, None)
    assert session.receive(b"more") == []


@pytest.mark.parametrize("reply", [b"O", b"CLOSE_WAIT", bytes(29)])
def test_a_publish_whose_reply_cannot_be_read_is_still_pending(reply: bytes) -> None:
    session = subscribed()
    session.pub("t", b"x", token="mine")
    with pytest.raises(RemoteProtocolError):
        session.receive(response(reply))
    (end,) = session.receive(b"")
    assert end.pending == (("PUB", "mine"),)


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


def test_a_message_above_the_limit_in_columns() -> None:
    session = subscribed(max_frame_size=1024)
    columns = session.column_reader().feed(message(b"before") + oversized() + message(b"after"))
    assert columns.body == b"beforeafter"
    (skipped,) = session.interpret(columns.frames)
    assert isinstance(skipped, MessageSkipped)
    assert session.fin(skipped.message) == b"FIN fedcba9876543210\n"
    assert session.in_flight == 0


def test_messages_carry_the_responder() -> None:
    responder = object()
    session = Session(ConnectionConfig(), responder=responder)
    session.connect()
    session.receive(reply_json())
    session.sub("t", "c")
    _, got = session.receive(OK + message())
    assert got.responder is responder


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
    session = subscribed()
    reader = session.column_reader()
    session.cls(token="bye")
    frames = reader.feed(message() + response(b"CLOSE_WAIT")).frames
    assert session.interpret(frames) == [Reply(command="CLS", data=b"CLOSE_WAIT", token="bye")]
    (failed,) = session.interpret(reader.feed(error(b"E_INVALID RDY out of range")).frames)
    assert isinstance(failed, ServerFailed)
    assert failed.fatal
    with pytest.raises(RemoteProtocolError, match="no command waits"):
        subscribed().interpret(ColumnReader().feed(OK).frames)


def test_columns_have_the_layout_of_the_subscription() -> None:
    session = ready({"version": "1.0.0-HA.1"}, extend_support=True)
    with pytest.raises(LocalProtocolError, match="without a subscription"):
        session.column_reader()
    session.sub("t", "c", partition=1, advanced=True)
    session.receive(OK)
    reader = session.column_reader()
    assert (reader.detail, reader.ext) == (True, True)
    assert reader.max_frame_size == session.config.max_frame_size
