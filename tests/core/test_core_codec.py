"""Messages and commands byte for byte, from lists and from columns; what they refuse; a message is answered once."""

from __future__ import annotations

import array
import pickle
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast import _codec
from nsq_fast._codec import Message, Records, encode_message, split_id
from nsq_fast._frame import FrameReader
from nsq_fast.config import MAX_PARTITION
from nsq_fast.errors import AlreadyResponded, RemoteProtocolError

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


BUFFERS: list[Any] = [
    b"abcd",
    bytearray(b"abcd"),
    memoryview(b"abcd"),
    memoryview(b"-abcd-")[1:5],
    memoryview(b"a-b-c-d-")[::2],
    memoryview(b"dcba")[::-1],
    array.array("B", b"abcd"),
    memoryview(array.array("H", b"abcd")),
]


@pytest.mark.parametrize("body", BUFFERS, ids=lambda body: type(body).__name__)
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


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=40))
def test_mpub_is_what_join_makes_and_its_size_is_known_before(bodies: list[bytes]) -> None:
    records = b"".join(struct.pack(">I", len(body)) + body for body in bodies)
    expected = struct.pack(">I", len(bodies)) + records
    assert _codec.mpub_body(bodies) == expected
    assert _codec.mpub("t", iter(bodies)) == b"MPUB t\n" + struct.pack(">I", len(expected)) + expected
    assert _codec.mpub("t", map(bytearray, bodies)) == _codec.mpub("t", bodies)
    if all(bodies):
        largest = max(map(len, bodies))
        assert _codec.mpub_size(bodies, largest) == len(expected)
        assert _codec.mpub_size(bodies, largest - 1) == -1


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=50))
def test_answers_to_many_and_to_a_column_are_those_to_each_id(ids: list[bytes]) -> None:
    fins, column = b"".join(map(_codec.fin, ids)), b"".join(ids)
    assert _codec.fin_many(ids) == fins
    assert _codec.fin_many(Message(1, 1, id, b"") for id in ids) == fins
    assert _codec.fin_columns(column) == fins
    assert _codec.fin_columns(memoryview(column)[16:]) == b"".join(map(_codec.fin, ids[1:]))
    assert _codec.req_columns(bytearray(column), 1500) == b"".join(_codec.req(each, 1500) for each in ids)


