"""What the session says to redesigned servers, what it refuses to say to original ones, and receipts."""

from __future__ import annotations

import json
from collections.abc import Callable
from struct import pack
from typing import Any

import pytest

from nsq_fast._codec import Message, TracedReply, encode_frame, encode_message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    ExtNotSupported,
    LocalProtocolError,
    NameInvalid,
    NotLeader,
    NotWritable,
    RemoteProtocolError,
    ServerError,
    server_error,
)
from nsq_fast.protocol.events import CommandFailed, Disconnected, Reply, ServerFailed
from nsq_fast.protocol.session import Session

REDESIGNED = "0.3.7-HA.1.13.0"
OK = encode_frame(0, b"OK")
ID = pack(">QQ", (2 << 50) + 7, 99)
RECEIPT = TracedReply(internal_id=2**50 + 4, trace_id=2**64 - 1, offset=64, size=32)
RECEIPT_FRAME = encode_frame(0, b"OK" + pack(">QQQI", *RECEIPT))

Say = Callable[[Session], bytes]


def ready(version: str = REDESIGNED, **options: Any) -> Session:
    session = Session(ConnectionConfig(**options))
    session.connect()
    session.receive(encode_frame(0, json.dumps({"version": version, "max_rdy_count": 2500}).encode()))
    assert session.is_ready
    return session


def failure(data: bytes) -> bytes:
    return encode_frame(1, data)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({}, b"SUB t c\n"),
        ({"partition": 0}, b"SUB t c 0\n"),
        ({"partition": 2, "advanced": True}, b"SUB_ADVANCED t c 2\n"),
        ({"partition": 2, "ordered": True}, b"SUB_ORDERED t c 2\n"),
        ({"ordered": True, "advanced": True}, b"SUB_ORDERED t c\n"),
    ],
)
def test_forms_of_subscription(options: dict[str, Any], line: bytes) -> None:
    session = ready()
    assert session.sub("t", "c", token="mine", **options) == line
    (reply,) = session.receive(OK)
    assert reply == Reply(command=line.split()[0].decode(), data=b"OK", token="mine")
    with pytest.raises(LocalProtocolError, match="has a subscription already"):
        session.sub("t", "c")


@pytest.mark.parametrize("is_ext", [False, True])
@pytest.mark.parametrize("form", ["ordered", "advanced", None])
def test_the_first_message_is_read_in_the_layout_of_the_subscription(form: str | None, is_ext: bool) -> None:
    session = ready(extend_support=is_ext)
    session.sub("t", "c", partition=2, **({form: True} if form else {}))
    layout: dict[str, Any] = {"ext_version": 4, "ext": b'{"k":"v"}'} if is_ext else {}
    if form:
        layout |= {"offset": 640, "raw_size": 44}
    # the OK and the first message in one read
    _, message = session.receive(OK + encode_message(5, 1, ID, b"body", **layout))
    assert isinstance(message, Message)
    assert (message.body, message.internal_id, message.trace_id) == (b"body", (2 << 50) + 7, 99)
    assert message.headers == ({"k": "v"} if is_ext else {})
    assert (message.offset, message.raw_size) == ((640, 44) if form else (None, None))


def test_original_servers_send_no_headers_whatever_was_asked_for() -> None:
    session = ready("1.3.0", extend_support=True)
    session.sub("t", "c")
    _, message = session.receive(OK + encode_message(5, 1, b"0123456789abcdef", b"\x04\x00\x01x body"))
    assert message.body == b"\x04\x00\x01x body"
    assert message.ext is None


@pytest.mark.parametrize(
    ("say", "advice"),
    [
        (lambda session: session.sub("t", "c", ordered=True), "leave ordered and advanced"),
        (lambda session: session.sub("t", "c", advanced=True), "leave ordered and advanced"),
        (lambda session: session.sub("t", "c", partition=0), "leave partition=0 out"),
        (lambda session: session.pub("t", b"x", partition=1), "leave partition=1 out"),
        (lambda session: session.mpub("t", [b"x"], partition=1), "leave partition=1 out"),
        (lambda session: session.pub_trace("t", 1, b"x"), "leave trace_id out"),
        (lambda session: session.mpub_trace("t", [(1, b"x")]), "leave trace_id out"),
        (lambda session: session.pub_ext("t", b"{}", b"x"), "leave headers and tag out"),
        (lambda session: session.mpub_ext("t", [(b"{}", b"x")]), "leave headers and tag out"),
        (lambda session: session.expect("PUB_TRACE"), "leave trace_id out"),
    ],
)
def test_original_servers_are_told_nothing_they_do_not_know(say: Say, advice: str) -> None:
    session = ready("1.3.0")
    with pytest.raises(LocalProtocolError, match=advice) as caught:
        say(session)
    assert "1.3.0" in str(caught.value)
    assert session.pending_count == 0
    assert session.sub("t", "c") == b"SUB t c\n"


