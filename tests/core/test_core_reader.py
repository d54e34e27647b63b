"""The readers: every layout, split and damage against the oracle and recordings; limits, poisoning, columns."""

from __future__ import annotations

import gc
import itertools
import mmap
import struct
import sys
import tracemalloc
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from core.readers import (
    LAYOUTS,
    PASSED_OVER,
    Conversation,
    conversations,
    layout_id,
    pieces,
    plain,
    read,
    read_columns,
)
from hypothesis import given
from hypothesis import strategies as st
from support.oracle import OracleFrame, OracleMessage, decode

from nsq_fast import _frame, errors
from nsq_fast._codec import Message, TruncatedMessage, encode_frame, encode_message
from nsq_fast._frame import ColumnReader, Columns, FrameReader, Response, join_columns

ID = b"0123456789abcdef"
FRAME = encode_message(1, 1, ID, b"body")
Reader = type[FrameReader] | type[ColumnReader]
both_readers = pytest.mark.parametrize("reader_type", [FrameReader, ColumnReader])


def feed_all(reader: FrameReader | ColumnReader, chunks: list[bytes]) -> None:
    for chunk in chunks:
        reader.feed(chunk)


def header(size: int, kind: int = 0) -> bytes:
    return struct.pack(">II", size, kind)


@pytest.mark.parametrize(
    ("data", "singleton"), [(b"OK", _frame.OK), (b"_heartbeat_", _frame.HEARTBEAT), (b"CLOSE_WAIT", _frame.CLOSE_WAIT)]
)
def test_repeated_responses_are_one_object(data: bytes, singleton: Response) -> None:
    assert FrameReader().feed(encode_frame(0, data)) == [singleton]
    assert singleton.data == data
    (other,) = FrameReader().feed(encode_frame(0, data.lower() + b"x"))
    assert other is not singleton


@both_readers
def test_any_buffer_may_be_fed_and_anything_else_is_refused_and_does_no_harm(reader_type: Reader) -> None:
    reader: Any = reader_type()
    for kind in (bytes, bytearray, memoryview):
        assert len(reader.feed(kind(FRAME + FRAME[:20]))) == 1
        for data in ("text", None, 5, [b"x"]):
            with pytest.raises(TypeError, match="bytes-like"):
                reader.feed(data)
        assert len(reader.feed(kind(FRAME[20:]))) == 1