@pytest.mark.parametrize(
    ("call", "error", "name"),
    [
        (lambda: untyped.pub(b"t", b""), TypeError, "topic"),
        (lambda: untyped.pub("", b""), ValueError, "topic"),
        (lambda: untyped.pub("a b", b""), ValueError, "topic"),
        (lambda: untyped.pub("a\nFIN ", b""), ValueError, "topic"),
        (lambda: untyped.pub("tôpic", b""), ValueError, "topic"),
        (lambda: untyped.pub("\ud800", b""), ValueError, "topic"),
        (lambda: untyped.sub("t", "c\r"), ValueError, "channel"),
        (lambda: untyped.sub("t", "c", "1"), TypeError, "partition"),
        (lambda: untyped.sub("t", "c", -1), ValueError, "partition"),
        (lambda: untyped.sub_advanced("t", "c", offset="special:-1"), ValueError, "partition"),
        (lambda: untyped.sub_advanced("t", "c", 1, "a b"), ValueError, "offset"),
        (lambda: untyped.sub_advanced("t", "c", 1, 5), TypeError, "offset"),
        (lambda: untyped.identify({}), TypeError, "body"),
        (lambda: untyped.auth("secret"), TypeError, "secret"),
        (lambda: untyped.pub("t", "text"), TypeError, "body"),
        (lambda: untyped.mpub("t", None), TypeError, "bodies"),
        (lambda: untyped.mpub("t", []), ValueError, "bodies"),
        (lambda: untyped.mpub("t", b"abc"), TypeError, "bodies"),
        (lambda: untyped.mpub("t", [b"a", "b"]), TypeError, "bodies"),
        (lambda: untyped.mpub_size((b"a",), 100), TypeError, "bodies"),
        (lambda: untyped.dpub("t", -1, b""), ValueError, "delay_ms"),
        (lambda: untyped.dpub("t", 1.5, b""), TypeError, "delay_ms"),
        (lambda: untyped.pub_trace("t", -1, b""), ValueError, "trace_id"),
        (lambda: untyped.pub_trace("t", 2**64, b""), ValueError, "trace_id"),
        (lambda: untyped.mpub_trace("t", [("1", b"")]), TypeError, "trace_id"),
        (lambda: untyped.mpub_trace("t", [b"ab"]), TypeError, "pairs"),
        (lambda: untyped.mpub_trace("t", []), ValueError, "bodies"),
        (lambda: untyped.pub_ext("t", {}, b""), TypeError, "header"),
        (lambda: untyped.pub_ext("t", b"x" * 65535, b""), ValueError, "header"),
        (lambda: untyped.mpub_ext("t", [(b"",)]), TypeError, "pairs"),
        (lambda: untyped.rdy(-1), ValueError, "n must"),
        (lambda: untyped.rdy("1"), TypeError, "n must"),
        (lambda: untyped.fin(b"short"), ValueError, "id"),
        (lambda: untyped.fin(None), TypeError, "id"),
        (lambda: untyped.req(ID, -1), ValueError, "delay_ms"),
        (lambda: untyped.req(ID, 0.5), TypeError, "delay_ms"),
        (lambda: untyped.touch(b""), ValueError, "id"),
        (lambda: untyped.fin_many([ID, b"short"]), ValueError, "messages"),
        (lambda: untyped.fin_many([None]), TypeError, "messages"),
        (lambda: untyped.fin_columns(ID + b"short"), ValueError, "ids"),
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


def test_the_largest_header_and_partition() -> None:
    assert _codec.MAX_HEADER_SIZE == 65506
    assert _codec.pub_ext("t", b"x" * 65506, b"")[14:18] == b"\xff\xe2xx"
    with pytest.raises(ValueError, match="at most 65506"):
        _codec.pub_ext("t", b"x" * 65507, b"")
    assert _codec.pub("t", b"x", MAX_PARTITION).startswith(b"PUB t %d\n" % MAX_PARTITION)
    with pytest.raises(ValueError, match=f"partition must be within 0 and {MAX_PARTITION}, not {MAX_PARTITION + 1}"):
        _codec.pub("t", b"x", MAX_PARTITION + 1)


@pytest.mark.parametrize("data", [b"", b"OK", b"OK" + bytes(27), b"OK" + bytes(29), b"NO" + bytes(28)])
def test_what_is_no_traced_reply(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="traced"):
        _codec.traced_reply(data)


BODIES = [b"a", b"", b"ccc", b"dd"]
TRACE_IDS = [1, 0, 2**64 - 1, 7]
HEADERS = [b"{}", b"", b'{"a":1}', b"{}"]


def offsets_of(entries: list[bytes]) -> bytes:
    return array.array("i", accumulate(map(len, entries), initial=0)).tobytes()


def records_of(
    bodies: list[bytes], trace_ids: list[int] | None = None, headers: list[bytes] | None = None, **changes: Any
) -> Records:
    arguments: dict[str, Any] = {"body_offsets": offsets_of(bodies), "body": b"".join(bodies)}
    if trace_ids is not None:
        arguments["trace_ids"] = array.array("Q", trace_ids)
    if headers is not None:
        arguments.update(header_offsets=offsets_of(headers), headers=b"".join(headers))
    return Records(**{**arguments, **changes})


def test_a_second_init_changes_nothing() -> None:
    records = records_of(BODIES, TRACE_IDS, HEADERS)
    before = records.mpub_trace("t"), records.mpub_ext("t")
    # The first argument is fine, and would have replaced what its pointer points to; the second is not.
    for arguments in ((offsets_of([b"x" * 1000]), None), (offsets_of([b"x"]), b"x"), (b"odd", b"x")):
        with suppress(TypeError, ValueError):
            Records.__init__(records, *arguments)
    assert (records.mpub_trace("t"), records.mpub_ext("t")) == before


def rows_of(*numbers: int) -> bytes:
    return array.array("i", numbers).tobytes()


ITEMS = st.lists(
    st.tuples(st.binary(max_size=9), st.integers(0, 2**64 - 1), st.binary(max_size=5)), min_size=1, max_size=20
)


@given(ITEMS, st.data())
def test_records_make_the_commands_of_lists(items: list[tuple[bytes, int, bytes]], data: st.DataObject) -> None:
    """Of all rows, of some in any order, and of a part of those; also where the column is a slice of a longer one."""
    bodies, traces, headers = (list(column) for column in zip(*items, strict=True))
    offsets = memoryview(offsets_of([b"xx", *bodies, b"yyy"]))[4:-4]
    records = records_of(bodies, traces, headers, body_offsets=offsets, body=b"".join([b"xx", *bodies, b"yyy"]))
    assert (records.count, records.is_traced, records.has_headers) == (len(items), True, True)
    rows = data.draw(st.none() | st.lists(st.integers(0, len(items) - 1), min_size=1))
    partition = data.draw(st.none() | st.integers(0, 9))
    chosen = items if rows is None else [items[row] for row in rows]
    given_rows = None if rows is None else rows_of(*rows)
    start = data.draw(st.integers(0, len(chosen) - 1))
    stop = data.draw(st.integers(start + 1, len(chosen)))
    part = chosen[start:stop]
    where = (partition, given_rows, start, stop)
    assert records.mpub("t", *where) == _codec.mpub("t", [body for body, _, _ in part], partition)
    assert records.mpub_trace("t", *where) == _codec.mpub_trace("t", [(t, b) for b, t, _ in part], partition)
    assert records.mpub_ext("t", *where) == _codec.mpub_ext("t", [(h, b) for b, _, h in part], partition)
    assert records.mpub("t", partition, given_rows) == _codec.mpub("t", [body for body, _, _ in chosen], partition)
    assert records.pairs(given_rows) == [(trace, len(body)) for body, trace, _ in chosen]
    with pytest.raises(ValueError, match="must not be empty"):
        records.mpub("t", None, b"")


@given(
    ITEMS, st.sampled_from(["plain", "traced", "with headers"]), st.integers(1, 5), st.integers(1, 90), st.booleans()
)
def test_cut_keeps_the_limits_and_leaves_nothing_out(
    items: list[tuple[bytes, int, bytes]], form: str, most: int, limit: int, is_reversed: bool
) -> None:
    bodies, traces, headers = (list(column) for column in zip(*items, strict=True))
    records = records_of(bodies, traces if form == "traced" else None, headers if form == "with headers" else None)
    rows = range(len(items))[::-1] if is_reversed else range(len(items))
    first = len(items) // 3
    overhead = {"plain": 0, "traced": 8, "with headers": 2}[form]

    def size(start: int, end: int) -> int:
        extras = [len(headers[row]) if form == "with headers" else 0 for row in rows[start:end]]
        return len(_codec.mpub_body([bodies[row] for row in rows[start:end]])) + sum(extras) + overhead * (end - start)

    ends = records.cut(most, limit, rows_of(*rows), first)
    starts = [first, *ends[:-1]]
    assert ends[-1] == len(items)
    for start, end in zip(starts, ends, strict=True):
        assert 0 < end - start <= most
        assert size(start, end) <= limit or end - start == 1
    for start, end in pairwise(starts):  # none could have had one more
        assert end - start == most or size(start, end + 1) > limit
    assert records.cut(most, limit, b"") == []
    assert records.cut(most, 10**6) == records.cut(most, 10**6, rows_of(*range(len(items))))


def test_what_makes_no_sense_is_refused() -> None:
    records = records_of(BODIES)
    wrong: dict[Callable[[], object], str] = {
        lambda: records.mpub("t", None, rows_of(4)): "rows must be within 0 and 3",
        lambda: records.mpub("t", None, rows_of(-1)): "rows must be within 0 and 3",
        lambda: records_of([b"a"], None, [bytes(65535)]).mpub_ext("t"): "at most 65506",
        lambda: Records(b"123", b""): "items of 4 bytes",
        lambda: Records(b"", b""): "one more",
        lambda: records_of(BODIES, [1]): "trace_ids must have 4 items, not 1",
        lambda: records_of(BODIES, None, [b""]): "header_offsets must have 5 items, not 2",
        lambda: Records(offsets_of([]), b"", headers=b""): "go together",
        lambda: records.mpub_trace("t"): "no trace_ids",
        lambda: records.mpub_ext("t"): "no headers",
        lambda: records.mpub("t", None, None, 3, 2): "start|stop",
        lambda: records.mpub("t", None, None, 0, 5): "start|stop",
        lambda: records.mpub("t", None, None, -1, 2): "start|stop",
        lambda: Records(untyped, b"a"): "body_offsets must be bytes-like",
        lambda: records.mpub("t t"): "topic",
    }
    for offsets in ([0, 1, 2, 9], [0, -1, 2, 3], [0, 2, 1, 3], [-2, 1, 1, 1]):
        wrong[Records(array.array("i", offsets), b"abc").pairs] = "lie beyond the data"
    for call, reason in wrong.items():
        with pytest.raises((ValueError, TypeError), match=reason):
            call()


@given(st.lists(st.integers(0, 3)))
def test_group_rows(targets: list[int]) -> None:
    groups = _codec.group_rows(array.array("i", targets), 4)
    found = [list(struct.unpack(f"={len(rows) // 4}i", rows)) for rows in groups]
    assert found == [[row for row, target in enumerate(targets) if target == group] for group in range(4)]
    for target in (-1, 2):
        with pytest.raises(ValueError, match="within 0 and 1"):
            _codec.group_rows(rows_of(0, target), 2)


ITS_ID = bytes(range(1, 17))


class Recorder:
    """A responder that writes down what it was asked, or refuses."""

    partition = 3

    def __init__(self, refusal: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refusal = refusal

    def _record(self, *call: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(call)

    def finish(self, message: Message) -> None:
        self._record("finish", message)

    def requeue(self, message: Message, time_ms: int | None, backoff: bool) -> None:
        self._record("requeue", message, time_ms, backoff)

    def touch(self, message: Message) -> None:
        self._record("touch", message)


def make(**options: Any) -> Message:
    return Message(1_500_000_000_000_000_000, 2, ITS_ID, b"body", **options)


def received(ext: bytes | None, *, version: int = 4, responder: object = None) -> Message:
    frame = encode_message(1, 1, ITS_ID, b"body", ext_version=0 if ext is None else version, ext=ext or b"")
    (message,) = FrameReader(ext=True, responder=responder).feed(frame)
    assert isinstance(message, Message)
    return message


def test_fields_of_a_message_built_by_hand() -> None:
    message = make()
    assert (message.attempts, message.id, message.body) == (2, ITS_ID, b"body")
    assert message.timestamp == 1_500_000_000_000_000_000
    assert (message.internal_id, message.trace_id) == (0x0102030405060708, 0x090A0B0C0D0E0F10) == split_id(ITS_ID)
    assert (message.ext, message.ext_version, message.headers) == (None, 0, {})
    assert (message.offset, message.raw_size, message.received_at) == (None, None, 0.0)
    assert (message.responder, message.partition) == (None, None)
    message = make(ext=bytearray(b'{"k": 1}'), offset=2**64 - 1, raw_size=2**32 - 1, received_at=1.5, responder=ITS_ID)
    assert (message.ext, message.ext_version, message.headers) == (b'{"k": 1}', 4, {"k": 1})
    assert (message.offset, message.raw_size, message.received_at) == (2**64 - 1, 2**32 - 1, 1.5)
    assert message.responder is ITS_ID


def test_reader_hands_over_responder_and_time() -> None:
    responder = Recorder()
    (message,) = FrameReader(responder=responder).feed(encode_message(1, 1, ITS_ID, b"x"), 12.25)
    assert isinstance(message, Message)
    assert message.responder is responder
    assert message.received_at == 12.25
    assert message.partition == 3


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"timestamp": 1.5}, TypeError, "timestamp"),
        ({"timestamp": 2**63}, ValueError, "timestamp"),
        ({"attempts": -1}, ValueError, "attempts"),
        ({"attempts": 65536}, ValueError, "attempts"),
        ({"id": b"1234"}, ValueError, "id"),
        ({"id": "0123456789abcdef"}, TypeError, "id"),
        ({"body": None}, TypeError, "body"),
        ({"ext": "{}"}, TypeError, "ext"),
        ({"ext_version": 256}, ValueError, "ext_version"),
        ({"offset": 1}, ValueError, "raw_size"),
        ({"offset": -1, "raw_size": 1}, ValueError, "offset"),
        ({"offset": 1, "raw_size": 2**32}, ValueError, "raw_size"),
    ],
)
def test_a_bad_field_is_named(options: dict[str, Any], error: type[Exception], name: str) -> None:
    arguments = {"timestamp": 1, "attempts": 1, "id": ITS_ID, "body": b"", **options}
    with pytest.raises(error, match=name):
        Message(**arguments)


