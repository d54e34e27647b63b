"""One connection on every loop: gevent's hub, asyncio, uvloop; with the same nsqds, and with peers that misbehave."""

from __future__ import annotations

import logging
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any
from uuid import uuid4

import gevent
import pytest
from gevent import get_hub
from support.contract import FACES, Face
from support.servers import EMBEDDED_NSQD, Daemon, RealNsqd, find_server
from support.waiting import PROMPT, WAIT, promptly, until, until_on

import nsq_fast
from nsq_fast import NsqdHTTPClient, Producer, _codec, errors
from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.client.connection import Connection
from nsq_fast.client.greenlets import Waiters
from nsq_fast.client.trace import PublishRecord, TraceLog
from nsq_fast.columns import ColumnSubscription
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    ConfigError,
    ConnectFailed,
    ConnectionClosed,
    ConnectionLost,
    InternalError,
    LocalProtocolError,
    NsqError,
)
from nsq_fast.names import Address, parse_address

BLOCK = bytes(1 << 20)


class Owner:
    """Notes what a connection tells it: for each call, by its name, what came with it."""

    def __init__(self) -> None:
        self.told: defaultdict[str, list[Any]] = defaultdict(list)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda conn, *values: self.told[name].append(values)

    @property
    def messages(self) -> list[Any]:
        return [message for (messages,) in self.told["on_messages"] for message in messages]

    @property
    def ends(self) -> list[NsqError]:
        return [error for (error,) in self.told["on_disconnect"]]


async def opened(loop: Any, address: Address, **options: Any) -> tuple[Owner, Connection]:
    """A connection that is made, and its owner."""
    owner = Owner()
    conn = Connection(address, ConnectionConfig(**options), owner, loop)
    await conn.open()
    return owner, conn


@pytest.fixture(scope="module", params=["embedded", "original"])
def nsqd_address(
    request: pytest.FixtureRequest, tls_files: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Address]:
    """An nsqd in another process, with TLS and compression, for tests with topics of their own."""
    if request.param == "original" and find_server("nsqd") is None:
        pytest.skip("no real nsqd")
    folder = tmp_path_factory.mktemp("nsqd")
    command = EMBEDDED_NSQD if request.param == "embedded" else None
    server = RealNsqd(folder, f"-tls-cert={tls_files['cert']}", f"-tls-key={tls_files['key']}", command=command)
    yield server.tcp_address
    server.kill()


LAYERS = ["", "tls_v1", "snappy", "deflate", "tls_v1 snappy", "tls_v1 deflate"]


@pytest.mark.parametrize("layers", LAYERS, ids=lambda layers: layers or "plain")
async def test_publishes_and_consumes(loop: Any, nsqd_address: Address, tls_files: dict[str, str], layers: str) -> None:
    options: dict[str, Any] = dict.fromkeys(layers.split(), True)
    if "tls_v1" in options:
        options["tls_options"] = {"cafile": tls_files["ca"]}
    topic = f"t{uuid4().hex}"
    bodies = [b"%d" % number * 200 for number in range(300)] + [b"large" * 100_000]
    owner, conn = await opened(loop, nsqd_address, **options)
    for number, body in enumerate(bodies):
        conn.request(_codec.pub(topic, body), "PUB", number)
    await until_on(loop, lambda: len(owner.told["on_reply"]) == len(bodies))
    await conn.subscribe(topic, "c")
    conn.set_rdy(500)
    await until_on(loop, lambda: len(owner.messages) == len(bodies))
    for message in owner.messages:
        message.finish()
    conn.start_close()
    await until_on(loop, lambda: owner.told["on_close_wait"])
    conn.close()
    await conn.closed()
    assert [token for token, _ in owner.told["on_reply"]] == list(range(len(bodies)))
    assert sorted(message.body for message in owner.messages) == sorted(bodies)
    assert [type(error) for error in owner.ends] == [ConnectionClosed]
    assert not owner.told["on_failed"]

    again, second = await opened(loop, nsqd_address, **options)  # everything was finished
    second.request(_codec.pub(topic, b"last"), "PUB", 0)
    await second.subscribe(topic, "c")
    second.set_rdy(500)
    await until_on(loop, lambda: again.messages)
    assert [message.body for message in again.messages] == [b"last"]
    with promptly():  # the server consents at once
        second.close(timeout=2 * PROMPT)
        await second.closed()


