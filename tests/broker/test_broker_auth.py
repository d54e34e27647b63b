"""Auth servers are asked as the original asks them, and their answers are checked before they count."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs

import msgspec
import pytest
from gevent import sleep
from support.wire import WireClient

from nsq_fast.broker.auth import AuthState, query_auth
from nsq_fast.broker.http import HttpFace, Request, Router
from nsq_fast.broker.net import Faults, bind
from nsq_fast.errors import AuthFailed

GRANT = {"topic": "^t", "channels": [".*"], "permissions": ["subscribe", "publish"]}
ANSWER = {"ttl": 60, "identity": "me", "identity_url": "http://me", "authorizations": [GRANT]}


class AuthServer:
    """Answers /auth with ``answer``, and keeps what it was asked."""

    def __init__(self, answer: Any) -> None:
        self.asked: list[tuple[str, dict[str, list[str]], str]] = []
        self.faults = Faults()
        self.answer = answer
        router = Router()
        for method in ("GET", "POST"):
            router.add(method, "/auth", self._auth)
            router.add(method, "/elsewhere", self._auth)
        self.face = HttpFace("auth", bind("127.0.0.1:0"), router, self.faults)
        self.face.start()
        self.address = str(self.face.address)

    def _auth(self, request: Request) -> Any:
        query = request.query or request.body(10_000, "TOO_BIG").decode()
        self.asked.append((request.method, parse_qs(query, keep_blank_values=True), request.header("Accept")))
        if isinstance(self.answer, int):
            raise request.refuse(self.answer, "NOT_AUTHORIZED")
        return self.answer


@pytest.fixture
def auth_server() -> Iterator[Callable[[Any], AuthServer]]:
    servers: list[AuthServer] = []

    def make(answer: Any = ANSWER) -> AuthServer:
        servers.append(AuthServer(answer))
        return servers[-1]

    yield make
    for server in servers:
        server.face.stop()


@pytest.mark.parametrize("method", ["get", "post"])
def test_the_question_tells_who_asks(auth_server: Callable[..., AuthServer], method: str) -> None:
    server = auth_server()
    state = query_auth([server.address], "s&cret", "10.0.0.1", tls=True, common_name="cn", method=method)
    assert (state.ttl, state.identity, state.identity_url) == (60, "me", "http://me")
    assert server.asked == [
        (
            method.upper(),
            {"secret": ["s&cret"], "remote_ip": ["10.0.0.1"], "tls": ["true"], "common_name": ["cn"]},
            "application/vnd.nsq; version=1.0",
        )
    ]


def test_a_full_url_is_asked_as_it_stands(auth_server: Callable[..., AuthServer]) -> None:
    server = auth_server()
    query_auth([f"http://{server.address}/elsewhere?app=1"], "s", "::1")
    assert server.asked[0][1]["app"] == ["1"]
    assert server.asked[0][1]["tls"] == ["false"]


def test_a_server_that_fails_is_passed_over(auth_server: Callable[..., AuthServer]) -> None:
    broken, good = auth_server(500), auth_server()
    for _ in range(4):  # whichever is asked first
        assert query_auth([broken.address, good.address], "s", "::1").identity == "me"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (403, "403"),
        ("not json", "JSON"),
        ([], "object"),
        ({**ANSWER, "ttl": 0}, "invalid TTL 0"),
        ({**ANSWER, "ttl": "60"}, "int"),
        ({**ANSWER, "authorizations": [{**GRANT, "permissions": ["fly"]}]}, "unknown permission fly"),
        ({**ANSWER, "authorizations": [{**GRANT, "topic": "("}]}, "unable to compile"),
        ({**ANSWER, "authorizations": [{**GRANT, "channels": ["*"]}]}, "unable to compile"),
    ],
)
def test_nonsense_is_no_answer(auth_server: Callable[..., AuthServer], answer: Any, reason: str) -> None:
    server = auth_server(answer)
    with pytest.raises(AuthFailed, match=reason):
        query_auth([server.address], "s", "::1")


def test_a_server_that_hangs_or_is_not_there_costs_the_timeout(auth_server: Callable[..., AuthServer]) -> None:
    server = auth_server()
    server.faults.drop_replies = True
    with pytest.raises(AuthFailed, match="no reply within"):
        query_auth([server.address], "s", "::1", timeout=0.05)
    server.face.stop()
    with pytest.raises(AuthFailed, match="refused"):
        query_auth([server.address], "s", "::1")
    with pytest.raises(AuthFailed):
        query_auth([], "s", "::1")


def test_what_a_grant_covers() -> None:
    assert not AuthState(ttl=1).allowed("t", "", "publish")
    grants = [
        {"topic": "^logs$", "channels": ["^c[0-9]$", ".*spare"], "permissions": ["subscribe"]},
        {"topic": "metrics", "channels": [".*"], "permissions": ["publish"]},
    ]
    state = msgspec.convert({"ttl": 1, "authorizations": grants}, AuthState)
    assert state.allowed("logs", "c1", "subscribe")
    assert state.allowed("logs", "my_spare_one", "subscribe")
    assert not state.allowed("logs", "c10", "subscribe")
    assert not state.allowed("logs", "c1", "publish")
    assert not state.allowed("mylogs", "c1", "subscribe")
    assert state.allowed("all.metrics.here", "", "publish")
    assert not state.allowed("all.metrics.here", "c1", "subscribe")


def test_a_grant_to_publish_must_match_no_channel_at_all(auth_server: Callable[..., AuthServer]) -> None:
    server = auth_server({**ANSWER, "authorizations": [{**GRANT, "channels": ["x"]}]})
    assert not query_auth([server.address], "s", "::1").allowed("t", "", "publish")


@pytest.fixture
def guard(start_nsqd: Callable[..., Any]) -> Callable[[AuthServer], Any]:
    """Start an nsqd, ours or the original's, that asks an auth server."""
    return lambda server: start_nsqd(auth_http_addresses=(server.address,))


