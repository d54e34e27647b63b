"""TLS, snappy and deflate from the client's side, by hand; the same on a real nsqd."""

from __future__ import annotations

import json
import ssl
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import snappy
import trustme
from gevent import Timeout, socket
from gevent.ssl import SSLContext
from support.http import ask
from support.waiting import WAIT

COMPRESSIBLE = b"nsq " * 20000


class Layered:
    """A client whose stream has the layers that IDENTIFY asked for."""

    def __init__(self, address: Any, context: SSLContext | None = None, **fields: Any) -> None:
        self.sock: Any = socket.create_connection(address)
        self.compress: Any = lambda data: data
        self.decompress: Any = lambda data: data
        self.buffer = b""
        body = json.dumps({"feature_negotiation": True, "tls_v1": context is not None, **fields}).encode()
        self.send(b"  V2IDENTIFY\n" + struct.pack(">i", len(body)) + body)
        self.info = json.loads(self.frame())
        if context is not None:
            self.sock = context.wrap_socket(self.sock, server_hostname="localhost")
            assert self.frame() == b"OK"
        if fields.get("snappy"):
            self._compressed(snappy.StreamCompressor().add_chunk, snappy.StreamDecompressor().decompress)
        if fields.get("deflate"):
            compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
            self._compressed(
                lambda data: compressor.compress(data) + compressor.flush(zlib.Z_SYNC_FLUSH),
                zlib.decompressobj(-15).decompress,
            )

    def _compressed(self, compress: Any, decompress: Any) -> None:
        self.compress, self.decompress = compress, decompress
        # The first bytes inside the layer may have come with the last ones outside.
        self.buffer = decompress(self.buffer) if self.buffer else b""
        assert self.frame() == b"OK"

    def send(self, data: bytes) -> None:
        self.sock.sendall(self.compress(data))

    def read(self, count: int) -> bytes:
        while len(self.buffer) < count:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self.buffer += self.decompress(data)
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data

    def frame(self) -> bytes:
        return self.read(struct.unpack(">i4x", self.read(8))[0] - 4)

    def ask(self, data: bytes) -> bytes:
        self.send(data)
        return self.frame()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    """Options of an nsqd with a certificate for localhost."""
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}


@pytest.fixture
def context(authority: trustme.CA) -> SSLContext:
    context = SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.configure_trust(context)
    return context


def exchange(client: Layered) -> None:
    """Publish and consume, small and large."""
    assert client.ask(b"SUB t c\n") == b"OK"
    client.send(b"RDY 10\n")
    for body in (b"small", COMPRESSIBLE):
        client.send(b"PUB t\n" + struct.pack(">i", len(body)) + body)
        frames = [client.frame(), client.frame()]
        frames.remove(b"OK")
        assert frames[0][26:] == body
        client.send(b"FIN " + frames[0][10:26] + b"\n")
    client.send(b"PUB t\n\0\0\0\1x" * 300)
    assert [client.frame() for _ in range(310)].count(b"OK") == 300


LAYERS: dict[str, dict[str, Any]] = {
    "none": {},
    "snappy": {"snappy": True},
    "deflate": {"deflate": True},
    "deflate 1": {"deflate": True, "deflate_level": 1},
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_compression(address: Any, layers: dict[str, Any]) -> None:
    client = Layered(address, **layers)
    assert {name: client.info[name] for name in layers} == layers
    exchange(client)


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_tls(start_nsqd: Any, tls: Any, context: SSLContext, layers: dict[str, Any]) -> None:
    client = Layered(start_nsqd(**tls).tcp_address, context, **layers)
    assert client.info["tls_v1"] is True
    exchange(client)


def test_tls_below_the_lowest_version_is_refused(start_nsqd: Any, tls: Any, context: SSLContext) -> None:
    server = start_nsqd(**tls, tls_min_version="tls1.3")
    assert Layered(server.tcp_address, context).info["tls_v1"] is True
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError):  # noqa: PT011
        exchange(Layered(server.tcp_address, context))


def test_deflate_level_is_capped(address: Any) -> None:
    assert Layered(address, deflate=True, deflate_level=9).info["deflate_level"] == 6


def test_layers_that_are_not_offered_are_not_put_on(start_nsqd: Any) -> None:
    client = Layered(start_nsqd(deflate=False).tcp_address, deflate=False)
    assert client.info["deflate"] is False
    plain = Layered(start_nsqd(snappy=False).tcp_address)
    assert plain.info["tls_v1"] is False


def test_required_tls(start_nsqd: Any, tls: Any, context: SSLContext) -> None:
    address = start_nsqd(**tls, tls_required="true").tcp_address
    refused = Layered(address)
    assert refused.ask(b"SUB t c\n") == b"E_INVALID cannot SUB in current state (TLS required)"
    exchange(Layered(address, context))


def test_required_client_certificate(
    start_nsqd: Any, tls: Any, context: SSLContext, authority: trustme.CA, tmp_path: Path
) -> None:
    options = {**tls, "tls_client_auth_policy": "require-verify", "tls_root_ca_file": str(tmp_path / "ca.pem")}
    address = start_nsqd(**options).tcp_address
    with pytest.raises((OSError, EOFError)):
        Layered(address, context)
    authority.issue_cert("client@example.org", common_name="client").configure_cert(context)
    exchange(Layered(address, context))


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_server_ends_a_layered_connection(
    start_nsqd: Any, tls: Any, context: SSLContext, layers: dict[str, Any]
) -> None:
    server = start_nsqd(**tls)
    client = Layered(server.tcp_address, context, **layers)
    assert client.ask(b"SUB t c\n") == b"OK"
    ask(server.http_address, "POST", "/channel/delete?topic=t&channel=c")
    with Timeout(WAIT, AssertionError("not closed")), pytest.raises((EOFError, OSError)):
        client.frame()


@pytest.mark.parametrize("layer", ["snappy", "deflate"])
def test_a_broken_stream_ends_the_connection(address: Any, layer: str) -> None:
    client = Layered(address, **{layer: True})
    client.sock.sendall(b"\xff\xfe this is neither " * 20)
    with Timeout(WAIT, AssertionError("not closed")), pytest.raises((EOFError, OSError)):
        client.frame()


def test_a_handshake_that_is_none_ends_the_connection(start_nsqd: Any, tls: Any) -> None:
    client = Layered(start_nsqd(**tls).tcp_address, tls_v1=True)
    client.sock.sendall(b"PUB t\n\0\0\0\1x")
    with Timeout(WAIT, AssertionError("not closed")), pytest.raises((EOFError, OSError)):
        client.read(1000)


def test_what_inflates_is_read_in_pieces(embedded: Any) -> None:
    client = Layered(embedded(max_msg_size=64 * 1024 * 1024, max_body_size=64 * 1024 * 1024).tcp_address, deflate=True)
    bomb = b"\0" * (32 * 1024 * 1024)
    assert client.ask(b"PUB t\n" + struct.pack(">i", len(bomb)) + bomb) == b"OK"
