"""Connecting: the handshake, TLS and compression, hosts, and what can go wrong in each; layers as transformations."""

from __future__ import annotations

import logging
import random
import re
import socket
import ssl
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import gevent
import pytest
import snappy
import trustme
from cryptography.hazmat.primitives import serialization
from gevent.event import Event
from gevent.ssl import PROTOCOL_TLS_SERVER, SSLContext, create_default_context
from support.peers import PeerServer
from support.processes import run_python
from support.scripted_nsqd import heard, noting
from support.servers import free_address
from support.waiting import PROCESS, WAIT, promptly, until
from support.wire import message_frame

from nsq_fast import Consumer, NsqdHTTPClient, Producer
from nsq_fast._snappy_chunks import crc32c
from nsq_fast.broker import Broker, BrokerProcess
from nsq_fast.client.connection import Connection
from nsq_fast.client.gevent_loop import GeventLoop, run
from nsq_fast.client.layers import PIECE_SIZE, DeflateLayer, Layer, SnappyLayer
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    AuthFailed,
    AuthFirst,
    ConfigError,
    ConnectFailed,
    ConnectionLost,
    HttpError,
    IdentifyFailed,
    NoNsqd,
    RemoteProtocolError,
)
from nsq_fast.names import Address


def connect(address, owner=None, **options):
    """A connection, once it is open."""
    conn = Connection(address, ConnectionConfig(**options), owner or Mock(), GeventLoop.here())
    run(conn.open())
    return conn


@pytest.fixture
def connect_to(servers):
    """``connect_to(script, **options)``: connect to a server that runs the script."""
    connections = []

    def make(script, host="127.0.0.1", owner=None, **options):
        connections.append(connect(servers(script, host, kind=PeerServer).address, owner, **options))
        return connections[-1]

    yield make
    for conn in connections:
        conn.close(ConnectionLost("the test is over"))


# Stages


