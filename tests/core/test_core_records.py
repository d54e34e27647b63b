"""Commands from columns are those from lists, byte for byte; and no offsets reach beyond the data."""

from __future__ import annotations

import struct
from array import array
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsq_fast import _codec
from nsq_fast._codec import Records

BODIES = [b"a", b"", b"ccc", b"dd"]
TRACE_IDS = [1, 0, 2**64 - 1, 7]
HEADERS = [b"{}", b"", b'{"a":1}', b"{}"]


def offsets_of(entries: list[bytes]) -> bytes:
    return array("i", accumulate(map(len, entries), initial=0)).tobytes()


def records_of(
    bodies: list[bytes], trace_ids: list[int] | None = None, headers: list[bytes] | None = None, **changes: Any
) -> Records:
    arguments: dict[str, Any] = {"body_offsets": offsets_of(bodies), "body": b"".join(bodies)}
    if trace_ids is not None:
        arguments["trace_ids"] = array("Q", trace_ids)
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


def test_no_records_without_their_buffers() -> None:
    with pytest.raises(TypeError):
        Records.__new__(Records)


def rows_of(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def test_all_rows_and_some_in_any_order() -> None:
    records = records_of(BODIES, TRACE_IDS, HEADERS)
    assert (records.count, records.is_traced, records.has_headers) == (4, True, True)
    assert records.mpub("t") == _codec.mpub("t", BODIES)
    assert records.mpub("t", 3, rows_of(3, 0, 3)) == _codec.mpub("t", [b"dd", b"a", b"dd"], 3)
    assert records.mpub("t", None, rows_of(3, 0, 2), 1, 2) == _codec.mpub("t", [b"a"])
    assert records.mpub("t", None, None, 2) == _codec.mpub("t", BODIES[2:])
    assert records.mpub_trace("t", 1) == _codec.mpub_trace("t", zip(TRACE_IDS, BODIES, strict=True), 1)
    assert records.mpub_ext("t", None, rows_of(2, 1)) == _codec.mpub_ext("t", [(HEADERS[2], b"ccc"), (b"", b"")])


def test_a_slice_of_a_column() -> None:
    whole = [b"xx", *BODIES, b"yyy"]
    offsets = memoryview(offsets_of(whole))[4:-4]
    assert Records(offsets, b"".join(whole)).mpub("t") == _codec.mpub("t", BODIES)


def test_buffers_at_odd_addresses() -> None:
    padded = memoryview(b"-" + offsets_of(BODIES))[1:]
    traces = memoryview(b"-" + array("Q", TRACE_IDS).tobytes())[1:]
    records = Records(padded, b"".join(BODIES), trace_ids=traces)
    assert records.mpub_trace("t") == _codec.mpub_trace("t", zip(TRACE_IDS, BODIES, strict=True))


@given(st.data())
def test_like_the_commands_of_lists(data: st.DataObject) -> None:
    items = data.draw(st.lists(st.tuples(st.binary(max_size=9), st.integers(0, 2**64 - 1), st.binary(max_size=5))))
    bodies, traces, headers = [list(column) for column in zip(*items, strict=True)] or [[], [], []]
    records = records_of(bodies, traces, headers)
    rows = data.draw(st.lists(st.integers(0, len(items) - 1))) if items else []
    if not rows:
        with pytest.raises(ValueError, match="must not be empty"):
            records.mpub("t", None, b"")
        return
    chosen = [items[row] for row in rows]
    assert records.mpub("t", 1, rows_of(*rows)) == _codec.mpub("t", [body for body, _, _ in chosen], 1)
    assert records.mpub_trace("t", 1, rows_of(*rows)) == _codec.mpub_trace("t", [(t, b) for b, t, _ in chosen], 1)
    assert records.mpub_ext("t", 1, rows_of(*rows)) == _codec.mpub_ext("t", [(h, b) for b, _, h in chosen], 1)
    assert records.pairs(rows_of(*rows)) == [(trace, len(body)) for body, trace, _ in chosen]


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1), st.integers(1, 5), st.integers(1, 60))
def test_cut_keeps_the_limits_and_leaves_nothing_out(bodies: list[bytes], most: int, limit: int) -> None:
    records = records_of(bodies)
    ends = records.cut(most, limit)
    starts = [0, *ends[:-1]]
    assert ends[-1] == len(bodies)
    assert all(start < end for start, end in zip(starts, ends, strict=True))
    for start, end in zip(starts, ends, strict=True):
        size = len(_codec.mpub_body(bodies[start:end]))
        assert end - start <= most
        assert size <= limit or end - start == 1
    for start, end in pairwise(starts):  # none could have had one more
        assert end - start == most or len(_codec.mpub_body(bodies[start : end + 1])) > limit


