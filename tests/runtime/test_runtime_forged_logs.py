"""A hostile server cannot forge lines of a log, steer a terminal, or fill the log."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from support.peers import Peer, PeerServer
from support.waiting import until

from nsq_fast import Consumer, NsqdHTTPClient, Producer
from nsq_fast.errors import HttpError, NsqError

FORGED = b"\n2026-01-01 00:00:00 CRITICAL all is lost\x1b[2J\r"
HUGE = FORGED + b"\x1b" * 1_000_000
LONGEST = 6000
"""Characters of a record: a few texts of 500, each of which may be escaped to four times that."""


def check(caplog: pytest.LogCaptureFixture, errors: list[Any]) -> None:
    texts = [record.getMessage() for record in caplog.records]
    texts += [text for error in errors for text in (str(error), repr(error))]
    assert texts
    assert [text[:100] for text in texts if not text.isprintable() or len(text) > LONGEST] == []


def refuse_identify(peer: Peer) -> None:
    peer.read_identify()
    peer.frame(1, b"E_INVALID" + HUGE)


def claim_a_version(peer: Peer) -> None:
    peer.handshake(version=HUGE.decode())


def reply_to_identify(peer: Peer) -> None:
    peer.read_identify()
    peer.frame(0, HUGE)


def refuse_auth(peer: Peer) -> None:
    peer.handshake(auth_required=True)
    peer.read_line()
    peer.read_body()
    peer.frame(1, b"E_UNAUTHORIZED" + HUGE)


def reply_to_auth(peer: Peer) -> None:
    peer.handshake(auth_required=True)
    peer.read_line()
    peer.read_body()
    peer.frame(0, HUGE)


def refuse_sub(peer: Peer) -> None:
    peer.handshake()
    peer.read_line()
    peer.frame(1, b"E_BAD_TOPIC" + HUGE)


def reply_to_nothing(peer: Peer) -> None:
    peer.accept_sub()
    peer.frame(0, HUGE)


def refuse_nothing(peer: Peer) -> None:
    peer.accept_sub()
    peer.frame(1, HUGE)


def refuse_a_fin(peer: Peer) -> None:
    peer.accept_sub()
    peer.frame(1, b"E_FIN_FAILED FIN " + HUGE)
    peer.read_all()


@pytest.mark.parametrize(
    "script",
    [
        refuse_identify, claim_a_version, reply_to_identify, refuse_auth, reply_to_auth, refuse_sub, reply_to_nothing,
        refuse_nothing, refuse_a_fin,
    ],
)  # fmt: skip
def test_what_an_nsqd_says_to_a_consumer(script: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    server = PeerServer(script)
    errors: list[Any] = []
    consumer = Consumer(
        "topic",
        "channel",
        str(server.address),
        message_handler=lambda *_: None,
        auth_secret="s",
        max_reconnect_delay=0.05,
    )
    consumer.on_error.connect(lambda _, error: errors.append(error), weak=False)
    consumer.start(block=False)
    until(lambda: errors)
    consumer.close(drain=False)
    server.stop()
    assert server.count >= 1
    check(caplog, errors)


def test_what_an_nsqd_says_to_a_producer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    def script(peer: Peer) -> None:
        peer.handshake(version=HUGE.decode())
        peer.read_line()
        peer.read_body()
        peer.frame(1, b"E_BAD_TOPIC" + HUGE)

    server = PeerServer(script)
    with Producer(str(server.address)) as producer, pytest.raises(NsqError) as caught:
        producer.publish("topic", b"x", timeout=5)
    server.stop()
    check(caplog, [caught.value])


def test_what_an_http_server_says(caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"message": FORGED.decode() * 3}).encode()

    def script(peer: Peer) -> None:
        peer.recv()
        peer.send(b"HTTP/1.1 500 E\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    server = PeerServer(script)
    with pytest.raises(HttpError) as caught:
        NsqdHTTPClient(*server.address).ping()
    assert caught.value.text.startswith("\n2026")
    consumer = Consumer("topic", "channel", lookupd_http_addresses=str(server.address), message_handler=lambda *_: None)
    consumer.start(block=False)
    until(lambda: "fails" in caplog.text)
    consumer.close()
    server.stop()
    check(caplog, [caught.value])