def sized(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


PUB = b"PUB %s\n" + sized(b"x")


def test_a_client_may_do_what_it_is_granted(auth_server: Callable[..., AuthServer], guard: Any) -> None:
    server = auth_server()
    client = WireClient(guard(server).tcp_address, client_id="id")
    answer = client.command(b"AUTH\n" + sized(b"secret"))
    assert json.loads(answer) == {"identity": "me", "identity_url": "http://me", "permission_count": 1}
    assert server.asked[0][1]["secret"] == ["secret"]
    assert server.asked[0][1]["remote_ip"] == ["127.0.0.1"]
    assert client.command(PUB % b"topic") == b"OK"
    assert client.command(PUB % b"other") == b'E_UNAUTHORIZED AUTH failed for PUB on "other" ""'
    client.close()


def test_without_auth_nothing_may_be_done(auth_server: Callable[..., AuthServer], guard: Any) -> None:
    nsqd = guard(auth_server())
    for command, name in ((PUB % b"topic", b"PUB"), (b"SUB topic c\n", b"SUB")):
        client = WireClient(nsqd.tcp_address)
        assert client.command(command) == b"E_AUTH_FIRST AUTH required before " + name
        client.close()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (403, b"E_AUTH_FAILED AUTH failed"),
        ("nonsense", b"E_AUTH_FAILED AUTH failed"),
        ({**ANSWER, "ttl": 0}, b"E_AUTH_FAILED AUTH failed"),
        ({**ANSWER, "authorizations": []}, b"E_UNAUTHORIZED AUTH no authorizations found"),
        ({**ANSWER, "authorizations": None}, b"E_UNAUTHORIZED AUTH no authorizations found"),
        ({**ANSWER, "identity": None}, None),
        ({"ttl": 1, "authorizations": [GRANT], "more": 1}, None),
        ({"ttl": 1, "authorizations": [{"topic": "t", "permissions": None}]}, None),
    ],
)
def test_answers_of_all_kinds(auth_server: Callable[..., AuthServer], guard: Any, answer: Any, error: Any) -> None:
    client = WireClient(guard(auth_server(answer)).tcp_address)
    reply = client.command(b"AUTH\n" + sized(b"secret"))
    client.close()
    assert reply == error if error else json.loads(reply)["permission_count"] == 1


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
    client.close()
