"""Servers end when they are told to, or are killed, or a disk fails for a moment: nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import random
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gevent import Timeout, socket, spawn
from gevent.subprocess import Popen
from support.http import ask, exchange, parse
from support.waiting import PROCESS, WAIT, promptly, until
from support.wire import Consumer, WireClient, sized

from nsq_fast.broker import Broker, BrokerProcess, NsqdServer, RedesignedCluster
from nsq_fast.names import parse_address

# Servers end when they are told to, whatever half of a request a client has sent.


HEAD = b"POST /pub?topic=t HTTP/1.1\r\nHost: x\r\n"

HALVES = [
    ("http", b"POST /pub?topic=t HT"),  # the request line
    ("http", b"POST /pub?topic=t HTTP/1.1\r\nHost:"),  # the headers
    ("http", HEAD + b"Content-Length: 100\r\n\r\nhalf"),  # the body
    ("http", HEAD.replace(b"pub", b"nowhere") + b"Content-Length: 100\r\n\r\nhalf"),  # the body of what has no route
    ("http", b"GET /stats HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf"),  # the body of a GET
    ("http", b"HEAD /ping HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf"),  # the body of a HEAD
    ("http", HEAD + b"Content-Length: 100000000\r\n\r\nhalf"),  # a body that is too long
    ("http", HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"),  # a body that waits for leave
    ("http", HEAD + b"Transfer-Encoding: chunked\r\n\r\n1"),  # the size of a chunk
    ("http", HEAD + b"Transfer-Encoding: chunked\r\n\r\n10\r\nhalf"),  # a chunk
    ("tcp", b"  V"),  # the magic
    ("tcp", b"  V2PUB to"),  # a command
    ("tcp", b"  V2PUB t\n\0\0"),  # the size of a message
    ("tcp", b"  V2PUB t\n\0\0\0\x64half"),  # a message
    ("tcp", b"  V2MPUB t\n\0\0\0\x64\0\0\0\2\0\0\0\4half"),  # an MPUB
    ("tcp", b"  V2IDENTIFY\n\0\0\0\x64{"),  # an IDENTIFY
    ("tcp", b"  V1REGIS"),  # a registration
    ("tcp", b"  V1IDENTIFY\n\0\0\0\x64{"),  # an IDENTIFY of an nsqd
]


@pytest.fixture(params=["original", "redesigned"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """What makes servers of both dialects, not yet started."""
    if request.param == "original":
        return Broker
    return lambda **options: RedesignedCluster(1, 1, **options)


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_servers_end_while_clients_have_sent_halves(make: Callable[..., Any], how: str) -> None:
    with make() as group, contextlib.ExitStack() as stack:
        for server, (face, data) in itertools.product(group.servers.values(), HALVES):
            sock = stack.enter_context(socket.create_connection(getattr(server, f"{face}_address")))
            sock.sendall(data)
        for server in group.servers.values():  # what came before is read before this is answered
            assert ask(server.http_address, "GET", "/ping").status == 200
        with promptly(), Timeout(WAIT, TimeoutError(how)):
            getattr(group, how)()


@pytest.mark.parametrize("switch", [{"delay_replies": 10 * WAIT}, {"drop_replies": True}])
def test_servers_end_while_a_fault_holds_answers(make: Callable[..., Any], switch: Any) -> None:
    asked = {"http": b"GET /stats HTTP/1.1\r\nHost: x\r\n\r\n", "tcp": b"  V2IDENTIFY\n\0\0\0\2{}"}
    with make() as group, contextlib.ExitStack() as stack:
        for server, (face, data) in itertools.product(group.servers.values(), asked.items()):
            faults = getattr(server.faults, face)
            faults.set(**switch)
            sock = stack.enter_context(socket.create_connection(getattr(server, f"{face}_address")))
            sock.sendall(data)
            until(lambda faults=faults: faults.accepted)  # type: ignore[misc]
        with promptly(), Timeout(WAIT, TimeoutError("stop")):
            group.stop()


def test_an_nsqd_ends_while_a_fault_holds_a_heartbeat() -> None:
    with Broker(lookupd=False) as broker, socket.create_connection(broker.nsqd.tcp_address) as sock:
        sock.sendall(b'  V2IDENTIFY\n\0\0\0\x1b{"heartbeat_interval":1000}')
        assert sock.recv(100).endswith(b"OK")
        broker.nsqd.faults.tcp.delay_replies = 10 * WAIT
        (client,) = broker.nsqd.nsqd.clients
        until(lambda: client.output.is_writing)
        with promptly(), Timeout(WAIT, TimeoutError("stop")):
            broker.stop()


@pytest.mark.parametrize("flags", [[], ["--redesigned", "--nodes", "1"]], ids=["original", "redesigned"])
def test_sigterm_ends_a_program_while_clients_have_sent_half_a_body(flags: list[str]) -> None:
    program = [sys.executable, "-m", "nsq_fast", "broker", "--json", *flags]
    for face in ("tcp", "http", "lookupd-listen-tcp", "lookupd-listen-http"):
        program += [f"--{face}-address", "127.0.0.1:0"]
    with Popen(program, stdout=subprocess.PIPE) as process, contextlib.ExitStack() as stack:
        found = json.loads(process.stdout.readline())
        for server in (found["nsqds"][0], found["lookupd"]):
            address = parse_address(server["http"], 0)
            stack.enter_context(socket.create_connection(address)).sendall(HEAD + b"Content-Length: 100\r\n\r\nhalf")
            ask(address, "GET", "/ping")
        os.kill(process.pid, signal.SIGTERM)
        with Timeout(PROCESS, TimeoutError("SIGTERM")):
            assert process.wait() == 0


UPGRADES = ("Connection: Upgrade\r\nUpgrade: h2c", "Connection: upgrade", "Upgrade: websocket")
"""Of curl --http2 and others."""


def test_a_request_that_would_be_upgraded_is_answered_as_it_is(make: Callable[..., Any]) -> None:
    def answered(server: Any, path: str, upgrade: str) -> bytes:
        """The replies to a POST that has a body of two bytes, and to a ping behind it."""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{upgrade}\r\nContent-Length: 2\r\n\r\n"
        after = b"GET /ping HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        raw = exchange(server.http_address, head.encode() + b"ab" + after)
        assert raw.count(b"HTTP/1.1 ") == 2
        assert raw.endswith(b"OK")
        return raw

    with make() as group:
        for upgrade in UPGRADES:
            for server in group.servers.values():
                assert parse(answered(server, "/ping", upgrade)).status == 405
            if isinstance(group, Broker):
                answered(group.nsqd, "/pub?topic=t", upgrade)
        if isinstance(group, Broker):
            assert group.messages("t") == [b"ab"] * len(UPGRADES)


# SIGKILL at random moments of publishing: nothing that was answered OK is lost.


KILLS = 4


def publish(address: Any, turn: int, dice: random.Random, confirmed: set[bytes]) -> None:
    """Publish until the connection ends."""
    with contextlib.suppress(OSError, struct.error):
        client = WireClient(address)
        for number in range(1_000_000):
            bodies = [b"%d-%d-%d" % (turn, number, each) for each in range(dice.choice((1, 1, 20)))]
            inner = struct.pack(">I", len(bodies)) + b"".join(map(sized, bodies))
            if client.command(b"MPUB t\n" + sized(inner)) == b"OK":
                confirmed.update(bodies)


def consume(address: Any, found: set[bytes]) -> None:
    with contextlib.suppress(OSError, struct.error):
        client = WireClient(address)
        client.subscribe("t", "c", 100)
        while True:
            found.add(client.message().body)


def test_kills_at_random_moments_lose_nothing_that_was_answered_ok(tmp_path: Path) -> None:
    dice, confirmed, found = random.Random(7), set[bytes](), set[bytes]()
    broker = BrokerProcess(nsqds=1, lookupd=False, data_path=tmp_path, mem_queue_size=50, sync_timeout=0.1)
    for turn in range(KILLS):
        broker.start()
        for path in ("/topic/create?topic=t", "/channel/create?topic=t&channel=c"):
            assert ask(broker.nsqd.http, "POST", path).status == 200
        least = len(confirmed) + dice.randrange(300, 2000)
        greenlets = [spawn(publish, broker.nsqd.tcp, turn, dice, confirmed), spawn(consume, broker.nsqd.tcp, found)]
        until(lambda least=least: len(confirmed) >= least)  # type: ignore[misc]
        broker.kill()
        for greenlet in greenlets:
            greenlet.join()
    broker.start()
    reader = spawn(consume, broker.nsqd.tcp, found)
    until(lambda: found >= confirmed)
    reader.kill()
    broker.stop()


# A read that fails for a moment is no damage: nothing is lost, and nothing is thought to be lost.


COUNT = 60


class Failing:
    """Lets reads of files in a folder fail, by ``os.pread`` and by ``Path.read_bytes``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.left = 0
        self.failed = 0
        self.number = errno.EIO
        self.suffix = ""  # of the files; one that is given can be opened
        pread, read_bytes, opened = os.pread, Path.read_bytes, os.open

        def may_fail(path: str) -> None:
            if self.left and path.startswith(str(folder)) and path.endswith(self.suffix):
                self.left -= 1
                self.failed += 1
                raise OSError(self.number, os.strerror(self.number), path)

        def failing_pread(fd: int, *arguments: Any) -> bytes:
            may_fail(os.readlink(f"/proc/self/fd/{fd}"))
            return pread(fd, *arguments)

        def failing_read_bytes(path: Path) -> bytes:
            if path.exists():
                may_fail(str(path))
            return read_bytes(path)

        def failing_open(path: Any, *arguments: Any, **keywords: Any) -> int:
            if not self.suffix and os.path.isfile(path):
                may_fail(str(path))
            return opened(path, *arguments, **keywords)

        monkeypatch.setattr(os, "pread", failing_pread)
        monkeypatch.setattr(Path, "read_bytes", failing_read_bytes)
        monkeypatch.setattr(os, "open", failing_open)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Failing:
    return Failing(monkeypatch, tmp_path)