def test_redesigned_servers_cannot_delay_a_publish() -> None:
    session = ready()
    with pytest.raises(LocalProtocolError, match="leave defer out"):
        session.dpub("t", 100, b"x")
    with pytest.raises(LocalProtocolError, match="leave defer out"):
        session.expect("DPUB")
    assert session.pending_count == 0


def test_ordered_messages_are_not_sampled() -> None:
    session = ready(sample_rate=10)
    with pytest.raises(LocalProtocolError, match="sample_rate=0"):
        session.sub("t", "c", ordered=True)
    assert not session.is_subscribed
    assert session.sub("t", "c")


@pytest.mark.parametrize(
    ("say", "data"),
    [
        (lambda session: session.pub("t", b"x", partition=3), b"PUB t 3\n\0\0\0\1x"),
        (lambda session: session.pub("t", b"x"), b"PUB t\n\0\0\0\1x"),
        (lambda session: session.mpub("t", [b"x"], partition=3), b"MPUB t 3\n\0\0\0\x09\0\0\0\1\0\0\0\1x"),
        (
            lambda session: session.pub_trace("t", 7, b"x", partition=3),
            b"PUB_TRACE t 3\n\0\0\0\x09" + pack(">Q", 7) + b"x",
        ),
        (
            lambda session: session.mpub_trace("t", [(7, b"x")], partition=3),
            b"MPUB_TRACE t 3\n\0\0\0\x11\0\0\0\1\0\0\0\x09" + pack(">Q", 7) + b"x",
        ),
        (lambda session: session.pub_ext("t", b"{}", b"x", partition=3), b"PUB_EXT t 3\n\0\0\0\5\0\2{}x"),
        (
            lambda session: session.mpub_ext("t", [(b"{}", b"x")], partition=3),
            b"MPUB_EXT t 3\n\0\0\0\x0d\0\0\0\1\0\0\0\5\0\2{}x",
        ),
    ],
)  # fmt: skip
def test_publishes_name_their_partition(say: Say, data: bytes) -> None:
    session = ready()
    assert say(session) == data
    assert session.pending_count == 1


def test_a_bad_argument_leaves_nothing_behind() -> None:
    session = ready()
    attempts: list[Callable[[], bytes]] = [
        lambda: session.pub("no topic!", b"x"),
        lambda: session.pub("t", b"x", partition=-3),
        lambda: session.pub_trace("t", 2**64, b"x"),
        lambda: session.pub_ext("t", b"{" * 70_000, b"x"),
        lambda: session.sub("t", "c", partition="0", ordered=True),  # type: ignore[arg-type]
    ]
    for say in attempts:
        with pytest.raises((NameInvalid, ValueError, TypeError)):
            say()
    assert session.pending_count == 0
    assert not session.is_subscribed


def test_traced_publishes_get_receipts() -> None:
    session = ready()
    session.pub_trace("t", 5, b"x", partition=0, token=1)
    session.mpub_trace("t", [(5, b"x")], partition=0, token=2)
    session.pub_ext("t", b'{"##trace_id":"5"}', b"x", token=3)
    session.pub_ext("t", b"{}", b"x", token=4)
    session.pub("t", b"x", token=5)
    replies = session.receive(RECEIPT_FRAME * 3 + OK * 2)
    assert [reply.token for reply in replies] == [1, 2, 3, 4, 5]
    assert [reply.receipt for reply in replies] == [RECEIPT, RECEIPT, RECEIPT, None, None]
    assert replies[0].data == RECEIPT_FRAME[8:]


@pytest.mark.parametrize("data", [b"OK" + bytes(27), b"OK" + bytes(29), b"KO" + bytes(28), b"CLOSE_WAIT", b""])
def test_a_receipt_of_another_length_is_the_servers_mistake(data: bytes) -> None:
    session = ready()
    session.pub_trace("t", 5, b"x")
    with pytest.raises(RemoteProtocolError):
        session.receive(encode_frame(0, data))


@pytest.mark.parametrize(
    "code", ["E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE", "E_MPUB_FAILED", "E_EXT_NOT_SUPPORT"]
)
@pytest.mark.parametrize(
    "say",
    [
        lambda session: session.pub_trace("t", 1, b"x", partition=0),
        lambda session: session.mpub_trace("t", [(1, b"x")], partition=0),
        lambda session: session.pub_ext("t", b"{}", b"x", partition=0),
        lambda session: session.mpub("t", [b"x"], partition=0),
    ],
)  # fmt: skip
def test_a_refused_publish_fails_alone(say: Say, code: str) -> None:
    session = ready()
    say(session)
    session.pub("t", b"next", token="next")
    failed, reply = session.receive(failure(code.encode() + b" ") + OK)
    assert isinstance(failed, CommandFailed)
    assert not failed.fatal
    assert reply.token == "next"


