"""Bad days: servers that die under load, freeze, lie, and links that damage what they carry.

Everywhere the same: nothing hangs, what was answered OK is handled, and what is
wrong is told.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gevent
import pytest
import trustme
from gevent.event import Event
from gevent.server import StreamServer
from support.embedded import EmbeddedNsqd
from support.http import ask
from support.ports import free_address
from support.servers import RealNsqd, find_server
from support.waiting import WAIT, until

from nsq_fast import Consumer, Message, Producer, RequeueMessage
from nsq_fast.broker import Broker, BrokerProcess, NsqdOptions, NsqdServer
from nsq_fast.client.give_up import PublishTo
from nsq_fast.errors import ConnectionLost, NoNsqd, RemoteProtocolError
from nsq_fast.names import Address
from nsq_fast.testing import FaultyLink

NSQD = EmbeddedNsqd

Link = Callable[..., FaultyLink]


class Child:
    """An nsqd in a process of its own, of either family."""

    def __init__(self, family: str, path: Path) -> None:
        self._real: RealNsqd | None = None
        if family == "original":
            self._real = RealNsqd(path, "-mem-queue-size=0", "-sync-every=1")
        else:
            self._broker = BrokerProcess(lookupd=False, data_path=path)
            self._broker.start()

    @property
    def tcp_address(self) -> Address:
        return self._real.tcp_address if self._real is not None else self._broker.nsqd.tcp

    @property
    def pid(self) -> int:
        if self._real is None:
            return self._broker.pid
        process = self._real._process
        assert process is not None
        return process.pid

    def crash(self) -> None:
        """SIGKILL, and start again. (The original loses what is in flight then: it is asked to stop instead.)"""
        if self._real is None:
            self._broker.restart()
        else:
            self._real.stop()
            self._real.start()

    def end(self) -> None:
        (self._real or self._broker).kill()


@pytest.fixture(params=["embedded", "original"])
def child(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Child]:
    if request.param == "original" and find_server("nsqd") is None:
        pytest.skip("no real nsqd")
    server = Child(request.param, tmp_path)
    yield server
    server.end()


class Load:
    """Producers and a consumer at work; what was answered OK, and what was handled.

    Every tenth message is requeued once, every seventh answered from another greenlet.
    """

    def __init__(self, producer: Producer, workers: int = 10, each: int = 60) -> None:
        self.stored: set[bytes] = set()
        self.handled: set[bytes] = set()
        self._producer = producer
        self._jobs = [gevent.spawn(self._publish, number, each) for number in range(workers)]

    def _publish(self, number: int, count: int) -> None:
        for index in range(count):
            body = b"%d-%d" % (number, index)
            self._producer.publish("t", body)
            self.stored.add(body)
            gevent.sleep(0.001)  # sleep: a program that does not publish without end

    def handle(self, consumer: Consumer, message: Message) -> None:
        number = int(message.body.split(b"-")[1])
        if number % 10 == 0 and message.attempts == 1:
            raise RequeueMessage(0.01, backoff=False)
        if number % 7 == 0:
            message.enable_async()
            gevent.spawn_later(0.005, self._finish, message)
        else:
            self.handled.add(message.body)

    def _finish(self, message: Message) -> None:
        with suppress(ConnectionLost):  # then it comes again
            message.finish()
            self.handled.add(message.body)

    @property
    def is_published(self) -> bool:
        return all(job.ready() for job in self._jobs)

    def check(self) -> None:
        gevent.joinall(self._jobs, raise_error=True)
        assert len(self.stored) == 600
        until(lambda: self.stored <= self.handled, timeout=30)


@pytest.mark.slow
@pytest.mark.kill
def test_nsqd_dies_again_and_again_under_load_and_nothing_is_lost(child: Child) -> None:
    address = [child.tcp_address]
    patient: dict[str, Any] = {"publish_timeout": 30, "max_publish_attempts": 100, "max_backoff_duration": 0.2}
    with Producer(address, **patient) as producer:
        load = Load(producer)
        with Consumer(
            "t", "c", address, message_handler=load.handle, max_in_flight=50, concurrency=5,
            max_tries=0, max_reconnect_delay=0.2, max_backoff_duration=0,
        ) as consumer:  # fmt: skip
            for share in (100, 250, 400):
                until(lambda share=share: len(load.stored) >= share)  # type: ignore[misc]
                child.crash()
            load.check()
            assert consumer.stats().connections[0].is_connected


@pytest.mark.slow
@pytest.mark.kill
def test_a_frozen_nsqd_is_left_and_found_again(child: Child) -> None:
    """SIGSTOP: the system accepts connections and bytes for it, and not even a heartbeat comes back."""
    errors: list[Exception] = []
    seen: set[bytes] = set()
    address = [child.tcp_address]
    quick: dict[str, Any] = {"heartbeat_interval": 1.0, "connect_timeout": 0.5}
    consumer = Consumer(
        "t", "c", address, message_handler=lambda c, m: seen.add(m.body), max_reconnect_delay=0.1, **quick
    )
    consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
    with consumer, Producer(address, publish_timeout=20, max_publish_attempts=50, **quick) as producer:
        producer.publish("t", b"before")
        until(lambda: seen == {b"before"})
        os.kill(child.pid, signal.SIGSTOP)
        try:
            result = producer.publish_nowait("t", b"meanwhile")
            until(lambda: len(errors) >= 2)
            assert "two heartbeat intervals" in str(errors[0])
            assert not consumer.stats().connections[0].is_connected
        finally:
            os.kill(child.pid, signal.SIGCONT)
        assert result.get(timeout=20) == b"OK"
        until(lambda: seen == {b"before", b"meanwhile"})


def test_a_link_that_cuts_in_the_middle_of_frames(nsqd: NsqdServer, nsq_link: Link) -> None:
    link = nsq_link(nsqd.tcp_address)
    seen: set[bytes] = set()
    bodies = {b"%d" % number * 50 for number in range(300)}
    with Producer([nsqd.tcp_address]) as producer:
        producer.multipublish("t", bodies)
    options: dict[str, Any] = {"max_in_flight": 20, "max_reconnect_delay": 0.02, "max_tries": 0, "msg_timeout": 1.0}
    with Consumer("t", "c", [link.address], message_handler=lambda c, m: seen.add(m.body), **options):
        link.chunk = 61
        for share in (30, 90, 150):
            until(lambda share=share: len(seen) >= share)  # type: ignore[misc]
            link.cut()
        link.chunk = 0
        until(lambda: seen == bodies)
    assert link.connections >= 4


class DamagingLink(FaultyLink):
    """Changes a byte in the middle of what passes, on demand."""

    damages = 0

    def _pass_on(self, data: bytes, sink: Any) -> None:
        if self.damages and len(data) > 20:
            self.damages -= 1
            data = data[:10] + bytes(255 - byte for byte in data[10:20]) + data[20:]
        super()._pass_on(data, sink)


@pytest.fixture
def tls(authority: trustme.CA, tmp_path: Path) -> dict[str, str]:
    """Options of an nsqd with a certificate for 127.0.0.1; ``ca.pem`` lies beside."""
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    return {"tls_cert": str(tmp_path / "cert.pem"), "tls_key": str(tmp_path / "key.pem")}


@pytest.mark.parametrize("layers", ["plain", "tls", "snappy", "deflate", "tls snappy", "tls deflate"])
def test_a_damaged_stream_is_left_and_nothing_is_lost(layers: str, tls: dict[str, str], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "tls_v1": "tls" in layers,
        "tls_options": {"cafile": str(tmp_path / "ca.pem")},
        "snappy": "snappy" in layers,
        "deflate": "deflate" in layers,
    }
    seen: set[bytes] = set()
    errors: list[Exception] = []
    with NsqdServer(NsqdOptions(**tls)) as nsqd:
        link = DamagingLink(nsqd.tcp_address)
        consumer = Consumer(
            "t", "c", [link.address], message_handler=lambda c, m: seen.add(m.body), max_in_flight=5,
            max_reconnect_delay=0.02, msg_timeout=1.0, max_tries=0, **options,
        )  # fmt: skip
        consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
        with consumer, Producer([nsqd.tcp_address]) as producer:
            producer.publish("t", b"before" * 20)
            until(lambda: seen == {b"before" * 20})
            link.damages = 1
            producer.publish("t", b"after" * 20)
            if layers in ("plain", "deflate"):  # without a checksum nothing tells that a body is not what it was
                until(lambda: len(seen) >= 2)
            else:
                until(lambda: b"after" * 20 in seen)
                assert isinstance(errors[0], (RemoteProtocolError, ConnectionLost))
                assert len(seen) == 2
        link.close()


def test_certificates_that_do_not_match_are_told_and_nothing_is_sent(tls: dict[str, str], tmp_path: Path) -> None:
    other = trustme.CA()
    other.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    options: dict[str, Any] = {"tls_v1": True, "tls_options": {"cafile": str(tmp_path / "other.pem")}}
    errors: list[Exception] = []
    with NsqdServer(NsqdOptions(**tls)) as nsqd:
        address = [nsqd.tcp_address]
        consumer = Consumer("t", "c", address, message_handler=print, max_reconnect_delay=0.05, **options)
        consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
        with consumer, Producer(address, **options) as producer:
            until(lambda: len(errors) >= 2)
            assert all("CERTIFICATE_VERIFY_FAILED" in str(error) for error in errors)
            with pytest.raises(NoNsqd, match="CERTIFICATE_VERIFY_FAILED"):
                producer.publish("t", b"secret", timeout=0.3)
        assert not nsqd.nsqd.topics


def test_a_dead_letter_topic_is_behind_the_same_tls(tls: dict[str, str], tmp_path: Path) -> None:
    def fail(consumer: Consumer, message: Message) -> None:
        raise RequeueMessage(0.0)

    dead: list[bytes] = []
    options: dict[str, Any] = {"tls_v1": True, "tls_options": {"cafile": str(tmp_path / "ca.pem")}}
    with NsqdServer(NsqdOptions(**tls, tls_required="true")) as nsqd:
        address = [nsqd.tcp_address]
        with (
            Producer(address, **options) as producer,
            Consumer("t", "c", address, message_handler=fail, max_tries=1, give_up=PublishTo("dead"), **options),
            Consumer("dead", "c", address, message_handler=lambda c, m: dead.append(m.body), **options),
        ):
            producer.publish("t", b"poison")
            until(lambda: dead == [b"poison"])


# Lookup services that lie


def reply(body: bytes) -> Callable[[Any], None]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    return lambda sock: sock.sendall(head + body)


def names(*addresses: Address) -> bytes:
    nsqds = b",".join(
        b'{"broadcast_address": "%s", "tcp_port": %d, "http_port": 1}' % (host.encode(), port)
        for host, port in addresses
    )
    return b'{"channels": [], "producers": [%s]}' % nsqds


def endless(sock: Any) -> None:
    sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        sock.sendall(b" " * 65536)


def hang(sock: Any) -> None:
    Event().wait(30)


def drop(sock: Any) -> None:
    sock.close()


LIES: dict[str, Callable[[Any], None]] = {
    "no json": reply(b"<html>"),
    "cut json": reply(names(Address("127.0.0.1", 1))[:-9]),
    "wrong types": reply(b'{"producers": {"broadcast_address": []}}'),
    "wrong port": reply(names(Address("127.0.0.1", 99999))),
    "nobody there": reply(names(Address("127.0.0.1", 1))),
    "no such host": reply(names(Address("no-such-host.invalid", 4150))),
    "endless": endless,
    "hangs": hang,
    "drops": drop,
}


@pytest.fixture
def liar() -> Iterator[Callable[[Callable[[Any], None]], Address]]:
    """A factory of HTTP servers that do the same to every request."""
    servers: list[StreamServer] = []

    def make(lie: Callable[[Any], None]) -> Address:
        def serve(sock: Any, _: object) -> None:
            with suppress(OSError):
                sock.recv(65536)
                lie(sock)

        servers.append(StreamServer(("127.0.0.1", 0), serve))
        servers[-1].start()
        return Address(*servers[-1].address)

    yield make
    for server in servers:
        server.stop(timeout=0)


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_lookupd_beside_an_honest_one_harms_nobody(lie: str, liar: Any, nsq_broker: Broker) -> None:
    assert nsq_broker.lookupd is not None
    lookupds = [str(liar(LIES[lie])), str(nsq_broker.lookupd.http_address)]
    options: dict[str, Any] = {"lookupd_poll_interval": 0.1, "lookupd_timeout": 0.3}
    seen: list[bytes] = []
    with Producer([nsq_broker.nsqd.tcp_address]) as producer:
        producer.publish("t", b"first")  # now the honest one knows the topic
    until(lambda: "t" in ask(nsq_broker.lookupd.http_address, "GET", "/topics").json["topics"])
    options["lookupd_http_addresses"] = lookupds
    with (
        Producer(**options) as producer,
        Consumer("t", "c", message_handler=lambda c, m: seen.append(m.body), **options),
    ):
        until(lambda: seen == [b"first"], timeout=WAIT)
        assert producer.publish("t", b"second", timeout=5) == b"OK"
        until(lambda: seen == [b"first", b"second"], timeout=WAIT)


def test_a_topic_whose_nsqds_are_all_out_of_reach_goes_to_another(liar: Any, nsq_broker: Broker) -> None:
    assert nsq_broker.lookupd is not None
    lookupds = [str(liar(reply(names(free_address())))), str(nsq_broker.lookupd.http_address)]
    with Producer(lookupd_http_addresses=lookupds, retry_max_delay=0.05) as producer:
        assert producer.publish("t", b"x", timeout=5) == b"OK"
    assert nsq_broker.nsqd.nsqd.topics["t"].message_count == 1


def test_a_lookupd_that_names_something_else_as_nsqd(liar: Any, nsq_broker: Broker) -> None:
    assert nsq_broker.lookupd is not None
    http = nsq_broker.nsqd.http_address
    lookupds = [str(liar(reply(names(http)))), str(nsq_broker.lookupd.http_address)]
    errors: list[Exception] = []
    seen: list[bytes] = []
    with Producer([nsq_broker.nsqd.tcp_address]) as producer:
        producer.publish("t", b"x")
    consumer = Consumer(
        "t", "c", lookupd_http_addresses=lookupds, message_handler=lambda c, m: seen.append(m.body), max_in_flight=4
    )
    consumer.on_error.connect(lambda c, error: errors.append(error), weak=False)
    with consumer:
        until(lambda: seen and errors)
    assert isinstance(errors[0], RemoteProtocolError)
    assert "HTTP" in str(errors[0])


class StuckResolver:
    """A DNS server that never answers for one name; the hub's own resolver knows all others."""

    def __init__(self, stuck: str) -> None:
        self.asked = Event()
        self._stuck = stuck
        self._others = gevent.get_hub().resolver

    def getaddrinfo(self, host: str, *args: Any, **options: Any) -> Any:
        if host == self._stuck:
            self.asked.set()
            Event().wait()
        return self._others.getaddrinfo(host, *args, **options)


def test_a_name_that_dns_never_resolves_holds_up_no_other_nsqd(monkeypatch: pytest.MonkeyPatch) -> None:
    resolver = StuckResolver("nowhere.test")
    monkeypatch.setattr(gevent.get_hub(), "resolver", resolver)
    seen: list[bytes] = []
    done = Event()

    def handle(consumer: Consumer, message: Message) -> None:
        seen.append(message.body)
        if len(seen) == 100:
            done.set()

    with Broker(lookupd=False) as broker:
        servers = ["nowhere.test:4150", broker.nsqd.tcp_address]
        with (
            Consumer("t", "c", servers, max_in_flight=50, message_handler=handle),
            Producer(servers, max_publish_attempts=10, connect_timeout=0.2) as producer,
        ):
            assert resolver.asked.wait(WAIT)
            for number in range(100):
                producer.publish("t", b"%d" % number)
            assert done.wait(10)
    assert sorted(seen) == sorted(b"%d" % number for number in range(100))