def test_cut_counts_trace_ids_and_headers_and_of_the_rows_alone() -> None:
    assert records_of([b"a"] * 4).cut(9, 14) == [2, 4]
    assert records_of([b"a"] * 4, [1] * 4).cut(9, 30) == [2, 4]
    assert records_of([b"a"] * 4, None, [b"{}"] * 4).cut(9, 22) == [2, 4]
    assert records_of([b"a"] * 4).cut(2, 999, rows_of(3, 2, 1, 0, 0), 1) == [3, 5]
    assert records_of([b"a"]).cut(2, 999, b"") == []


def test_find_misfit() -> None:
    assert records_of([b"a", b"bb"]).find_misfit(2) == -1
    assert records_of([b"a", b"bb"]).find_misfit(1) == 1
    assert records_of([b"a", b"", b"bb"]).find_misfit(2) == 1
    assert records_of([b"a", b"bb"], [1, 2]).find_misfit(9) == 1
    assert records_of([b"a", b"b"], None, [b"{}", b"{-}"]).find_misfit(5) == 1
    assert records_of([]).find_misfit(1) == -1
    assert records_of([b"a", b"bb"]).size_of(1) == 2


def test_what_makes_no_sense_is_refused() -> None:
    records = records_of(BODIES)
    for rows in (rows_of(4), rows_of(-1)):
        with pytest.raises(ValueError, match=r"rows must be within 0 and 3"):
            records.mpub("t", None, rows)
    for offsets in ([0, 1, 2, 9], [0, -1, 2, 3], [0, 2, 1, 3], [-2, 1, 1, 1]):
        with pytest.raises(ValueError, match="lie beyond the data"):
            Records(array("i", offsets), b"abc").mpub("t")
    with pytest.raises(ValueError, match="at most 65506"):
        records_of([b"a"], None, [bytes(65535)]).mpub_ext("t")
    with pytest.raises(ValueError, match="items of 4 bytes"):
        Records(b"123", b"")
    with pytest.raises(ValueError, match="one more"):
        Records(b"", b"")
    with pytest.raises(ValueError, match="trace_ids must have 4 items, not 1"):
        records_of(BODIES, [1])
    with pytest.raises(ValueError, match="header_offsets must have 5 items, not 2"):
        records_of(BODIES, None, [b""])
    with pytest.raises(ValueError, match="go together"):
        Records(offsets_of([]), b"", headers=b"")
    with pytest.raises(ValueError, match="no trace_ids"):
        records.mpub_trace("t")
    with pytest.raises(ValueError, match="no headers"):
        records.mpub_ext("t")
    for part in ((3, 2), (0, 5), (-1, 2)):
        with pytest.raises(ValueError, match=r"start|stop"):
            records.mpub("t", None, None, *part)
    with pytest.raises(TypeError, match="body_offsets must be bytes-like"):
        Records([0, 1], b"a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="topic"):
        records.mpub("t t")


@given(st.lists(st.integers(0, 3)))
def test_group_rows(targets: list[int]) -> None:
    groups = _codec.group_rows(array("i", targets), 4)
    found = [list(struct.unpack(f"={len(rows) // 4}i", rows)) for rows in groups]
    assert found == [[row for row, target in enumerate(targets) if target == group] for group in range(4)]


def test_group_rows_refuses_other_targets() -> None:
    for target in (-1, 2):
        with pytest.raises(ValueError, match="within 0 and 1"):
            _codec.group_rows(rows_of(0, target), 2)
    assert _codec.group_rows(b"", 0) == []
