"""Auth servers, and the switches that make a server of the broker misbehave."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import gevent
import pytest
from gevent import Timeout, sleep, socket
from gevent.event import Event
from gevent.server import StreamServer
from support.http import ask, exchange
from support.http_server import Question, ScriptedHttp
from support.waiting import WAIT, promptly
from support.wire import WireClient, sized

from nsq_fast.broker import LookupdServer, NsqdServer
from nsq_fast.broker.auth import query_auth
from nsq_fast.broker.net import FaultyLink, reset
from nsq_fast.errors import AuthFailed
from nsq_fast.names import Address

# Auth servers are asked as the original asks them, and their answers are checked before they count.


GRANT = {"topic": "^t", "channels": [".*"], "permissions": ["subscribe", "publish"]}

ANSWER = {"ttl": 60, "identity": "me", "identity_url": "http://me", "authorizations": [GRANT]}


class AuthServer(ScriptedHttp):
    """Gives ``answer``, a status or JSON, and keeps what it was asked: the method, the arguments, and the head."""

    def __init__(self, answer: Any) -> None:
        super().__init__(self._auth)
        self.asked: list[tuple[str, dict[str, list[str]], str]] = []
        self.answer = answer

    def _auth(self, question: Question) -> None:
        query = question.target.partition("?")[2] or question.body.decode()
        self.asked.append((question.method, parse_qs(query, keep_blank_values=True), question.head))
        if isinstance(self.answer, int):
            question.answer({"message": "NOT_AUTHORIZED"}, f"{self.answer} refused")
        else:
            question.answer(self.answer)


@pytest.fixture
def auth_server() -> Iterator[Callable[..., AuthServer]]:
    servers: list[AuthServer] = []

    def make(answer: Any = ANSWER) -> AuthServer:
        servers.append(AuthServer(answer))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.mark.parametrize("method", ["get", "post"])
def test_the_question_tells_who_asks(auth_server: Callable[..., AuthServer], method: str) -> None:
    server = auth_server()
    state = query_auth([str(server.address)], "s&cret", "10.0.0.1", tls=True, common_name="cn", method=method)
    assert (state.ttl, state.identity, state.identity_url) == (60, "me", "http://me")
    [(asked, arguments, head)] = server.asked
    assert asked == method.upper()
    assert arguments == {"secret": ["s&cret"], "remote_ip": ["10.0.0.1"], "tls": ["true"], "common_name": ["cn"]}
    assert "Accept: application/vnd.nsq; version=1.0\r\n" in head


def test_a_full_url_is_asked_as_it_stands(auth_server: Callable[..., AuthServer]) -> None:
    server = auth_server()
    query_auth([f"http://{server.address}/elsewhere?app=1"], "s", "::1")
    assert server.asked[0][1]["app"] == ["1"]
    assert server.asked[0][1]["tls"] == ["false"]


def test_a_server_that_fails_is_passed_over(auth_server: Callable[..., AuthServer]) -> None:
    broken, good = auth_server(500), auth_server()
    for _ in range(4):  # whichever is asked first
        assert query_auth([str(broken.address), str(good.address)], "s", "::1").identity == "me"


def test_a_server_that_hangs_or_is_not_there_costs_the_timeout(auth_server: Callable[..., AuthServer]) -> None:
    server = auth_server()
    server.script = Question.hang
    with pytest.raises(AuthFailed, match="no reply within"):
        query_auth([str(server.address)], "s", "::1", timeout=0.05)
    server.stop()
    with pytest.raises(AuthFailed, match="refused"):
        query_auth([str(server.address)], "s", "::1")
    with pytest.raises(AuthFailed):
        query_auth([], "s", "::1")


@pytest.fixture
def guard(start_nsqd: Callable[..., Any]) -> Callable[[AuthServer], Any]:
    """Start an nsqd, ours or the original's, that asks an auth server."""
    return lambda server: start_nsqd(auth_http_addresses=(str(server.address),))


PUB = b"PUB %s\n" + sized(b"x")


