"""Every command byte for byte, and what the functions that build them refuse."""

from __future__ import annotations

import array
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast import _codec
from nsq_fast._codec import Message
from nsq_fast.config import MAX_PARTITION
from nsq_fast.errors import RemoteProtocolError

ID = b"0123456789abcdef"
RAW_ID = b"\n \r\x00" * 4
MESSAGE = Message(1, 1, RAW_ID, b"")
untyped: Any = _codec  # to be called with what the stubs forbid


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (_codec.identify(b"{}"), b"IDENTIFY\n\x00\x00\x00\x02{}"),
        (_codec.auth(b"secret"), b"AUTH\n\x00\x00\x00\x06secret"),
        (_codec.sub("t", "c"), b"SUB t c\n"),
        (_codec.sub("t", "c#ephemeral", 0), b"SUB t c#ephemeral 0\n"),
        (_codec.sub_advanced("t", "c"), b"SUB_ADVANCED t c\n"),
        (_codec.sub_advanced("t", "c", 1), b"SUB_ADVANCED t c 1\n"),
        (_codec.sub_advanced("t", "c", 1, "timestamp:5"), b"SUB_ADVANCED t c 1 timestamp:5\n"),
        (_codec.sub_ordered("t", "c", 1023), b"SUB_ORDERED t c 1023\n"),
        (_codec.pub("t", b"hi"), b"PUB t\n\x00\x00\x00\x02hi"),
        (_codec.pub("t", b"", partition=7), b"PUB t 7\n\x00\x00\x00\x00"),
        (_codec.dpub("t", 100, b"hi"), b"DPUB t 100\n\x00\x00\x00\x02hi"),
        (_codec.mpub("t", [b"a", b""]), b"MPUB t\n\0\0\0\x0d\0\0\0\x02\0\0\0\x01a\0\0\0\0"),
        (_codec.mpub("t", [b"a"], 2), b"MPUB t 2\n\0\0\0\x09\0\0\0\x01\0\0\0\x01a"),
        (_codec.mpub_body([b"a"]), b"\0\0\0\x01\0\0\0\x01a"),
        (_codec.pub_trace("t", 2**64 - 1, b"x"), b"PUB_TRACE t\n\0\0\0\x09" + b"\xff" * 8 + b"x"),
        (
            _codec.mpub_trace("t", [(1, b"x"), (2, b"yz")], 4),
            b"MPUB_TRACE t 4\n\0\0\0\x1f\0\0\0\x02\0\0\0\x09\0\0\0\0\0\0\0\x01x\0\0\0\x0a\0\0\0\0\0\0\0\x02yz",
        ),
        (_codec.pub_ext("t", b"{}", b"x", 1), b"PUB_EXT t 1\n\0\0\0\x05\0\x02{}x"),
        (
            _codec.mpub_ext("t", [(b"{}", b"x"), (b"", b"y")]),
            b"MPUB_EXT t\n\0\0\0\x14\0\0\0\x02\0\0\0\x05\0\x02{}x\0\0\0\x03\0\0y",
        ),
        (_codec.rdy(0), b"RDY 0\n"),
        (_codec.rdy(2500), b"RDY 2500\n"),
        (_codec.fin(ID), b"FIN 0123456789abcdef\n"),
        (_codec.fin(MESSAGE), b"FIN " + RAW_ID + b"\n"),
        (_codec.req(ID, 0), b"REQ 0123456789abcdef 0\n"),
        (_codec.req(MESSAGE, 3_600_000), b"REQ " + RAW_ID + b" 3600000\n"),
        (_codec.touch(MESSAGE), b"TOUCH " + RAW_ID + b"\n"),
        (_codec.cls(), b"CLS\n"),
        (_codec.nop(), b"NOP\n"),
        (_codec.MAGIC_V2, b"  V2"),
        (_codec.internal_create_topic("t", 0), b"INTERNAL_CREATE_TOPIC t 0\n"),
        (_codec.internal_create_topic("t", 3, True), b"INTERNAL_CREATE_TOPIC t 3 true\n"),
        (_codec.fin_many([]), b""),
        (_codec.fin_many([MESSAGE, ID]), b"FIN " + RAW_ID + b"\nFIN " + ID + b"\n"),
        (_codec.encode_frame(0, b"OK"), b"\0\0\0\x06\0\0\0\0OK"),
    ],
)
def test_bytes(command: bytes, expected: bytes) -> None:
    assert type(command) is bytes
    assert command == expected


