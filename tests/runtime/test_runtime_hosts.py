"""Hosts that nothing can connect to, replies that nothing can parse: a failed connection, and the rest goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.peers import Peer, PeerServer
from support.scripted_nsqd import ScriptedNsqd
from support.waiting import PROCESS, until

from nsq_fast import ColumnSubscription, Consumer, NsqdHTTPClient, Producer
from nsq_fast.broker import BrokerProcess, LookupdServer, NsqdOptions, NsqdServer
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import ConnectFailed, HttpError, NoNsqd, RemoteProtocolError
from nsq_fast.names import Address

BAD_HOSTS = ["a..b", "x" * 64]
DEEP = b'{"version":"1.3.0","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_configured_host_that_cannot_be_encoded_leaves_its_share_to_the_others(host: str) -> None:
    nsqd = ScriptedNsqd()
    errors: list[Any] = []
    consumer = Consumer("topic", "channel", [(host, 4150), tuple(nsqd.address)], max_in_flight=10)
    consumer.on_error.connect(lambda _, error: errors.append(error), weak=False)
    consumer.on_message.connect(lambda *_, **__: None, weak=False)
    consumer.start(block=False)
    nsqd.connection().wait_rdy(10)
    until(lambda: errors)
    assert "is no host name" in str(errors[0])
    consumer.close(drain=False)
    nsqd.stop()


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_a_producer_says_what_is_wrong_with_the_host(host: str) -> None:
    with Producer((host, 4150) for _ in range(1)) as producer:
        with pytest.raises(NoNsqd, match="is no host name"):
            producer.publish("topic", b"x", timeout=0.3)
        assert not producer.is_connected


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_the_other_clients_say_it_too(host: str) -> None:
    with pytest.raises(ConnectFailed, match="is no host name"):
        ColumnSubscription(Address(host, 4150), "topic", "channel", ConnectionConfig()).open()
    with pytest.raises(HttpError, match="is no host name"):
        NsqdHTTPClient(host).ping()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[LookupdServer, NsqdServer]]:
    """A lookupd, a healthy nsqd, and one whose broadcast address is no host name, all of one topic."""
    lookupd = LookupdServer()
    lookupd.start()
    nsqds = []
    for name, options in {"good": {}, "bad": {"broadcast_address": BAD_HOSTS[0]}}.items():
        path = tmp_path / name
        path.mkdir()
        nsqds.append(NsqdServer(NsqdOptions(data_path=str(path), **options)))  # type: ignore[arg-type]
        nsqds[-1].register_at(lookupd.tcp_address)
        nsqds[-1].start()
        with Producer(str(nsqds[-1].tcp_address)) as producer:
            producer.publish("topic", b"from " + name.encode())
    yield lookupd, nsqds[0]
    for server in (*nsqds, lookupd):
        server.kill()


def test_a_host_from_lookup_that_cannot_be_encoded_costs_the_others_nothing(
    cluster: tuple[LookupdServer, NsqdServer],
) -> None:
    lookupd, _ = cluster
    bodies: list[bytes] = []
    lookupds = str(lookupd.http_address)
    consumer = Consumer(
        "topic",
        "channel",
        lookupd_http_addresses=lookupds,
        message_handler=lambda _, message: bodies.append(message.body),
        max_in_flight=10,
    )
    consumer.start(block=False)
    with Producer(lookupd_http_addresses=lookupds) as producer:
        for number in range(20):
            producer.publish("topic", b"%d" % number)
    until(lambda: len(bodies) == 21)
    assert b"from bad" not in bodies
    until(lambda: consumer.total_ready_count == 10)
    consumer.close()


@pytest.mark.parametrize("reply", ["IDENTIFY", "AUTH"])
def test_a_reply_nested_beyond_reason_is_a_failed_connection_that_is_tried_again(reply: str) -> None:
    """The server is well again at the second connection."""

    def script(peer: Peer) -> None:
        if server.count == 1 and reply == "IDENTIFY":
            peer.read_identify()
            peer.frame(0, DEEP)
            peer.read_all()
            return
        peer.handshake(auth_required=True)
        assert peer.read_line() == b"AUTH"
        peer.read_body()
        peer.frame(0, DEEP if server.count == 1 else b'{"identity":"i","identity_url":"","permission_count":1}')
        assert peer.read_line() == b"SUB topic channel"
        peer.ok()
        peer.messages(1)
        peer.read_all()

    server = PeerServer(script)
    bodies: list[bytes] = []
    errors: list[Any] = []
    consumer = Consumer(
        "topic",
        "channel",
        str(server.address),
        message_handler=lambda _, message: bodies.append(message.body),
        auth_secret="secret",
    )
    consumer.on_error.connect(lambda _, error: errors.append(error), weak=False)
    consumer.start(block=False)
    until(lambda: bodies == [b"body"])
    assert isinstance(errors[0], (RemoteProtocolError, RecursionError))
    consumer.close(drain=False)
    server.stop()


def test_what_nobody_foresaw_while_connecting_is_a_failed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise LookupError("no codec")

    monkeypatch.setattr("nsq_fast.client.gevent_loop.resolve_name", fail)
    with pytest.raises(ConnectFailed, match="no codec"):
        ColumnSubscription(Address("nsqd", 4150), "topic", "channel", ConnectionConfig()).open()


IN_ONE_THREAD = """
import sys
from gevent import get_hub
from nsq_fast import Consumer, NsqdHTTPClient, Producer
tcp, http, lookupd = sys.argv[1:]
NsqdHTTPClient.from_url(http).create_topic("t")
with Producer(tcp) as producer, Consumer("t", "c", lookupd_http_addresses=lookupd) as consumer:
    producer.publish("t", b"body")
    next(iter(consumer))
print(get_hub().threadpool.size)
"""


def test_addresses_are_connected_to_without_a_thread_of_the_resolver() -> None:
    """A process without threads may fork without the warning that CPython has for it from 3.12 on."""
    with BrokerProcess() as broker:
        addresses = [str(each) for each in (broker.nsqd.tcp, broker.nsqd.http, broker.lookupd.http)]
        program = [sys.executable, "-c", IN_ONE_THREAD, *addresses]
        done = subprocess.run(program, capture_output=True, text=True, timeout=PROCESS)
    assert (done.stdout, done.stderr) == ("0\n", "")