def test_a_client_may_do_what_it_is_granted_and_nothing_without_auth(
    auth_server: Callable[..., AuthServer], guard: Any
) -> None:
    server = auth_server()
    nsqd = guard(server)
    for command, name in ((PUB % b"topic", b"PUB"), (b"SUB topic c\n", b"SUB")):
        assert WireClient(nsqd.tcp_address).command(command) == b"E_AUTH_FIRST AUTH required before " + name
    client = WireClient(nsqd.tcp_address, client_id="id")
    answer = client.command(b"AUTH\n" + sized(b"secret"))
    assert json.loads(answer) == {"identity": "me", "identity_url": "http://me", "permission_count": 1}
    assert server.asked[0][1]["secret"] == ["secret"]
    assert server.asked[0][1]["remote_ip"] == ["127.0.0.1"]
    assert client.command(PUB % b"topic") == b"OK"
    assert client.command(PUB % b"other") == b'E_UNAUTHORIZED AUTH failed for PUB on "other" ""'


NO_ANSWER, NO_GRANT = b"E_AUTH_FAILED AUTH failed", b"E_UNAUTHORIZED AUTH no authorizations found"


ANSWERS = [
    (403, NO_ANSWER, "403"),
    (b"nonsense", NO_ANSWER, "JSON"),
    ([], NO_ANSWER, "object"),
    ({**ANSWER, "ttl": 0}, NO_ANSWER, "invalid TTL 0"),
    ({**ANSWER, "ttl": "60"}, NO_ANSWER, "int"),
    ({**ANSWER, "authorizations": [{**GRANT, "permissions": ["fly"]}]}, NO_ANSWER, "unknown permission fly"),
    ({**ANSWER, "authorizations": [{**GRANT, "topic": "("}]}, NO_ANSWER, "unable to compile"),
    ({**ANSWER, "authorizations": [{**GRANT, "channels": ["*"]}]}, NO_ANSWER, "unable to compile"),
    ({**ANSWER, "authorizations": []}, NO_GRANT, ""),
    ({**ANSWER, "authorizations": None}, NO_GRANT, ""),
    ({**ANSWER, "identity": None}, None, ""),
    ({"ttl": 1, "authorizations": [GRANT], "more": 1}, None, ""),
    ({"ttl": 1, "authorizations": [{"topic": "t", "permissions": None}]}, None, ""),
]


