"""Bodies that a publisher compresses: what youzan's Go client does on topics with extended headers.

The header names the codec and the size of the body before: ``nsq.client.compress`` and ``nsq.msg.size``, both strings.
The codecs are gzip, and the block formats of snappy and lz4, without a size or a frame around them: a reader takes the
size from the header.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

# youzan/go-nsq: compress.go, NSQ_CLIENT_COMPRESS_HEADER_KEY, CompressDecodec_GZIP and the others; message.go, where a
# consumer takes both headers as strings.
CODEC_HEADER = "nsq.client.compress"
SIZE_HEADER = "nsq.msg.size"
GZIP, SNAPPY, LZ4 = "1", "2", "3"

CODEC_NUMBERS: Mapping[str, str] = MappingProxyType({"gzip": GZIP, "snappy": SNAPPY, "lz4": LZ4})
"""The name of a codec -> its number in the header."""

# What the two headers add to a message, about: less is not worth it.
_LEAST_SAVING = 64


def _gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


def _snappy(body: bytes) -> bytes:
    import snappy  # type: ignore[import-untyped]

    return bytes(snappy.compress(body))


def _lz4(body: bytes) -> bytes:
    import lz4.block  # type: ignore[import-untyped]

    return bytes(lz4.block.compress(body, store_size=False))


_CODECS: Mapping[str, Callable[[bytes], bytes]] = MappingProxyType({"gzip": _gzip, "snappy": _snappy, "lz4": _lz4})


def compressed(codec: str, body: bytes) -> tuple[bytes, dict[str, str]] | None:
    """The body compressed with a codec of ``CODEC_NUMBERS``, and its headers; None where that saves nothing."""
    packed = _CODECS[codec](body)
    if len(packed) + _LEAST_SAVING > len(body):
        return None
    return packed, {CODEC_HEADER: CODEC_NUMBERS[codec], SIZE_HEADER: str(len(body))}
