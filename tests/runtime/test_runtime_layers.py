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

from nsq_fast._snappy_chunks import crc32c
from nsq_fast.client.layers import PIECE_SIZE, DeflateLayer, Layer, SnappyLayer, TlsLayer
from nsq_fast.client.tls import client_context
from nsq_fast.errors import RemoteProtocolError

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


def test_end_of_a_deflate_stream_is_a_protocol_error() -> None:
    with pytest.raises(RemoteProtocolError, match="ended"):
        decode(DeflateLayer(6), deflated(b"bye", zlib.Z_FINISH), 100)


def test_deflate_bomb_comes_in_pieces() -> None:
    layer = DeflateLayer(6)
    layer.feed(deflated(bytes(64 << 20)))
    pieces = [layer.read() for _ in range(10)]
    assert [len(piece) for piece in pieces] == [PIECE_SIZE] * 10


@pytest.mark.parametrize("more", [0, 1, 100, 257, 258, 259, 1000])
def test_what_one_deflate_piece_had_no_room_for_needs_no_more_bytes(more: int) -> None:
    """The decompressor may have taken in all there is, and keep what it makes of the end: a match of 258 bytes."""
    layer = DeflateLayer(6)
    layer.feed(deflated(bytes(PIECE_SIZE + more)))
    got = 0
    while piece := layer.read():
        got += len(piece)
    assert got == PIECE_SIZE + more
    assert not layer.holds_more()


def test_snappy_bomb_comes_in_pieces() -> None:
    layer = SnappyLayer()
    layer.feed(snapped(bytes(16 << 20))[: 2 * PIECE_SIZE])
    pieces = [layer.read() for _ in range(10)]
    assert [len(piece) for piece in pieces] == [PIECE_SIZE] * 10


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
        self.layer = TlsLayer(client_context({"cafile": str(folder / "ca.pem")}), "localhost")
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


IDENTIFIER = b"\xff\x06\x00\x00sNaPpY"


def chunk(kind: int, content: bytes) -> bytes:
    return bytes([kind]) + len(content).to_bytes(3, "little") + content


def masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def uncompressed(data: bytes) -> bytes:
    return chunk(0x01, masked_crc(data) + data)


def compressed(data: bytes, block: bytes | None = None) -> bytes:
    return chunk(0x00, masked_crc(data) + (snappy.compress(data) if block is None else block))


# RFC 3720, B.4
@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_the_checksum_is_the_standards_one(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc32c(data, by_table=True) == crc


@pytest.mark.parametrize("size", [1, 5, 1 << 20])
def test_chunks_of_all_kinds_are_read(size: int) -> None:
    stream = IDENTIFIER + chunk(0xFE, bytes(10)) + uncompressed(b"one ") + chunk(0x80, b"") + compressed(b"two ")
    stream += IDENTIFIER + compressed(b"") + uncompressed(b"") + chunk(0xFE, b"x") + uncompressed(b"three")
    assert decode(SnappyLayer(), stream, size) == b"one two three"


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(chunk(0x02, bytes(8)), id="reserved kind"),
        pytest.param(chunk(0x7F, bytes(8)), id="last reserved kind"),
        pytest.param(chunk(0xFF, b"snappy"), id="other identifier"),
        pytest.param(chunk(0xFF, b"sNaPpY!"), id="long identifier"),
        pytest.param(chunk(0x00, b"abc"), id="no room for a checksum"),
        pytest.param(chunk(0x00, b"abcd"), id="no size"),
        pytest.param(compressed(b"x", b"\x80"), id="half a size"),
        pytest.param(compressed(b"x", b"\x81\x80\x04"), id="above 64 KiB when decompressed"),
        pytest.param(compressed(b"x", b"\x80\x80\x80\x80\x01"), id="a size of gigabytes"),
        pytest.param(chunk(0x01, bytes(4 + PIECE_SIZE + 1)), id="above 64 KiB"),
        pytest.param(compressed(b"x", b"\x01\xff\xff\xff"), id="no block of snappy"),
        pytest.param(compressed(b"xx", b"\x02\x00x"), id="less than its size"),
        pytest.param(compressed(b"one", snappy.compress(b"two")), id="another checksum"),
        pytest.param(chunk(0x01, masked_crc(b"one") + b"two"), id="another checksum, uncompressed"),
        pytest.param(compressed(b"one", b"\x00" + snappy.compress(b"one")[1:]), id="a size of nothing, and a block"),
        pytest.param(compressed(b"one", b"\x00"), id="another checksum of nothing"),
        pytest.param(chunk(0x01, masked_crc(b"one")), id="another checksum of nothing, uncompressed"),
    ],
)
def test_what_comes_before_a_broken_chunk_is_read(broken: bytes) -> None:
    layer = SnappyLayer()
    layer.feed(IDENTIFIER + compressed(b"before") + broken + compressed(b"behind"))
    assert layer.read() == b"before"
    for _ in range(2):
        with pytest.raises(RemoteProtocolError, match=r"broken snappy stream: .*chunk"):
            layer.read()


def test_chunks_are_read_in_pieces_of_64_kib_at_most() -> None:
    chunks = [DATA[start : start + 20_000] for start in range(0, 200_000, 20_000)]
    layer = SnappyLayer()
    layer.feed(b"".join(map(compressed, chunks)))
    pieces = []
    while piece := layer.read():
        pieces.append(piece)
    assert b"".join(pieces) == b"".join(chunks)
    assert [len(piece) for piece in pieces] == [60_000, 60_000, 60_000, 20_000]


def test_the_largest_chunks_are_read() -> None:
    noise = random.Random(3).randbytes(PIECE_SIZE)
    for data in (noise, bytes(PIECE_SIZE)):
        assert decode(SnappyLayer(), compressed(data) + uncompressed(data), 1 << 20) == data + data
