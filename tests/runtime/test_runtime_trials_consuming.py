"""What trials broke in the consuming side, where a user meets it: through public names, and on whole nsqds."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

import gevent
import pytest
from gevent.event import Event
from gevent.ssl import PROTOCOL_TLS_SERVER, SSLContext
from support.blocking import Connection
from support.http import ask
from support.partitions import PartitionNsqd, answers, push_record
from support.peers import Peer, PeerServer, RecordingOwner, frame, message
from support.waiting import PROCESS, PROMPT, WAIT, promptly, until

from nsq_fast import Consumer, Message, Producer, aio, threads
from nsq_fast._codec import pub
from nsq_fast.broker import RedesignedCluster
from nsq_fast.config import ConnectionConfig

NSQD = PartitionNsqd

Change = Callable[[list[Any]], object]


def post(address: Any, path: str, body: bytes = b"") -> None:
    assert ask(address, "POST", path, body).status == 200


def channel_stats(address: Any) -> dict[str, Any]:
    stats = ask(address, "GET", "/stats?format=json&topic=t").json
    (found,) = stats["topics"][0]["channels"]
    return dict(found)


# A batch handler's list is its own


@contextmanager
def batches_on_gevent(handle: Change, **options: Any) -> Iterator[None]:
    with Consumer("t", "c", batch_handler=lambda consumer, messages: handle(messages), **options):
        yield


@contextmanager
def batches_on_handler_threads(handle: Change, **options: Any) -> Iterator[None]:
    with batches_on_gevent(handle, handler_threads=2, **options):
        yield


@contextmanager
def batches_on_threads(handle: Change, **options: Any) -> Iterator[None]:
    with threads.Consumer("t", "c", batch_handler=lambda consumer, messages: handle(messages), **options):
        yield


@contextmanager
def batches_on_asyncio(handle: Change, **options: Any) -> Iterator[None]:
    ended = threading.Event()

    async def handle_later(consumer: aio.Consumer, messages: list[Message]) -> None:
        await asyncio.sleep(0)
        handle(messages)

    async def run() -> None:
        async with aio.Consumer("t", "c", batch_handler=handle_later, **options):
            while not ended.is_set():
                await asyncio.sleep(0.01)  # sleep: the loop of the consumer runs until the test is done

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        until(lambda: not thread.is_alive())


FACES = [batches_on_gevent, batches_on_handler_threads, batches_on_threads, batches_on_asyncio]

CHANGES: dict[str, Change] = {
    "append None": lambda messages: messages.append(None),
    "an item is None": lambda messages: messages.__setitem__(0, None),
    "pop": lambda messages: messages.pop(),
    "clear": lambda messages: messages.clear(),
    "bodies": lambda messages: messages.__setitem__(slice(None), [message.body for message in messages]),
    "other objects": lambda messages: messages.__setitem__(slice(None), [object(), 1, "text"]),
    "twice": lambda messages: messages.extend(messages[:]),
}


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("change", CHANGES)
def test_what_was_handed_over_is_finished_whatever_a_batch_handler_does_to_its_list(
    nsqd_process: Any, face: Any, change: str
) -> None:
    seen: list[bytes] = []

    def handle(messages: list[Any]) -> None:
        seen.extend(message.body for message in messages)
        CHANGES[change](messages)

    bodies = [b"m%d" % number for number in range(5)]
    post(nsqd_process.http, "/mpub?topic=t", b"\n".join(bodies))
    with face(handle, nsqd_tcp_addresses=nsqd_process.address, max_in_flight=10):
        until(lambda: len(seen) >= len(bodies))
    stats = channel_stats(nsqd_process.http)
    assert sorted(seen) == bodies, "each of them once"
    counts = ("depth", "in_flight_count", "deferred_count", "requeue_count", "timeout_count")
    assert [stats[name] for name in counts] == [0] * len(counts)


@pytest.mark.parametrize("face", FACES)
def test_what_was_handed_over_is_requeued_when_a_batch_handler_clears_its_list_and_raises(
    nsqd_process: Any, face: Any
) -> None:
    attempts: Counter[bytes] = Counter()

    def handle(messages: list[Any]) -> None:
        first = [message.body for message in messages if message.attempts == 1]
        attempts.update(message.body for message in messages)
        messages.clear()
        if first:
            raise ValueError("no")

    bodies = [b"m%d" % number for number in range(5)]
    post(nsqd_process.http, "/mpub?topic=t", b"\n".join(bodies))
    options: dict[str, Any] = {"max_in_flight": 10, "requeue_delay": 0, "max_backoff_duration": 0}
    with face(handle, nsqd_tcp_addresses=nsqd_process.address, **options):
        until(lambda: all(attempts[body] >= 2 for body in bodies))
    stats = channel_stats(nsqd_process.http)
    assert (stats["depth"], stats["in_flight_count"], stats["timeout_count"]) == (0, 0, 0)


# Iteration over an ordered topic


def test_iteration_in_order_finishes_at_once(nsqd: Any, consume: Any) -> None:
    """Not with the answer to a heartbeat: this server sends none."""
    consumer = consume(None, ordered=True, max_in_flight=5)
    seen = []

    def iterate() -> None:
        for got in consumer:
            seen.append(got.internal_id & ((1 << 50) - 1))
            if len(seen) == 4:
                return

    taker = gevent.spawn(iterate)
    connection = nsqd.subscriber(None)
    for number in range(1, 4):
        push_record(connection, number)
        connection.wait_for(lambda number=number: number - 1 in [0, *answers(connection, b"FIN")])
        until(lambda number=number: number in seen)
    connection.wait_for(lambda: answers(connection, b"FIN") == [1, 2, 3])
    push_record(connection, 4)
    taker.join(WAIT)
    assert seen == [1, 2, 3, 4]


def test_iteration_in_order_on_a_cluster() -> None:
    """All are taken in less time than a heartbeat for each would need."""
    with RedesignedCluster(nodes=1) as cluster:
        cluster.create_topic("t", 2, 1, ordered=True, channels=["c"])
        lookup = str(cluster.lookupds[0].http_address)
        bodies = [b"m%d" % number for number in range(20)]
        with Producer(lookupd_http_addresses=lookup) as producer:
            for number, body in enumerate(bodies):
                producer.publish("t", body, key=str(number))
        seen = []
        consumer = Consumer("t", "c", lookupd_http_addresses=lookup, heartbeat_interval=60)
        with gevent.Timeout(WAIT):
            for got in consumer:
                seen.append(got.body)
                if len(seen) == len(bodies):
                    break
        consumer.close()
    assert sorted(seen) == sorted(bodies)


# A worker that reads in place of the reader, through TLS or compression, and gives way to others


class LayeredNsqd:
    """Speaks TLS, snappy or deflate, and sends one burst of messages that takes several reads."""

    def __init__(self, layers: str, tls: dict[str, str], count: int) -> None:
        self.commands: list[bytes] = []
        self.bodies = [b"%05d" % number + os.urandom(SIZE) for number in range(count)]
        self.peer: Peer | None = None
        self.count = 0
        self._layers = layers
        self._tls = tls
        self._server = PeerServer(self._script)
        self.options = {"nsqd_tcp_addresses": str(self._server.address), "max_in_flight": count}
        self.options.update({name: True for name in layers.split("+") if name != "tls"})
        if "tls" in layers:
            self.options.update(tls_v1=True, tls_options={"cafile": tls["ca"]})

    def _script(self, peer: Peer) -> None:
        self.count += 1
        # As much as the system takes at once: who reads does not wait, so that it gives way in most turns.
        peer.sock.setsockopt(SOL_SOCKET, SO_SNDBUF, 4 << 20)
        names = {"tls": "tls_v1", "snappy": "snappy", "deflate": "deflate"}
        peer.handshake(**{names[name]: True for name in self._layers.split("+")})
        for name in self._layers.split("+"):
            if name == "tls":
                context = SSLContext(PROTOCOL_TLS_SERVER)
                context.load_cert_chain(self._tls["cert"], self._tls["key"])
                peer.start_tls(context)
            else:
                getattr(peer, f"start_{name}")()
            peer.ok()
        with suppress(EOFError):
            assert peer.read_line().startswith(b"SUB ")
            peer.ok()
            self.peer = peer
            while True:
                self.commands.append(peer.read_line())
                if self.commands[-1] == b"CLS":
                    peer.frame(0, b"CLOSE_WAIT")

    def burst(self, share: float = 0.5) -> None:
        """That share in one large piece, the others in small ones: each makes other reads."""
        assert self.peer is not None
        frames = [message(number, body) for number, body in enumerate(self.bodies)]
        half = round(share * len(frames))
        with suppress(OSError):  # the consumer has closed
            if half:
                self.peer.send(b"".join(frames[:half]))
            for at in range(half, len(frames), 4):
                self.peer.send(b"".join(frames[at : at + 4]))
                gevent.sleep(0)

    def is_ready(self) -> bool:
        return any(command.startswith(b"RDY ") and command != b"RDY 0" for command in self.commands)

    def heartbeat(self) -> None:
        assert self.peer is not None
        self.peer.frame(0, b"_heartbeat_")

    def stop(self) -> None:
        self._server.stop()


SIZE, COUNT, MANY = 4000, 120, 600
TURNS = range(12)
"""Of the hub, after which something happens: in one of them the worker has given way, whatever the layer."""
SHARES = (0.0, 0.5, 1.0)


@pytest.fixture(params=["tls", "snappy", "deflate", "tls+deflate"])
def layered(request: pytest.FixtureRequest, tls_files: dict[str, str]) -> Iterator[Callable[..., LayeredNsqd]]:
    servers: list[LayeredNsqd] = []

    def make(count: int = COUNT) -> LayeredNsqd:
        servers.append(LayeredNsqd(request.param, tls_files, count))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


def test_close_without_drain_ends_in_any_turn_of_a_read(layered: Callable[..., LayeredNsqd]) -> None:
    for turns, share in product(TURNS, SHARES):
        server, seen = layered(MANY), []
        consumer = Consumer("t", "c", message_handler=lambda _, m, seen=seen: seen.append(m.body), **server.options)
        consumer.start(block=False)
        until(server.is_ready)
        sender = gevent.spawn(server.burst, share)
        while not seen:
            gevent.sleep(0)
        for _ in range(turns):
            gevent.sleep(0)
        closer = gevent.spawn(consumer.close, drain=False, timeout=0.5)
        closer.join(PROMPT)
        assert closer.ready(), f"close() hangs, called {turns} turns after the first message"
        sender.kill()


def test_a_connection_is_heard_while_a_handler_waits_after_any_read(layered: Callable[..., LayeredNsqd]) -> None:
    for number, share in product(range(0, COUNT, 8), SHARES):
        server, release, waits = layered(), Event(), Event()

        def handle(_: Any, got: Message, number: int = number, release: Event = release, waits: Event = waits) -> None:
            if got.body.startswith(b"%05d" % number):
                waits.set()
                release.wait()

        consumer = Consumer("t", "c", message_handler=handle, **server.options)
        consumer.start(block=False)
        until(server.is_ready)
        sender = gevent.spawn(server.burst, share)
        assert waits.wait(WAIT)
        sender.join(WAIT)
        server.heartbeat()
        until(lambda server=server: b"NOP" in server.commands, about=lambda number=number: f"message {number}")
        release.set()
        until(lambda server=server: sum(command.startswith(b"FIN ") for command in server.commands) == COUNT)
        consumer.close()


def test_a_timeout_that_a_handler_has_left_running_loses_nothing(
    layered: Callable[..., LayeredNsqd], no_unseen_errors: list[Any]
) -> None:
    for number, share in product(range(0, COUNT, 8), SHARES):
        server, seen = layered(), []

        def handle(_: Any, got: Message, number: int = number, seen: list[bytes] = seen) -> None:
            seen.append(got.body)
            if got.body.startswith(b"%05d" % number):
                gevent.Timeout(0).start()  # whatever the worker does in the next turn is interrupted

        consumer = Consumer("t", "c", message_handler=handle, **server.options)
        consumer.start(block=False)
        until(server.is_ready)
        sender = gevent.spawn(server.burst, share)
        until(lambda seen=seen: len(seen) >= COUNT, about=lambda seen=seen: f"{len(seen)} of {COUNT}")
        assert (seen, server.count) == (server.bodies, 1)
        sender.join(WAIT)
        consumer.close()
    no_unseen_errors.clear()  # of the workers that were interrupted: each began again


# What is interrupted, raised or forgotten leaves the rest whole


def test_a_touched_message_that_the_program_has_dropped_does_not_hold_close(nsqd_process: Any) -> None:
    def drop(_: Any, got: Message) -> None:
        got.enable_async()
        got.touch()
        dropped.set()

    dropped = Event()
    post(nsqd_process.http, "/pub?topic=t", b"m")
    consumer = Consumer("t", "c", nsqd_tcp_addresses=nsqd_process.address, message_handler=drop)
    consumer.start(block=False)
    assert dropped.wait(WAIT)
    with promptly():  # it would wait for the message's timeout, or its own, which are longer
        consumer.close()
    stats = channel_stats(nsqd_process.http)
    assert (stats["requeue_count"], stats["in_flight_count"]) == (1, 0)


@pytest.mark.parametrize("callers", [1, 3])
def test_a_switch_without_a_reason_ends_no_publish(publish_nsqd: Any, new_producer: Any, callers: int) -> None:
    withheld: list[Peer] = []
    server = publish_nsqd(lambda peer, command: withheld.append(peer))
    producer = new_producer(server)
    publishing = [gevent.spawn(producer.publish, "t", b"m%d" % number) for number in range(callers)]
    publishing.append(gevent.spawn(producer.multipublish, "t", [b"n%d" % number for number in range(3)], headers=None))
    server.wait_commands(len(publishing))
    for each in publishing * 2:
        gevent.get_hub().loop.run_callback(each.switch)
        gevent.sleep(0)
    assert not any(each.ready() for each in publishing)
    for peer in withheld:
        peer.ok()
    assert [each.get(timeout=WAIT) for each in publishing] == [b"OK"] * len(publishing)


@pytest.mark.parametrize("replies", ["OKs alone", "among messages"])
def test_replies_behind_one_whose_owner_raises_are_told_all_the_same(replies: str, no_unseen_errors: list[Any]) -> None:
    """An embedder's owner fails: of every command it hears, once, what became of it."""

    class Owner(RecordingOwner):
        def on_reply(self, conn: Any, token: Any, data: bytes) -> None:
            super().on_reply(conn, token, data)
            if token == 1:
                raise ValueError("no")

    def script(peer: Peer) -> None:
        peer.accept_sub()
        for _ in range(3):
            assert peer.read_line().startswith(b"PUB ")
            peer.read_body()
        oks = frame(0, b"OK") * 3
        peer.send(oks if replies == "OKs alone" else message(1) + oks + message(2))
        peer.read_all()

    server, owner = PeerServer(script), Owner()
    conn = Connection(server.address, ConnectionConfig(), owner)
    conn.connect()
    conn.subscribe("t", "c")
    for token in (1, 2, 3):
        conn.request(pub("t", b"x"), "PUB", token)
    assert "no" in str(owner.wait_end())
    assert [token for token, _ in owner.replies] == [1, 2, 3]
    assert not owner.failed
    no_unseen_errors.clear()
    server.stop()