@pytest.mark.parametrize("value", ["big", None, 1.5, -1, 0, 3, 2**31])
def test_max_frame_size_must_be_a_number_in_range(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_frame_size"):
        FrameReader(max_frame_size=value)


@both_readers
def test_layout_may_change_between_frames(reader_type: Reader) -> None:
    reader = reader_type()
    assert len(reader.feed(FRAME)) == 1
    reader.detail = reader.ext = True
    frame = encode_message(1, 1, ID, b"body", ext_version=4, ext=b"{}", offset=5, raw_size=6)
    assert len(reader.feed(frame)) == 1
    assert (reader.detail, reader.ext) == (True, True)


OUT_OF_BOUNDS = "frame size {} is not within 4 and max_frame_size=1024"
SKIPPING = {"skip_oversized": True}


@pytest.mark.parametrize(
    ("options", "data", "error"),
    [
        *(({}, header(size)[:4], OUT_OF_BOUNDS.format(size)) for size in (0, 3, 1025, 2**31, 2**32 - 1)),
        *(({}, header(100, kind), f"unknown frame type {kind}") for kind in (3, 2**31, 2**32 - 1)),
        *((SKIPPING, header(1025, kind), OUT_OF_BOUNDS.format(1025)) for kind in (0, 1, 3)),  # it skips messages only
        ({**SKIPPING, "max_frame_size": 2**31 - 1}, header(2**31, 2), "frame size 2147483648"),
        ({**SKIPPING, "max_frame_size": 10}, header(29, 2), "message frame cut short"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@both_readers
def test_a_frame_that_cannot_be_is_an_error_at_once(
    reader_type: Reader, options: dict[str, Any], data: bytes, error: str
) -> None:
    for size in (1, 3, len(data)):
        reader = reader_type(**{"max_frame_size": 1024, **options})
        with pytest.raises(errors.RemoteProtocolError, match=error):
            feed_all(reader, pieces(data, size))


@pytest.mark.parametrize(
    ("options", "data", "part"),
    [
        ({}, bytes(25), "fixed header"),
        ({"detail": True}, bytes(26 + 11), "detail header"),
        ({"ext": True}, bytes(26), "ext header"),
        ({"ext": True}, bytes(26) + b"\x04", "ext header"),
        ({"ext": True}, bytes(26) + b"\x04\x00", "ext header"),
        ({"ext": True}, bytes(26) + b"\x04\x00\x02x", "ext header"),
        ({"ext": True}, bytes(26) + b"\x04\xff\xff" + bytes(65534), "ext header"),
        ({"ext": True, "detail": True}, bytes(26) + b"\x04\x00\x01x" + bytes(11), "detail header"),
        ({"ext": True, "detail": True}, bytes(26) + b"\x00" + bytes(11), "detail header"),
    ],
)
@both_readers
def test_a_message_shorter_than_its_headers(
    reader_type: Reader, options: dict[str, bool], data: bytes, part: str
) -> None:
    for chunks in ([encode_frame(2, data)], pieces(encode_frame(2, data), 7)):
        reader = reader_type(**options)
        with pytest.raises(errors.RemoteProtocolError, match=part):
            feed_all(reader, chunks)


@pytest.mark.parametrize(
    ("first", "hint"), [(b"HTTP/1.1 400 Bad Request\r\n", "4151"), (b"\x15\x03\x03\x00\x02\x02F", "TLS")]
)
@both_readers
def test_a_hint_when_the_peer_is_something_else(reader_type: Reader, first: bytes, hint: str) -> None:
    for chunks in ([first], pieces(first, 1)):
        reader = reader_type()
        with pytest.raises(errors.RemoteProtocolError, match=hint):
            feed_all(reader, chunks)


@both_readers
def test_an_announced_size_beyond_the_limit_takes_no_memory(reader_type: Reader) -> None:
    reader = reader_type(max_frame_size=1 << 20)

    def feed() -> None:
        with pytest.raises(errors.RemoteProtocolError):
            reader.feed(header((1 << 30) - 1, 2))

    assert _peak_of(feed) < 100_000


@both_readers
def test_a_partial_frame_takes_its_size_and_no_more(reader_type: Reader) -> None:
    size = 1 << 20
    frame = encode_message(1, 1, ID, bytes(size))
    chunks = pieces(frame[:-1], 4096)
    reader = reader_type()
    assert size < _peak_of(lambda: feed_all(reader, chunks)) < size + 50_000
    assert reader.buffered == len(frame) - 1
    assert len(reader.feed(frame[-1:])) == 1
    assert reader.buffered == 0


def _peak_of(action: Any) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@both_readers
def test_work_is_linear_in_the_bytes(reader_type: Reader) -> None:
    # copied anew for every piece, these 32 MiB would be eight TiB: the test would time out
    reader = reader_type(max_frame_size=1 << 26)
    frame = encode_message(1, 1, ID, bytes(1 << 25))
    view = memoryview(frame)
    count = sum(len(reader.feed(view[at : at + 64])) for at in range(0, len(frame), 64))
    assert count == 1


@both_readers
def test_frames_before_the_bad_one_come_first_and_then_the_same_error_with_each_call(reader_type: Reader) -> None:
    reader = reader_type()
    assert len(reader.feed(FRAME + FRAME + b"HTTP/1.1 200 OK\r\n" + FRAME)) == 2
    seen = []
    for chunk in (b"", FRAME, b"", FRAME):
        with pytest.raises(errors.RemoteProtocolError, match="HTTP") as caught:
            reader.feed(chunk)
        seen.append((caught.value, len(caught.traceback)))
    assert len({id(error) for error, _ in seen}) == 1
    assert len({depth for _, depth in seen[1:]}) == 1
    assert reader.buffered == 0


def test_feed_inside_feed_is_refused() -> None:
    reader = FrameReader()
    refusals: list[Exception] = []

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            try:
                reader.feed(FRAME)
            except errors.LocalProtocolError as error:
                refusals.append(error)

    thresholds = gc.get_threshold()
    gc.collect()  # so that it does not happen to be due before the feed
    gc.disable()
    Cycle()
    gc.enable()
    gc.set_threshold(100)  # the messages of the next feed set the collector off
    try:
        frames = reader.feed(FRAME * 2000)
    finally:
        gc.set_threshold(*thresholds)
    assert len(frames) == 2000
    if sys.version_info < (3, 12):  # from then on the collector waits until the call has returned
        assert len(refusals) == 1
    assert len(reader.feed(FRAME)) == 1


@both_readers
def test_an_oversized_message_takes_no_memory(reader_type: Reader) -> None:
    body = bytes(1 << 20)
    reader: Any = reader_type(max_frame_size=1 << 20, skip_oversized=True)
    frame = encode_message(1, 7, ID, b"")
    head = struct.pack(">I", 30 + 64 * len(body)) + frame[4:]
    tracemalloc.start()
    try:
        assert len(reader.feed(head)) == 0
        for _ in range(63):
            assert len(reader.feed(body)) == 0
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    with pytest.raises(errors.LocalProtocolError, match="passed over"):
        reader.take_buffered()
    frames = reader.feed(body + frame)
    truncated, whole = frames if isinstance(frames, list) else (frames.frames[0], frames)
    assert (truncated.id, truncated.attempts, truncated.body, truncated.is_truncated) == (ID, 7, b"", True)
    assert (truncated.body_size, truncated.max_frame_size) == (64 << 20, 1 << 20)
    assert whole.body == b""
    assert (reader.buffered, reader.take_buffered()) == (0, b"")


@pytest.mark.parametrize(("options", "sizes"), [({"ext": True}, {"ext": b"x" * 65535}), ({"detail": True}, {})])
@both_readers
def test_an_oversized_message_keeps_its_headers(
    reader_type: Reader, options: dict[str, bool], sizes: dict[str, bytes]
) -> None:
    given: Any = {"offset": 7, "raw_size": 9} if "detail" in options else {"ext_version": 4, **sizes}
    stream = encode_message(1, 1, ID, b"body" * 100, **given)
    for size in (1000, len(stream)):
        reader: Any = reader_type(max_frame_size=100, skip_oversized=True, **options)
        for piece in pieces(stream, size):
            frames = reader.feed(piece)
        (truncated,) = frames if isinstance(frames, list) else frames.frames
        assert truncated.body_size == 400
        assert {name: getattr(truncated, name) for name in given} == given


def test_a_truncated_message_made_by_hand() -> None:
    message = TruncatedMessage(1, 2, ID, body_size=100, max_frame_size=50, ext=b"{}", responder="r")
    assert (message.id, message.attempts, message.body, message.ext, message.responder) == (ID, 2, b"", b"{}", "r")
    assert (message.body_size, message.max_frame_size, message.is_truncated) == (100, 50, True)
    assert not Message(1, 2, ID, b"").is_truncated


def test_take_buffered_hands_the_stream_over_at_any_place() -> None:
    for cut in (0, 3, 7, 8, 9, len(FRAME) - 1):
        for rest in (FRAME[:cut], b"\x16\x03\x01 a TLS record"):
            reader = FrameReader()
            reader.feed(FRAME + rest, max_frames=1)
            assert reader.buffered == len(rest)
            assert reader.take_buffered() == rest
            assert reader.buffered == 0
            assert len(reader.feed(FRAME)) == 1


@pytest.mark.parametrize("max_frames", [1, 2, 3])
def test_max_frames_gives_the_same_frames_in_the_end(max_frames: int) -> None:
    stream = (FRAME + encode_frame(0, b"OK") + encode_message(2, 2, ID, bytes(100))) * 5
    for size in (1, 5, 50, 1000):
        reader = FrameReader()
        frames: list[Any] = []
        for chunk in [*pieces(stream, size), *[b""] * 15]:
            frames.append(reader.feed(chunk, max_frames=max_frames))
            assert len(frames[-1]) <= max_frames
        assert reader.buffered == 0
        assert [plain(frame) for got in frames for frame in got] == read([stream]).frames


def test_a_long_backlog_is_worked_off_in_linear_time() -> None:
    reader = FrameReader()
    for _ in range(20):  # copied anew for every frame, they would be 300 GiB
        reader.feed(FRAME * 2000, max_frames=1)
    count = 0
    while reader.feed(b"", max_frames=1):
        count += 1
    assert count == 40_000 - 20


@both_readers
def test_a_layout_that_changes_within_an_oversized_message_is_judged_by_what_is_kept(reader_type: Reader) -> None:
    """Of its headers only those of the layout before are here: nothing beyond them may be read."""
    frame = encode_message(1, 1, ID, b"x" * 5000)
    reader: Any = reader_type(max_frame_size=1024, skip_oversized=True)
    reader.feed(frame[:100])
    reader.ext = reader.detail = True
    with pytest.raises(errors.RemoteProtocolError, match="cut short"):
        reader.feed(frame[100:])


LIMITS = [(2048, False), (2048, True), (64, True), (30, True)]  # of the size of a frame, and whether it is an error
limits = st.sampled_from(LIMITS)
every_layout = pytest.mark.parametrize(("detail", "ext"), LAYOUTS, ids=map(layout_id, LAYOUTS))
EDGES = [0, 1, 3, 4, 7, 8, 25, 26, 27, 29, 30, 31, 38, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1]


def good_stream(random: Random, detail: bool, ext: bool) -> bytearray:
    stream = bytearray()
    for _ in range(random.randrange(1, 6)):
        if random.random() < 0.3:
            stream += encode_frame(random.randrange(2), random.randbytes(random.randrange(12)))
            continue
        stream += good_message(random, detail, ext)
    return stream


def good_message(random: Random, detail: bool, ext: bool) -> bytes:
    version = random.choice([0, 2, 4])
    return encode_message(
        random.getrandbits(62),
        random.getrandbits(16),
        random.randbytes(16),
        random.randbytes(random.randrange(60)),
        ext_version=version if ext else None,
        ext=random.randbytes(random.randrange(20)) if ext and version else b"",
        offset=random.getrandbits(64) if detail else None,
        raw_size=random.getrandbits(32) if detail else None,
    )


def damage(random: Random, stream: bytearray) -> None:
    at = random.randrange(len(stream))
    match random.randrange(5):
        case 0:
            stream[at] ^= 1 << random.randrange(8)
        case 1:
            width = random.choice([1, 2, 4])
            stream[at : at + width] = (random.choice(EDGES) & (256**width - 1)).to_bytes(width, "big")
        case 2:
            del stream[at : at + random.randrange(1, 9)]
        case 3:
            stream[at:at] = random.randbytes(random.randrange(1, 9))
        case _:
            del stream[at:]


def check(stream: bytes, detail: bool, ext: bool, limit: tuple[int, bool], sizes: list[int]) -> None:
    layout: dict[str, Any] = {"detail": detail, "ext": ext, "max_frame_size": limit[0], "skip_oversized": limit[1]}
    expected = decode(stream, **layout)
    whole = read([stream], **layout)
    assert whole.frames == expected.frames
    assert (whole.error is not None) == expected.malformed
    rest = expected.rest
    assert expected.malformed or whole.rest == rest or (limit[1] and whole.rest == PASSED_OVER % len(rest))
    columns = read_columns([stream], **layout)
    assert columns[0].frames == [frame for frame in expected.frames if isinstance(frame, OracleMessage)]
    assert columns[1] == [frame for frame in expected.frames if not isinstance(frame, OracleMessage)]
    assert (columns[0].rest, columns[0].error) == (whole.rest, whole.error)
    for size in sizes:
        assert read(pieces(stream, size), **layout) == whole
        assert read_columns(pieces(stream, size), **layout) == columns


@every_layout
@pytest.mark.parametrize("seed", range(10))
def test_damaged_streams(seed: int, detail: bool, ext: bool) -> None:
    random = Random(f"{seed}-{detail}-{ext}")
    for _ in range(40):
        stream = good_stream(random, detail, ext)
        for _ in range(random.randrange(4)):
            if stream:
                damage(random, stream)
        check(bytes(stream), detail, ext, random.choice(LIMITS), [1, random.randrange(2, 50)])


@every_layout
@given(stream=st.binary(max_size=200), limit=limits, size=st.integers(1, 50))
def test_noise(stream: bytes, detail: bool, ext: bool, limit: tuple[int, bool], size: int) -> None:
    check(stream, detail, ext, limit, [1, size])


@every_layout
@given(
    bodies=st.lists(st.tuples(st.sampled_from([0, 1, 2, 2, 2, 3]), st.binary(max_size=80)), max_size=4),
    limit=limits,
    size=st.integers(1, 50),
)
def test_frames_of_noise(
    bodies: list[tuple[int, bytes]], detail: bool, ext: bool, limit: tuple[int, bool], size: int
) -> None:
    check(b"".join(encode_frame(kind, data) for kind, data in bodies), detail, ext, limit, [1, size])


def numbers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


def messages_of(detail: bool, ext: bool) -> st.SearchStrategy[OracleMessage]:
    headers = st.just((0, None)) | st.tuples(st.integers(1, 255), st.binary(max_size=70) | st.just(bytes(65535)))
    return st.builds(
        lambda header, **fields: OracleMessage(ext_version=header[0], ext=header[1], **fields),
        timestamp=st.integers(-(2**63), 2**63 - 1),
        attempts=numbers(16),
        id=st.binary(min_size=16, max_size=16),
        header=headers if ext else st.just((0, None)),
        offset=numbers(64) if detail else st.none(),
        raw_size=numbers(32) if detail else st.none(),
        body=st.binary(max_size=100),
    )


OTHERS = st.builds(
    OracleFrame, st.integers(0, 1), st.sampled_from([b"", b"OK", b"_heartbeat_", b"CLOSE_WAIT", b"E_X y"]) | st.binary()
)


def encode(frame: OracleMessage | OracleFrame, ext: bool) -> bytes:
    if isinstance(frame, OracleFrame):
        return encode_frame(frame.type, frame.data)
    options: dict[str, Any] = {"offset": frame.offset, "raw_size": frame.raw_size}
    if ext:
        options.update(ext_version=frame.ext_version, ext=frame.ext or b"")
    return encode_message(frame.timestamp, frame.attempts, frame.id, frame.body, **options)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@every_layout
@given(data=st.data(), cuts=st.lists(st.integers(0, 2**20), max_size=6))
def test_round_trip(detail: bool, ext: bool, data: st.DataObject, cuts: list[int]) -> None:
    frames = data.draw(st.lists(messages_of(detail, ext) | OTHERS, max_size=8))
    stream = b"".join(encode(frame, ext) for frame in frames)
    chunks = split(stream, cuts)
    assert decode(stream, detail=detail, ext=ext) == (frames, b"", False)
    assert read(chunks, detail=detail, ext=ext) == (frames, b"", None)
    outcome, others = read_columns(chunks, detail=detail, ext=ext)
    assert outcome == ([frame for frame in frames if isinstance(frame, OracleMessage)], b"", None)
    assert others == [frame for frame in frames if isinstance(frame, OracleFrame)]


CONVERSATIONS = list(conversations())


@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=[f"{each.dialect}-{each.name}" for each in CONVERSATIONS])
def test_what_servers_have_sent_cut_anywhere(conversation: Conversation) -> None:
    stream = b"".join(conversation.received)
    layout = {"detail": conversation.detail, "ext": conversation.ext}
    check(stream, **layout, limit=(2**20, False), sizes=[])
    whole, columns = read([stream], **layout), read_columns([stream], **layout)
    assert (len(whole.frames), whole.rest, whole.error) == (len(conversation.received), b"", None)
    for at in range(len(stream) + 1):
        halves = [stream[:at], stream[at:]]
        assert (read(halves, **layout), read_columns(halves, **layout)) == (whole, columns)


def test_the_largest_limit_takes_chunks_whole_and_in_pieces() -> None:
    frame = encode_message(1, 1, ID, b"body")
    reader = ColumnReader(max_frame_size=2**31 - 1)
    assert reader.feed(frame).body == b"body"
    for size in (3, 20, 36):  # the cut lies in the frame's header, in the message's header, in the body
        assert reader.feed(frame[:size]).count == 0
        assert reader.feed(frame[size:]).body == b"body"


@pytest.mark.skipif(sys.maxsize < 2**33, reason="such a chunk needs 64 bits")
def test_a_chunk_whose_offsets_would_not_fit_is_refused() -> None:
    reader = ColumnReader(max_frame_size=2**31 - 1)
    reader.feed(encode_message(1, 1, ID, bytes(1000))[:-1])  # 999 bytes of body are here
    chunk = mmap.mmap(-1, 2**31 - 1)  # no page of it is ever touched
    with pytest.raises(ValueError, match=f"chunk must be at most {2**31 - 1 - 999} bytes, not {2**31 - 1}"):
        reader.feed(chunk)
    chunk.close()
    assert reader.feed(b"\0").count == 1  # it took nothing


def test_arrow_takes_the_buffers() -> None:
    pa = pytest.importorskip("pyarrow")
    frames = [
        encode_message(n, n, ID, b"b" * n, ext_version=4, ext=b'{"n":1}', offset=n * 100, raw_size=n + 40)
        for n in range(5)
    ]
    columns = ColumnReader(detail=True, ext=True).feed(b"".join(frames))
    plain = ColumnReader().feed(FRAME)  # what its layout has not is None
    assert {plain.offsets, plain.sizes, plain.ext_versions, plain.ext_offsets, plain.ext} == {None}

    def array(type: object, *buffers: bytes | None) -> list[object]:
        made = pa.Array.from_buffers(type, columns.count, [None, *map(pa.py_buffer, buffers)])
        made.validate(full=True)
        return list(made.to_pylist())

    assert array(pa.int64(), columns.timestamps) == [0, 1, 2, 3, 4]
    assert array(pa.uint16(), columns.attempts) == [0, 1, 2, 3, 4]
    assert array(pa.binary(16), columns.ids) == [ID] * 5
    assert array(pa.uint64(), columns.internal_ids) == [int.from_bytes(ID[:8], "big")] * 5
    assert array(pa.uint64(), columns.trace_ids) == [int.from_bytes(ID[8:], "big")] * 5
    assert array(pa.uint64(), columns.offsets) == [0, 100, 200, 300, 400]
    assert array(pa.uint32(), columns.sizes) == [40, 41, 42, 43, 44]
    assert array(pa.uint8(), columns.ext_versions) == [4] * 5
    assert array(pa.binary(), columns.ext_offsets, columns.ext) == [b'{"n":1}'] * 5
    assert array(pa.binary(), columns.body_offsets, columns.body) == [b"b" * n for n in range(5)]


def feed(*messages: bytes, ext: bool = False, detail: bool = False) -> Columns:
    return ColumnReader(ext=ext, detail=detail).feed(b"".join(messages))


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_id)
@pytest.mark.parametrize("cuts", [[], [5], [3, 3, 7], [0, 10], list(range(11))], ids=str)
def test_joined_columns_are_those_that_came_at_once(layout: tuple[bool, bool], cuts: list[int]) -> None:
    detail, ext = layout
    frames = []
    for n in range(10):
        header: dict[str, Any] = {"ext_version": 4, "ext": b'{"n":%d}' % n} if n % 3 else {"ext_version": 0}
        options = header if ext else {}
        where = {"offset": n * 1000, "raw_size": n + 40} if detail else {}
        frames.append(encode_message(n, n, bytes([n]) * 16, b"b" * (n * 7 % 5), **options, **where))
    whole = feed(*frames, ext=ext, detail=detail)
    bounds = [0, *cuts, 10]
    parts = [feed(*frames[a:b], ext=ext, detail=detail) for a, b in itertools.pairwise(bounds)]
    joined = join_columns(parts)
    names = [name for name in dir(Columns) if not name.startswith("_") and name != "frames"]
    assert {name: getattr(joined, name) for name in names} == {name: getattr(whole, name) for name in names}
    bare = join_columns(parts, bodies=False)
    assert bare.body == b""
    names.remove("body")
    assert {name: getattr(bare, name) for name in names} == {name: getattr(whole, name) for name in names}


def test_joined_columns_have_all_frames_and_one_layout() -> None:
    joined = join_columns(iter(()))
    assert (joined.count, joined.body, joined.body_offsets, joined.frames) == (0, b"", bytes(4), [])
    plain = feed(encode_message(1, 1, ID, b"x"))
    joined = join_columns([feed(encode_frame(0, b"OK")), plain, feed(encode_frame(1, b"E_X"))])
    assert joined.count == 1
    assert [frame.data for frame in joined.frames] == [b"OK", b"E_X"]
    detailed = feed(encode_message(1, 1, ID, b"x", offset=1, raw_size=2), detail=True)
    with pytest.raises(ValueError, match="parts must have the same headers"):
        join_columns([plain, detailed])
    assert join_columns([feed(detail=True), plain]).count == 1
