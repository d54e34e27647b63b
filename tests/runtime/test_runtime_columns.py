"""A channel read as columns and finished in bulk: against the embedded broker, real servers, and scripts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from struct import pack
from typing import Any

import pytest
from gevent.event import Event
from gevent.pywsgi import WSGIServer
from hypothesis import given
from hypothesis import strategies as st
from support.cluster import Standalone
from support.peers import Peer, PeerServer
from support.waiting import WAIT, promptly, until

import nsq_fast
from nsq_fast import NsqdHTTPClient
from nsq_fast._codec import encode_frame, encode_message
from nsq_fast._frame import Columns
from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.client.transport import Transport
from nsq_fast.columns import ColumnSubscription, InFlightIds
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    AuthFirst,
    ConfigError,
    ConnectFailed,
    ConnectionClosed,
    ConnectionLost,
    FinFailed,
    HeartbeatMissed,
    Invalid,
    LocalProtocolError,
    RemoteProtocolError,
    ServerError,
    SubFailed,
)
from nsq_fast.names import Address

BODIES = [b"%d " % number + b"x" * (number * 37 % 300) for number in range(5000)]
Subscribe = Callable[..., ColumnSubscription]
Script = Callable[[Peer], Any]


class Server:
    """An nsqd to judge by: what is published, and what it says of a channel afterwards."""

    def __init__(self, tcp: Address, http: Address) -> None:
        self.tcp = tcp
        self.http = NsqdHTTPClient(*http)

    def publish(self, bodies: list[bytes], topic: str = "t", channel: str = "c") -> None:
        self.http.create_topic(topic)
        self.http.create_channel(topic, channel)
        for start in range(0, len(bodies), 1000):
            self.http.multipublish(topic, bodies[start : start + 1000], binary=True)
        until(lambda: self.channel()["depth"] == len(bodies))

    def channel(self) -> dict[str, Any]:
        (topic,) = self.http.stats("t")["topics"]
        (channel,) = topic["channels"]
        return dict(channel)

    def counts(self) -> tuple[int, int]:
        """Messages that wait, and messages in flight."""
        channel = self.channel()
        return channel["depth"], channel["in_flight_count"]


@pytest.fixture(params=["embedded", "original"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "original":
        nsqd = request.getfixturevalue("real_nsqd")()
        yield Server(nsqd.tcp_address, nsqd.http_address)
    else:
        with Broker(lookupd=False) as broker:
            yield Server(broker.nsqd.tcp_address, broker.nsqd.http_address)


@pytest.fixture
def subscribe() -> Iterator[Subscribe]:
    """``subscribe(address, partition=..., **config)``: an open subscription to channel c of topic t."""
    made: list[ColumnSubscription] = []

    def make(address: Address, **options: Any) -> ColumnSubscription:
        own = {name: options.pop(name) for name in ("partition", "ordered", "advanced") if name in options}
        config = ConnectionConfig(**{"output_buffer_timeout": 25, **options})
        made.append(ColumnSubscription(address, "t", "c", config, **own))
        made[-1].open()
        return made[-1]

    yield make
    for each in made:
        each.abort()


@pytest.fixture
def script() -> Iterator[Callable[..., Address]]:
    """``script(play, **fields)``: the address of a server that accepts SUB and then plays; fields are of IDENTIFY."""
    servers: list[PeerServer] = []

    def make(play: Script, **fields: Any) -> Address:
        def serve(peer: Peer) -> None:
            peer.accept_sub(**fields)
            play(peer)

        servers.append(PeerServer(serve))
        return servers[-1].address

    yield make
    for each in servers:
        each.stop()


def bodies_of(columns: Columns) -> list[bytes]:
    offsets = memoryview(columns.body_offsets).cast("i")
    return [columns.body[offsets[n] : offsets[n + 1]] for n in range(columns.count)]


def drain(subscription: ColumnSubscription, count: int, at_least: int = 1) -> list[bytes]:
    """Fetch and finish so many messages."""
    bodies: list[bytes] = []
    while len(bodies) < count:
        columns = subscription.fetch(5.0, min(at_least, count - len(bodies)))
        assert columns.count
        bodies += bodies_of(columns)
        subscription.finish(columns.ids)
    return bodies


# Reading and finishing


@pytest.mark.parametrize("at_least", [1, 700])
def test_everything_is_read_once_and_finished(server: Server, subscribe: Subscribe, at_least: int) -> None:
    server.publish(BODIES)
    with subscribe(server.tcp) as subscription:
        subscription.set_rdy(1000)
        bodies = drain(subscription, len(BODIES), at_least)
        assert subscription.in_flight == 0
    assert sorted(bodies) == sorted(BODIES)
    assert subscription.unfinished == []
    assert server.counts() == (0, 0)
    assert not subscription.is_open


def test_the_public_name() -> None:
    assert nsq_fast.ColumnSubscription is ColumnSubscription


def test_what_a_subscription_knows(server: Server, subscribe: Subscribe) -> None:
    subscription = subscribe(server.tcp)
    assert subscription.dialect.name == "original"
    assert subscription.info.max_rdy_count == 2500
    assert subscription.local_address is not None
    assert subscription.local_address.port != server.tcp.port
    assert "t/c" in repr(subscription)
    with pytest.raises(LocalProtocolError, match="RDY 2501"):
        subscription.set_rdy(2501)
    with pytest.raises(LocalProtocolError, match="open"):
        subscription.open()


def test_fetch_gathers_as_much_as_it_is_told(server: Server, subscribe: Subscribe) -> None:
    server.publish(BODIES[:2000])
    subscription = subscribe(server.tcp)
    subscription.set_rdy(2000)
    columns = subscription.fetch(5.0, at_least=2000)
    assert columns.count == 2000
    assert subscription.in_flight == 2000
    subscription.finish(columns.ids[: 500 * 16])
    subscription.requeue(memoryview(columns.ids)[500 * 16 :])
    assert subscription.in_flight == 0
    subscription.close()
    assert server.counts() == (1500, 0)
    assert server.channel()["requeue_count"] >= 1500


def test_fetch_returns_what_there_is_when_time_is_up(server: Server, subscribe: Subscribe) -> None:
    server.publish(BODIES[:10])
    subscription = subscribe(server.tcp)
    assert subscription.fetch(0.05).count == 0
    subscription.set_rdy(100)
    assert subscription.fetch(0.5, at_least=100).count == 10
    start = time.monotonic()
    with promptly():
        assert subscription.fetch(0.1).count == 0
    assert time.monotonic() - start > 0.09


def test_no_ids_are_no_command(server: Server, subscribe: Subscribe) -> None:
    """As after a fetch that found nothing: the connection lives on."""
    server.publish([b"one"])
    subscription = subscribe(server.tcp, write_timeout=0.5)
    with promptly():
        subscription.finish(b"")
        subscription.requeue(b"")
    subscription.set_rdy(1)
    assert drain(subscription, 1) == [b"one"]


def test_requeue_with_a_delay(server: Server, subscribe: Subscribe) -> None:
    server.publish([b"one"])
    subscription = subscribe(server.tcp)
    subscription.set_rdy(1)
    subscription.requeue(subscription.fetch(5.0).ids, 60_000)
    until(lambda: server.channel()["deferred_count"] == 1)
    with pytest.raises(ConfigError, match="multiple of 16"):
        subscription.finish(b"short")


@pytest.mark.slow
def test_heartbeats_are_answered_inside_fetch(server: Server, subscribe: Subscribe) -> None:
    subscription = subscribe(server.tcp, heartbeat_interval=1.0)
    assert subscription.fetch(3.5).count == 0
    subscription.set_rdy(1)
    server.http.publish("t", b"late")
    assert bodies_of(subscription.fetch(5.0)) == [b"late"]


# Many at once


def test_a_heartbeat_is_answered_while_many_messages_are_wanted(
    script: Callable[..., Address], subscribe: Subscribe
) -> None:
    """The rest does not come before the NOP has: a heartbeat is fewer bytes than are waited for."""
    heard: list[bytes] = []

    def play(peer: Peer) -> None:
        heard.append(peer.read_line())  # RDY
        peer.messages(*range(50))
        peer.frame(0, b"_heartbeat_")
        heard.append(peer.read_line())
        peer.messages(*range(50))
        peer.frame(0, b"_heartbeat_")
        heard.append(peer.read_line())
        peer.messages(*range(100))
        peer.read_all()

    subscription = subscribe(script(play))
    subscription.set_rdy(200)
    assert subscription.fetch(WAIT, at_least=50).count == 50
    assert subscription.fetch(WAIT, at_least=150).count == 150
    assert heard == [b"RDY 200", b"NOP", b"NOP"]


# The barrier


def test_fins_that_came_to_nothing_are_known_after_close(server: Server, subscribe: Subscribe) -> None:
    server.publish(BODIES[:100])
    bogus = [b"%016x" % number for number in (1, 2)]
    subscription = subscribe(server.tcp)
    subscription.set_rdy(100)
    columns = subscription.fetch(5.0, at_least=100)
    subscription.finish(bogus[0] + columns.ids + bogus[1])
    subscription.close()
    assert subscription.unfinished == bogus
    assert server.counts() == (0, 0)


@pytest.mark.slow
def test_a_fin_that_is_too_late_is_known_after_close(server: Server, subscribe: Subscribe) -> None:
    server.publish([b"one", b"two"])
    subscription = subscribe(server.tcp, msg_timeout=1.0)
    subscription.set_rdy(2)
    columns = subscription.fetch(5.0, at_least=2)
    subscription.set_rdy(0)
    until(lambda: server.channel()["timeout_count"] == 2)
    subscription.finish(columns.ids)
    subscription.close()
    assert sorted(subscription.unfinished) == sorted((columns.ids[:16], columns.ids[16:]))
    assert server.counts() == (2, 0)


def test_close_gives_back_at_once_what_was_not_answered(server: Server, subscribe: Subscribe) -> None:
    server.publish(BODIES[:3000])
    subscription = subscribe(server.tcp)
    subscription.set_rdy(2000)
    columns = subscription.fetch(5.0, at_least=100)
    subscription.finish(columns.ids[: 60 * 16])
    subscription.close()
    assert subscription.unfinished == []
    until(lambda: server.counts() == (2940, 0), WAIT)
    assert server.channel()["timeout_count"] == 0


def test_an_error_gives_back_what_was_fetched(server: Server, subscribe: Subscribe) -> None:
    server.publish(BODIES[:200])

    def fail() -> None:
        with subscribe(server.tcp) as subscription:
            subscription.set_rdy(200)
            subscription.fetch(5.0, at_least=200)
            raise RuntimeError("the reader of it")

    with pytest.raises(RuntimeError, match="the reader"):
        fail()
    until(lambda: server.counts() == (200, 0), WAIT)


def test_closing_twice_and_using_it_afterwards(server: Server, subscribe: Subscribe) -> None:
    subscription = subscribe(server.tcp)
    subscription.close()
    subscription.close()
    subscription.abort()
    for use in (
        lambda: subscription.fetch(0.1),
        lambda: subscription.finish(bytes(16)),
        lambda: subscription.set_rdy(1),
    ):
        with pytest.raises(ConnectionClosed, match="not open"):
            use()
    assert ColumnSubscription(server.tcp, "t", "c", ConnectionConfig()).close() is None  # type: ignore[func-returns-value]


# Layers


@pytest.mark.parametrize("compression", [None, "snappy", "deflate"])
@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_every_layer(
    real_nsqd: Callable[..., Any],
    tls_files: dict[str, str],
    subscribe: Subscribe,
    is_tls: bool,
    compression: str | None,
) -> None:
    nsqd = real_nsqd(f"-tls-cert={tls_files['cert']}", f"-tls-key={tls_files['key']}")
    server = Server(nsqd.tcp_address, nsqd.http_address)
    server.publish(BODIES)
    options: dict[str, Any] = {"tls_v1": is_tls, "tls_options": {"cafile": tls_files["ca"]}}
    if compression:
        options[compression] = True
    with subscribe(server.tcp, **options) as subscription:
        subscription.set_rdy(2500)
        bodies = drain(subscription, 4000, 1500)
        subscription.finish(b"0123456789abcdef")
    assert subscription.unfinished == [b"0123456789abcdef"]
    assert len(set(bodies)) == len(bodies)
    assert set(bodies) <= set(BODIES)
    until(lambda: server.counts() == (len(BODIES) - len(bodies), 0), WAIT)


def test_close_over_tls_where_openssl_is_at_the_other_end(tls_files: dict[str, str], subscribe: Subscribe) -> None:
    options: dict[str, Any] = {"tls_v1": True, "tls_options": {"cafile": tls_files["ca"]}}
    with Broker(lookupd=False, tls_cert=tls_files["cert"], tls_key=tls_files["key"]) as broker:
        subscription = subscribe(broker.nsqd.tcp_address, **options)
        subscription.close()
    assert not subscription.is_open


def test_auth(subscribe: Subscribe) -> None:
    secrets: list[bytes] = []

    def play(peer: Peer) -> None:
        peer.handshake(auth_required=True)
        assert peer.read_line() == b"AUTH"
        secrets.append(peer.read_body())
        peer.frame(0, b'{"identity":"me","identity_url":"","permission_count":1}')
        assert peer.read_line() == b"SUB t c"
        peer.ok()
        assert peer.read_line() == b"RDY 1"
        peer.messages(7)
        peer.read_all()

    server = PeerServer(play)
    subscription = subscribe(server.address, auth_secret="geheim")
    subscription.set_rdy(1)
    assert subscription.fetch(5.0).ids == b"%016x" % 7
    subscription.abort()
    assert secrets == [b"geheim"]
    server.stop()


@pytest.fixture
def auth_server() -> Iterator[str]:
    """Grants everything to who knows the secret."""
    grants = [{"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]}]

    def answer(environ: dict[str, Any], start: Any) -> list[bytes]:
        known = "secret=geheim" in environ["QUERY_STRING"]
        start("200 OK", [("Content-Type", "application/json")])
        return [json.dumps({"ttl": 60, "identity": "me", "authorizations": grants if known else []}).encode()]

    server = WSGIServer(("127.0.0.1", 0), answer, log=None)
    server.start()
    yield f"127.0.0.1:{server.server_port}"
    server.stop()


@pytest.mark.parametrize("kind", ["embedded", "original"])
def test_auth_at_servers(request: pytest.FixtureRequest, auth_server: str, subscribe: Subscribe, kind: str) -> None:
    with ExitStack() as stack:
        if kind == "original":
            tcp = request.getfixturevalue("real_nsqd")(f"-auth-http-address={auth_server}").tcp_address
        else:
            tcp = stack.enter_context(Broker(lookupd=False, auth_http_addresses=(auth_server,))).nsqd.tcp_address
        with nsq_fast.Producer([tcp], auth_secret="geheim") as producer:
            producer.publish("t", b"one")
        with subscribe(tcp, auth_secret=b"geheim") as subscription:
            subscription.set_rdy(1)
            assert drain(subscription, 1) == [b"one"]
        with pytest.raises(ConnectFailed, match="E_UNAUTHORIZED") as refused:
            subscribe(tcp, auth_secret="guessed")
        assert "guessed" not in str(refused.value)


# Servers that refuse, fail, or stall


def cause_of_open(play: Script, **options: Any) -> BaseException | None:
    server = PeerServer(play)
    subscription = ColumnSubscription(server.address, "t", "c", ConnectionConfig(**options))
    with pytest.raises(ConnectFailed) as failure:
        subscription.open()
    assert not subscription.is_open
    server.stop()
    return failure.value.__cause__


def test_open_fails_with_the_reason() -> None:
    def demands_auth(peer: Peer) -> None:
        peer.handshake(auth_required=True)
        peer.read_all()

    def ends(peer: Peer) -> None:
        peer.handshake()
        peer.read_line()

    def pushes(peer: Peer) -> None:
        peer.handshake()
        peer.read_line()
        peer.send(encode_frame(0, b"OK") + encode_message(1, 1, bytes(16), b"unasked"))
        peer.read_all()

    assert isinstance(cause_of_open(demands_auth), AuthFirst)
    assert isinstance(cause_of_open(ends), ConnectionLost)
    assert isinstance(cause_of_open(pushes), RemoteProtocolError)


@pytest.mark.parametrize("stage", ["connected", "identified"])
def test_the_whole_of_open_is_limited(stage: str) -> None:
    def stalls(peer: Peer) -> None:
        if stage == "identified":
            peer.handshake()
        peer.read_all()

    with promptly():
        cause_of_open(stalls, connect_timeout=0.2)


def test_nobody_listens() -> None:
    with pytest.raises(ConnectFailed, match="refused"):
        ColumnSubscription(Address("127.0.0.1", 1), "t", "c", ConnectionConfig()).open()


def test_a_refused_sub_is_the_servers_error(real_nsqd: Callable[..., Any], subscribe: Subscribe) -> None:
    nsqd = real_nsqd("-max-channel-consumers=1")
    subscribe(nsqd.tcp_address)
    with pytest.raises(SubFailed):
        subscribe(nsqd.tcp_address)


def test_what_the_dialect_lacks_is_refused(server: Server, subscribe: Subscribe) -> None:
    with pytest.raises(LocalProtocolError, match="no partitions"):
        subscribe(server.tcp, partition=0)
    with pytest.raises(LocalProtocolError, match="SUB_ADVANCED"):
        subscribe(server.tcp, advanced=True)


def test_a_killed_server_is_noticed(real_nsqd: Callable[..., Any], subscribe: Subscribe) -> None:
    nsqd = real_nsqd()
    subscription = subscribe(nsqd.tcp_address)
    nsqd.kill()
    with pytest.raises(ConnectionLost):
        subscription.fetch(5.0)
    assert not subscription.is_open


def test_a_fatal_error_is_raised_when_it_comes(script: Callable[..., Address], subscribe: Subscribe) -> None:
    address = script(lambda peer: (peer.messages(1), peer.frame(1, b"E_INVALID whatever"), peer.read_all()))
    subscription = subscribe(address)
    with pytest.raises(Invalid):
        subscription.fetch(5.0, at_least=2)
    assert not subscription.is_open


def test_the_reason_is_found_when_sending_fails(
    script: Callable[..., Address], subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise BrokenPipeError("gone")

    subscription = subscribe(script(lambda peer: (peer.frame(1, b"E_INVALID why"), peer.read_all())))
    monkeypatch.setattr(Transport, "send_encoded", fail)
    with pytest.raises(ServerError, match="why"):
        subscription.finish(bytes(16))
    assert not subscription.is_open


def test_garbage_ends_it(script: Callable[..., Address], subscribe: Subscribe) -> None:
    subscription = subscribe(script(lambda peer: (peer.send(b"GARBAGE!" * 4), peer.read_all())))
    with pytest.raises(RemoteProtocolError):
        subscription.fetch(5.0)
    assert not subscription.is_open


def test_a_failed_fin_without_an_id_ends_it(script: Callable[..., Address], subscribe: Subscribe) -> None:
    subscription = subscribe(script(lambda peer: (peer.frame(1, b"E_FIN_FAILED for reasons"), peer.read_all())))
    with pytest.raises(FinFailed):
        subscription.fetch(5.0)


def test_a_failed_requeue_is_none_of_the_unfinished(script: Callable[..., Address], subscribe: Subscribe) -> None:
    def play(peer: Peer) -> None:
        peer.frame(1, b"E_REQ_FAILED REQ 0123456789abcdef failed")
        peer.messages(1)
        peer.read_all()

    subscription = subscribe(script(play))
    assert subscription.fetch(5.0).count == 1
    assert subscription.unfinished == []


@pytest.mark.slow
def test_silence_of_two_heartbeat_intervals(script: Callable[..., Address], subscribe: Subscribe) -> None:
    subscription = subscribe(script(lambda peer: peer.read_all()), heartbeat_interval=1.0)

    def fetch_until_it_fails() -> None:
        until(lambda: subscription.fetch(0.1).count)

    with pytest.raises(HeartbeatMissed):
        fetch_until_it_fails()
    assert not subscription.is_open


def test_a_close_that_is_not_confirmed_says_so(script: Callable[..., Address], subscribe: Subscribe) -> None:
    subscription = subscribe(script(lambda peer: peer.read_all()))
    with pytest.raises(ConnectionLost, match=r"no CLOSE_WAIT within 0\.1 s"):
        subscription.close(timeout=0.1)
    assert not subscription.is_open


def test_messages_behind_close_wait_are_given_back(script: Callable[..., Address], subscribe: Subscribe) -> None:
    heard: list[bytes] = []

    def play(peer: Peer) -> None:
        while peer.read_line() != b"CLS":
            pass
        peer.messages(1)
        peer.frame(0, b"CLOSE_WAIT")
        peer.messages(2)
        heard.append(peer.read_all())

    subscription = subscribe(script(play))
    subscription.set_rdy(10)
    subscription.close()
    until(lambda: heard)
    assert heard == [b"REQ %016x 0\nREQ %016x 0\n" % (1, 2)]


def test_a_peer_that_waits_for_us_to_read_is_read_from(script: Callable[..., Address], subscribe: Subscribe) -> None:
    """Both sides write more than the system buffers: whoever only writes would wait for the other for ever."""
    flood = b"".join(encode_message(1, 1, b"%016x" % n, b"x" * 1000) for n in range(20_000))
    heard: list[int] = []

    def play(peer: Peer) -> None:
        assert peer.read_line() == b"RDY 2500"
        peer.send(flood)
        heard.extend(len(peer.read(100_000)) for _ in range(105))
        peer.read_all()

    subscription = subscribe(script(play))
    subscription.set_rdy(2500)
    subscription.finish(bytes(16) * 500_000)
    assert subscription.fetch(5.0, at_least=20_000).count == 20_000
    until(lambda: sum(heard) == 21 * 500_000)


def test_a_heartbeat_read_while_writing_is_answered_behind_what_is_written(
    script: Callable[..., Address], subscribe: Subscribe
) -> None:
    """The peer takes nothing until its heartbeat was read, in the middle of the FINs."""
    heard: list[bytes] = []
    is_open = Event()

    def play(peer: Peer) -> None:
        is_open.wait()
        opened_at = subscription.last_received_at
        peer.frame(0, b"_heartbeat_")
        until(lambda: subscription.last_received_at > opened_at)
        heard.append(peer.read_all())

    subscription = ColumnSubscription(script(play), "t", "c", ConnectionConfig())
    subscription.open()
    is_open.set()
    subscription.finish(b"0123456789abcdef" * 1_000_000)
    subscription.abort()
    until(lambda: heard)
    assert heard == [b"FIN 0123456789abcdef\n" * 1_000_000 + b"NOP\n"]


# Redesigned servers


def test_a_partition_with_offsets_and_headers(subscribe: Subscribe) -> None:
    with RedesignedCluster(nodes=2, lookupds=1) as cluster:
        cluster.create_topic("t", partitions=2, replicas=1, channels=["c"], ext=True)
        with nsq_fast.Producer(lookupd_http_addresses=[cluster.lookupds[0].http_address]) as producer:
            for number in range(50):
                producer.publish("t", b"%d" % number, partition=number % 2, headers={"n": number})
        address = cluster.leader_of("t", 1).tcp_address
        with subscribe(address, partition=1, advanced=True, extend_support=True) as subscription:
            subscription.set_rdy(100)
            columns = subscription.fetch(5.0, at_least=25)
            subscription.finish(columns.ids)
    assert subscription.dialect.name == "redesigned"
    assert bodies_of(columns) == [b"%d" % number for number in range(1, 50, 2)]
    assert columns.offsets is not None
    assert columns.sizes is not None
    offsets, sizes = memoryview(columns.offsets).cast("Q"), memoryview(columns.sizes).cast("I")
    assert all(offsets[n] + sizes[n] == offsets[n + 1] for n in range(24))
    assert columns.ext is not None
    assert columns.ext.startswith(b'{"n":1}')


def test_a_real_redesigned_nsqd(standalone_nsqd: Standalone, subscribe: Subscribe) -> None:
    standalone_nsqd.create_topic("t")
    subscription = subscribe(standalone_nsqd.tcp_address, partition=0, advanced=True)
    subscription.set_rdy(100)
    publisher = NsqdHTTPClient(*standalone_nsqd.http_address)
    publisher.multipublish("t", [b"%d" % number for number in range(30)], binary=True, partition=0)
    columns = subscription.fetch(5.0, at_least=30)
    assert bodies_of(columns) == [b"%d" % number for number in range(30)]
    assert columns.offsets is not None
    subscription.finish(columns.ids[: 20 * 16] + pack(">QQ", 7, 7))
    subscription.close()
    assert subscription.unfinished == [pack(">QQ", 7, 7)]
    again = subscribe(standalone_nsqd.tcp_address, partition=0, advanced=True)
    again.set_rdy(100)
    assert bodies_of(again.fetch(5.0, at_least=10)) == [b"%d" % number for number in range(20, 30)]


def test_a_heartbeat_with_the_reply_to_sub_is_answered(subscribe: Subscribe) -> None:
    def play(peer: Peer) -> None:
        peer.handshake()
        peer.read_line()
        peer.send(encode_frame(0, b"OK") + encode_frame(0, b"_heartbeat_") + encode_frame(0, b"_heartbeat_")[:7])
        assert peer.read_line() == b"NOP"
        peer.send(encode_frame(0, b"_heartbeat_")[7:])
        assert peer.read_line() == b"NOP"
        peer.messages(1)
        peer.read_all()

    server = PeerServer(play)
    assert subscribe(server.address).fetch(5.0).count == 1
    server.stop()


def test_the_layout_of_a_column(script: Callable[..., Address], subscribe: Subscribe) -> None:
    def play(peer: Peer) -> None:
        peer.send(encode_message(5, 3, b"0123456789abcdef", b"body") + encode_frame(0, b"_heartbeat_"))
        assert peer.read_line() == b"NOP"
        peer.send(encode_message(6, 1, b"0123456789abcdeg", b""))
        peer.read_all()

    subscription = subscribe(script(play))
    columns = subscription.fetch(5.0, at_least=2)
    assert (columns.ids, columns.body) == (b"0123456789abcdef0123456789abcdeg", b"body")
    assert list(memoryview(columns.attempts).cast("H")) == [3, 1]


# What is held


def test_held_ids() -> None:
    held = InFlightIds()
    ids = [b"%016x" % number for number in range(10)]
    held.add(b"".join(ids[:4]))
    held.add(b"".join(ids[4:]))
    held.remove(ids[3] + ids[7])
    held.remove(memoryview(b"".join(ids))[:32])
    assert held.count == 6
    assert held.take() == b"".join([ids[2], *ids[4:7], *ids[8:]])
    assert (held.count, held.take()) == (0, b"")


def test_many_held_ids_are_compared_now_and_then() -> None:
    held = InFlightIds()
    stuck = b"s" * 16
    held.add(stuck)
    for start in range(0, 200_000, 1000):
        ids = b"".join(b"%016x" % number for number in range(start, start + 1000))
        held.add(ids)
        held.remove(ids)
    assert held.count == 1
    assert held.take() == stuck


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7), st.booleans()), max_size=30), st.randoms())
def test_held_ids_are_those_received_and_not_answered(steps: list[tuple[int, int, bool]], random: Any) -> None:
    held = InFlightIds()
    expected: list[bytes] = []
    number = 0
    for received, answered, in_order in steps:
        fresh = [b"%016x" % each for each in range(number, number + received)]
        number += received
        expected += fresh
        held.add(b"".join(fresh))
        gone = expected[:answered] if in_order else random.sample(expected, min(answered, len(expected)))
        held.remove(b"".join(gone))
        expected = [each for each in expected if each not in gone]
        assert held.count == len(expected)
    assert held.take() == b"".join(expected)
    assert held.take() == b""