BODIES: list[Any] = [
    b"abcd",
    bytearray(b"abcd"),
    memoryview(b"abcd"),
    memoryview(b"-abcd-")[1:5],
    memoryview(b"a-b-c-d-")[::2],
    memoryview(b"dcba")[::-1],
    array.array("B", b"abcd"),
    memoryview(array.array("H", b"abcd")),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_any_buffer_is_a_body(body: Any) -> None:
    assert _codec.identify(body)[-4:] == b"abcd"
    assert _codec.auth(body)[-4:] == b"abcd"
    assert _codec.pub("t", body) == b"PUB t\n\0\0\0\x04abcd"
    assert _codec.dpub("t", 1, body)[-4:] == b"abcd"
    assert _codec.pub_trace("t", 1, body)[-4:] == b"abcd"
    assert _codec.pub_ext("t", body, body)[-10:] == b"\0\x04abcdabcd"
    assert _codec.mpub("t", [body, b"x", body]) == _codec.mpub("t", [b"abcd", b"x", b"abcd"])
    assert _codec.mpub_trace("t", [(1, body)]) == _codec.mpub_trace("t", [(1, b"abcd")])
    assert _codec.mpub_ext("t", [(body, body)]) == _codec.mpub_ext("t", [(b"abcd", b"abcd")])
    assert _codec.encode_frame(0, body)[8:] == b"abcd"
    assert _codec.encode_message(1, 1, ID, body)[-4:] == b"abcd"


def test_buffers_are_let_go_afterwards() -> None:
    body = bytearray(b"abcd")
    _codec.mpub("t", [body, b"x"])
    with pytest.raises(TypeError):
        _codec.mpub("t", [body, None])  # type: ignore[list-item]
    body.extend(b"more")  # raises BufferError while anybody holds it


def test_a_buffer_cannot_shrink_while_it_is_copied() -> None:
    body = bytearray(b"x" * 1000)

    def bodies() -> Iterator[bytearray]:
        yield body
        body.clear()
        yield body

    assert _codec.mpub_body(bodies()) == struct.pack(">III", 2, 0, 0)


def test_mpub_takes_any_iterable() -> None:
    expected = _codec.mpub("t", [b"a", b"b"])
    assert _codec.mpub("t", (body for body in (b"a", b"b"))) == expected
    assert _codec.mpub("t", (b"a", b"b")) == expected
    assert _codec.mpub("t", {b"a": 1, b"b": 2}) == expected


def test_an_error_in_a_generator_is_the_one_that_comes_out() -> None:
    def bodies() -> Iterator[bytes]:
        yield b"a"
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        _codec.mpub("t", bodies())


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=40))
def test_the_size_of_an_mpub_is_known_before_it_is_made(bodies: list[bytes]) -> None:
    largest = max(map(len, bodies))
    assert _codec.mpub_size(bodies, largest) == len(_codec.mpub_body(bodies))
    assert _codec.mpub_size(bodies, largest - 1) == -1


@pytest.mark.parametrize("odd", [b"", bytearray(b"a"), memoryview(b"a"), "a", None])
def test_what_is_no_plain_message_has_no_size_known_before(odd: object) -> None:
    assert _codec.mpub_size([b"a", odd], 100) == -1
    assert _codec.mpub_size([odd, b"a"], 100) == -1


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=40))
def test_mpub_is_what_join_makes(bodies: list[bytes]) -> None:
    records = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    expected = struct.pack(">I", len(bodies)) + records
    assert _codec.mpub_body(bodies) == expected
    assert _codec.mpub("t", iter(bodies)) == b"MPUB t\n" + struct.pack(">I", len(expected)) + expected
    assert _codec.mpub("t", map(bytearray, bodies)) == _codec.mpub("t", bodies)


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=40), st.none() | st.integers(0, MAX_PARTITION))
def test_bodies_of_bytes_make_the_commands_that_other_buffers_make(bodies: list[bytes], partition: int | None) -> None:
    views = [memoryview(body) for body in bodies]
    assert _codec.mpub("topic", bodies, partition) == _codec.mpub("topic", views, partition)
    assert _codec.pub("topic", bodies[0], partition) == _codec.pub("topic", views[0], partition)


