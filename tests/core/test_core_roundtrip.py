"""What the encoder makes the readers read back, in every layout and split, and the oracle agrees."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core import LAYOUTS, layout_id, read, read_columns
from support.oracle import OracleFrame, OracleMessage, decode

from nsq_fast._codec import encode_frame, encode_message

every_layout = pytest.mark.parametrize(("detail", "ext"), LAYOUTS, ids=map(layout_id, LAYOUTS))


def numbers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(0, 2**bits - 1)


def messages(detail: bool, ext: bool) -> st.SearchStrategy[OracleMessage]:
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
    frames = data.draw(st.lists(messages(detail, ext) | OTHERS, max_size=8))
    stream = b"".join(encode(frame, ext) for frame in frames)
    chunks = split(stream, cuts)
    assert decode(stream, detail=detail, ext=ext) == (frames, b"", False)
    assert read(chunks, detail=detail, ext=ext) == (frames, b"", None)
    outcome, others = read_columns(chunks, detail=detail, ext=ext)
    assert outcome == ([frame for frame in frames if isinstance(frame, OracleMessage)], b"", None)
    assert others == [frame for frame in frames if isinstance(frame, OracleFrame)]
