"""Where the embedded nsqd differs from the real one on purpose: docs/broker.md. Each test runs on both."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme
from gevent import socket
from gevent.ssl import SSLContext
from support.http import ask
from support.waiting import WAIT, holds, until
from support.wire import WireClient

from nsq_fast.broker import NsqdServer


def is_ours(server: Any) -> bool:
    return isinstance(server, NsqdServer)


def channel(server: Any) -> dict[str, Any]:
    [topic] = ask(server.http_address, "GET", "/stats?format=json&topic=t&channel=c").json["topics"]
    return dict(topic["channels"][0])


def consume(server: Any, count: int) -> list[bytes]:
    """Messages of the channel, one after the other."""
    client = WireClient(server.tcp_address)
    client.subscribe("t", "c")
    return [client.message().body for _ in range(count)]


def publish_hundred(server: Any) -> list[bytes]:
    """Create the topic and its channel, publish 100 messages; their bodies."""
    ask(server.http_address, "POST", "/topic/create?topic=t")
    ask(server.http_address, "POST", "/channel/create?topic=t&channel=c")
    bodies = [b"%d" % n for n in range(100)]
    publisher = WireClient(server.tcp_address)
    for body in bodies:
        publisher.publish("t", body)
    return bodies


@pytest.mark.parametrize("preserve_order", [False, True])
def test_messages_beyond_the_memory_queue_keep_their_order_here_if_they_should(
    start_nsqd: Callable[..., Any], preserve_order: bool
) -> None:
    server = start_nsqd(mem_queue_size=50, preserve_order=preserve_order)
    bodies = publish_hundred(server)
    until(lambda: (channel(server)["depth"], channel(server)["backend_depth"]) == (100, 50))
    got = consume(server, 100)
    assert [body for body in got if int(body) < 50] == bodies[:50]
    assert [body for body in got if int(body) >= 50] == bodies[50:]
    assert (got == bodies) is (preserve_order and is_ours(server))


def test_without_a_memory_queue_messages_come_in_the_order_of_the_disk(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=0)
    bodies = publish_hundred(server)
    assert consume(server, 100) == bodies


@pytest.fixture
def durable(start_nsqd: Callable[..., Any], tmp_path: Path) -> Any:
    """An nsqd with files, the topic ``t`` and its channel ``c``."""
    folder = tmp_path / "data"
    folder.mkdir()
    server = start_nsqd(data_path=str(folder))
    ask(server.http_address, "POST", "/topic/create?topic=t")
    ask(server.http_address, "POST", "/channel/create?topic=t&channel=c")
    return server


def test_a_kill_loses_nothing_here(durable: Any) -> None:
    WireClient(durable.tcp_address).publish("t", b"1")
    until(lambda: channel(durable)["depth"] == 1)
    durable.restart()
    assert channel(durable)["depth"] == (1 if is_ours(durable) else 0)


def test_a_deferred_message_stays_deferred_over_a_restart_here(durable: Any) -> None:
    ask(durable.http_address, "POST", "/pub?topic=t&defer=3600000", b"1")
    until(lambda: channel(durable)["deferred_count"] == 1)
    durable.stop()
    durable.start()
    figures = channel(durable)
    assert (figures["depth"], figures["deferred_count"]) == ((0, 1) if is_ours(durable) else (1, 0))


def test_a_message_is_written_once_for_all_channels_here(start_nsqd: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    server = start_nsqd(data_path=str(folder), mem_queue_size=0)
    ask(server.http_address, "POST", "/topic/create?topic=t")
    for name in "cd":
        ask(server.http_address, "POST", f"/channel/create?topic=t&channel={name}")
    WireClient(server.tcp_address).publish("t", b"the body")
    until(lambda: channel(server)["depth"] == 1)
    server.stop()
    written = sum(file.read_bytes().count(b"the body") for file in folder.rglob("*") if file.is_file())
    assert written == (1 if is_ours(server) else 3)  # the topic's, and one for each channel


def test_messages_come_in_the_order_of_their_publishes_after_a_restart_here(
    start_nsqd: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    server = start_nsqd(data_path=str(folder), mem_queue_size=2)
    ask(server.http_address, "POST", "/topic/create?topic=t")
    ask(server.http_address, "POST", "/channel/create?topic=t&channel=c")
    publisher = WireClient(server.tcp_address)
    for n in range(5):
        publisher.publish("t", b"%d" % n)
    until(lambda: channel(server)["depth"] == 5)
    server.stop()
    server.start()
    assert channel(server)["backend_depth"] == 5
    assert consume(server, 5) == ([b"0", b"1", b"2", b"3", b"4"] if is_ours(server) else [b"2", b"3", b"4", b"0", b"1"])


def test_a_deferred_message_that_a_topic_has_no_room_for_stays_deferred_here(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(mem_queue_size=3)
    ask(server.http_address, "POST", "/mpub?topic=t", b"x\nx\nx")
    ask(server.http_address, "POST", "/pub?topic=t&defer=3600000", b"1")
    ask(server.http_address, "POST", "/channel/create?topic=t&channel=c")
    until(lambda: channel(server)["message_count"] == 4)
    figures = channel(server)
    assert (figures["depth"], figures["deferred_count"]) == ((3, 1) if is_ours(server) else (4, 0))


@pytest.mark.parametrize("policy", ["require", "require-verify"])
def test_a_required_certificate_is_verified_here(start_nsqd: Callable[..., Any], tmp_path: Path, policy: str) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    server = start_nsqd(
        tls_cert=str(tmp_path / "cert.pem"),
        tls_key=str(tmp_path / "key.pem"),
        tls_root_ca_file=str(tmp_path / "ca.pem"),
        tls_client_auth_policy=policy,
    )
    own, foreign, none = (SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(3))
    for context in (own, foreign, none):
        authority.configure_trust(context)
    for context, issuer in ((own, authority), (foreign, trustme.CA())):
        issuer.issue_cert("client@example.org").configure_cert(context)
    assert is_served(server, own)
    assert not is_served(server, none)
    assert is_served(server, foreign) is (policy == "require" and not is_ours(server))


def is_served(server: Any, context: SSLContext) -> bool:
    """Whether a client that has negotiated TLS gets a reply inside it."""
    client = WireClient(server.tcp_address)
    client.command(b"IDENTIFY\n\0\0\0\x2b" + b'{"feature_negotiation":true,"tls_v1":true}'.ljust(0x2B))
    client.sock.settimeout(WAIT)
    try:
        inside = context.wrap_socket(client.sock, server_hostname="localhost")
        return bool(inside.recv(64).endswith(b"OK"))
    except OSError:
        return False


def test_an_output_buffer_timeout_of_0_is_understood_here(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd(output_buffer_timeout=0.0)
    with socket.create_connection(server.tcp_address) as sock:
        sock.settimeout(WAIT)
        sock.sendall(b"  V2PUB t\n\0\0\0\1x")
        try:
            reply = sock.recv(64)
        except ConnectionError:
            reply = b""
    assert reply.endswith(b"OK") is is_ours(server)


def test_memory_figures_of_go_are_0_here(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd()
    memory = ask(server.http_address, "GET", "/stats?format=json").json["memory"]
    assert memory["heap_in_use_bytes"] > 0
    assert (memory["next_gc_bytes"] == 0) is is_ours(server)


def test_an_mpub_is_awaited_to_the_size_that_it_says_here(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd()
    ask(server.http_address, "POST", "/topic/create?topic=t")
    ask(server.http_address, "POST", "/channel/create?topic=t&channel=c")
    client = WireClient(server.tcp_address)
    client.send(b"MPUB t\n\0\0\0\x0d" + b"\0\0\0\1" + b"\0\0\0\1a")  # 4 bytes fewer than it says
    if is_ours(server):
        holds(lambda: channel(server)["depth"] == 0)
    else:
        assert client.frame().data == b"OK"
    client.send(b"NOP\n")
    if is_ours(server):
        assert client.frame().data == b"OK"
    until(lambda: channel(server)["depth"] == 1)
    client.publish("t", b"next")


def test_messages_are_not_counted_by_zone_here(start_nsqd: Callable[..., Any]) -> None:
    server = start_nsqd()
    WireClient(server.tcp_address).publish("t", b"1")
    assert consume(server, 1) == [b"1"]
    assert ("global_msg_count" in channel(server)) is not is_ours(server)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/debug/pprof/", b"", 404),
        ("GET", "/debug/pprof/cmdline", b"", 404),
        ("POST", "/debug/freememory", b"", 404),
        ("PUT", "/debug/setblockrate?rate=1", b"", 404),
        ("GET", "/config/mem_queue_size", b"", 400),
        ("PUT", "/config/log_level", b"info", 400),
    ],
)
def test_routes_of_the_runtime_are_missing_here(
    start_nsqd: Callable[..., Any], method: str, path: str, body: bytes, status: int
) -> None:
    server = start_nsqd()
    answer = ask(server.http_address, method, path, body)
    if isinstance(server, NsqdServer):
        assert answer.status == status
    else:  # what they do is done, though two of them answer 500
        assert answer.status in (200, 500)
