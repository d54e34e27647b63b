"""The switches that make a server of the broker misbehave."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import gevent
import pytest
from gevent import Timeout, socket
from support.http import ask, exchange, parse
from support.waiting import WAIT
from support.wire import WireClient

from nsq_fast.broker import Faults, LookupdServer, NsqdServer
from nsq_fast.broker.net import reset
from nsq_fast.errors import ConfigError

NSQD = NsqdServer


@pytest.fixture
def lookupd() -> Iterator[LookupdServer]:
    with LookupdServer() as server:
        yield server


def test_no_switch_is_on_to_begin_with() -> None:
    faults = Faults()
    assert not faults.active
    faults.delay_replies = 1.0
    assert faults.active
    faults.clear()
    assert not faults.active


def test_an_unknown_switch_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'drop_replies'"):
        Faults().set(drop_reply=True)


def test_connections_are_refused_with_a_reset(lookupd: LookupdServer) -> None:
    lookupd.faults.http.refuse_connections = True
    with pytest.raises(ConnectionResetError):
        exchange(lookupd.http_address, b"GET /ping HTTP/1.0\r\n\r\n")
    assert lookupd.faults.http.accepted == 1
    lookupd.faults.clear()
    assert ask(lookupd.http_address, "GET", "/ping").body == b"OK"


def test_a_reply_is_lied_about(lookupd: LookupdServer) -> None:
    lookupd.faults.http.set(lie=b"<html>", lie_status=502)
    answer = ask(lookupd.http_address, "GET", "/topics")
    assert (answer.status, answer.body) == (502, b"<html>")


def test_a_mute_server_answers_when_it_finds_its_voice(lookupd: LookupdServer) -> None:
    lookupd.faults.http.drop_replies = True
    pending = gevent.spawn(ask, lookupd.http_address, "GET", "/ping")
    with Timeout(0.05, False):
        pending.join()
    assert not pending.ready()
    lookupd.faults.http.drop_replies = False
    assert pending.get(timeout=WAIT).body == b"OK"


def test_replies_are_delayed(lookupd: LookupdServer) -> None:
    lookupd.faults.http.delay_replies = 0.1
    with pytest.raises(Timeout), Timeout(0.05):
        ask(lookupd.http_address, "GET", "/ping")
    assert ask(lookupd.http_address, "GET", "/ping").body == b"OK"


def test_a_connection_is_cut_after_some_bytes(lookupd: LookupdServer) -> None:
    lookupd.faults.http.close_after = 20
    with socket.create_connection(lookupd.http_address) as sock:
        sock.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(100) == b"HTTP/1.1 200 OK\r\nCon"
        with pytest.raises(ConnectionResetError):
            sock.recv(100)


def test_the_tcp_face_has_switches_of_its_own(lookupd: LookupdServer) -> None:
    lookupd.faults.tcp.lie = b"rubbish"
    with socket.create_connection(lookupd.tcp_address) as sock:
        sock.sendall(b"  V1PING\n")
        assert sock.recv(100) == b"rubbish"
        lookupd.faults.tcp.clear()
        sock.sendall(b"PING\n")
        assert sock.recv(100) == b"\x00\x00\x00\x02OK"
    assert ask(lookupd.http_address, "GET", "/ping").body == b"OK"


def test_an_expected_continue_is_not_awaited_when_the_request_is_refused(lookupd: LookupdServer) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    answer = parse(exchange(lookupd.http_address, head))
    assert (answer.status, answer.headers["connection"]) == (404, "close")


GARBAGE = [
    b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /ping HTTP/1\r\nHost: x\r\n\r\n",
    b"GET /%ff?topic=%ff HTTP/1.1\r\n\r\n",
    b"GET /lookup?topic=\xff\xfe HTTP/1.1\r\n\r\n",
    b"POST /topic/create?topic=t HTTP/1.1\r\nContent-Length: abc\r\n\r\n",
    b"POST /topic/create?topic=t HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"POST /topic/create?topic=t HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nxyz",
    b"POST /topic/create?topic=t HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
    b"  V1IDENTIFY\n\x00\x00\x00\x05{}\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"G" * 100_000,
]


@pytest.mark.parametrize("ending", ["reset", "close", "half close"])
def test_garbage_ends_its_own_connection_only_and_prints_nothing(
    lookupd: LookupdServer, capfd: pytest.CaptureFixture[str], ending: str
) -> None:
    randomly = random.Random(ending)

    def attack(address: tuple[str, int]) -> None:
        data = bytearray(randomly.choice(GARBAGE))
        data[randomly.randrange(len(data))] = randomly.randrange(256)
        with contextlib.suppress(OSError), socket.create_connection(address) as sock:
            sock.sendall(data[: randomly.randrange(len(data) * 2)])
            if ending == "half close":
                sock.shutdown(socket.SHUT_WR)
                with Timeout(1, False):
                    sock.recv(1000)
            elif ending == "reset":
                reset(sock)

    addresses = (lookupd.tcp_address, lookupd.http_address)
    gevent.joinall([gevent.spawn(attack, randomly.choice(addresses)) for _ in range(100)], raise_error=True)
    assert ask(lookupd.http_address, "GET", "/ping").body == b"OK"
    assert capfd.readouterr().err == ""


def test_a_mute_nsqd_stores_what_it_does_not_confirm(nsqd: NsqdServer) -> None:
    client = WireClient(nsqd.tcp_address)
    client.publish("t", b"1")
    nsqd.faults.tcp.drop_replies = True
    client.send(b"PUB t\n\0\0\0\0012")
    with pytest.raises(Timeout), Timeout(0.1):
        client.frame()
    assert nsqd.nsqd.topics["t"].message_count == 2
    nsqd.faults.clear()
    client.publish("t", b"3")
    client.close()


def test_messages_are_cut_in_the_middle_of_a_frame(nsqd: NsqdServer) -> None:
    client = WireClient(nsqd.tcp_address)
    client.publish("t", b"x" * 100)
    nsqd.faults.tcp.close_after = 60
    consumer = WireClient(nsqd.tcp_address)
    consumer.subscribe("t", "c")
    head = consumer.reader.read(50)  # 10 were the answer to SUB
    assert head[:8] == b"\x00\x00\x00\x82\x00\x00\x00\x02"
    with pytest.raises(ConnectionResetError):
        consumer.reader.read(1)
    consumer.close()
    client.close()


def test_replies_of_nsqd_are_delayed_and_in_order(nsqd: NsqdServer) -> None:
    client = WireClient(nsqd.tcp_address)
    nsqd.faults.tcp.delay_replies = 0.05
    client.send(b"PUB t\n\0\0\0\0011SUB t c\nRDY 1\n")
    with pytest.raises(Timeout), Timeout(0.02):
        client.reader.peek(1)
    assert [client.frame().data for _ in range(2)] == [b"OK", b"OK"]
    assert client.message().body == b"1"
    client.close()


def test_nsqd_lies_and_refuses(nsqd: NsqdServer) -> None:
    client = WireClient(nsqd.tcp_address)
    client.publish("t", b"0")
    nsqd.faults.tcp.set(lie=b"HTTP/1.1 400 Bad Request\r\n\r\n", refuse_connections=True)
    client.send(b"PUB t\n\0\0\0\0011")
    with Timeout(WAIT):
        assert client.reader.read(8) == b"HTTP/1.1"
    refused = socket.create_connection(nsqd.tcp_address)
    with pytest.raises(ConnectionResetError):
        refused.recv(1)
    assert ask(nsqd.http_address, "GET", "/ping").body == b"OK"
    client.close()