@pytest.mark.parametrize("partition", [0, 9, 10, 99, 100, 999, 1000, MAX_PARTITION])
def test_a_partition_is_written_in_decimal(partition: int) -> None:
    assert _codec.pub("t", b"x", partition) == f"PUB t {partition}\n\0\0\0\x01x".encode()


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=50))
def test_fin_many_is_many_fins(ids: list[bytes]) -> None:
    expected = b"".join(map(_codec.fin, ids))
    assert _codec.fin_many(ids) == expected
    assert _codec.fin_many(Message(1, 1, id, b"") for id in ids) == expected


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda: untyped.pub(b"t", b""), TypeError, "topic"),
        (lambda: untyped.pub("", b""), ValueError, "topic"),
        (lambda: untyped.pub("a b", b""), ValueError, "topic"),
        (lambda: untyped.pub("a\nFIN ", b""), ValueError, "topic"),
        (lambda: untyped.pub("tôpic", b""), ValueError, "topic"),
        (lambda: untyped.pub("\ud800", b""), ValueError, "topic"),
        (lambda: untyped.sub("t", None), TypeError, "channel"),
        (lambda: untyped.sub("t", "c\r"), ValueError, "channel"),
        (lambda: untyped.sub("t", "c", "1"), TypeError, "partition"),
        (lambda: untyped.sub("t", "c", -1), ValueError, "partition"),
        (lambda: untyped.pub("t", b"", 1024), ValueError, "partition"),
        (lambda: untyped.sub_advanced("t", "c", offset="special:-1"), ValueError, "partition"),
        (lambda: untyped.sub_advanced("t", "c", 1, "a b"), ValueError, "offset"),
        (lambda: untyped.sub_advanced("t", "c", 1, 5), TypeError, "offset"),
        (lambda: untyped.identify("{}"), TypeError, "body"),
        (lambda: untyped.identify({}), TypeError, "body"),
        (lambda: untyped.auth("secret"), TypeError, "secret"),
        (lambda: untyped.pub("t", "text"), TypeError, "body"),
        (lambda: untyped.pub("t", None), TypeError, "body"),
        (lambda: untyped.pub("t", 5), TypeError, "body"),
        (lambda: untyped.mpub("t", None), TypeError, "bodies"),
        (lambda: untyped.mpub("t", []), ValueError, "bodies"),
        (lambda: untyped.mpub("t", b"abc"), TypeError, "bodies"),
        (lambda: untyped.mpub("t", "abc"), TypeError, "bodies"),
        (lambda: untyped.mpub("t", [b"a", "b"]), TypeError, "bodies"),
        (lambda: untyped.mpub_body([]), ValueError, "bodies"),
        (lambda: untyped.mpub_size((b"a",), 100), TypeError, "bodies"),
        (lambda: untyped.mpub_size(None, 100), TypeError, "bodies"),
        (lambda: untyped.mpub_size([b"a"], "100"), TypeError, "int"),
        (lambda: untyped.dpub("t", -1, b""), ValueError, "delay_ms"),
        (lambda: untyped.dpub("t", 1.5, b""), TypeError, "delay_ms"),
        (lambda: untyped.dpub("t", None, b""), TypeError, "delay_ms"),
        (lambda: untyped.pub_trace("t", -1, b""), ValueError, "trace_id"),
        (lambda: untyped.pub_trace("t", 2**64, b""), ValueError, "trace_id"),
        (lambda: untyped.mpub_trace("t", [("1", b"")]), TypeError, "trace_id"),
        (lambda: untyped.mpub_trace("t", [b"ab"]), TypeError, "pairs"),
        (lambda: untyped.mpub_trace("t", 5), TypeError, "pairs"),
        (lambda: untyped.mpub_trace("t", []), ValueError, "bodies"),
        (lambda: untyped.pub_ext("t", {}, b""), TypeError, "header"),
        (lambda: untyped.pub_ext("t", b"x" * 65535, b""), ValueError, "header"),
        (lambda: untyped.mpub_ext("t", [(b"",)]), TypeError, "pairs"),
        (lambda: untyped.rdy(-1), ValueError, "n must"),
        (lambda: untyped.rdy("1"), TypeError, "n must"),
        (lambda: untyped.fin(b"short"), ValueError, "id"),
        (lambda: untyped.fin("0123456789abcdef"), TypeError, "id"),
        (lambda: untyped.fin(None), TypeError, "id"),
        (lambda: untyped.req(ID, -1), ValueError, "delay_ms"),
        (lambda: untyped.req(ID, 0.5), TypeError, "delay_ms"),
        (lambda: untyped.touch(b""), ValueError, "id"),
        (lambda: untyped.fin_many([ID, b"short"]), ValueError, "messages"),
        (lambda: untyped.fin_many([None]), TypeError, "messages"),
        (lambda: untyped.fin_many(5), TypeError, "messages"),
        (lambda: untyped.fin_columns(ID + b"short"), ValueError, "ids"),
        (lambda: untyped.fin_columns("0123456789abcdef"), TypeError, "ids"),
        (lambda: untyped.fin_columns(None), TypeError, "ids"),
        (lambda: untyped.req_columns(b"short", 0), ValueError, "ids"),
        (lambda: untyped.req_columns(ID, -1), ValueError, "delay_ms"),
        (lambda: untyped.req_columns(ID, 0.5), TypeError, "delay_ms"),
        (lambda: untyped.internal_create_topic("t", None), TypeError, "partition"),
        (lambda: untyped.split_id(b""), ValueError, "id"),
        (lambda: untyped.encode_frame(0, None), TypeError, "data"),
        (lambda: untyped.encode_frame(-1, b""), ValueError, "type"),
        (lambda: untyped.encode_message(1, 1, ID, b"", ext=b"x"), ValueError, "ext_version"),
        (lambda: untyped.encode_message(1, 1, ID, b"", ext_version=4, ext=b"x" * 65536), ValueError, "ext"),
        (lambda: untyped.encode_message(1, 1, ID, b"", offset=1), ValueError, "raw_size"),
        (lambda: untyped.traced_reply(None), TypeError, "data"),
    ],
)
def test_a_bad_argument_is_named(call: Callable[[], bytes], error: type[Exception], name: str) -> None:
    with pytest.raises(error, match=name):
        call()