STAGES = {
    "at once": lambda peer: None,
    "after the magic": lambda peer: peer.read(4),
    "inside the reply": lambda peer: (peer.read_identify(), peer.send(b"\0\0\1\x34\0\0\0\0{")),
    "before the upgrade": lambda peer: peer.handshake(deflate=True),
    "before the reply to AUTH": lambda peer: (peer.handshake(auth_required=True), peer.read_line()),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ending", ["end", "reset", "silence"])
def test_connection_that_ends_during_the_handshake(connect_to, stage, ending):
    def script(peer):
        STAGES[stage](peer)
        if ending == "reset":
            peer.reset()
        if ending == "silence":
            peer.read_all()

    options = {"deflate": stage == "before the upgrade", "auth_secret": "x"}
    if ending != "silence":
        with pytest.raises(ConnectFailed) as caught:
            connect_to(script, **options)
        assert isinstance(caught.value.__cause__, OSError)
        return
    awaited = {"before the upgrade": "the upgrade", "before the reply to AUTH": "AUTH, for"}.get(stage, "IDENTIFY")
    with promptly(), pytest.raises(ConnectFailed, match=rf"not connected within 0\.1 s: no reply .*{awaited}"):
        connect_to(script, connect_timeout=0.1, **options)


@pytest.mark.parametrize(
    ("before", "reply", "error"),
    [
        (lambda peer: peer.handshake(auth_required=True), b"", AuthFirst),
        (STAGES["before the reply to AUTH"], b"E_AUTH_FAILED AUTH failed", AuthFailed),
        (lambda peer: peer.read_identify(), b"E_IDENTIFY_FAILED", IdentifyFailed),
    ],
)
def test_what_a_server_refuses_is_its_error(connect_to, before, reply, error):
    def script(peer):
        before(peer)
        if reply:
            peer.frame(1, reply)
        peer.read_all()

    with pytest.raises(ConnectFailed) as caught:
        connect_to(script, auth_secret=None if error is AuthFirst else "wrong")
    assert isinstance(caught.value.__cause__, error)
    if error is AuthFailed:
        assert re.search("auth server refuses auth_secret.*log of nsqd", str(caught.value)), "where to look"


def test_killed_connect_closes_its_socket(servers):
    ended, arrived = Event(), Event()

    def script(peer):
        peer.read_identify()
        arrived.set()
        peer.read_all()
        ended.set()

    attempt = gevent.spawn(connect, servers(script, kind=PeerServer).address)
    arrived.wait()
    attempt.kill()
    assert ended.wait(WAIT)


# Hosts


def answer(peer):
    peer.handshake()
    peer.read_all()


def has_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@needs_ipv6
def test_ipv6(connect_to):
    assert connect_to(answer, host="::1").local_address.host == "::1"
    listening = {"tcp": ("::1", 0), "http": ("::1", 0)}
    seen = []
    with Broker(addresses={"nsqds": [listening], "lookupd": listening}, broadcast_address="::1") as broker:
        lookups = {"lookupd_http_addresses": str(broker.lookupd.http_address), "lookupd_poll_interval": 0.1}
        with Producer(**lookups) as producer:
            assert producer.publish("t", b"x") == b"OK"
        with Consumer("t", "c", message_handler=noting(seen), **lookups):
            until(lambda: seen == [b"x"])


def test_addresses_and_local_addresses(servers, connect_to):
    server = servers(answer, kind=PeerServer)  # on IPv4 only; localhost may have an IPv6 address first: each is tried
    connect(Address("localhost", server.address.port)).close()
    assert connect_to(answer, local_address="127.0.0.2").local_address.host == "127.0.0.2"


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_cannot_be_encoded_is_named_and_leaves_its_share_to_the_others(servers, host):
    nsqd = servers()
    consumer = Consumer("t", "c", [(host, 4150), tuple(nsqd.address)], message_handler=print, max_in_flight=10)
    errors = heard(consumer)
    with consumer:
        nsqd.connection().wait_rdy(10)
        until(lambda: errors)
    assert "is no host name" in str(errors[0])
    with Producer([(host, 4150)]) as producer:
        with pytest.raises(NoNsqd, match="is no host name"):
            producer.publish("t", b"x", timeout=0.3)
        assert not producer.is_connected
    with pytest.raises(HttpError, match="is no host name"):
        NsqdHTTPClient(host).ping()


def test_a_consumer_warns_once_of_an_nsqd_that_is_away(caplog):
    def told():
        return [record.levelname for record in caplog.records if getattr(record, "event", "") == "subscription_failed"]

    with (
        caplog.at_level(logging.INFO, "nsq_fast.consumer"),
        Consumer("t", "c", free_address(), message_handler=print, max_reconnect_delay=0.01),
    ):
        until(lambda: len(told()) > 3)
    assert told()[:4] == ["WARNING", "INFO", "INFO", "INFO"]


IN_ONE_THREAD = """
import sys
from gevent import get_hub
from nsq_fast import Consumer, NsqdHTTPClient, Producer
tcp, http, lookupd = sys.argv[1:]
NsqdHTTPClient.from_url(http).create_topic("t")
with Producer(tcp) as producer, Consumer("t", "c", lookupd_http_addresses=lookupd) as consumer:
    producer.publish("t", b"body")
    next(iter(consumer))
print(get_hub().threadpool.size)
"""


def test_addresses_are_connected_to_without_a_thread_of_the_resolver():
    """A process without threads may fork without the warning that CPython has for it from 3.12 on."""
    with BrokerProcess() as broker:
        addresses = [str(each) for each in (broker.nsqd.tcp, broker.nsqd.http, broker.lookupd.http)]
        done = run_python(IN_ONE_THREAD, *addresses)
    assert (done.stdout, done.stderr) == ("0\n", "")


# TLS and compression


@pytest.fixture
def tls(authority, tmp_path):
    """``tls(*names, wants_client=False)``: the script of a server with a certificate for these names."""

    def make(*names, wants_client=False):
        context = SSLContext(PROTOCOL_TLS_SERVER)
        authority.issue_cert(*names).configure_cert(context)
        if wants_client:
            authority.configure_trust(context)
            context.verify_mode = ssl.CERT_REQUIRED

        def script(peer):
            peer.handshake(tls_v1=True)
            peer.start_tls(context)
            peer.ok()
            peer.read_all()

        return script

    return make


def refused(call):
    with pytest.raises(ConnectFailed) as caught:
        call()
    assert isinstance(caught.value.__cause__, ssl.SSLError)
    return str(caught.value)


def test_the_certificate_is_verified_unless_that_is_switched_off(connect_to, tls, tls_files):
    here, elsewhere = tls("127.0.0.1"), tls("nsqd.example.org")
    trusted = {"cafile": tls_files["ca"]}
    for script, options, said in (
        (here, None, "verify failed"),
        (here, {"verify": False}, None),
        (here, {"cert_reqs": ssl.CERT_NONE}, None),
        (here, trusted, None),
        (here, ssl.create_default_context(cafile=tls_files["ca"]), None),
        (here, create_default_context(cafile=tls_files["ca"]), None),  # of gevent
        (elsewhere, trusted, "127.0.0.1"),
        (elsewhere, {**trusted, "server_hostname": "nsqd.example.org"}, None),
    ):
        given = {"tls_v1": True, "tls_options": options}
        if said is None:
            assert connect_to(script, **given).info.tls_v1
        else:
            assert said in refused(lambda script=script, given=given: connect_to(script, **given))


def test_client_certificate(connect_to, tls, tls_files, authority: trustme.CA, tmp_path):
    script, pem = tls("127.0.0.1", wants_client=True), str(tmp_path / "client.pem")
    authority.issue_cert("client@example.org").private_key_and_cert_chain_pem.write_to_path(pem)
    options = {"ca_certs": tls_files["ca"], "certfile": pem, "keyfile": pem}
    assert connect_to(script, tls_v1=True, tls_options=options)


def test_a_key_that_cannot_be_used_is_told_and_nobody_is_asked_for_a_passphrase(tls_files, tmp_path):
    pem = Path(tls_files["key"]).read_bytes()
    locked = serialization.load_pem_private_key(pem, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"passphrase"),
    )
    (tmp_path / "locked.pem").write_bytes(locked)
    for keyfile, said in (
        (str(tmp_path / "locked.pem"), "the key is encrypted: decrypt it"),
        (None, "with its key in the same file"),
    ):
        options = {"certfile": tls_files["cert"]} | ({"keyfile": keyfile} if keyfile else {})
        with pytest.raises(ConfigError, match=said):
            Producer("127.0.0.1:1", tls_v1=True, tls_options=options)


