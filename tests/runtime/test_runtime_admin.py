"""The HTTP clients of nsqd and nsqlookupd, against real and scripted servers."""

from __future__ import annotations

import json
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import gevent
import gevent.subprocess
import pytest
import trustme
from gevent.event import Event
from gevent.pywsgi import WSGIServer
from gevent.server import StreamServer
from gevent.socket import socket as Socket
from support.servers import RealLookupd, RealNsqd
from support.waiting import PROCESS, WAIT, promptly, until

from nsq_fast.client.admin import AdminClient, LookupdHTTPClient, LookupPoller, NsqdHTTPClient
from nsq_fast.client.http import Endpoint, HttpClient, parse_endpoint
from nsq_fast.config import LookupConfig
from nsq_fast.errors import BodyInvalid, ConfigError, HttpError, NameInvalid, RemoteProtocolError


class Recorder:
    """A WSGI server that notes requests and gives the answer of the moment."""

    def __init__(self, host: str = "127.0.0.1", **options: Any) -> None:
        self.requests: list[tuple[str, str, bytes]] = []
        self.headers: list[dict[str, str]] = []
        self.client_ports: set[str] = set()
        self.status = "200 OK"
        self.body = b"OK"
        self.server = WSGIServer((host, 0), self._serve, log=None, error_log=None, **options)
        self.server.start()
        self.port: int = self.server.server_port

    def _serve(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        query = environ["QUERY_STRING"]
        target = environ["PATH_INFO"] + (f"?{query}" if query else "")
        self.requests.append((environ["REQUEST_METHOD"], target, environ["wsgi.input"].read()))
        self.client_ports.add(environ["REMOTE_PORT"])
        self.headers.append({name: value for name, value in environ.items() if name.startswith("HTTP_")})
        start_response(self.status, [("Content-Length", str(len(self.body)))])
        return [self.body]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    server = Recorder()
    yield server
    server.server.stop(timeout=0)


@pytest.fixture
def nsqd_client(recorder: Recorder) -> Iterator[NsqdHTTPClient]:
    with NsqdHTTPClient("127.0.0.1", recorder.port) as client:
        yield client


@pytest.fixture
def lookupd(recorder: Recorder) -> Iterator[LookupdHTTPClient]:
    with LookupdHTTPClient("127.0.0.1", recorder.port) as client:
        yield client


# What goes out

NSQD_ROUTES: list[tuple[Callable[[NsqdHTTPClient], Any], tuple[str, str, bytes]]] = [
    (lambda c: c.ping(), ("GET", "/ping", b"")),
    (lambda c: c.publish("t", b"x"), ("POST", "/pub?topic=t", b"x")),
    (lambda c: c.publish("t#ephemeral", memoryview(b"x")), ("POST", "/pub?topic=t%23ephemeral", b"x")),  # type: ignore[arg-type]
    (lambda c: c.publish("t", b"x", 500), ("POST", "/pub?topic=t&defer=500", b"x")),
    (lambda c: c.publish("t", b"x", partition=2), ("POST", "/pub?topic=t&partition=2", b"x")),
    (lambda c: c.multipublish("t", iter([b"x", b"y"])), ("POST", "/mpub?topic=t", b"x\ny")),
    (
        lambda c: c.multipublish("t", [b"x\n", b"yz"], binary=True),
        ("POST", "/mpub?topic=t&binary=true", b"\0\0\0\2\0\0\0\2x\n\0\0\0\2yz"),
    ),
    (lambda c: c.create_topic("t"), ("POST", "/topic/create?topic=t", b"")),
    (lambda c: c.delete_topic("t"), ("POST", "/topic/delete?topic=t", b"")),
    (lambda c: c.empty_topic("t"), ("POST", "/topic/empty?topic=t", b"")),
    (lambda c: c.pause_topic("t"), ("POST", "/topic/pause?topic=t", b"")),
    (lambda c: c.unpause_topic("t"), ("POST", "/topic/unpause?topic=t", b"")),
    (lambda c: c.create_channel("t", "c"), ("POST", "/channel/create?topic=t&channel=c", b"")),
    (lambda c: c.delete_channel("t", "c"), ("POST", "/channel/delete?topic=t&channel=c", b"")),
    (lambda c: c.empty_channel("t", "c"), ("POST", "/channel/empty?topic=t&channel=c", b"")),
    (lambda c: c.pause_channel("t", "c"), ("POST", "/channel/pause?topic=t&channel=c", b"")),
    (
        lambda c: c.unpause_channel("t", "c", partition=0),
        ("POST", "/channel/unpause?topic=t&channel=c&partition=0", b""),
    ),
    (lambda c: c.stats(text=True), ("GET", "/stats", b"")),
    (
        lambda c: c.stats("t", "c", True, include_clients=False, include_mem=True),
        ("GET", "/stats?topic=t&channel=c&include_clients=false&include_mem=true", b""),
    ),
    (lambda c: c.get_config("log_level"), ("GET", "/config/log_level", b"")),
    (lambda c: c.set_config("log_level", "debug"), ("PUT", "/config/log_level", b"debug")),
    (
        lambda c: c.set_config("nsqlookupd_tcp_addresses", ["a:4160"]),
        ("PUT", "/config/nsqlookupd_tcp_addresses", b'["a:4160"]'),
    ),
    (lambda c: c.profile("heap"), ("GET", "/debug/pprof/heap", b"")),
    (lambda c: c.set_block_rate(3), ("PUT", "/debug/setblockrate?rate=3", b"")),
    (lambda c: c.free_memory(), ("POST", "/debug/freememory", b"")),
    (
        lambda c: c.call("POST", "/channel/skip", topic="t", channel="c"),
        ("POST", "/channel/skip?topic=t&channel=c", b""),
    ),
]

LOOKUPD_ROUTES: list[tuple[Callable[[LookupdHTTPClient], Any], tuple[str, str, bytes]]] = [
    (lambda c: c.create_topic("t"), ("POST", "/topic/create?topic=t", b"")),
    (
        lambda c: c.create_topic("t", partition_num=2, replicator=1, orderedmulti=True),
        ("POST", "/topic/create?topic=t&partition_num=2&replicator=1&orderedmulti=true", b""),
    ),
    (lambda c: c.delete_topic("t", partition="**"), ("POST", "/topic/delete?topic=t&partition=%2A%2A", b"")),
    (lambda c: c.create_channel("t", "c"), ("POST", "/channel/create?topic=t&channel=c", b"")),
    (lambda c: c.delete_channel("t", "c"), ("POST", "/channel/delete?topic=t&channel=c", b"")),
    (
        lambda c: c.tombstone_topic("t", "nsqd.example:4151"),
        ("POST", "/topic/tombstone?topic=t&node=nsqd.example%3A4151", b""),
    ),
    (lambda c: c.tombstone_topic("t", ("::1", 1)), ("POST", "/topic/tombstone?topic=t&node=%5B%3A%3A1%5D%3A1", b"")),
]

LOOKUPD_QUERIES: list[tuple[Callable[[LookupdHTTPClient], Any], str]] = [
    (lambda c: c.lookup("t"), "/lookup?topic=t"),
    (lambda c: c.lookup("t", access="w", metainfo=True), "/lookup?topic=t&access=w&metainfo=true"),
    (lambda c: c.topics(), "/topics"),
    (lambda c: c.channels("t"), "/channels?topic=t"),
    (lambda c: c.nodes(), "/nodes"),
    (lambda c: c.list_lookupds(), "/listlookup"),
    (lambda c: c.debug(), "/debug"),
    (lambda c: c.info(), "/info"),
]


@pytest.mark.parametrize(("use", "expected"), NSQD_ROUTES)
def test_nsqd_requests(nsqd_client: NsqdHTTPClient, recorder: Recorder, use: Any, expected: Any) -> None:
    use(nsqd_client)
    assert recorder.requests == [expected]
    assert recorder.headers[0]["HTTP_ACCEPT"] == "application/vnd.nsq; version=1.0"
    assert recorder.headers[0]["HTTP_HOST"] == f"127.0.0.1:{recorder.port}"
    assert recorder.headers[0]["HTTP_USER_AGENT"].startswith("nsq_fast/")


@pytest.mark.parametrize(("use", "expected"), LOOKUPD_ROUTES)
def test_lookupd_requests(lookupd: LookupdHTTPClient, recorder: Recorder, use: Any, expected: Any) -> None:
    recorder.body = b""
    assert use(lookupd) is None
    assert recorder.requests == [expected]


@pytest.mark.parametrize(("use", "target"), LOOKUPD_QUERIES)
@pytest.mark.parametrize("wrap", [False, True])
def test_lookupd_queries(lookupd: LookupdHTTPClient, recorder: Recorder, use: Any, target: str, wrap: bool) -> None:
    data = {"topics": ["t"], "version": "1.3.0"}
    recorder.body = json.dumps({"status_code": 200, "status_txt": "OK", "data": data} if wrap else data).encode()
    assert use(lookupd) == data
    assert recorder.requests == [("GET", target, b"")]


def test_connections_are_kept_and_used_again(nsqd_client: NsqdHTTPClient, recorder: Recorder) -> None:
    for _ in range(3):
        nsqd_client.ping()
    assert len(recorder.client_ports) == 1
    gevent.joinall([gevent.spawn(nsqd_client.ping) for _ in range(20)], raise_error=True)
    assert len(recorder.requests) == 23
    assert len(recorder.client_ports) <= 20


# What comes back


@pytest.mark.parametrize("body", [b"OK", b'{"status_code":200,"status_txt":"OK","data":"OK"}'])
def test_a_publish_returns_ok_in_both_formats(nsqd_client: NsqdHTTPClient, recorder: Recorder, body: bytes) -> None:
    recorder.body = body
    assert nsqd_client.publish("t", b"x") == b"OK"
    assert nsqd_client.ping() == b"OK"


def test_an_empty_reply_is_an_empty_object(nsqd_client: NsqdHTTPClient, recorder: Recorder) -> None:
    recorder.body = b""
    assert nsqd_client.info() == nsqd_client.stats() == {}


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b'{"a":', b'"text"', b"\xff"])
def test_a_reply_that_is_no_object_is_an_error(nsqd_client: NsqdHTTPClient, recorder: Recorder, body: bytes) -> None:
    recorder.body = body
    with pytest.raises(RemoteProtocolError, match="/info"):
        nsqd_client.info()


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        ("404 Not Found", b'{"message":"TOPIC_NOT_FOUND"}', "TOPIC_NOT_FOUND"),
        ("500 Oh", b'{"status_code":500,"status_txt":"MISSING_ARG_TOPIC","data":null}', "MISSING_ARG_TOPIC"),
        ("302 Found", b"", ""),
        ("503 No", b"a proxy " * 1000, ("a proxy " * 1000)[:200]),
    ],
)
def test_a_refusal_is_an_error_with_the_reason(
    nsqd_client: NsqdHTTPClient, recorder: Recorder, status: str, body: bytes, text: str
) -> None:
    recorder.status, recorder.body = status, body
    with pytest.raises(HttpError) as error:
        nsqd_client.delete_topic("t")
    assert error.value.status == int(status[:3])
    assert error.value.text == text
    assert error.value.url == f"http://127.0.0.1:{recorder.port}/topic/delete?topic=t"