@pytest.mark.parametrize("count", [0, 1, 2, 2500])
def test_answers_to_a_column_are_those_to_each_id(count: int) -> None:
    ids = [n.to_bytes(16, "big") for n in range(count)]
    column = b"".join(ids)
    assert _codec.fin_columns(column) == b"".join(map(_codec.fin, ids))
    assert _codec.req_columns(column, 1500) == b"".join(_codec.req(each, 1500) for each in ids)
    assert _codec.fin_columns(memoryview(column)[16:]) == b"".join(map(_codec.fin, ids[1:]))
    assert _codec.req_columns(bytearray(column), 0) == b"".join(_codec.req(each, 0) for each in ids)


def test_the_largest_header() -> None:
    assert _codec.MAX_HEADER_SIZE == 65506
    assert _codec.pub_ext("t", b"x" * 65506, b"")[14:18] == b"\xff\xe2xx"
    with pytest.raises(ValueError, match="at most 65506"):
        _codec.pub_ext("t", b"x" * 65507, b"")


def test_traced_reply() -> None:
    data = b"OK" + struct.pack(">QQQI", 12, 77, 342, 36)
    reply = _codec.traced_reply(memoryview(data))
    assert reply == (12, 77, 342, 36)
    assert (reply.internal_id, reply.trace_id, reply.offset, reply.size) == (12, 77, 342, 36)


@pytest.mark.parametrize("data", [b"", b"OK", b"OK" + bytes(27), b"OK" + bytes(29), b"NO" + bytes(28)])
def test_what_is_no_traced_reply(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="traced"):
        _codec.traced_reply(data)


def test_the_core_and_the_options_agree_on_the_highest_partition() -> None:
    assert _codec.pub("t", b"x", MAX_PARTITION).startswith(b"PUB t %d\n" % MAX_PARTITION)
    with pytest.raises(ValueError, match=f"partition must be within 0 and {MAX_PARTITION}, not {MAX_PARTITION + 1}"):
        _codec.pub("t", b"x", MAX_PARTITION + 1)
