"""Message bodies that a publisher compressed: youzan's Go client does, on topics with extended headers.

The header ``nsq.client.compress`` names the codec, ``nsq.msg.size`` the size
of the body before. Both come from the network: the size is checked against a
limit before anything is decompressed, and no codec gives more than that.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from nsq_fast._codec import Message
from nsq_fast.errors import BodyInvalid, NsqError
from nsq_fast.protocol.publishing import CODEC_HEADER, GZIP, LZ4, SIZE_HEADER, SNAPPY

_MARK = CODEC_HEADER.encode()


def is_compressed(message: Message) -> bool:
    """Whether its headers may say so; cheap, and now and then wrong for a header that holds the name as a value."""
    return message.ext is not None and _MARK in message.ext


def decompressed(message: Message, limit: int) -> Message:
    """Return the message with its body decompressed; the message itself when its headers name no codec.

    Raises BodyInvalid if the body is not what its headers say, is larger than ``limit`` bytes, or needs a codec that
    is not known; RemoteProtocolError if the headers are not JSON.
    """
    headers = message.headers
    if CODEC_HEADER not in headers:
        return message
    codec = str(headers[CODEC_HEADER])
    if codec not in _CODECS:
        raise BodyInvalid(f"{CODEC_HEADER}={codec[:20]!r}: only 1 (gzip), 2 (snappy) and 3 (lz4) are known")
    size = _size(headers.get(SIZE_HEADER), limit)
    try:
        body = _CODECS[codec](message.body, size)
    except NsqError:
        raise
    except Exception as error:  # each library has exceptions of its own
        raise BodyInvalid(f"the body does not decompress ({CODEC_HEADER}={codec}): {error}") from error
    if len(body) != size:
        raise BodyInvalid(f"the body has {len(body)} bytes, its header {SIZE_HEADER} says {size}")
    return _with_body(message, body)


def _size(text: object, limit: int) -> int:
    digits = str(text)
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise BodyInvalid(f"{SIZE_HEADER}={digits[:20]!r}: must be the size of the body before it was compressed")
    if int(digits) > limit:
        raise BodyInvalid(f"the body has {digits} bytes, max_decompressed_size={limit}")
    return int(digits)


def _gunzip(body: bytes, size: int) -> bytes:
    reader = zlib.decompressobj(16 + zlib.MAX_WBITS)
    data = reader.decompress(body, size + 1)
    if not reader.eof and len(data) <= size:
        raise BodyInvalid("the gzip body is cut short")
    return data


def _unsnappy(body: bytes, size: int) -> bytes:
    claimed = _varint(body)
    if claimed != size:  # what the library would take memory for
        raise BodyInvalid(f"the snappy body has {claimed} bytes, its header {SIZE_HEADER} says {size}")
    import snappy  # type: ignore[import-untyped]

    return bytes(snappy.uncompress(body))


def _varint(data: bytes) -> int:
    value = 0
    for position, byte in enumerate(data[:5]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value
    raise BodyInvalid("the snappy body does not begin with its length")


def _unlz4(body: bytes, size: int) -> bytes:
    import lz4.block  # type: ignore[import-untyped]

    return bytes(lz4.block.decompress(body, uncompressed_size=size))


_CODECS: dict[str, Callable[[bytes, int], bytes]] = {GZIP: _gunzip, SNAPPY: _unsnappy, LZ4: _unlz4}


def _with_body(message: Message, body: bytes) -> Message:
    return Message(
        message.timestamp,
        message.attempts,
        message.id,
        body,
        ext=message.ext,
        ext_version=message.ext_version,
        offset=message.offset,
        raw_size=message.raw_size,
        responder=message.responder,
        received_at=message.received_at,
    )