class Peer:
    """A server in a thread that takes one connection, answers IDENTIFY, and then does what a test says; or nothing."""

    def __init__(self, then: Callable[[socket.socket], None] | None) -> None:
        self._then = then
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)  # else it takes megabytes unread
        self.address = Address(*self._listener.getsockname())
        self.is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._listener:
            if self._then is None:  # whoever else knows this port from earlier takes nothing away then
                self.is_over.wait(WAIT)
                return
            sock, _ = self._listener.accept()
        with sock, suppress(OSError):
            with sock.makefile("rb") as lines:
                lines.read(4)
                lines.readline()
                lines.read(struct.unpack(">I", lines.read(4))[0])
            sock.sendall(frame(b"OK"))
            self._then(sock)
            self.is_over.wait(WAIT)

    def stop(self) -> None:
        self.is_over.set()
        self._thread.join(WAIT)


def frame(data: bytes, kind: int = 0) -> bytes:
    return struct.pack(">II", 4 + len(data), kind) + data


@pytest.fixture
def peer() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def make(then: Callable[[socket.socket], None] | None) -> Peer:
        peers.append(Peer(then))
        return peers[-1]

    yield make
    for each in peers:
        each.stop()


def ignore(_: socket.socket) -> None:
    """Say and read nothing."""


@pytest.mark.parametrize("user_agent", [None, "x" * 5_000_000], ids=["says nothing", "reads nothing"])
async def test_who_does_not_answer_is_not_connected_in_time(
    loop: Any, peer: Callable[..., Peer], user_agent: str | None
) -> None:
    config = ConnectionConfig(connect_timeout=0.1, user_agent=user_agent)
    conn = Connection(peer(None).address, config, Owner(), loop)
    with pytest.raises(ConnectFailed, match=r"not connected within 0\.1 s"):
        await conn.open()
    assert not conn.is_open


async def test_names_that_no_server_answers_keep_no_other_waiting(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 1))]
    ended, asked = threading.Event(), list[str]()

    def name_server(host: str, *_: Any) -> Any:
        asked.append(host)
        if host.endswith(".hung.test"):
            ended.wait(2 * WAIT)
        return found

    monkeypatch.setattr("nsq_fast.client.loop.getaddrinfo", name_server)
    names = [f"n{number}.hung.test" for number in range(40)]  # more than a pool of a loop has threads
    try:
        for name in 2 * names:
            with pytest.raises(TimeoutError, match=f"{name} was not resolved within 0.001 s"):
                await loop.resolve(name, 1, 0.001)
        conn = Connection(Address(names[0], 1), ConnectionConfig(connect_timeout=0.1), Owner(), loop)
        with pytest.raises(ConnectFailed, match=f"{names[0]}:1: cannot connect: {names[0]} was not resolved within"):
            await conn.open()
        assert await loop.resolve("good.test", 1, WAIT) == found
        assert sorted(asked) == sorted([*names, "good.test"]), "who asks again waits for the same answer"
    finally:
        ended.set()


