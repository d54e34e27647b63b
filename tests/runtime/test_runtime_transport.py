"""TLS and compression on real sockets, against a scripted server."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from gevent.ssl import PROTOCOL_TLS_SERVER, SSLContext, create_default_context
from support.blocking import Connection
from support.peers import Peer, PeerServer, RecordingOwner, message

from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConfigError, ConnectFailed, ConnectionLost, RemoteProtocolError
from nsq_fast.names import Address


class Authority:
    """A certificate authority with a server's certificate for 127.0.0.1 and localhost, and a client's."""

    def __init__(self, path: Path) -> None:
        self._ca = trustme.CA()
        self.cafile = str(path / "ca.pem")
        self.client_pem = str(path / "client.pem")
        self._ca.cert_pem.write_to_path(self.cafile)
        self._ca.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(self.client_pem)

    def server_context(self, *names: str, wants_client: bool = False) -> SSLContext:
        context = SSLContext(PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(*names).configure_cert(context)
        if wants_client:
            self._ca.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


Connect = Callable[..., tuple[Connection, RecordingOwner]]


@pytest.fixture
def connect_to() -> Iterator[Connect]:
    servers: list[PeerServer] = []
    connections: list[Connection] = []

    def make(script: Callable[[Peer], Any], host: str = "127.0.0.1", **options: Any) -> tuple[Connection, Any]:
        owner = RecordingOwner()
        servers.append(PeerServer(script))
        address = Address(host, servers[-1].address.port)
        connections.append(Connection(address, ConnectionConfig(**options), owner))
        connections[-1].connect()
        return connections[-1], owner

    yield make
    for conn in connections:
        conn.close(ConnectionLost("the test is over"))
    for server in servers:
        server.stop()


def tls_script(context: SSLContext) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.handshake(tls_v1=True)
        peer.start_tls(context)
        peer.ok()
        peer.read_all()

    return script


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_tls_with_a_certificate_for_the_host(connect_to: Connect, authority: Authority, host: str) -> None:
    script = tls_script(authority.server_context("127.0.0.1", "localhost"))
    conn, _ = connect_to(script, host, tls_v1=True, tls_options={"cafile": authority.cafile})
    assert conn.info.tls_v1


def refused(connect: Callable[[], Any]) -> str:
    with pytest.raises(ConnectFailed) as caught:
        connect()
    assert isinstance(caught.value.__cause__, ssl.SSLError)
    return str(caught.value)


def test_certificate_of_another_host_is_refused(connect_to: Connect, authority: Authority) -> None:
    script = tls_script(authority.server_context("nsqd.example.org"))
    options = {"cafile": authority.cafile}
    assert "127.0.0.1" in refused(lambda: connect_to(script, tls_v1=True, tls_options=options))
    options["server_hostname"] = "nsqd.example.org"
    assert connect_to(script, tls_v1=True, tls_options=options)


def test_unknown_authority_is_refused_unless_verification_is_off(connect_to: Connect, authority: Authority) -> None:
    script = tls_script(authority.server_context("127.0.0.1"))
    assert "verify failed" in refused(lambda: connect_to(script, tls_v1=True))
    assert connect_to(script, tls_v1=True, tls_options={"verify": False})
    assert connect_to(script, tls_v1=True, tls_options={"cert_reqs": ssl.CERT_NONE})


def test_client_certificate(connect_to: Connect, authority: Authority) -> None:
    script = tls_script(authority.server_context("127.0.0.1", wants_client=True))
    options = {"ca_certs": authority.cafile, "certfile": authority.client_pem, "keyfile": authority.client_pem}
    assert connect_to(script, tls_v1=True, tls_options=options)
    with pytest.raises(ConnectFailed):
        connect_to(script, tls_v1=True, tls_options={"cafile": authority.cafile})


@pytest.mark.parametrize("make", [ssl.create_default_context, create_default_context], ids=["ssl", "gevent"])
def test_ready_made_context(connect_to: Connect, authority: Authority, make: Callable[..., Any]) -> None:
    script = tls_script(authority.server_context("127.0.0.1"))
    assert connect_to(script, tls_v1=True, tls_options=make(cafile=authority.cafile))


@pytest.mark.parametrize("options", [{"ca_file": "x"}, {"cafile": "/no/such/file"}, 7])
def test_unusable_tls_options_are_a_config_error(connect_to: Connect, authority: Authority, options: Any) -> None:
    script = tls_script(authority.server_context("127.0.0.1"))
    with pytest.raises(ConfigError):
        connect_to(script, tls_v1=True, tls_options=options)


def test_server_that_does_not_speak_tls_after_all(connect_to: Connect) -> None:
    def script(peer: Peer) -> None:
        peer.handshake(tls_v1=True)
        peer.ok()
        peer.read_all()

    refused(lambda: connect_to(script, tls_v1=True))


def compressed(kind: str, context: SSLContext | None, then: Callable[[Peer], Any]) -> Callable[[Peer], None]:
    def script(peer: Peer) -> None:
        peer.handshake(**{kind: True, "tls_v1": context is not None})
        if context is not None:
            peer.start_tls(context)
            peer.ok()
        (peer.start_snappy if kind == "snappy" else peer.start_deflate)()
        peer.ok()
        assert peer.read_line() == b"SUB t c"
        peer.ok()
        then(peer)

    return script


@pytest.mark.parametrize("kind", ["snappy", "deflate"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_compression(connect_to: Connect, authority: Authority, kind: str, is_tls: bool) -> None:
    answers: list[bytes] = []

    def then(peer: Peer) -> None:
        peer.messages(1, 2, body=b"x" * 300_000)
        answers.append(peer.read_all())

    context = authority.server_context("127.0.0.1") if is_tls else None
    options = {kind: True, "tls_v1": is_tls, "tls_options": {"cafile": authority.cafile}}
    conn, owner = connect_to(compressed(kind, context, then), **options)
    conn.subscribe("t", "c")
    owner.wait(lambda: len(owner.messages) == 2)
    for got in owner.messages:
        got.finish()
    conn.close()
    assert [got.body for got in owner.messages] == [b"x" * 300_000] * 2
    assert answers == [b"FIN %016x\nFIN %016x\n" % (1, 2)]


@pytest.mark.parametrize("kind", ["snappy", "deflate"])
def test_first_compressed_frame_in_one_read_with_the_reply(connect_to: Connect, kind: str) -> None:
    sent: list[bytes] = []

    def script(peer: Peer) -> None:
        sendall = peer.sock.sendall
        peer.read_identify()
        peer.sock = Collecting(peer.sock, sent)
        peer.frame(0, b'{"%s":true}' % kind.encode())
        (peer.start_snappy if kind == "snappy" else peer.start_deflate)()
        peer.ok()
        sendall(b"".join(sent))
        peer.read_all()

    conn, _ = connect_to(script, **{kind: True})
    assert conn.is_open
    assert len(sent) == 2


class Collecting:
    """A socket whose ``sendall`` only writes down."""

    def __init__(self, sock: Any, sent: list[bytes]) -> None:
        self._sock = sock
        self._sent = sent

    def sendall(self, data: bytes) -> None:
        self._sent.append(bytes(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@pytest.mark.parametrize("kind", ["snappy", "deflate"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_stream_that_breaks(connect_to: Connect, authority: Authority, kind: str, is_tls: bool) -> None:
    def then(peer: Peer) -> None:
        peer.messages(1)
        assert peer.read_line().startswith(b"FIN ")
        peer.sock.sendall(b"\xff\x03garbage" * 50)
        peer.read_all()

    context = authority.server_context("127.0.0.1") if is_tls else None
    options = {kind: True, "tls_v1": is_tls, "tls_options": {"cafile": authority.cafile}}
    conn, owner = connect_to(compressed(kind, context, then), **options)
    conn.subscribe("t", "c")
    owner.wait(lambda: owner.messages)
    owner.messages[0].finish()
    assert isinstance(owner.wait_end(), RemoteProtocolError)


def test_tls_stream_that_breaks(connect_to: Connect, authority: Authority) -> None:
    def script(peer: Peer) -> None:
        peer.handshake(tls_v1=True)
        peer.start_tls(authority.server_context("127.0.0.1"))
        peer.ok()
        peer.read_line()
        os.write(peer.sock.fileno(), b"this is not a TLS record" * 10)
        peer.read_all()

    conn, owner = connect_to(script, tls_v1=True, tls_options={"cafile": authority.cafile})
    conn.write(b"NOP\n")
    assert isinstance(owner.wait_end(), RemoteProtocolError)


@pytest.mark.parametrize("kind", [0, 1])
def test_deflate_bomb_ends_at_the_frame_limit(connect_to: Connect, kind: int) -> None:
    def then(peer: Peer) -> None:
        peer.frame(kind, b"\0" * (32 << 20))
        peer.read_all()

    conn, owner = connect_to(compressed("deflate", None, then), deflate=True, max_frame_size=1 << 20)
    conn.subscribe("t", "c")
    end = owner.wait_end()
    assert isinstance(end, RemoteProtocolError)
    assert "max_frame_size=1048576" in str(end)


def test_deflate_bomb_in_a_message_takes_no_memory(connect_to: Connect) -> None:
    def then(peer: Peer) -> None:
        peer.send(message(1, b"\0" * (32 << 20)) + message(2))
        peer.read_all()

    conn, owner = connect_to(compressed("deflate", None, then), deflate=True, max_frame_size=1 << 20)
    conn.subscribe("t", "c")
    owner.wait(lambda: owner.messages)
    ((skipped, error),) = owner.skipped
    assert (skipped.body, skipped.is_truncated) == (b"", True)
    assert "max_frame_size=1048576" in str(error)
    assert owner.messages[0].body == b"body"