def test_verification_is_switched_off_by_nothing_but_false_and_a_secret_is_not_empty():
    for verify in ("no", "false", 0, None):
        with pytest.raises(ConfigError, match=r"verify=.*: must be True or False"):
            Producer("127.0.0.1:1", tls_v1=True, tls_options={"verify": verify})
    for secret in ("", b""):
        with pytest.raises(ConfigError, match="auth_secret: it is empty"):
            Producer("127.0.0.1:1", auth_secret=secret)


def test_a_file_of_tls_that_cannot_be_used_now_is_a_failed_connection(connect_to, tls):
    """It is read for each connection, and somebody may just be renewing it. A client checks it when it is made."""
    with pytest.raises(ConnectFailed, match="/no/such/file"):
        connect_to(tls("127.0.0.1"), tls_v1=True, tls_options={"cafile": "/no/such/file"})


def test_server_that_does_not_speak_tls_after_all(connect_to):
    def script(peer):
        peer.handshake(tls_v1=True)
        peer.ok()
        peer.read_all()

    refused(lambda: connect_to(script, tls_v1=True))


@pytest.mark.parametrize("kind", [0, 2])
def test_deflate_bomb_takes_no_memory(connect_to, kind):
    """In a message it is skipped; any other frame ends the connection at the limit."""

    def script(peer):
        peer.handshake(deflate=True)
        peer.start_deflate()
        peer.ok()
        assert peer.read_line() == b"SUB t c"
        peer.ok()
        if kind == 0:
            peer.frame(0, b"\0" * (32 << 20))
        else:
            peer.send(message_frame(1, b"\0" * (32 << 20)) + message_frame(2))
        peer.read_all()

    owner = Mock()
    conn = connect_to(script, owner=owner, deflate=True, max_frame_size=1 << 20)
    run(conn.subscribe("t", "c"))
    if kind == 0:
        until(lambda: owner.on_disconnect.called)
        _, end = owner.on_disconnect.call_args.args
        assert isinstance(end, RemoteProtocolError)
        assert "max_frame_size=1048576" in str(end)
        return
    until(lambda: owner.on_messages.called)
    _, skipped, error = owner.on_message_skipped.call_args.args
    assert (skipped.body, skipped.is_truncated) == (b"", True)
    assert "max_frame_size=1048576" in str(error)
    assert [each.body for each in owner.on_messages.call_args.args[1]] == [b"body"]