# What is refused before anything is sent


@pytest.mark.parametrize(
    ("use", "error", "match"),
    [
        (lambda c: c.publish("bad topic!", b"x"), NameInvalid, "topic"),
        (lambda c: c.publish("", b"x"), NameInvalid, "topic"),
        (lambda c: c.publish(None, b"x"), NameInvalid, "topic"),
        (lambda c: c.publish("t", "text"), TypeError, "data must be bytes, not str"),
        (lambda c: c.publish("t", b""), BodyInvalid, "data must not be empty"),
        (lambda c: c.publish("t", b"x", -1), ConfigError, "defer"),
        (lambda c: c.publish("t", b"x", 1.5), ConfigError, "defer"),
        (lambda c: c.publish("t", b"x", True), ConfigError, "defer"),
        (lambda c: c.multipublish("t", []), BodyInvalid, "no messages"),
        (lambda c: c.multipublish("t", [b"a\nb"]), BodyInvalid, "binary=True"),
        (lambda c: c.multipublish("t", [b"a", b""]), BodyInvalid, "empty"),
        (lambda c: c.multipublish("t", ["a"]), TypeError, "bytes"),
        (lambda c: c.multipublish("t", b"abc"), TypeError, "bytes"),
        (lambda c: c.create_channel("t", "a b"), NameInvalid, "channel"),
        (lambda c: c.create_channel("t", ""), NameInvalid, "channel"),
        (lambda c: c.pause_topic("x" * 65), NameInvalid, "topic"),
        (lambda c: c.stats(topic="a/b"), NameInvalid, "topic"),
        (lambda c: c.get_config("../ping"), ConfigError, "option"),
        (lambda c: c.set_config("a?b", 1), ConfigError, "option"),
        (lambda c: c.profile("../../ping"), ConfigError, "profile"),
    ],
)
def test_bad_arguments_never_reach_the_wire(
    nsqd_client: NsqdHTTPClient, recorder: Recorder, use: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        use(nsqd_client)
    assert recorder.requests == []


def test_a_tombstone_needs_an_address(lookupd: LookupdHTTPClient, recorder: Recorder) -> None:
    with pytest.raises(ConfigError):
        lookupd.tombstone_topic("t", "host:port")
    assert recorder.requests == []


@pytest.mark.parametrize(
    "options",
    [
        {"host": "http://h"},
        {"host": ""},
        {"host": None},
        {"port": 70000},
        {"port": "x"},
        {"scheme": "ftp"},
        {"timeout": 0},
        {"timeout": "5"},
        {"authorization": "a\r\nX: y"},
        {"scheme": "https", "tls_options": {"ca": "x"}},
        {"scheme": "https", "tls_options": {"cafile": "/does/not/exist"}},
        {"scheme": "https", "tls_options": 5},
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        NsqdHTTPClient(**options)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1", "http://h:1/"),
        ("https://h:1/", "https://h:1/"),
        ("h", "http://h:4151/"),
        ("[::1]:5", "http://[::1]:5/"),
        ("http://[::1]", "http://[::1]:4151/"),
        (("::1", 7), "http://[::1]:7/"),
    ],
)
def test_a_client_from_a_url(url: Any, address: str) -> None:
    client = NsqdHTTPClient.from_url(url)
    assert client.address == address
    assert f"{client.scheme}://" in address
    assert str(client.port) in address
    assert client.host in address


def test_default_ports() -> None:
    assert NsqdHTTPClient().port == 4151
    assert LookupdHTTPClient().port == 4161
    assert parse_endpoint(Endpoint("https", LookupdHTTPClient()._endpoint.address), 1).scheme == "https"


# Bad days


@contextmanager
def raw_server(handle: Callable[[Socket], object]) -> Iterator[int]:
    def serve(sock: Socket, _: object) -> None:
        with closing(sock), suppress(OSError):
            handle(sock)

    server = StreamServer(("127.0.0.1", 0), serve)
    server.start()
    try:
        yield server.server_port
    finally:
        server.stop(timeout=0)


@pytest.mark.parametrize(
    ("begin", "then"),
    [
        pytest.param(b"0\r\n", b"name: " + b"x" * 10_000 + b"\r\n", id="trailers"),
        pytest.param(b"1;", b"x" * 10_000, id="chunk-extension"),
    ],
)
def test_a_reply_that_never_ends_its_framing_is_given_up(begin: bytes, then: bytes) -> None:
    """What is neither head nor body takes memory too, and is bounded."""

    def handle(sock: Socket) -> None:
        sock.recv(4096)
        sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + begin)
        while True:
            sock.sendall(then)

    with raw_server(handle) as port, pytest.raises(HttpError, match="of trailers or of chunk sizes"):
        NsqdHTTPClient("127.0.0.1", port).ping()


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_a_body_in_small_chunks_is_taken(size: int) -> None:
    body = b"x" * 30_000
    chunks = b"".join(b"%x\r\n%b\r\n" % (size, body[:size]) for _ in range(len(body) // size))
    reply = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    with raw_server(lambda sock: (sock.recv(4096), sock.sendall(reply))) as port:
        assert NsqdHTTPClient("127.0.0.1", port).ping() == body


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"garbage",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nOK",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nOK",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nOK",
        b"\x00" * 100,
        b"HTTP/9.9 999 \xff\r\n\r\n",
    ],
)
def test_a_broken_reply_is_an_error_without_a_status(reply: bytes) -> None:
    with raw_server(lambda sock: (sock.recv(4096), sock.sendall(reply))) as port:
        with pytest.raises(HttpError) as error:
            NsqdHTTPClient("127.0.0.1", port).ping()
        assert error.value.status is None


