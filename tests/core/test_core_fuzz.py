"""Garbage gives frames or one RemoteProtocolError: never anything else, and the same whatever way it is split.

Streams are damaged in the places that matter, from seeds, so that a failure can be had again.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core import LAYOUTS, PASSED_OVER, layout_id, pieces, read, read_columns
from support.oracle import OracleMessage, decode

from nsq_fast._codec import encode_frame, encode_message

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