@pytest.fixture
def start(embedded: Callable[..., NsqdServer], tmp_path: Path) -> Callable[[], NsqdServer]:
    return partial(embedded, data_path=str(tmp_path), mem_queue_size=0, max_bytes_per_file=4096)


def publish_some(address: Any, topic: bytes = b"t") -> list[bytes]:
    client = WireClient(address)
    bodies = [b"%040d" % number for number in range(COUNT)]
    for body in bodies:
        assert client.command(b"PUB " + topic + b"\n" + sized(body))[:2] == b"OK"
    client.close()
    return bodies


def consume_all(server: Any, count: int = COUNT, subscription: str = "SUB t c") -> list[bytes]:
    consumer = Consumer(server, subscription)
    bodies = []
    for _ in range(count):
        frame = consumer.receive()
        consumer.finish(frame)
        bodies.append(frame.data[26:])
    assert consumer.is_quiet(0.05)
    consumer.close()
    return bodies


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_messages_come_when_they_can_be_read_again(
    start: Callable[[], NsqdServer], failing: Failing, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    server = start()
    server.nsqd.get_topic("t").get_channel("c")
    bodies = publish_some(server.tcp_address)
    failing.number = number
    failing.left = 5
    assert consume_all(server) == bodies
    assert failing.failed == 5
    events = [record.event for record in caplog.records if record.levelno >= logging.WARNING]
    assert events == ["broker_read_failed", "broker_read_recovered"]


def test_what_cannot_be_read_keeps_no_core_busy_and_nothing_else_waiting(
    start: Callable[[], NsqdServer], failing: Failing
) -> None:
    server = start()
    server.nsqd.get_topic("t").get_channel("c")
    bodies = publish_some(server.tcp_address)
    failing.left = 10**9
    consumer = Consumer(server, "SUB t c")
    assert consumer.is_quiet(0.5)
    assert 0 < failing.failed < 100
    failing.left = 0
    assert consumer.receive().data[26:] == bodies[0]


def test_a_pause_that_ends_while_nothing_can_be_read_loses_nothing_beside_ephemeral_channels_either(
    start: Callable[[], NsqdServer], failing: Failing
) -> None:
    server = start()
    topic = server.nsqd.get_topic("t")
    for name in ("a#ephemeral", "c", "z#ephemeral"):
        topic.get_channel(name)
    topic.set_paused(True)
    bodies = publish_some(server.tcp_address)
    failing.left = 10**9
    topic.set_paused(False)
    failing.left = 0
    assert sorted(consume_all(server)) == bodies


@pytest.mark.parametrize(
    ("number", "reads", "suffix"),
    [(errno.EMFILE, 1, ""), (errno.EIO, 3, ".log"), (errno.EMFILE, 9, ".log"), (errno.EIO, 9, "checkpoint")],
)
def test_a_start_tries_again(
    start: Callable[[], NsqdServer], failing: Failing, tmp_path: Path, number: int, reads: int, suffix: str
) -> None:
    server = start()
    server.nsqd.get_topic("t").get_channel("c")
    server.nsqd.get_topic("paused").set_paused(True)
    bodies = publish_some(server.tcp_address)
    server.stop()
    failing.number, failing.suffix, failing.left = number, suffix, reads
    again = start()
    assert failing.failed == reads
    opened = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path)]
    logs = [path for path in opened if path.startswith(f"{tmp_path}/") and path.endswith(".log")]
    assert len(set(logs)) == len(logs)  # what it could not read is open no more
    assert consume_all(again) == bodies
    assert again.nsqd.topics["paused"].is_paused