def test_answers_of_all_kinds(
    auth_server: Callable[..., AuthServer], guard: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = auth_server()
    nsqd = guard(server)
    for server.answer, error, reason in ANSWERS:
        caplog.clear()
        reply = WireClient(nsqd.tcp_address).command(b"AUTH\n" + sized(b"secret"))
        assert reply == error if error else json.loads(reply)["permission_count"] == 1, server.answer
        assert reason in caplog.text or not isinstance(nsqd, NsqdServer)


GRANTS = [
    {"topic": "^logs$", "channels": ["^c[0-9]$", ".*spare"], "permissions": ["subscribe"]},
    {"topic": "metrics", "channels": [".*"], "permissions": ["publish"]},
    {"topic": "^narrow$", "channels": ["x"], "permissions": ["publish"]},
]


COVERED = {  # what is refused, if it is
    b"SUB logs c1\n": None,
    b"SUB logs my_spare_one\n": None,
    b"SUB logs c10\n": b'SUB on "logs" "c10"',
    PUB % b"logs": b'PUB on "logs" ""',
    b"SUB mylogs c1\n": b'SUB on "mylogs" "c1"',
    PUB % b"all.metrics.here": None,
    b"SUB all.metrics.here c1\n": b'SUB on "all.metrics.here" "c1"',
    PUB % b"narrow": b'PUB on "narrow" ""',  # it must match no channel at all
}


def test_what_a_grant_covers(auth_server: Callable[..., AuthServer], guard: Any) -> None:
    nsqd = guard(auth_server({**ANSWER, "authorizations": GRANTS}))
    for command, refused in COVERED.items():
        client = WireClient(nsqd.tcp_address)
        client.command(b"AUTH\n" + sized(b"secret"))
        assert client.command(command) == (b"E_UNAUTHORIZED AUTH failed for " + refused if refused else b"OK")


def test_an_expired_answer_is_asked_for_anew(auth_server: Callable[..., AuthServer], guard: Any) -> None:
    server = auth_server({**ANSWER, "ttl": 1})
    client = WireClient(guard(server).tcp_address)
    client.command(b"AUTH\n" + sized(b"secret"))
    assert client.command(PUB % b"topic") == b"OK"
    assert len(server.asked) == 1
    server.answer = {**ANSWER, "authorizations": [{**GRANT, "topic": "none"}]}
    sleep(1.01)  # sleep: longer than the ttl of the answer, in whole seconds
    assert client.command(PUB % b"topic") == b'E_UNAUTHORIZED AUTH failed for PUB on "topic" ""'
    assert len(server.asked) == 2


# The switches that make a server of the broker misbehave.


NSQD = NsqdServer


@pytest.fixture
def lookupd() -> Iterator[LookupdServer]:
    with LookupdServer() as server:
        yield server


def test_connections_are_refused_with_a_reset_and_replies_are_lied_about(lookupd: LookupdServer) -> None:
    faults = lookupd.faults.http
    faults.refuse_connections = True
    with pytest.raises(ConnectionResetError):
        exchange(lookupd.http_address, b"GET /ping HTTP/1.0\r\n\r\n")
    assert faults.accepted == 1
    faults.clear()
    faults.set(lie=b"<html>", lie_status=502)
    answer = ask(lookupd.http_address, "GET", "/topics")
    assert (answer.status, answer.body) == (502, b"<html>")
    faults.clear()
    assert ask(lookupd.http_address, "GET", "/ping").body == b"OK"


def test_the_tcp_face_has_switches_of_its_own(lookupd: LookupdServer) -> None:
    lookupd.faults.tcp.lie = b"rubbish"
    with socket.create_connection(lookupd.tcp_address) as sock:
        sock.sendall(b"  V1PING\n")
        assert sock.recv(100) == b"rubbish"
        lookupd.faults.tcp.clear()
        sock.sendall(b"PING\n")
        assert sock.recv(100) == b"\x00\x00\x00\x02OK"
    assert ask(lookupd.http_address, "GET", "/ping").body == b"OK"


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


def test_garbage_ends_its_own_connection_only_and_prints_nothing(
    lookupd: LookupdServer, capfd: pytest.CaptureFixture[str]
) -> None:
    randomly = random.Random(1)

    def attack(address: tuple[str, int], ending: str) -> None:
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

    attacks = itertools.product((lookupd.tcp_address, lookupd.http_address), ("reset", "close", "half close"))
    gevent.joinall([gevent.spawn(attack, *each) for each in [*attacks] * 50], raise_error=True)
    assert ask(lookupd.http_address, "GET", "/ping").body == b"OK"
    assert capfd.readouterr().err == ""


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


def test_replies_of_nsqd_are_delayed_and_in_order(nsqd: NsqdServer) -> None:
    client = WireClient(nsqd.tcp_address)
    nsqd.faults.tcp.delay_replies = 0.05
    client.send(b"PUB t\n\0\0\0\0011SUB t c\nRDY 1\n")
    with pytest.raises(Timeout), Timeout(0.02):
        client.reader.peek(1)
    assert [client.frame().data for _ in range(2)] == [b"OK", b"OK"]
    assert client.message().body == b"1"


def test_a_link_adds_no_delay_of_its_own() -> None:
    def answer_pairs(sock: Any, _: object) -> None:
        while sock.recv(1):
            half.set()
            if sock.recv(1):
                sock.sendall(b"!")

    half = Event()
    server = StreamServer(("127.0.0.1", 0), answer_pairs)
    server.start()
    link = FaultyLink(Address(*server.address))
    with promptly(), socket.create_connection(link.address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(1000):  # with the system's delays it takes 40 s
            half.clear()
            sock.sendall(b"a")
            assert half.wait(WAIT)
            sock.sendall(b"b")
            assert sock.recv(1) == b"!"
    link.close()
    server.stop()
