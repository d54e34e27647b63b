"""The output buffer of a client: what waits in it, and what makes it go out; ours and the original's.

nsqio/nsq: nsqd/protocol_v2.go, messagePump. With ``output_buffer_timeout=-1`` no time makes it go out, so that
these tests need none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gevent import socket
from support.http import ask
from support.waiting import until
from support.wire import MESSAGE, WireClient

from nsq_fast.broker.connection import FlushTicker

WAITS_FOR_EVER = {"heartbeat_interval": 60000, "output_buffer_timeout": -1}


@pytest.fixture
def server(start_nsqd: Callable[..., Any]) -> Any:
    return start_nsqd()


def publish(server: Any, *bodies: bytes) -> None:
    client = WireClient(server.tcp_address)
    for body in bodies:
        client.publish("t", body)


def subscribed(server: Any, rdy: int, **identify: Any) -> WireClient:
    client = WireClient(server.tcp_address, **identify)
    client.subscribe("t", "c", rdy)
    return client


def in_flight(server: Any) -> int:
    [topic] = ask(server.http_address, "GET", "/stats?format=json&topic=t").json["topics"]
    return int(topic["channels"][0]["in_flight_count"])


def has_come(client: WireClient) -> bool:
    client.sock.setblocking(False)
    try:
        return bool(client.sock.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        client.sock.setblocking(True)


def test_messages_wait_while_the_client_may_have_more(server: Any) -> None:
    client = subscribed(server, 3, **WAITS_FOR_EVER)
    publish(server, b"1", b"2")
    until(lambda: in_flight(server) == 2)
    assert not has_come(client)
    publish(server, b"3")
    assert [client.frame().body for _ in range(3)] == [b"1", b"2", b"3"]


def test_a_reply_takes_the_messages_along(server: Any) -> None:
    client = subscribed(server, 3, **WAITS_FOR_EVER)
    publish(server, b"1", b"2")
    until(lambda: in_flight(server) == 2)
    assert not has_come(client)
    client.send(b"FIN 0123456789abcdef\n")
    assert [client.frame().body for _ in range(2)] == [b"1", b"2"]
    assert client.frame().data == b"E_FIN_FAILED FIN 0123456789abcdef failed ID not in flight"


def test_messages_come_before_a_fatal_error(server: Any) -> None:
    client = subscribed(server, 3, **WAITS_FOR_EVER)
    publish(server, b"1", b"2")
    until(lambda: in_flight(server) == 2)
    client.send(b"NONSENSE\n")
    assert [client.frame().body for _ in range(2)] == [b"1", b"2"]
    assert client.frame().data == b"E_INVALID invalid command NONSENSE"


@pytest.mark.parametrize("command", [b"RDY 2\n", b"RDY 0\n", b"CLS\n"])
def test_a_client_that_wants_no_more_gets_what_waits(server: Any, command: bytes) -> None:
    client = subscribed(server, 3, **WAITS_FOR_EVER)
    publish(server, b"1", b"2")
    until(lambda: in_flight(server) == 2)
    client.send(command)
    frames = [client.frame() for _ in range(2)]
    assert sorted(frame.body for frame in frames if frame.type == MESSAGE) == [b"1", b"2"]


def test_a_pause_of_the_channel_lets_out_what_waits(server: Any) -> None:
    client = subscribed(server, 3, **WAITS_FOR_EVER)
    publish(server, b"1")
    until(lambda: in_flight(server) == 1)
    assert not has_come(client)
    ask(server.http_address, "POST", "/channel/pause?topic=t&channel=c")
    assert client.frame().body == b"1"


def test_a_full_buffer_goes_out(server: Any) -> None:
    client = subscribed(server, 100, output_buffer_size=1000, **WAITS_FOR_EVER)
    publish(server, *[b"x" * 300] * 10)
    assert [len(client.frame().body) for _ in range(3)] == [300] * 3


def test_without_a_buffer_nothing_waits(server: Any) -> None:
    client = subscribed(server, 100, output_buffer_size=-1)
    publish(server, b"1")
    assert client.frame().body == b"1"


def test_after_the_timeout_messages_go_out(server: Any) -> None:
    client = subscribed(server, 100, output_buffer_timeout=25)
    for body in (b"1", b"2", b"3"):
        publish(server, body)
        assert client.frame().body == body


def test_a_broker_may_have_nothing_wait(embedded: Callable[..., Any]) -> None:
    server = embedded(output_buffer_timeout=0.0)
    client = subscribed(server, 100)
    publish(server, b"1", b"2")
    assert [client.frame().body for _ in range(2)] == [b"1", b"2"]


def test_a_tick_that_nobody_took_waits_and_those_after_it_are_dropped() -> None:
    ticker = FlushTicker(0.25, 100.0)
    assert not ticker.take(100.2)
    assert ticker.wait(100.125) == 0.125
    assert ticker.wait(107.1) == 0.0
    assert ticker.take(107.1)
    assert not ticker.take(107.2)
    assert ticker.take(107.25)


def test_a_ticker_without_a_period_never_ticks() -> None:
    ticker = FlushTicker(0.0, 100.0)
    assert not ticker.take(1e9)
    assert ticker.wait(1e9) is None