def test_a_start_that_cannot_read_says_so_and_changes_nothing(
    start: Callable[[], NsqdServer], failing: Failing, tmp_path: Path
) -> None:
    server = start()
    server.nsqd.get_topic("t").get_channel("c")
    bodies = publish_some(server.tcp_address)
    server.stop()
    before = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    failing.left = 10**9
    with pytest.raises(OSError, match="cannot be read, and is left as it is"):
        start()
    failing.left = 0
    assert {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == before
    assert consume_all(start()) == bodies


@pytest.mark.parametrize(
    ("number", "reads", "suffix"), [(errno.EMFILE, 1, ""), (errno.EIO, 4, ".log"), (errno.EIO, 7, ".log")]
)
def test_a_cluster_that_starts_tries_again(
    tmp_path: Path, failing: Failing, number: int, reads: int, suffix: str
) -> None:
    with RedesignedCluster(1, 1, data_path=tmp_path, kind=True) as cluster:
        cluster.create_topic("t", channels=["c"])
        bodies = publish_some(cluster.nsqds[0].tcp_address, b"t 0")
    failing.number, failing.suffix, failing.left = number, suffix, reads
    with RedesignedCluster(1, 1, data_path=tmp_path, kind=True) as cluster:
        assert failing.failed == reads
        until(lambda: cluster.partition("t", 0).is_writable)
        assert consume_all(cluster.nsqds[0], subscription="SUB t c 0") == bodies
    assert not list(tmp_path.rglob("*.bad"))
