"""Bad days: servers that die under load, freeze, lie and forge, links that damage or lose what they carry.

Everywhere the same: nothing hangs, what was answered OK is handled, and what is wrong is told.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from itertools import product
from pathlib import Path
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Any

import gevent
import pytest
import trustme
from gevent.event import Event
from gevent.ssl import PROTOCOL_TLS_SERVER, SSLContext
from support.http_server import Question, scripted_http
from support.peers import Peer, PeerServer
from support.publishing import Command, Nsqds, Producers, PublishNsqd
from support.scripted_nsqd import heard, noting
from support.servers import free_address
from support.waiting import PROMPT, WAIT, until
from support.wire import message_frame

from nsq_fast import Consumer, Message, NsqdHTTPClient, Producer
from nsq_fast.broker import Broker, NsqdOptions, NsqdServer
from nsq_fast.errors import ConnectionLost, HttpError, NoNsqd, PublishRefused, RemoteProtocolError
from nsq_fast.names import Address
from nsq_fast.testing import FaultyLink

NSQD = NsqdServer


class DamagingLink(FaultyLink):
    """Changes a byte in the middle of what passes, on demand."""

    damages = 0

    def _pass_on(self, data: bytes, sink: Any) -> None:
        if self.damages and len(data) > 20:
            self.damages -= 1
            data = data[:10] + bytes(255 - byte for byte in data[10:20]) + data[20:]
        super()._pass_on(data, sink)


@pytest.mark.parametrize("layers", ["plain", "tls", "snappy", "deflate", "tls snappy", "tls deflate"])
def test_a_damaged_stream_is_left_and_nothing_is_lost(layers: str, tls_files: dict[str, str]) -> None:
    options: dict[str, Any] = {"snappy": "snappy" in layers, "deflate": "deflate" in layers}
    if "tls" in layers:
        options |= {"tls_v1": True, "tls_options": {"cafile": tls_files["ca"]}}
    seen: set[bytes] = set()
    with NsqdServer(NsqdOptions(tls_cert=tls_files["cert"], tls_key=tls_files["key"])) as nsqd:
        link = DamagingLink(nsqd.tcp_address)
        consumer = Consumer(
            "t", "c", [link.address], message_handler=lambda c, m: seen.add(m.body), max_in_flight=5,
            max_reconnect_delay=0.02, msg_timeout=1.0, max_tries=0, **options,
        )  # fmt: skip
        errors = heard(consumer)
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


LONG_AGO = datetime(2020, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("names", "options", "reason", "advice"),
    [
        (["127.0.0.1"], {"cafile": None}, "verify failed", "cafile in tls_options"),
        (["127.0.0.1"], {"certfile": None}, "certificate required", "name it in tls_options, as certfile"),
        (["127.0.0.1"], {"certfile": "stranger"}, "unknown ca", "of the client certificate, certfile"),
        (["127.0.0.1"], {"certfile": "old"}, "certificate expired", "of the client certificate, certfile"),
        (["elsewhere.example"], {}, "IP address mismatch", "server_hostname in tls_options"),
        (["old", "127.0.0.1"], {}, "certificate has expired", "it is the server's certificate"),
    ],
)
def test_an_error_of_tls_says_whose_certificate_it_means_and_what_to_do(
    names: list[str], options: dict[str, Any], reason: str, advice: str, authority: trustme.CA, tmp_path: Path
) -> None:
    issued = {
        "server": authority.issue_cert(*names, not_after=LONG_AGO if "old" in names else None),
        "client": authority.issue_cert("client"),
        "stranger": trustme.CA().issue_cert("client"),
        "old": authority.issue_cert("client", not_after=LONG_AGO),
    }
    paths = {name: str(tmp_path / f"{name}.pem") for name in (*issued, "ca")}
    authority.cert_pem.write_to_path(paths["ca"])
    for name, each in issued.items():
        each.private_key_and_cert_chain_pem.write_to_path(paths[name])
    chosen = {"cafile": "ca", "certfile": "client", **options}
    tls_options = {option: paths[name] for option, name in chosen.items() if name}
    server = NsqdOptions(
        tls_cert=paths["server"],
        tls_key=paths["server"],
        tls_root_ca_file=paths["ca"],
        tls_client_auth_policy="require-verify",
    )
    with NsqdServer(server) as nsqd, Producer([nsqd.tcp_address], tls_v1=True, tls_options=tls_options) as producer:

        def said() -> str | None:
            with pytest.raises(NoNsqd) as caught:
                producer.publish("t", b"x", timeout=0.1)
            return str(caught.value) if "SSL" in str(caught.value) else None

        text = until(said)
        assert reason in text
        assert advice in text
        assert str(nsqd.tcp_address) in text
        assert not nsqd.nsqd.topics, "nothing was sent"


def test_a_refusal_says_which_nsqd_it_comes_from_and_what_to_do(tls_files: dict[str, str]) -> None:
    options = NsqdOptions(tls_cert=tls_files["cert"], tls_key=tls_files["key"], tls_required="true")
    with NsqdServer(options) as nsqd, Producer([nsqd.tcp_address]) as producer:
        with pytest.raises(PublishRefused, match=r"TLS required.*set tls_v1=True") as caught:
            producer.publish("t", b"x", timeout=WAIT)
        assert f", at {nsqd.tcp_address}" in str(caught.value)


def naming(nsqd: Address) -> Callable[[Question], object]:
    """The script of a lookupd that names this as the nsqd of every topic."""
    named = {"broadcast_address": nsqd.host, "tcp_port": nsqd.port, "http_port": 1}
    return lambda question: question.answer({"channels": [], "producers": [named]})


def test_a_topic_whose_nsqds_are_all_out_of_reach_goes_to_another(nsq_broker: Broker) -> None:
    assert nsq_broker.lookupd is not None
    with scripted_http(naming(free_address())) as [liar]:
        lookupds = [str(liar.address), str(nsq_broker.lookupd.http_address)]
        with Producer(lookupd_http_addresses=lookupds, retry_max_delay=0.05) as producer:
            assert producer.publish("t", b"x", timeout=5) == b"OK"
    assert nsq_broker.nsqd.nsqd.topics["t"].message_count == 1


def test_a_lookupd_that_names_something_else_as_nsqd(nsq_broker: Broker) -> None:
    assert nsq_broker.lookupd is not None
    seen: list[bytes] = []
    with Producer([nsq_broker.nsqd.tcp_address]) as producer:
        producer.publish("t", b"x")
    with scripted_http(naming(nsq_broker.nsqd.http_address)) as [liar]:
        lookupds = [str(liar.address), str(nsq_broker.lookupd.http_address)]
        consumer = Consumer("t", "c", lookupd_http_addresses=lookupds, message_handler=noting(seen), max_in_flight=4)
        errors = heard(consumer)
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
    with Broker(lookupd=False) as broker:
        servers = ["nowhere.test:4150", broker.nsqd.tcp_address]
        with (
            Consumer("t", "c", servers, max_in_flight=50, message_handler=noting(seen)),
            Producer(servers, max_publish_attempts=10, connect_timeout=0.2) as producer,
        ):
            assert resolver.asked.wait(WAIT)
            for number in range(100):
                producer.publish("t", b"%d" % number)
            until(lambda: len(seen) == 100)
    assert sorted(seen) == sorted(b"%d" % number for number in range(100))


@cache
def bodies(count: int) -> list[bytes]:
    """They cannot be compressed, so that they take several reads."""
    return [b"%05d" % number + os.urandom(SIZE) for number in range(count)]


class LayeredNsqd:
    """Speaks TLS, snappy or deflate, and sends one burst of messages that takes several reads."""

    def __init__(self, layers: str, tls: dict[str, str], count: int) -> None:
        self.commands: list[bytes] = []
        self.bodies = bodies(count)
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
        frames = [message_frame(number, body) for number, body in enumerate(self.bodies)]
        half = round(share * len(frames))
        with suppress(OSError):  # the consumer has closed
            if half:
                self.peer.send(b"".join(frames[:half]))
            for at in range(half, len(frames), 4):
                self.peer.send(b"".join(frames[at : at + 4]))
                gevent.sleep(0)

    def consume(self, handler: Any, share: float) -> tuple[Consumer, gevent.Greenlet]:
        """A consumer that is ready, and who sends it the burst."""
        consumer = Consumer("t", "c", message_handler=handler, **self.options)
        consumer.start(block=False)
        until(lambda: any(command.startswith(b"RDY ") and command != b"RDY 0" for command in self.commands))
        return consumer, gevent.spawn(self.burst, share)

    def heartbeat(self) -> None:
        assert self.peer is not None
        self.peer.frame(0, b"_heartbeat_")

    def stop(self) -> None:
        self._server.stop()


SIZE, COUNT, MANY = 4000, 120, 600


TURNS = range(12)
"""Of the hub, after which something happens: in one of them the worker has given way, whatever the layer."""


SHARES = (0.0, 0.5, 1.0)


@pytest.fixture(
    params=["tls", *(pytest.param(each, marks=pytest.mark.slow) for each in ("snappy", "deflate", "tls+deflate"))]
)
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
        consumer, sender = server.consume(lambda _, m, seen=seen: seen.append(m.body), share)
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

        consumer, sender = server.consume(handle, share)
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

        consumer, sender = server.consume(handle, share)
        until(lambda seen=seen: len(seen) >= COUNT, about=lambda seen=seen: f"{len(seen)} of {COUNT}")
        assert (seen, server.count) == (server.bodies, 1)
        sender.join(WAIT)
        consumer.close()
    no_unseen_errors.clear()  # of the workers that were interrupted: each began again


# Packets get lost for a while, with nobody told: publishes go on soon after, not when the system would try again


NEVER = 600.0
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a filter of sockets that drops packets")


class DroppedPackets:
    """A filter of the system drops all that comes for a socket, before TCP has seen it: nothing is acknowledged."""

    ATTACH, DETACH = 26, 27  # linux: include/uapi/asm-generic/socket.h
    RETURN = 0x06

    def __init__(self) -> None:
        self._filter = ctypes.create_string_buffer(struct.pack("HBBI", self.RETURN, 0, 0, 0))
        self._program = struct.pack("HP", 1, ctypes.addressof(self._filter))

    def begin(self, sock: Any) -> None:
        sock.setsockopt(socket.SOL_SOCKET, self.ATTACH, self._program)

    def end(self, sock: Any) -> None:
        sock.setsockopt(socket.SOL_SOCKET, self.DETACH, 0)


@on_linux
@pytest.mark.parametrize("seconds", [0.0, 2.5])
def test_a_connection_that_nobody_acknowledges_is_given_up_for_a_new_one(
    publish_nsqd: Nsqds, new_producer: Producers, seconds: float
) -> None:
    """Also where a slow server would be given much longer: the system tells one from the other."""
    used: list[Peer] = []

    def agree_by(peer: Peer, command: Command) -> None:
        used.append(peer)
        peer.ok()

    nsqd, dropped = publish_nsqd(agree_by), DroppedPackets()
    sender = new_producer(nsqd, attempt_timeout=NEVER, publish_timeout=NEVER)
    assert sender.publish("t", b"before") == b"OK"
    dropped.begin(nsqd.peers[0].sock)  # for good: it may take the system minutes to try again
    dropped.begin(nsqd.listener)
    result = sender.publish_nowait("t", b"x")
    gevent.sleep(seconds)  # sleep: how long packets get lost
    dropped.end(nsqd.listener)
    assert result.get(timeout=60) == b"OK"
    assert sender.publish("t", b"after") == b"OK"
    # More may have been tried beside it during the outage: of those the first that works is used, and it alone.
    assert (nsqd.bodies, [used.index(peer) for peer in used]) == ([b"before", b"x", b"after"], [0, 1, 1])
    assert sender.stats()["stalled"] == []


@on_linux
def test_so_is_one_whose_reply_got_lost(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    """Nothing of ours has to be sent again then: we send something that needs no reply."""
    dropped = DroppedPackets()

    def lose_the_first(peer: Peer, command: Command) -> None:
        if peer is nsqd.peers[0]:
            dropped.begin(peer.sock)
        else:
            peer.ok()

    nsqd: PublishNsqd = publish_nsqd(lose_the_first)
    sender = new_producer(nsqd, attempt_timeout=NEVER, publish_timeout=NEVER)
    assert sender.publish_nowait("t", b"x").get(timeout=60) == b"OK"
    assert (nsqd.bodies, len(nsqd.peers)) == ([b"x", b"x"], 2)


def test_a_server_that_is_slow_is_not_given_up(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    def answer_late(peer: Peer, command: Command) -> None:
        gevent.sleep(4.0)  # sleep: the system has told lost packets by then
        peer.ok()

    nsqd = publish_nsqd(answer_late)
    sender = new_producer(nsqd, attempt_timeout=NEVER, publish_timeout=NEVER)
    assert sender.publish("t", b"x") == b"OK"
    assert (nsqd.bodies, len(nsqd.peers)) == ([b"x"], 1)


def test_a_server_that_replies_to_one_command_after_the_other_is_not_given_up(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    """Although the last of many replies comes later than ``attempt_timeout``."""

    def answer_slowly(peer: Peer, command: Command) -> None:
        gevent.sleep(0.2)  # sleep: what it takes to store one
        peer.ok()

    nsqd = publish_nsqd(answer_slowly)
    sender = new_producer(nsqd, attempt_timeout=0.6, publish_timeout=NEVER)
    results = [sender.publish_nowait(f"t{number}", b"%d" % number) for number in range(12)]
    assert [each.get(timeout=WAIT) for each in results] == [b"OK"] * len(results)
    assert (nsqd.bodies, len(nsqd.peers)) == ([b"%d" % number for number in range(12)], 1)


@on_linux
def test_what_nobody_acknowledges_for_write_timeout_ends_the_connection(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    nsqd, dropped = publish_nsqd(), DroppedPackets()
    sender = new_producer(nsqd, attempt_timeout=NEVER, publish_timeout=NEVER, write_timeout=1.0, connect_timeout=1.0)
    assert sender.publish("t", b"before") == b"OK"
    dropped.begin(nsqd.peers[0].sock)
    dropped.begin(nsqd.listener)
    sender.publish_nowait("t", b"x")
    until(lambda: sender.stats()["disconnected"])
    assert not sender.is_connected


# A hostile server cannot forge lines of a log, steer a terminal, or fill the log


FORGED = b"\n2026-01-01 00:00:00 CRITICAL all is lost\x1b[2J\r"
HUGE = FORGED + b"\x1b" * 1_000_000
LONG = FORGED + b"\x1b" * 9_000  # in a frame that is no longer than one may be
LONGEST = 6000
"""Characters of a record: a few texts of 500, each of which may be escaped to four times that."""


def check(caplog: pytest.LogCaptureFixture, errors: list[Any]) -> None:
    texts = [record.getMessage() for record in caplog.records]
    texts += [text for error in errors for text in (str(error), repr(error))]
    assert texts
    assert [text[:100] for text in texts if not text.isprintable() or len(text) > LONGEST] == []


def asks_for_auth(peer: Peer) -> None:
    peer.handshake(auth_required=True)
    peer.read_line()
    peer.read_body()


def is_asked_to_subscribe(peer: Peer) -> None:
    peer.handshake()
    peer.read_line()


# What it waits for, and the frame that it sends then: its type, and the data.
SAID: list[tuple[Callable[[Peer], object], int, bytes]] = [
    (Peer.read_identify, 1, b"E_INVALID" + HUGE),
    (Peer.read_identify, 0, HUGE),
    (Peer.read_identify, 0, json.dumps({"version": HUGE.decode()}).encode()),
    (lambda peer: (peer.handshake(version=LONG.decode()), peer.read_line()), 1, b"E_BAD_TOPIC" + LONG),
    (asks_for_auth, 1, b"E_UNAUTHORIZED" + HUGE),
    (asks_for_auth, 0, HUGE),
    (is_asked_to_subscribe, 1, b"E_BAD_TOPIC" + HUGE),
    (Peer.accept_sub, 0, HUGE),
    (Peer.accept_sub, 1, HUGE),
    (Peer.accept_sub, 1, b"E_FIN_FAILED FIN " + HUGE),
]


@pytest.mark.parametrize(("step", "kind", "data"), SAID, ids=range(len(SAID)))
def test_what_an_nsqd_says_to_a_consumer(
    step: Any, kind: int, data: bytes, servers: Any, start_consumer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = servers(lambda peer: (step(peer), peer.frame(kind, data)), kind=PeerServer)
    options: dict[str, Any] = {"message_handler": lambda *_: None, "auth_secret": "s", "max_reconnect_delay": 0.05}
    errors = heard(start_consumer("topic", "channel", str(server.address), **options))
    until(lambda: errors)
    assert server.count >= 1
    check(caplog, errors)


def test_what_an_nsqd_says_to_a_producer(servers: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def script(peer: Peer) -> None:
        peer.handshake(version=LONG.decode())
        peer.read_line()
        peer.read_body()
        peer.frame(1, b"E_BAD_TOPIC" + LONG)

    address = servers(script, kind=PeerServer).address
    with Producer(str(address)) as producer, pytest.raises(PublishRefused) as caught:
        producer.publish("topic", b"x", timeout=WAIT)
    check(caplog, [caught.value])


def test_what_an_http_server_says(servers: Any, start_consumer: Any, caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"message": FORGED.decode() * 3}).encode()

    def script(peer: Peer) -> None:
        peer.recv()
        peer.send(b"HTTP/1.1 500 E\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    server = servers(script, kind=PeerServer)
    with pytest.raises(HttpError) as caught:
        NsqdHTTPClient(*server.address).ping()
    assert caught.value.text.startswith("\n2026")
    start_consumer("topic", "channel", lookupd_http_addresses=str(server.address), message_handler=lambda *_: None)
    until(lambda: "fails" in caplog.text)
    check(caplog, [caught.value])