PROGRAM = """
import sys
if sys.argv[1] == "before":
    from gevent import monkey; monkey.patch_all()
from nsq_fast import Producer
if sys.argv[1] == "after":
    from gevent import monkey; monkey.patch_all()
import socket, threading
assert (socket.socket.__module__ != "socket") == (sys.argv[1] != "never")
with Producer(sys.argv[2], tls_v1=True, snappy=True, tls_options={"cafile": sys.argv[3]}) as producer:
    print(producer.publish("t", b"x"))
    if sys.argv[1] != "never":  # then the threads of ``threading`` are greenlets of one native thread
        thread = threading.Thread(target=producer.publish, args=("t", b"y"))
        thread.start()
        thread.join()
        print(producer.stats()["stored"])
"""


@pytest.mark.parametrize("patched", ["never", "before", "after"])
def test_patched_or_not(real_nsqd, tls_files, patched):
    nsqd = real_nsqd(f"-tls-cert={tls_files['cert']}", f"-tls-key={tls_files['key']}")
    run_it = [sys.executable, "-W", "ignore", "-c", PROGRAM, patched, str(nsqd.tcp_address), tls_files["ca"]]
    done = subprocess.run(run_it, capture_output=True, text=True, timeout=PROCESS, cwd=Path(__file__).parents[2])
    assert (done.stdout, done.stderr) == ("b'OK'\n" if patched == "never" else "b'OK'\n2\n", "")


# Snappy and deflate as transformations of bytes: whole, in pieces, broken, and as bombs


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


def test_empty_deflate_blocks_are_nothing() -> None:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    empty = b"\0\0\0\xff\xff"
    data = empty + compressor.compress(b"one") + compressor.flush(zlib.Z_SYNC_FLUSH) + empty * 3
    data += compressor.compress(b"two") + compressor.flush(zlib.Z_SYNC_FLUSH)
    assert decode(DeflateLayer(1), data, 1) == b"onetwo"


@pytest.mark.parametrize(("make", "encode"), LAYERS)
def test_garbage_is_a_protocol_error(make: Callable[[], Layer], encode: object) -> None:
    for data in (b"\xff" * 100, b"HTTP/1.1 200 OK\r\n\r\n" * 20, b"\x07" * 300):
        with pytest.raises(RemoteProtocolError, match="broken"):
            decode(make(), data, 1 << 20)


def test_end_of_a_deflate_stream_is_a_protocol_error() -> None:
    with pytest.raises(RemoteProtocolError, match="ended"):
        decode(DeflateLayer(6), deflated(b"bye", zlib.Z_FINISH), 100)


@pytest.mark.parametrize(("make", "encode"), LAYERS)
def test_a_bomb_comes_in_pieces(make: Callable[[], Layer], encode: Callable[[bytes], bytes]) -> None:
    layer = make()
    layer.feed(encode(bytes(16 << 20)))
    assert [len(layer.read()) for _ in range(10)] == [PIECE_SIZE] * 10


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
    for largest in (random.Random(3).randbytes(PIECE_SIZE), bytes(PIECE_SIZE)):
        assert decode(SnappyLayer(), compressed(largest) + uncompressed(largest), 1 << 20) == 2 * largest