WANT_OF_MEMORY = """
import resource, sys
from nsq_fast import Producer
from nsq_fast.broker import RedesignedCluster
from nsq_fast.config import ConnectionConfig

MANY = 200 << 20
with RedesignedCluster(nodes=1) as cluster:
    cluster.create_topic("t", 2, 1, ordered=True, channels=["c"])
    lookup = str(cluster.lookupds[0].http_address)
    with Producer(lookupd_http_addresses=lookup, max_msg_size=2 * MANY, max_body_size=2 * MANY) as producer:
        producer.publish("t", b"before", key="k")
        body = bytes(MANY)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        for publish in (producer.publish, lambda *given, **more: producer.multipublish(given[0], [given[1]], **more)):
            resource.setrlimit(resource.RLIMIT_AS, (used + MANY // 2, limits[1]))
            try:
                publish("t", body, key="k")
            except Exception as error:
                print(type(error).__name__, getattr(error, "possibly_stored", None))
            resource.setrlimit(resource.RLIMIT_AS, limits)
            print(producer.publish("t", b"after", key="k"), flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a limit of the address space")
def test_want_of_memory_while_a_command_is_made_does_not_wedge_its_partition() -> None:
    command = [sys.executable, "-c", WANT_OF_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False)
    assert done.stdout.split("\n")[:-1] == ["PublishFailed False", "b'OK'"] * 2, done.stderr[-2000:]
