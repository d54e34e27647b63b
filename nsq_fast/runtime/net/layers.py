"""What the handshake puts between the socket and the frames: snappy, deflate, and TLS (``tls_layer``).

A layer transforms bytes and does no I/O: ``encode`` what goes out, ``feed``
what came in, ``read`` what that amounts to, a bounded piece at a time, so that
a compressed bomb never takes more memory than one piece.
"""

from __future__ import annotations

import zlib
from typing import Protocol

from nsq_fast._snappy_chunks import SnappyChunks
from nsq_fast.errors import RemoteProtocolError

# Largest piece that one read returns.
PIECE_SIZE = 64 * 1024


class Layer(Protocol):
    """One transformation of the byte stream."""

    is_ended: bool

    def encode(self, data: bytes) -> bytes:
        """The bytes that carry ``data``, complete: nothing is held back for more."""

    def feed(self, data: bytes) -> None:
        """Take encoded bytes."""

    def read(self) -> bytes:
        """The next decoded piece; ``b""`` when more must be fed first. Raises RemoteProtocolError."""


def compression_layer(kind: str, deflate_level: int) -> Layer:
    """The layer for an upgrade of the session to ``snappy`` or ``deflate``."""
    return SnappyLayer() if kind == "snappy" else DeflateLayer(deflate_level)


class DeflateLayer:
    """Raw deflate, flushed after each write. The server's empty blocks decode to nothing, as they should."""

    # nsqio/nsq: nsqd/client_v2.go, UpgradeDeflate and Flush

    def __init__(self, level: int) -> None:
        self.is_ended = False
        self._compressor = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        self._input = b""

    def encode(self, data: bytes) -> bytes:
        return self._compressor.compress(data) + self._compressor.flush(zlib.Z_SYNC_FLUSH)

    def feed(self, data: bytes) -> None:
        self._input += data

    def read(self) -> bytes:
        if not self._input:
            return b""
        try:
            data = self._decompressor.decompress(self._input, PIECE_SIZE)
        except zlib.error as error:
            raise RemoteProtocolError(f"broken deflate stream: {error}") from error
        self._input = self._decompressor.unconsumed_tail
        if self._decompressor.eof:
            raise RemoteProtocolError("the deflate stream ended")
        return data


class SnappyLayer(SnappyChunks):
    """The snappy framing format."""

    # nsqio/nsq: nsqd/client_v2.go, UpgradeSnappy; the format: google/snappy, framing_format.txt

    def __init__(self) -> None:
        import cramjam
        import snappy  # type: ignore[import-untyped]

        super().__init__(cramjam.snappy.decompress_raw_into)
        self.is_ended = False
        self._compressor = snappy.StreamCompressor()

    def encode(self, data: bytes) -> bytes:
        return bytes(self._compressor.compress(data))