@pytest.mark.parametrize("answer", ["finish", "requeue"])
def test_a_message_is_answered_once_and_what_could_not_be_sent_may_be_tried_again(answer: str) -> None:
    responder = Recorder(refusal=OSError("closed"))
    message = make(responder=responder)
    with pytest.raises(OSError, match="closed"):
        getattr(message, answer)()
    assert not message.has_responded()
    responder.refusal = None
    message.touch()
    getattr(message, answer)()
    assert message.has_responded()
    for again in (message.finish, message.requeue, message.touch):
        with pytest.raises(AlreadyResponded, match=ITS_ID.hex()):
            again()
    assert [call[0] for call in responder.calls] == ["touch", answer]


def test_requeue_passes_its_arguments_on() -> None:
    responder = Recorder()
    make(responder=responder).requeue(1500, backoff=False)
    make(responder=responder).requeue()
    assert [call[2:] for call in responder.calls] == [(1500, False), (None, True)]


@pytest.mark.parametrize(
    ("ext", "version", "headers"),
    [
        (b'{"##trace_id":"77","k":"v"}', 4, {"##trace_id": "77", "k": "v"}),
        (None, 0, {}),
        (b"", 4, {}),
        (b"123", 4, {}),
        (b"[1]", 4, {}),
        (b"a tag, not JSON", 2, {}),
        (b"whatever comes later", 9, {}),
    ],
)
def test_headers(ext: bytes | None, version: int, headers: dict[str, Any]) -> None:
    message = received(ext, version=version)
    assert message.headers == headers
    assert message.headers is message.headers
    assert (message.ext, message.ext_version) == (ext, version)