async def test_a_system_without_threads_fails_a_lookup_alone(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr("nsq_fast.client.loop._start_thread", refuse)
        with pytest.raises(OSError, match="cannot be resolved: can't start"):
            await loop.resolve("good.test", 1, WAIT)
    monkeypatch.setattr("nsq_fast.client.loop.getaddrinfo", lambda *_: [])
    assert await loop.resolve("good.test", 1, WAIT) == []


async def test_closing_while_it_connects_ends_that(loop: Any, peer: Callable[..., Peer]) -> None:
    conn = Connection(peer(None).address, ConnectionConfig(connect_timeout=WAIT), Owner(), loop)
    loop.call_later(0.05, conn.close)
    with pytest.raises(ConnectFailed, match="closed by us"):
        await conn.open()


async def test_what_is_dropped_does_not_connect(loop: Any, peer: Callable[..., Peer], closed_port: int) -> None:
    """As where the loop of a consumer ends: nobody waits for it to be connected, and nobody would close it then."""
    reason = ConnectionClosed("the loop has ended")
    owner = Owner()
    conn = Connection(peer(None).address, ConnectionConfig(connect_timeout=WAIT), owner, loop)
    loop.call_later(0.05, conn.drop, reason)
    with pytest.raises(ConnectFailed, match="the connection was closed"):
        await conn.open()
    conn = Connection(Address("127.0.0.1", closed_port), ConnectionConfig(), owner, loop)
    conn.drop(reason)
    with pytest.raises(LocalProtocolError, match="called already"):
        await conn.open()
    assert not owner.ends


async def test_it_does_not_look_early_after_a_time_without_the_loop(loop: Any, peer: Callable[..., Peer]) -> None:
    def beat(sock: socket.socket) -> None:
        while not beating.wait(0.2):
            sock.sendall(frame(b"_heartbeat_"))

    def beats() -> int:
        return len(owner.told["on_heartbeat"])

    beating = threading.Event()
    owner, conn = await opened(loop, peer(beat).address, heartbeat_interval=1.0)
    try:
        await until_on(loop, beats)
        time.sleep(2.5)  # sleep: the process itself does not run, for more than two intervals
        count = beats()
        await until_on(loop, lambda: beats() > count + 14 or owner.ends)  # 12 have come meanwhile
        assert owner.ends == []
        conn.close(ConnectionLost("the test is over"))
        await conn.closed()
    finally:
        beating.set()


async def test_a_server_that_takes_nothing_is_dead_and_blocks_nobody(loop: Any, peer: Callable[..., Peer]) -> None:
    owner, conn = await opened(loop, peer(ignore).address, write_timeout=0.2)
    for number in range(32):
        conn.request(_codec.pub("t", BLOCK[1:]), "PUB", number)
    conn.flush()
    assert conn.is_blocked
    await until_on(loop, lambda: owner.ends)
    assert "took no byte" in str(owner.ends[0])
    assert [token for token, _ in owner.told["on_failed"]] == list(range(32))


@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
async def test_a_closed_producer_has_let_go_of_a_silent_server_in_its_time(
    face: Face, peer: Callable[..., Peer]
) -> None:
    socks: list[socket.socket] = []
    async with face.client("Producer", str(peer(socks.append).address)) as producer:
        await face.until(lambda: producer.is_connected)
        await face(producer.close(timeout=0.2))
        with pytest.raises(ConnectionError):  # as long as only one direction is closed it takes them
            deque(map(socks[0].send, repeat(b"x", 1000)), maxlen=0)


async def test_a_flood_leaves_others_their_turns(loop: Any, peer: Callable[..., Peer]) -> None:
    message = _codec.encode_frame(2, _codec.encode_message(1, 1, b"0123456789abcdef", b"x" * 1000))
    count = 20_000

    def flood(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(frame(b"OK"))
        sock.recv(1 << 16)
        sock.sendall(message * count)

    owner, conn = await opened(loop, peer(flood).address)
    await conn.subscribe("t", "c")
    conn.set_rdy(2500)
    turns = [0]
    # RDY is exceeded on purpose: what is looked at is who runs meanwhile, not the end that this brings.
    while not owner.ends and turns[-1] < count:
        await loop.sleep(0)
        turns.append(sum(len(messages) for (messages,) in owner.told["on_messages"]))
    steps = [after - before for before, after in pairwise(turns)]
    assert max(steps) * len(message) <= 256 * 1024  # two reads of 64 KiB, and what was left of one before
    conn.close(ConnectionLost("the test is over"))
    await conn.closed()


# What the client asks of a loop, on each of them.


log = logging.getLogger("nsq_fast.test")


async def test_faults_are_told_whatever_the_receiver_does_and_what_is_kept_begins_again(
    loop: Any, caplog: pytest.LogCaptureFixture, no_unseen_errors: list[Any]
) -> None:
    faults: list[NsqError] = []
    starts = 0

    async def fail_twice() -> None:
        nonlocal starts
        starts += 1
        await loop.sleep(0)
        if starts < 3:
            raise ValueError(f"fault {starts}")

    def receive(error: NsqError) -> None:
        faults.append(error)
        raise OSError("of the receiver")

    supervisor = loop.supervisor(log, receive)
    assert await supervisor.keep("fail_twice", fail_twice).join(WAIT)
    assert starts == 3
    assert [type(each) for each in faults] == [InternalError, InternalError]
    assert [str(each.__cause__) for each in faults] == ["fault 1", "fault 2"]
    assert "fail_twice: ValueError('fault 2'); it begins again in 0.2 s" in caplog.text
    assert "OSError: of the receiver" in caplog.text
    starts = 0
    assert await supervisor.job("a job", fail_twice).join(WAIT)
    assert "a job: ValueError('fault 1'); it is not tried again" in caplog.text
    assert (starts, len(faults)) == (1, 3)
    no_unseen_errors.clear()


def test_a_worker_that_is_killed_as_it_is_woken_leaves_the_message_to_another() -> None:
    waiters = Waiters()
    served: list[str] = []

    def wait(name: str) -> None:
        waiters.wait()
        served.append(name)

    first, second = gevent.spawn(wait, "first"), gevent.spawn(wait, "second")
    gevent.idle()
    get_hub().loop.run_callback(first.throw, gevent.GreenletExit)
    waiters.release()
    second.join(WAIT)
    assert served == ["second"]


def test_who_is_killed_while_nothing_comes_takes_nothing_with_it() -> None:
    waiters = Waiters()
    killed, other = gevent.spawn(waiters.wait), gevent.spawn(waiters.wait)
    gevent.idle()
    killed.kill()
    waiters.release()
    other.join(WAIT)
    assert other.successful()


# An nsqd that listens on Unix sockets: every face reaches it, by TCP's commands and by HTTP.


def is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


@pytest.fixture(scope="module", params=["embedded", "original"])
def folder(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Where nsqd.sock and http.sock of an nsqd are. The name of a Unix socket must be short."""
    if request.param == "original":
        found = find_server("nsqd")
        if found is None:
            pytest.skip("no real nsqd")
        command = [str(found), "-https-address=127.0.0.1:0"]
    else:
        command = [*EMBEDDED_NSQD]
    with tempfile.TemporaryDirectory(prefix="nsq") as name:
        path = Path(name)
        flags = [f"-tcp-address={path}/nsqd.sock", f"-http-address={path}/http.sock", f"-data-path={path}"]
        server = Daemon([*command, *flags], path / "log")
        server.start()
        try:
            until(lambda: server.check() or is_listening(path / "http.sock"), WAIT)  # the file is there before
            yield path
        finally:
            server.kill()


@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
async def test_what_is_published_over_a_unix_socket_is_consumed_over_it(face: Face, folder: Path) -> None:
    address, topic = f"{folder}/nsqd.sock", f"t{uuid4().hex}"
    wanted = {b"%d" % number for number in range(20)}
    seen = set()

    async def handle(consumer: Any, message: Any) -> None:
        seen.add(message.body)

    async with face.client("Producer", nsqd_tcp_addresses=address) as producer:
        for body in wanted:
            assert await face(producer.publish(topic, body)) == b"OK"
        assert producer.nsqd_tcp_addresses == {f"unix:{folder}/nsqd.sock"}
    async with face.client("Consumer", topic, "c", nsqd_tcp_addresses=address, message_handler=handle) as consumer:
        await face.until(lambda: consumer.stats().totals.finished >= len(wanted))
    assert seen == wanted


def test_columns_and_http_come_over_a_unix_socket(folder: Path) -> None:
    with NsqdHTTPClient.from_url(f"unix:{folder}/http.sock") as client:
        client.create_topic("made")
        assert "made" in [topic["topic_name"] for topic in client.stats()["topics"]]
    with ColumnSubscription(parse_address(f"{folder}/nsqd.sock", 1), "made", "c", ConnectionConfig()) as subscription:
        assert str(subscription.local_address) == f"unix:{folder}/nsqd.sock"
        with pytest.raises(errors.LocalProtocolError, match="called already"):
            subscription.open()


def test_nobody_listens_and_the_error_names_the_path(tmp_path: Path) -> None:
    with (
        nsq_fast.Producer(nsqd_tcp_addresses=f"{tmp_path}/none") as producer,
        pytest.raises(errors.NoNsqd, match=rf"{tmp_path}/none: cannot connect: No such file"),
    ):
        producer.publish("t", b"x", timeout=0.2)


# How much of the client a publish goes through


PACKAGE = str(Path(nsq_fast.__file__).parent)


@pytest.mark.parametrize(
    ("options", "most_calls", "most_files", "most_changes"),
    [({}, 14, 6, 10), ({"key": "k"}, 14, 6, 10), ({"key": "k", "trace_id": 7}, 25, 7, 16)],
    ids=["plain", "keyed", "keyed-and-traced"],
)
@pytest.mark.nsq_cluster(nodes=2, lookupds=1)
def test_a_warm_publish_walks_few_functions_in_few_files(
    nsq_cluster: RedesignedCluster, options: Any, most_calls: int, most_files: int, most_changes: int
) -> None:
    nsq_cluster.create_topic("t", partitions=2, channels=["ch"])
    with Producer(lookupd_http_addresses=[str(each.http_address) for each in nsq_cluster.lookupds]) as producer:
        for _ in range(20):
            producer.publish("t", b"body", **options)
        walks = [_walk(producer, options) for _ in range(20)]
    # The shortest is the publish alone: the hub has nothing else to do meanwhile.
    walk = min(walks, key=len)
    assert len(walk) <= most_calls
    assert len(set(walk)) <= most_files
    assert sum(one != other for one, other in pairwise(walk)) <= most_changes


@pytest.mark.parametrize("by_lookup", [False, True], ids=["address", "lookup"])
def test_a_key_that_keeps_no_order_lengthens_no_walk(nsq_broker: Broker, by_lookup: bool) -> None:
    """An original nsqd has no partitions, and keys go anywhere."""
    nsqd, lookupd = str(nsq_broker.nsqd.tcp_address), str(nsq_broker.lookupd.http_address)
    where = {"lookupd_http_addresses": lookupd} if by_lookup else {"nsqd_tcp_addresses": nsqd}
    with Producer(**where) as producer:
        for _ in range(20):
            producer.publish("t", b"body", key="k")
        walk = min([_walk(producer, {"key": "k"}) for _ in range(20)], key=len)
    assert len(walk) <= 14
    assert len(set(walk)) <= 6


@pytest.mark.parametrize("face", FACES, ids=lambda face: str(face.name))
@pytest.mark.nsq_cluster(nodes=2, lookupds=1)
async def test_each_face_gives_the_receipt_of_what_is_traced(
    face: Face, nsq_cluster: RedesignedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    nsq_cluster.create_topic("t", partitions=2, channels=["ch"])
    log = TraceLog()
    log.enable("another-topic")
    lookupds = [str(each.http_address) for each in nsq_cluster.lookupds]
    async with face.client("Producer", lookupd_http_addresses=lookupds, trace=log) as producer:
        assert await face(producer.publish("t", b"plain", key="k")) == b"OK"
        found = [
            await face(producer.publish("t", b"warm", key="k", trace_id=7)),
            await face(producer.publish("t", b"anywhere", trace_id=8)),
            await face.result(producer.publish_nowait("t", b"nowait", partition=1, trace_id=9)),
        ]
        assert [receipt.trace_id for receipt in found] == [7, 8, 9]
        assert found[2].partition == 1
        with pytest.raises(ConfigError, match="trace_id"):
            await face(producer.publish("t", b"x", key="k", trace_id=-1))
        log.enable("t")
        drawn = await face(producer.publish("t", b"switched on", key="k"))
        assert drawn.trace_id > 0
        assert drawn.partition == found[0].partition
        assert producer.stats()["held"] == 0
        records = [each.msg for each in caplog.records if isinstance(each.msg, PublishRecord)]
        assert [record.trace_id for record in records] == [drawn.trace_id], "of the others nobody asked for one"


def _walk(producer: Producer, options: Any) -> list[str]:
    """The files of ours in which a function is called, call by call."""
    calls = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        producer.publish("t", b"body", **options)
    finally:
        sys.setprofile(None)
    return calls
