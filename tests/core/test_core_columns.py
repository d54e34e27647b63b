"""ColumnReader: Arrow can take its buffers as they are; the rest is compared with the oracle elsewhere."""

from __future__ import annotations

import itertools
import mmap
import sys
from typing import Any

import pytest
from support.core import LAYOUTS, layout_id, rows

from nsq_fast import _frame
from nsq_fast._codec import encode_frame, encode_message
from nsq_fast._frame import ColumnReader, Columns, join_columns

ID = bytes(range(16))


def test_no_message_gives_empty_columns() -> None:
    for data in (b"", b"\0\0", encode_frame(0, b"OK")):
        columns = ColumnReader(detail=True, ext=True).feed(data)
        assert (columns.count, len(columns), columns.body) == (0, 0, b"")
        assert list(rows(columns)) == []


def test_columns_of_headers_are_none_where_the_layout_has_none() -> None:
    columns = ColumnReader().feed(encode_message(1, 1, ID, b"x"))
    assert (columns.offsets, columns.sizes) == (None, None)
    assert (columns.ext_versions, columns.ext_offsets, columns.ext) == (None, None, None)


def test_other_frames_come_apart_in_their_order() -> None:
    message = encode_message(1, 1, ID, b"x")
    chunk = encode_frame(0, b"OK") + message + encode_frame(1, b"E_X") + message + encode_frame(0, b"_heartbeat_")
    columns = ColumnReader().feed(chunk)
    assert columns.count == 2
    assert [frame.data for frame in columns.frames] == [b"OK", b"E_X", b"_heartbeat_"]
    assert columns.frames[2] is _frame.HEARTBEAT


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


def test_joined_columns_have_all_frames() -> None:
    parts = [feed(encode_frame(0, b"OK")), feed(encode_message(1, 1, ID, b"x")), feed(encode_frame(1, b"E_X"))]
    joined = join_columns(parts)
    assert joined.count == 1
    assert [frame.data for frame in joined.frames] == [b"OK", b"E_X"]


def test_nothing_joined_is_empty() -> None:
    joined = join_columns(iter(()))
    assert (joined.count, joined.body, joined.body_offsets, joined.frames) == (0, b"", bytes(4), [])


def test_parts_of_several_layouts_are_refused() -> None:
    plain = feed(encode_message(1, 1, ID, b"x"))
    detailed = feed(encode_message(1, 1, ID, b"x", offset=1, raw_size=2), detail=True)
    with pytest.raises(ValueError, match="parts must have the same headers"):
        join_columns([plain, detailed])
    assert join_columns([feed(detail=True), plain]).count == 1
