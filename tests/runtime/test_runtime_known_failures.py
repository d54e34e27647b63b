"""What other NSQ clients are known to fail at, where no other test of ours shows it already.

Each was seen in a client of some language: see the name of the test.
"""

from __future__ import annotations

import socket as standard_socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gevent.event import Event
from support.peers import Peer
from support.publishing import Command, Nsqds, Producers
from support.scripted_nsqd import ScriptedNsqd, frame
from support.servers import RealNsqd
from support.waiting import PROCESS, WAIT, holds, promptly, until

from nsq_fast import Consumer, Message, Producer
from nsq_fast.broker import Broker, NsqdOptions, NsqdServer
from nsq_fast.names import Address
from nsq_fast.protocol.backoff import Backoff, ReconnectDelay


def ignore(*_: object) -> None: ...


def has_ipv6() -> bool:
    try:
        with standard_socket.socket(standard_socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@pytest.fixture
def black_hole() -> Iterator[Address]:
    """Where connections are accepted by the system, and nobody ever says a word."""
    with standard_socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(100)
        yield Address(*sock.getsockname())


def run(program: str) -> str:
    """Run a program in a process of its own, which nothing has patched; what it printed."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PROCESS, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Connecting


def test_an_nsqd_that_says_nothing_delays_no_other(
    servers: Callable[..., ScriptedNsqd], black_hole: Address, publish_nsqd: Nsqds
) -> None:
    server, publishing = servers(), publish_nsqd()
    with promptly():
        with Consumer("t", "c", [black_hole, server.address], message_handler=ignore, connect_timeout=60.0):
            conn = server.connection()
            conn.push(1)
            conn.wait_for(lambda: conn.answered(b"FIN") == [1])
        with Producer([black_hole, publishing.address], connect_timeout=60.0) as producer:
            assert producer.publish("t", b"x") == b"OK"


@pytest.mark.parametrize("role", ["consumer", "producer"])
def test_a_hung_lookupd_does_not_freeze_an_unpatched_program(role: str) -> None:
    made = {
        "consumer": "Consumer('t', 'c', lookupd_http_addresses=address, lookupd_timeout=60, message_handler=print)",
        "producer": "Producer(lookupd_http_addresses=address, lookupd_timeout=60)",
    }[role]
    program = f"""
import socket, time
import gevent
from nsq_fast import Consumer, Producer

hung = socket.socket()
hung.bind(("127.0.0.1", 0))
hung.listen(10)
address = "127.0.0.1:%d" % hung.getsockname()[1]
gaps, last = [], time.monotonic()

def tick():
    global last
    while True:
        now = time.monotonic()
        gaps.append(now - last)
        last = now
        gevent.sleep(0.01)  # sleep: a timer that shows whether the hub runs

ticker = gevent.spawn(tick)
client = {made}
began = time.monotonic()
client.start(**({{"block": False}} if isinstance(client, Consumer) else {{}}))
while len(gaps) < 20:
    gevent.sleep(0.01)  # sleep: looks again and again
client.close()
assert time.monotonic() - began < 20.0, "close or start waited for the lookupd"
print(max(gaps))
"""
    assert float(run(program)) < 10


def test_reconnecting_goes_on_after_any_number_of_failures() -> None:
    delay = ReconnectDelay(60.0, random=lambda: 1.0)
    for _ in range(100_000):
        last = delay.next(0.0)
    assert last == 60.0
    delay.connected(1000.0)
    assert delay.next(2000.0) < 1.0, "one good connection makes up for any number of bad ones"


def test_backoff_recovers_in_a_few_steps_after_any_number_of_failures() -> None:
    backoff, now = Backoff(128.0, random=lambda: 0.0), 0.0
    for _ in range(100_000):
        backoff.record(False, now)
        now = backoff.until + 1.0
    steps = 0
    while backoff.is_on:
        backoff.record(True, now)
        now = max(now, backoff.until) + 1.0
        steps += 1
    assert steps <= 10


def test_a_closed_consumer_does_not_come_back(servers: Callable[..., ScriptedNsqd]) -> None:
    both = [servers(), servers()]
    addresses = [server.address for server in both]
    consumer = Consumer("t", "c", addresses, message_handler=ignore, max_in_flight=2, max_reconnect_delay=0.02)
    consumer.start(block=False)
    for server in both:
        server.connection()
    consumer.close()
    holds(lambda: [len(server.connections) for server in both] == [1, 1], 0.2)


def test_time_of_day_may_jump(
    servers: Callable[..., ScriptedNsqd], monkeypatch: pytest.MonkeyPatch, publish_nsqd: Nsqds
) -> None:
    server, publishing = servers(), publish_nsqd()
    jump = 0.0
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + jump)
    with (
        Consumer("t", "c", [server.address], message_handler=ignore, max_in_flight=5) as consumer,
        Producer([publishing.address]) as producer,
    ):
        for number, days in enumerate((0, -1, 1)):
            jump = days * 86400.0
            conn = server.connection(number)
            conn.push(number)
            conn.wait_for(lambda conn=conn, number=number: conn.answered(b"FIN") == [number])
            assert producer.publish("t", b"x", timeout=2) == b"OK"
            conn.close()
        assert server.connection(3).rdy == 5
        assert consumer.stats().totals.finished == 3


# Flow


def test_an_idle_connection_keeps_its_rdy(servers: Callable[..., ScriptedNsqd]) -> None:
    both = [servers(), servers()]
    addresses = [server.address for server in both]
    with Consumer("t", "c", addresses, message_handler=ignore, max_in_flight=10, low_ready_idle_timeout=0.02):
        connections = [server.connection() for server in both]
        for conn in connections:
            conn.wait_rdy(5)
        holds(lambda: [conn.words().count(b"RDY") for conn in connections] == [1, 1], 0.2)


def test_attempts_are_unsigned(servers: Callable[..., ScriptedNsqd]) -> None:
    server = servers()
    seen: list[int] = []
    with Consumer("t", "c", [server.address], message_handler=lambda c, m: seen.append(m.attempts), max_tries=0):
        conn = server.connection()
        conn.push(1, attempts=65535)
        conn.wait_for(lambda: conn.answered(b"FIN") == [1])
    assert seen == [65535]


# Answers


def test_an_error_of_one_word_is_an_error_like_any_other(servers: Callable[..., ScriptedNsqd]) -> None:
    server = servers()
    errors: list[Any] = []
    consumer = Consumer("t", "c", [server.address], message_handler=ignore)
    consumer.on_error.connect(lambda c, error: errors.append(error.code), weak=False)
    with consumer:
        conn = server.connection()
        conn.send(frame(1, b"E_FIN_FAILED") + frame(1, b"E_TOUCH_FAILED "))
        conn.push(1)
        conn.wait_for(lambda: conn.answered(b"FIN") == [1])
        assert errors == ["E_FIN_FAILED", "E_TOUCH_FAILED"]
        assert len(server.connections) == 1, "they are not fatal"
        assert consumer.stats().totals.answers_failed == 2


def test_a_failed_answer_fails_no_publish_that_is_pending(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    def answer(peer: Peer, command: Command) -> None:
        peer.frame(1, b"E_FIN_FAILED of somebody else")
        peer.ok()

    producer = new_producer(publish_nsqd(answer))
    assert [producer.publish("t", b"%d" % number) for number in range(3)] == [b"OK"] * 3


def test_a_response_nobody_asked_for_costs_the_connection_and_no_more(
    publish_nsqd: Nsqds, new_producer: Producers
) -> None:
    def answer(peer: Peer, command: Command) -> None:
        peer.send(frame(0, b"OK") * 3)

    server = publish_nsqd(answer)
    producer = new_producer(server)
    assert [producer.publish("t", b"%d" % number) for number in range(5)] == [b"OK"] * 5
    assert set(server.bodies) == {b"%d" % number for number in range(5)}


def test_a_finish_that_could_not_be_sent_may_be_tried_again_elsewhere(servers: Callable[..., ScriptedNsqd]) -> None:
    server, kept = servers(), list[Message]()

    def keep(_: Consumer, message: Message) -> None:
        message.enable_async()
        kept.append(message)

    with Consumer("t", "c", [server.address], message_handler=keep, max_in_flight=2):
        conn = server.connection()
        conn.push(1)
        until(lambda: kept)
        conn.close()
        server.connection(1)
        for _ in range(2):
            with pytest.raises(OSError, match="connection"):
                kept[0].finish()
            assert not kept[0].has_responded()


# Closing


def test_close_sends_every_fin_that_was_promised(servers: Callable[..., ScriptedNsqd]) -> None:
    server, handled = servers(), Event()

    def handle(consumer: Consumer, message: Message) -> None:
        if message.id == b"%016x" % 99:
            handled.set()

    consumer = Consumer("t", "c", [server.address], message_handler=handle, max_in_flight=100)
    consumer.start(block=False)
    conn = server.connection()
    conn.push(*range(100))
    handled.wait(WAIT)
    consumer.close()
    conn.wait_for(lambda: not conn.is_open)
    assert conn.answered(b"FIN") == list(range(100))


# IPv6


@needs_ipv6
@pytest.mark.parametrize("family", ["embedded", "original"])
def test_an_nsqd_on_ipv6(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server: Any
    if family == "embedded":
        server = NsqdServer(NsqdOptions(tcp_address="[::1]:0"))
        server.start()
    else:
        request.getfixturevalue("real_nsqd")  # skips where there is none
        server = RealNsqd(tmp_path, "-tcp-address=[::1]:0")
    seen: list[bytes] = []
    try:
        host, port = server.tcp_address
        assert host.strip("[]") == "::1"
        address = f"[::1]:{port}"
        with Producer(address) as producer:
            assert producer.publish("t", b"x") == b"OK"
        with Consumer("t", "c", address, message_handler=lambda c, m: seen.append(m.body)) as consumer:
            until(lambda: seen)
            assert str(consumer.stats().connections[0].address) == address
    finally:
        server.kill()
    assert seen == [b"x"]


@needs_ipv6
def test_an_nsqd_on_ipv6_is_found_through_an_nsqlookupd_on_ipv6() -> None:
    listening: dict[str, Any] = {
        "nsqds": [{"tcp": ("::1", 0), "http": ("::1", 0)}],
        "lookupd": {"tcp": ("::1", 0), "http": ("::1", 0)},
    }
    seen: list[bytes] = []
    with Broker(addresses=listening, broadcast_address="::1") as broker:
        assert broker.lookupd is not None
        lookupd = str(broker.lookupd.http_address)
        with Producer(lookupd_http_addresses=lookupd) as producer:
            assert producer.publish("t", b"x") == b"OK"
        with Consumer(
            "t", "c", lookupd_http_addresses=lookupd, lookupd_poll_interval=0.1,
            message_handler=lambda c, m: seen.append(m.body),
        ):  # fmt: skip
            until(lambda: seen)


# Manners


def test_the_library_touches_no_logging_but_its_own_and_prints_nothing() -> None:
    program = """
import logging
from nsq_fast import Consumer, Producer
from nsq_fast.broker import Broker

with Broker() as broker:
    address = str(broker.nsqd.tcp_address)
    with Producer(address) as producer:
        producer.publish("t", b"x")
    def handler(consumer, message):
        consumer.close()
    Consumer("t", "c", address, message_handler=handler).start()
assert not logging.root.handlers, logging.root.handlers
assert logging.root.level == logging.WARNING
names = [name for name in logging.root.manager.loggerDict if name.startswith("nsq_fast")]
assert names
for name in names:
    for handler in logging.getLogger(name).handlers:
        assert isinstance(handler, logging.NullHandler), (name, handler)
"""
    assert run(program) == ""
