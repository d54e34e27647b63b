"""TLS, snappy and deflate as transformations of bytes: whole, in pieces, broken, and as bombs."""

from __future__ import annotations

import random
import ssl
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import snappy
import trustme

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import RemoteProtocolError
from nsq_fast.runtime.net.layers import PIECE_SIZE, DeflateLayer, Layer, SnappyLayer
from nsq_fast.runtime.net.tls_layer import TlsLayer

DATA = random.Random(7).randbytes(5000) + b"nsq " * 50_000


def deflated(data: bytes, flush: int = zlib.Z_SYNC_FLUSH) -> bytes:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    return compressor.compress(data) + compressor.flush(flush)


def snapped(data: bytes) -> bytes:
    encoded: bytes = snappy.StreamCompressor().compress(data)
    return encoded


LAYERS = [
    pytest.param(lambda: DeflateLayer(6), deflated, id="deflate"),
    pytest.param(SnappyLayer, snapped, id="snappy"),
]


def decode(layer: Layer, data: bytes, size: int) -> bytes:
    out = b""
    for start in range(0, len(data), size):
        layer.feed(data[start : start + size])
        while piece := layer.read():
            out += piece
    return out


@pytest.mark.parametrize("size", [1, 3, 1000, 1 << 20])
@pytest.mark.parametrize(("make", "encode"), LAYERS)
def test_decodes_in_any_pieces(make: Callable[[], Layer], encode: Callable[[bytes], bytes], size: int) -> None:
    data = DATA if size > 1 else DATA[:9000]
    assert decode(make(), encode(data), size) == data


@pytest.mark.parametrize(("make", "encode"), LAYERS)
def test_two_ends_understand_each_other_write_by_write(
    make: Callable[[], Layer], encode: Callable[[bytes], bytes]
) -> None:
    here, there = make(), make()
    for data in (b"PUB t\n", b"x", DATA, b"FIN"):
        assert decode(there, here.encode(data), 700) == data


def test_empty_deflate_blocks_are_nothing() -> None:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    empty = b"\0\0\0\xff\xff"
    data = empty + compressor.compress(b"one") + compressor.flush(zlib.Z_SYNC_FLUSH) + empty * 3
    data += compressor.compress(b"two") + compressor.flush(zlib.Z_SYNC_FLUSH)
    assert decode(DeflateLayer(1), data, 1) == b"onetwo"


@pytest.mark.parametrize("make", [lambda: DeflateLayer(6), SnappyLayer], ids=["deflate", "snappy"])
def test_garbage_is_a_protocol_error(make: Callable[[], Layer]) -> None:
    for data in (b"\xff" * 100, b"HTTP/1.1 200 OK\r\n\r\n" * 20, b"\x07" * 300):
        with pytest.raises(RemoteProtocolError, match="broken"):
            decode(make(), data, 1 << 20)


def test_damaged_snappy_chunk_is_a_protocol_error() -> None:
    data = bytearray(snapped(DATA[:4000]))
    data[2000] ^= 1  # the checksum notices
    with pytest.raises(RemoteProtocolError, match="snappy"):
        decode(SnappyLayer(), bytes(data), 64)


def test_snappy_chunk_above_the_limit_of_the_format_is_refused_by_its_header() -> None:
    layer = SnappyLayer()
    layer.feed(snapped(b"x")[:10] + b"\x00\xff\xff\xff")
    with pytest.raises(RemoteProtocolError, match="chunk"):
        layer.read()


def test_end_of_a_deflate_stream_is_a_protocol_error() -> None:
    with pytest.raises(RemoteProtocolError, match="ended"):
        decode(DeflateLayer(6), deflated(b"bye", zlib.Z_FINISH), 100)


def test_deflate_bomb_comes_in_pieces() -> None:
    layer = DeflateLayer(6)
    layer.feed(deflated(bytes(64 << 20)))
    pieces = [layer.read() for _ in range(10)]
    assert [len(piece) for piece in pieces] == [PIECE_SIZE] * 10


def test_snappy_bomb_is_bounded_by_the_format() -> None:
    bomb = snapped(bytes(16 << 20))
    layer = SnappyLayer()
    layer.feed(bomb[:PIECE_SIZE])
    assert len(layer.read()) <= 32 * PIECE_SIZE


RECORD = 16 * 1024


class TlsEnd:
    """The server's end of a TLS stream in memory, and the layer that is the other one, shaken hands."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(context)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.layer = TlsLayer(ConnectionConfig(tls_options={"cafile": str(folder / "ca.pem")}), "localhost")
        while not (self.layer.try_handshake() and self._is_done()):
            self._incoming.write(self.layer.take_outgoing())
            self._is_done()
            self.layer.feed(self._outgoing.read())

    def _is_done(self) -> bool:
        self._incoming.write(self.layer.take_outgoing())
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def records(self, data: bytes) -> bytes:
        for start in range(0, len(data), RECORD):
            self._tls.write(data[start : start + RECORD])
        return self._outgoing.read()


def test_the_records_of_one_read_are_one_piece(tmp_path: Path) -> None:
    end = TlsEnd(tmp_path)
    end.layer.feed(end.records(DATA))
    pieces = []
    while piece := end.layer.read():
        pieces.append(piece)
    assert b"".join(pieces) == DATA
    assert max(map(len, pieces)) == PIECE_SIZE
    assert len(pieces) == -(-len(DATA) // PIECE_SIZE)


def test_what_comes_before_a_broken_record_is_read(tmp_path: Path) -> None:
    end = TlsEnd(tmp_path)
    whole = end.records(DATA[:RECORD])
    broken = bytearray(end.records(DATA[RECORD : 2 * RECORD]))
    broken[-1] ^= 1
    end.layer.feed(whole + bytes(broken))
    assert end.layer.read() == DATA[:RECORD]
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match="broken TLS stream"):
            end.layer.read()
