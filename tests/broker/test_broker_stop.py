"""Servers end when they are told to, whatever half of a request a client has sent."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gevent import Timeout, socket
from gevent.subprocess import Popen
from support.http import ask, exchange, parse
from support.waiting import PROCESS, WAIT, promptly, until

from nsq_fast.broker import Broker, RedesignedCluster

HEAD = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\n"
HALVES = {
    "the request line": ("http", b"POST /pub?topic=t HT"),
    "the headers": ("http", b"POST /pub?topic=t HTTP/1.1\r\nHost:"),
    "the body": ("http", HEAD + b"Content-Length: 100\r\n\r\nhalf"),
    "the body of what has no route": ("http", HEAD.replace(b"pub", b"nowhere") + b"Content-Length: 100\r\n\r\nhalf"),
    "the body of a GET": ("http", b"GET /stats HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf"),
    "the body of a HEAD": ("http", b"HEAD /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf"),
    "a body that is too long": ("http", HEAD + b"Content-Length: 100000000\r\n\r\nhalf"),
    "a body that waits for leave": ("http", HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"),
    "the size of a chunk": ("http", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1"),
    "a chunk": ("http", HEAD + b"Transfer-Encoding: chunked\r\n\r\n10\r\nhalf"),
    "the magic": ("tcp", b"  V"),
    "a command": ("tcp", b"  V2PUB to"),
    "the size of a message": ("tcp", b"  V2PUB t\n\0\0"),
    "a message": ("tcp", b"  V2PUB t\n\0\0\0\x64half"),
    "an MPUB": ("tcp", b"  V2MPUB t\n\0\0\0\x64\0\0\0\2\0\0\0\4half"),
    "an IDENTIFY": ("tcp", b"  V2IDENTIFY\n\0\0\0\x64{"),
    "a registration": ("tcp", b"  V1REGIS"),
    "an IDENTIFY of an nsqd": ("tcp", b"  V1IDENTIFY\n\0\0\0\x64{"),
}


@pytest.fixture(params=["original", "redesigned"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """What makes servers of both dialects, not yet started."""
    if request.param == "original":
        return Broker
    return lambda **options: RedesignedCluster(1, 1, **options)


@contextlib.contextmanager
def connected(servers: Any, face: str, data: bytes) -> Iterator[list[Any]]:
    """Connections to all servers on which ``data`` was sent, and read."""
    with contextlib.ExitStack() as stack:
        made = []
        for server in servers:
            sock = stack.enter_context(socket.create_connection(getattr(server, f"{face}_address")))
            sock.sendall(data)
            made.append(sock)
        for server in servers:  # what came before is read before this is answered
            assert ask(server.http_address, "GET", "/ping").status == 200
        yield made


@pytest.mark.parametrize("what", HALVES)
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_servers_end_while_a_client_has_sent_half_of(make: Callable[..., Any], what: str, how: str) -> None:
    group = make()
    group.start()
    with connected(list(group.servers.values()), *HALVES[what]), promptly(), Timeout(WAIT, TimeoutError(how)):
        getattr(group, how)()
    group.release_ports()


@pytest.mark.parametrize("switch", [{"delay_replies": 10 * WAIT}, {"drop_replies": True}])
@pytest.mark.parametrize("face", ["tcp", "http"])
def test_servers_end_while_a_fault_holds_an_answer(make: Callable[..., Any], switch: Any, face: str) -> None:
    data = {"http": b"GET /stats HTTP/1.1\r\nHost: x\r\n\r\n", "tcp": b"  V2IDENTIFY\n\0\0\0\2{}"}[face]
    group = make()
    group.start()
    servers = list(group.servers.values())
    for server in servers:
        getattr(server.faults, face).set(**switch)
    with contextlib.ExitStack() as stack:
        for server in servers:
            sock = stack.enter_context(socket.create_connection(getattr(server, f"{face}_address")))
            sock.sendall(data)
        until(lambda: all(getattr(server.faults, face).accepted for server in servers))
        with promptly(), Timeout(WAIT, TimeoutError("stop")):
            group.stop()
    group.release_ports()


def test_an_nsqd_ends_while_a_fault_holds_a_heartbeat() -> None:
    with Broker(lookupd=False) as broker, socket.create_connection(broker.nsqd.tcp_address) as sock:
        sock.sendall(b'  V2IDENTIFY\n\0\0\0\x1b{"heartbeat_interval":1000}')
        assert sock.recv(100).endswith(b"OK")
        broker.nsqd.faults.tcp.delay_replies = 10 * WAIT
        (client,) = broker.nsqd.nsqd.clients
        until(lambda: client.output.is_writing)
        with promptly(), Timeout(WAIT, TimeoutError("stop")):
            broker.stop()


@pytest.mark.parametrize("server", ["nsqd", "lookupd"])
@pytest.mark.parametrize("flags", [[], ["--redesigned", "--nodes", "1"]], ids=["original", "redesigned"])
def test_sigterm_ends_a_program_while_a_client_has_sent_half_a_body(flags: list[str], server: str) -> None:
    program = [sys.executable, "-m", "nsq_fast", "broker", "--json", *flags]
    for face in ("tcp", "http", "lookupd-listen-tcp", "lookupd-listen-http"):
        program += [f"--{face}-address", "127.0.0.1:0"]
    with Popen(program, stdout=subprocess.PIPE) as process, contextlib.ExitStack() as stack:
        found = json.loads(process.stdout.readline())
        host, _, port = (found["nsqds"][0] if server == "nsqd" else found["lookupd"])["http"].rpartition(":")
        sock = stack.enter_context(socket.create_connection((host, int(port))))
        sock.sendall(HEAD + b"Content-Length: 100\r\n\r\nhalf")
        ask((host, int(port)), "GET", "/ping")
        os.kill(process.pid, signal.SIGTERM)
        with Timeout(PROCESS, TimeoutError("SIGTERM")):
            assert process.wait() == 0


@pytest.mark.parametrize(
    "upgrade", ["Connection: Upgrade\r\nUpgrade: h2c", "Connection: upgrade", "Upgrade: websocket"]
)
def test_a_request_that_would_be_upgraded_is_answered_as_it_is(make: Callable[..., Any], upgrade: str) -> None:
    # Of curl --http2 and others.
    with make() as group:
        for server in group.servers.values():
            head = f"POST /ping HTTP/1.1\r\nHost: x\r\n{upgrade}\r\nContent-Length: 2\r\n\r\n"
            after = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            raw = exchange(server.http_address, head.encode() + b"ab" + after)
            assert raw.count(b"HTTP/1.1 ") == 2
            assert parse(raw).status == 405
            assert raw.endswith(b"OK")
        if isinstance(group, Broker):
            head = f"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\n{upgrade}\r\nContent-Length: 2\r\n\r\n"
            after = b"GET /stats?format=json HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            assert b'"message_count":1' in exchange(group.nsqd.http_address, head.encode() + b"ab" + after)