@pytest.mark.parametrize("ext", [b"{", b"\xff\xfe{}", b"[" * 60_000, b"{" * 10 + b"}"])
def test_headers_that_are_not_json(ext: bytes) -> None:
    message = received(ext)
    with pytest.raises(RemoteProtocolError, match="not JSON"):
        _ = message.headers
    assert message.ext == ext


def test_repr_shows_what_one_looks_for() -> None:
    message = Message(7, 2, b"18a271187ba69000", b"hello", offset=9, raw_size=35)
    assert repr(message) == "<Message 18a271187ba69000 attempts=2 timestamp=7 body=5 bytes offset=9>"
    message.finish()
    assert repr(message).endswith(" responded>")
    assert ITS_ID.hex() in repr(make())


def test_it_may_be_subclassed() -> None:
    class Mine(Message):
        def finish(self) -> None:
            self.done = True
            super().finish()

    message = Mine(1, 1, ITS_ID, b"x")
    message.finish()
    assert message.done
    assert message.has_responded()
    assert repr(message).startswith("<Mine ")


def test_a_subclass_that_never_calls_init_is_harmless() -> None:
    message = Message.__new__(Message)
    assert (message.id, message.body, message.headers) == (bytes(16), None, {})
    assert "0 bytes" in repr(message)


def test_no_weak_references_and_no_pickles() -> None:
    for attempt in (weakref.ref, pickle.dumps):
        with pytest.raises(TypeError):
            attempt(make())