@pytest.mark.parametrize("code", [b"E_EXT_NOT_SUPPORT x", b"E_INVALID_JSON_HEADER x", b"INVALID_TRACE_ID x"])
def test_an_error_to_mpub_ext_ends_the_connection_and_the_fate_of_the_rest_is_unknown(code: bytes) -> None:
    session = ready()
    session.mpub_ext("t", [(b"{}", b"x")], token="ext")
    session.pub("t", b"behind", token="behind")
    (failed,) = session.receive(failure(code))
    assert (failed.token, failed.fatal) == ("ext", True)
    (end,) = session.receive(b"")
    # After the last message's header the body was read to its end: what came behind it was carried out.
    assert (end.pending, end.executed) == ((("PUB", "behind"),), None)


def test_what_follows_a_broken_mpub_ext_answers_nothing() -> None:
    session = ready()
    session.sub("t", "c")
    session.mpub_ext("t", [(b"{}", b"x"), (b"{}", b"y")], token="ext")
    session.pub("t", b"behind", token="behind")
    message = encode_message(5, 1, ID, b"body")
    stream = OK + message + failure(b"E_EXT_NOT_SUPPORT x") + failure(b"E_INVALID invalid command") + message
    reply, first, failed = session.receive(stream)
    assert (reply.command, first.body, failed.token) == ("SUB", b"body", "ext")
    assert (session.message_count, session.in_flight) == (1, 1)
    assert session.receive(message + failure(b"E_INVALID")) == []
    with pytest.raises(LocalProtocolError):
        session.pub("t", b"x")
    (end,) = session.receive(b"")
    assert end.pending == (("PUB", "behind"),)
    assert session.receive(b"") == []


def test_a_fatal_error_to_mpub_ext_stops_the_server() -> None:
    session = ready()
    session.mpub_ext("t", [(b"{}", b"x")])
    session.pub("t", b"behind", token="behind")
    session.receive(failure(b"E_TOPIC_NOT_EXIST "))
    (end,) = session.receive(b"")
    assert isinstance(end, Disconnected)
    assert end.executed is False


@pytest.mark.parametrize(("code", "error"), [(b"NOT_LEADER", NotLeader), (b"NOT_WRITABLE", NotWritable)])
@pytest.mark.parametrize("is_closing", [False, True])
def test_a_fin_at_a_node_that_lost_the_partition_ends_the_subscription(
    code: bytes, error: type[ServerError], is_closing: bool
) -> None:
    session = ready()
    session.sub("t", "c", partition=2, ordered=True)
    _, message = session.receive(OK + encode_message(5, 1, ID, b"body", offset=1, raw_size=1))
    assert session.fin(message) == b"FIN " + ID + b"\n"
    if is_closing:
        session.cls()
    (failed,) = session.receive(failure(b"E_FAILED_ON_" + code + b" "))
    assert isinstance(failed, ServerFailed)
    assert isinstance(failed.error, error)
    assert failed.fatal
    assert session.pending_count == is_closing


@pytest.mark.parametrize(
    "text", [b"Invalid Message ID", b"invalid message ID", b"No channel", b"cannot REQ in current state"]
)
def test_an_invalid_answer_is_not_taken_for_an_invalid_cls(text: bytes) -> None:
    session = ready()
    session.sub("t", "c")
    session.receive(OK)
    session.cls()
    (failed,) = session.receive(failure(b"E_INVALID " + text))
    assert isinstance(failed, ServerFailed)
    assert session.pending_count == 1


def test_errors_say_which_option_to_set() -> None:
    assert str(server_error(b"E_SUB_ORDER_IS_MUST only ordered")).endswith("(the topic is ordered: set ordered=True)")
    assert "extend_support=True" in str(server_error(b"E_SUB_EXTEND_NEED "))
    assert "extend_support=False" in str(server_error(b"E_SUB_EXTEND_FORBIDDON "))
    assert "/channel/create" in str(server_error(b"E_SUB_CHANNEL_NOT_REGISTERED "))
    assert str(server_error(b"E_FAILED_ON_NOT_LEADER ")) == "E_FAILED_ON_NOT_LEADER"
    assert isinstance(server_error(b"E_EXT_NOT_SUPPORT x"), ExtNotSupported)
