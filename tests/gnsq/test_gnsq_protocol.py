"""gnsq's protocol functions, errors, timer, addresses and messages: what goes in, what comes out."""

from __future__ import annotations

import struct

import pytest

from nsq_fast import _codec, errors, gnsq
from nsq_fast.gnsq import protocol
from nsq_fast.gnsq.errors import ERROR_CODES, NSQErrorCode, NSQFinishFailed, NSQRequeueFailed, make_error
from nsq_fast.gnsq.util import normalize_nsqd_address, parse_lookupds, parse_nsqds


def sized(data: bytes) -> bytes:
    return struct.pack(">i", len(data)) + data


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (protocol.identify({"a": "é"}), b"IDENTIFY\n" + sized(b'{"a": "\\u00e9"}')),
        (protocol.auth("secret"), b"AUTH\n" + sized(b"secret")),
        (protocol.subscribe("t", "c#ephemeral"), b"SUB t c#ephemeral\n"),
        (protocol.publish("t", b""), b"PUB t\n" + sized(b"")),
        (protocol.deferpublish("t", b"x", 7), b"DPUB t 7\n" + sized(b"x")),
        (protocol.ready(0), b"RDY 0\n"),
        (protocol.finish("any é"), "FIN any é\n".encode()),
        (protocol.requeue(b"id", -1), b"REQ id -1\n"),
        (protocol.touch("id"), b"TOUCH id\n"),
        (protocol.close(), b"CLS\n"),
        (protocol.nop(), b"NOP\n"),
    ],
)
def test_commands(command, expected):
    assert command == expected


def test_a_batch_may_come_from_any_iterable():
    body = struct.pack(">i", 2) + sized(b"a") + sized(b"bc")
    assert protocol.multipublish("t", (each for each in [b"a", b"bc"])) == b"MPUB t\n" + sized(body)
    assert protocol.multipublish_body(iter([b"a", b"bc"])) == body


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: protocol.publish("no topic", b"x"), ValueError),
        (lambda: protocol.subscribe("t", "no channel"), ValueError),
        (lambda: protocol.publish("t", "text"), TypeError),
        (lambda: protocol.multipublish("t", [b"x", "text"]), TypeError),
        (lambda: protocol.ready("1"), TypeError),
        (lambda: protocol.ready(-1), ValueError),
        (lambda: protocol.requeue(b"id", 1.5), TypeError),
    ],
)
def test_wrong_arguments_are_refused(call, error):
    with pytest.raises(error):
        call()


def test_a_message_is_taken_apart_with_unsigned_attempts():
    frame = _codec.encode_message(5, 40_000, b"0123456789abcdef", b"body")
    assert protocol.unpack_size(frame[:4]) == len(frame) - 4
    kind, data = protocol.unpack_response(frame[4:])
    assert kind == protocol.FRAME_TYPE_MESSAGE
    assert protocol.unpack_message(data) == (5, 40_000, b"0123456789abcdef", b"body")


@pytest.mark.parametrize("data", [b"", b"short"])
def test_what_is_no_message_is_a_frame_error(data):
    with pytest.raises(gnsq.errors.NSQFrameError):
        protocol.unpack_message(data)


@pytest.mark.parametrize(
    ("data", "kind", "is_fatal"),
    [
        (b"E_INVALID no", errors.Invalid, True),
        (b"E_PUT_FAILED no", errors.PutFailed, True),
        (b"E_FIN_FAILED no", NSQFinishFailed, False),
        (b"E_FINISH_FAILED no", NSQFinishFailed, False),
        (b"E_REQUEUE_FAILED no", NSQRequeueFailed, False),
        (b"what is this", NSQErrorCode, True),
        (b"E_TOPIC_NOT_EXIST", errors.TopicNotExist, True),
    ],
)
def test_make_error(data, kind, is_fatal):
    error = make_error(data)
    assert type(error) is kind
    assert error.fatal is is_fatal


def test_error_codes_are_bytes_and_name_our_classes():
    assert ERROR_CODES[b"E_BAD_TOPIC"] is errors.BadTopic
    assert all(isinstance(code, bytes) and issubclass(cls, NSQErrorCode) for code, cls in ERROR_CODES.items())


def test_the_timer_never_overflows_however_often_it_failed():
    timer = gnsq.BackoffTimer(max_interval=30)
    for _ in range(5000):
        timer.failure()
    assert 0 < timer.get_interval() <= 30
    assert not timer.is_reset()
    assert timer.reset().success().is_reset()
    assert timer.get_interval() == 0
    assert gnsq.BackoffTimer(ratio=2, min_interval=7).get_interval() == 7


def test_addresses_of_all_kinds():
    assert normalize_nsqd_address("host") == "host:4150"
    assert parse_nsqds(["[::1]:4150", "::1", "host:1"]) == {"[::1]:4150", "host:1"}
    assert [client.port for client in parse_lookupds("http://host:9/")] == [9]
    assert len(parse_lookupds({"a:1", "b:2"})) == 2
    with pytest.raises(ValueError, match="port"):
        normalize_nsqd_address("host:port")
    for call in (lambda: parse_nsqds(None), lambda: parse_lookupds(None), lambda: normalize_nsqd_address(4150)):
        with pytest.raises(TypeError):
            call()


# Messages: anything may be id and body, answers go to its signals, and what a consumer gets is one too


def heard_by(message):
    heard = []

    def listen(name):
        def receive(sender, **values):
            heard.append((name, sender is message, values))

        getattr(message, name).connect(receive, weak=False)

    for name in ("on_finish", "on_requeue", "on_touch"):
        listen(name)
    return heard


def test_it_keeps_what_it_was_made_of():
    message = gnsq.Message(1, 2, "id", "text")
    assert (message.timestamp, message.attempts, message.id, message.body) == (1, 2, "id", "text")
    assert not message.has_responded()
    assert not message.is_async()
    message.enable_async()
    assert message.is_async()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda message: message.finish(), ("on_finish", True, {})),
        (lambda message: message.requeue(), ("on_requeue", True, {"timeout": 0, "backoff": True})),
        (lambda message: message.requeue(9, backoff=False), ("on_requeue", True, {"timeout": 9, "backoff": False})),
    ],
)
def test_it_is_answered_once(answer, expected):
    message = gnsq.Message(1, 2, "id", "text")
    heard = heard_by(message)
    message.touch()
    answer(message)
    assert message.has_responded()
    for again in (message.finish, message.requeue, message.touch):
        with pytest.raises(gnsq.errors.NSQException):
            again()
    assert heard == [("on_touch", True, {}), expected]


def test_what_a_consumer_hands_over_is_an_instance():
    assert isinstance(_codec.Message(1, 1, b"0" * 16, b"body"), gnsq.Message)
    assert isinstance(gnsq.Message(1, 1, "id", "body"), _codec.Message)
    assert not isinstance("message", gnsq.Message)