def test_a_reply_in_single_bytes_and_one_that_ends_with_the_connection() -> None:
    def drip(sock: Socket) -> None:
        sock.recv(4096)
        for byte in b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\n\r\nOK":
            sock.sendall(bytes([byte]))
            gevent.sleep(0)

    with raw_server(drip) as port:
        assert NsqdHTTPClient("127.0.0.1", port).ping() == b"OK"


def test_the_timeout_is_for_the_whole_request() -> None:
    def drip(sock: Socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while True:
            sock.sendall(b"x")
            gevent.sleep(0.01)  # sleep: each byte in time, the reply never

    with raw_server(drip) as port, promptly(), pytest.raises(HttpError, match=r"no reply within 0\.2 s"):
        NsqdHTTPClient("127.0.0.1", port, timeout=0.2).ping()


def test_a_timeout_of_the_caller_is_the_callers() -> None:
    blocked = Event()
    with raw_server(lambda sock: blocked.wait(WAIT)) as port:
        client = NsqdHTTPClient("127.0.0.1", port)
        with gevent.Timeout(0.05) as timeout, pytest.raises(gevent.Timeout) as raised:
            client.ping()
        assert raised.value is timeout
        blocked.set()


def test_a_reply_beyond_the_limit_is_cut_off() -> None:
    def flood(sock: Socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
        while True:
            sock.sendall(b"x" * 65536)

    with raw_server(flood) as port:
        client = HttpClient(parse_endpoint(f"127.0.0.1:{port}", 1), max_reply_size=1_000_000)
        with pytest.raises(HttpError, match="more than 1000000 bytes"):
            client.request("GET", "/")


def test_a_server_that_closed_the_kept_connection_is_connected_to_again() -> None:
    connections: list[Socket] = []

    def serve(sock: Socket) -> None:
        connections.append(sock)
        sock.recv(4096)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK")

    with raw_server(serve) as port, NsqdHTTPClient("127.0.0.1", port) as client:
        for _ in range(3):
            assert client.ping() == b"OK"
            until(lambda: connections[-1].closed)
    assert len(connections) == 3


def test_kept_connections_in_a_patched_process(recorder: Recorder) -> None:
    program = f"""
import gevent.monkey
gevent.monkey.patch_all()
from nsq_fast.client.admin import NsqdHTTPClient
client = NsqdHTTPClient("127.0.0.1", {recorder.port})
print([client.ping() for _ in range(3)])
"""
    done = gevent.subprocess.run([sys.executable, "-c", program], stdout=gevent.subprocess.PIPE, timeout=PROCESS)
    assert done.stdout.split(b"\n")[0] == b"[b'OK', b'OK', b'OK']"
    assert len(recorder.client_ports) == 1


def test_nobody_there(closed_port: int) -> None:
    with pytest.raises(HttpError, match="refused"):
        NsqdHTTPClient("127.0.0.1", closed_port).ping()
    with pytest.raises(HttpError):
        NsqdHTTPClient("host.invalid", 1, timeout=5).ping()


def test_ipv6() -> None:
    try:
        server = Recorder("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with NsqdHTTPClient("::1", server.port) as client:
        assert client.ping() == b"OK"
    assert server.headers[0]["HTTP_HOST"] == f"[::1]:{server.port}"
    server.server.stop(timeout=0)


# https


@pytest.fixture
def cafile(authority: trustme.CA, tmp_path: Path) -> str:
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    return str(tmp_path / "ca.pem")


@contextmanager
def https_server(authority: trustme.CA, name: str = "localhost", ask_client: bool = False) -> Iterator[Recorder]:
    context = gevent.ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    if ask_client:
        context.verify_mode = ssl.CERT_REQUIRED
        authority.configure_trust(context)
    server = Recorder(ssl_context=context)
    server.server.get_environ()["wsgi.errors"] = None
    try:
        yield server
    finally:
        server.server.stop(timeout=0)


def test_https_with_verification(authority: trustme.CA, cafile: str) -> None:
    with https_server(authority) as server:
        options = {"tls_options": {"cafile": cafile}}
        with NsqdHTTPClient.from_url(f"https://localhost:{server.port}", **options) as client:
            assert client.ping() == b"OK"
        named = {"tls_options": {"cafile": cafile, "server_hostname": "localhost"}}
        with NsqdHTTPClient("127.0.0.1", server.port, scheme="https", **named) as client:
            assert client.ping() == b"OK"


def test_https_with_a_context_of_the_standard_library(authority: trustme.CA, cafile: str) -> None:
    context = ssl.create_default_context(cafile=cafile)
    with (
        https_server(authority) as server,
        NsqdHTTPClient("localhost", server.port, scheme="https", tls_options=context) as client,
    ):
        assert client.ping() == b"OK"


def test_https_with_a_client_certificate(authority: trustme.CA, cafile: str, tmp_path: Path) -> None:
    certificate = authority.issue_cert("client")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
    options = {"cafile": cafile, "certfile": str(tmp_path / "client.pem")}
    with (
        https_server(authority, ask_client=True) as server,
        NsqdHTTPClient("localhost", server.port, scheme="https", tls_options=options) as client,
    ):
        assert client.ping() == b"OK"


def test_the_lookup_poller_over_https(authority: trustme.CA, cafile: str) -> None:
    config = LookupConfig(lookupd_tls_options={"cafile": cafile}, lookupd_authorization="Bearer s3cret")
    with https_server(authority) as server:
        server.body = b'{"channels":["c"],"producers":[]}'
        poller = LookupPoller(f"https://localhost:{server.port}", config)
        poller.start()
        try:
            assert poller.wait_topology("t", 5).channels == ("c",)
        finally:
            poller.stop()
    assert server.headers[0]["HTTP_AUTHORIZATION"] == "Bearer s3cret"


def test_a_certificate_that_does_not_match_is_refused(
    authority: trustme.CA, cafile: str, no_unseen_errors: list[Any]
) -> None:
    with https_server(authority, "other.example") as server:
        url = f"https://localhost:{server.port}"
        for options in ({"cafile": cafile}, None):
            with pytest.raises(HttpError, match="certificate"):
                NsqdHTTPClient.from_url(url, tls_options=options).ping()
        with NsqdHTTPClient.from_url(url, tls_options={"verify": False}) as client:
            assert client.ping() == b"OK"
    no_unseen_errors.clear()  # the server's handler does not like our hanging up


def test_https_to_a_server_that_speaks_plain_http(recorder: Recorder, no_unseen_errors: list[Any]) -> None:
    with pytest.raises(HttpError) as error:
        NsqdHTTPClient.from_url(f"https://localhost:{recorder.port}", timeout=2).ping()
    assert error.value.status is None
    no_unseen_errors.clear()


# Real servers


def test_a_real_nsqd(real_nsqd: Callable[..., RealNsqd]) -> None:
    with NsqdHTTPClient(*real_nsqd().http_address) as client:
        assert client.ping() == b"OK"
        assert client.info()["version"].startswith("1.")
        client.create_topic("t")
        client.create_channel("t", "c")
        assert client.publish("t", b"one") == b"OK"
        assert client.publish("t", b"late", 60_000) == b"OK"
        assert client.multipublish("t", [b"two", b"three"]) == b"OK"
        assert client.multipublish("t", [b"with\nnewline"], binary=True) == b"OK"

        def channel() -> Any:
            return client.stats("t", "c")["topics"][0]["channels"][0]

        until(lambda: channel()["depth"] == 4 and channel()["deferred_count"] == 1)
        assert b"[c" in client.stats(text=True)
        client.pause_channel("t", "c")
        assert channel()["paused"]
        client.unpause_channel("t", "c")
        assert not channel()["paused"]
        client.empty_channel("t", "c")
        assert channel()["depth"] == 0
        client.pause_topic("t")
        assert client.stats("t")["topics"][0]["paused"]
        client.unpause_topic("t")
        client.empty_topic("t")
        client.delete_channel("t", "c")
        client.delete_topic("t")
        assert client.stats()["topics"] == []
        with pytest.raises(HttpError) as error:
            client.empty_topic("t")
        assert (error.value.status, error.value.text) == (404, "TOPIC_NOT_FOUND")
        assert client.get_config("nsqlookupd_tcp_addresses") == []
        client.set_config("nsqlookupd_tcp_addresses", ["127.0.0.1:1"])
        assert client.get_config("nsqlookupd_tcp_addresses") == ["127.0.0.1:1"]
        client.set_config("nsqlookupd_tcp_addresses", [])
        client.set_config("log_level", "warn")
        assert b"goroutine" in client.profile("goroutine", debug=1)
        client.set_block_rate(0)
        client.free_memory()


def test_a_real_lookupd(real_lookupd: Callable[[], RealLookupd], real_nsqd: Callable[..., RealNsqd]) -> None:
    server = real_lookupd()
    nsqd = real_nsqd(f"-lookupd-tcp-address={server.tcp_address}")
    with LookupdHTTPClient(*server.http_address) as client, NsqdHTTPClient(*nsqd.http_address) as nsqd_client:
        assert client.ping() == b"OK"
        assert client.info()["version"].startswith("1.")
        with pytest.raises(HttpError) as error:
            client.lookup("t")
        assert (error.value.status, error.value.text) == (404, "TOPIC_NOT_FOUND")
        nsqd_client.create_topic("t")
        nsqd_client.create_channel("t", "c")
        until(lambda: client.topics()["topics"] == ["t"] and client.channels("t")["channels"] == ["c"])
        assert client.lookup("t")["producers"][0]["tcp_port"] == nsqd.tcp_address.port
        client.tombstone_topic("t", nsqd.http_address)
        assert client.lookup("t")["producers"] == []
        assert client.nodes()["producers"][0]["tombstones"] == [True]
        assert client.debug()
        client.create_topic("new")
        client.create_channel("new", "channel")
        assert "new" in client.topics()["topics"]
        client.delete_channel("new", "channel")
        client.delete_topic("new")
        assert "new" not in client.topics()["topics"]
        with pytest.raises(HttpError) as error:
            client.list_lookupds()
        assert error.value.status == 404


def test_clients_share_their_manners() -> None:
    assert issubclass(NsqdHTTPClient, AdminClient)
    assert issubclass(LookupdHTTPClient, AdminClient)
    assert repr(LookupdHTTPClient("h", 1)) == "<LookupdHTTPClient http://h:1/>"
