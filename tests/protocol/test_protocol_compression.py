"""Bodies as youzan's Go client compresses them: what the headers say, and what each codec's reader makes of them."""

from __future__ import annotations

import gzip

import lz4.block
import pytest
import snappy

from nsq_fast.protocol.publishing import CODEC_NUMBERS, compressed

BODY = b"hello, hello, hello, " * 100


@pytest.mark.parametrize("codec", CODEC_NUMBERS)
def test_each_codec_is_read_by_its_own_library(codec: str) -> None:
    found = compressed(codec, BODY)
    assert found is not None
    packed, headers = found
    assert len(packed) < len(BODY)
    assert headers == {"nsq.client.compress": CODEC_NUMBERS[codec], "nsq.msg.size": str(len(BODY))}
    read = {
        "gzip": gzip.decompress,
        "snappy": snappy.uncompress,
        "lz4": lambda data: lz4.block.decompress(data, uncompressed_size=len(BODY)),
    }[codec]
    assert bytes(read(packed)) == BODY


@pytest.mark.parametrize("codec", CODEC_NUMBERS)
def test_what_would_not_become_smaller_is_left_as_it_is(codec: str) -> None:
    assert compressed(codec, bytes(range(256))) is None
    assert compressed(codec, b"x" * 40) is None
