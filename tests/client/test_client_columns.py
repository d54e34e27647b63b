"""Columns of messages, consumed by a ColumnSubscription and published by a ColumnProducer."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate
from struct import pack
from typing import Any

import gevent
import pytest
from gevent.event import Event
from hypothesis import given
from hypothesis import strategies as st
from support.http_server import scripted_http
from support.peers import Peer, PeerServer
from support.publishing import REDESIGNED, Command, Nsqds, numbers
from support.waiting import WAIT, promptly, until

import nsq_fast
from nsq_fast import ColumnProducer, ColumnSubscription, NsqdHTTPClient, Receipt, TraceLog, errors
from nsq_fast._codec import Records, encode_frame, encode_message
from nsq_fast.broker import RedesignedCluster
from nsq_fast.columns import InFlightIds
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import (
    AuthFirst,
    ConfigError,
    ConnectFailed,
    ConnectionClosed,
    ConnectionLost,
    HeartbeatMissed,
    Invalid,
    LocalProtocolError,
    RemoteProtocolError,
    SubFailed,
)

BODIES = [b"%d " % number + b"x" * (number * 37 % 300) for number in range(5000)]


class Server:
    """An nsqd to judge by: what is published, and what it says of a channel afterwards."""

    def __init__(self, tcp, http):
        self.tcp = tcp
        self.http = NsqdHTTPClient(*http)

    def publish(self, bodies):
        self.http.create_topic("t")
        self.http.create_channel("t", "c")
        for start in range(0, len(bodies), 1000):
            self.http.multipublish("t", bodies[start : start + 1000], binary=True)
        until(lambda: self.channel()["depth"] == len(bodies))

    def channel(self):
        (topic,) = self.http.stats("t")["topics"]
        (channel,) = topic["channels"]
        return channel

    def counts(self):
        """Messages that wait, and messages in flight."""
        channel = self.channel()
        return channel["depth"], channel["in_flight_count"]


@pytest.fixture
def server(make_nsqd):
    nsqd = make_nsqd()
    return Server(nsqd.tcp_address, nsqd.http_address)


@pytest.fixture
def subscribe():
    """``subscribe(address, partition=..., **config)``: an open subscription to channel c of topic t."""
    made = []

    def make(address, **options):
        own = {name: options.pop(name) for name in ("partition", "ordered", "advanced") if name in options}
        config = ConnectionConfig(**{"output_buffer_timeout": 25, **options})
        made.append(ColumnSubscription(address, "t", "c", config, **own))
        made[-1].open()
        return made[-1]

    yield make
    for each in made:
        each.abort()


@pytest.fixture
def script(servers):
    """``script(play)``: the address of a server that accepts SUB and then plays."""
    return lambda play: servers(lambda peer: (peer.accept_sub(), play(peer)), kind=PeerServer).address


def bodies_of(columns):
    offsets = memoryview(columns.body_offsets).cast("i")
    return [columns.body[offsets[n] : offsets[n + 1]] for n in range(columns.count)]


def drain(subscription, count, at_least=1):
    """Fetch and finish so many messages."""
    bodies = []
    while len(bodies) < count:
        columns = subscription.fetch(WAIT, min(at_least, count - len(bodies)))
        assert columns.count
        bodies += bodies_of(columns)
        subscription.finish(columns.ids)
    return bodies


# Reading and finishing


@pytest.mark.parametrize("at_least", [1, 700])
def test_everything_is_read_once_and_finished(server, subscribe, at_least):
    """What was finished and is not known to the server is told after the close."""
    server.publish(BODIES)
    bogus = [b"%016x" % number for number in (1, 2)]
    with subscribe(server.tcp) as subscription:
        with pytest.raises(LocalProtocolError, match="RDY 2501"):
            subscription.set_rdy(2501)
        subscription.set_rdy(1000)
        bodies = drain(subscription, len(BODIES), at_least)
        subscription.finish(b"".join(bogus))
        assert subscription.in_flight == 0
    assert sorted(bodies) == sorted(BODIES)
    assert subscription.unfinished == bogus
    assert server.counts() == (0, 0)
    assert not subscription.is_open


def test_fetch_gathers_as_much_as_it_is_told_or_what_there_is_when_time_is_up(server, subscribe):
    server.publish(BODIES[:2000])
    subscription = subscribe(server.tcp)
    with promptly():
        assert subscription.fetch(0.05).count == 0
        subscription.finish(b"")  # as after a fetch that found nothing: no command
    subscription.set_rdy(2000)
    columns = subscription.fetch(WAIT, at_least=2000)
    assert columns.count == subscription.in_flight == 2000
    subscription.finish(columns.ids[: 500 * 16])
    subscription.requeue(memoryview(columns.ids)[500 * 16 : 1999 * 16])
    subscription.requeue(columns.ids[1999 * 16 :], 60_000)
    with pytest.raises(ConfigError, match="multiple of 16"):
        subscription.finish(b"short")
    assert subscription.in_flight == 0
    subscription.close()
    assert server.counts() == (1499, 0)
    assert server.channel()["deferred_count"] == 1
    assert server.channel()["requeue_count"] >= 1500


def test_a_heartbeat_is_answered_while_many_messages_are_wanted(script, subscribe):
    """The rest does not come before the NOP has: a heartbeat is fewer bytes than are waited for."""
    heard = []

    def play(peer):
        heard.append(peer.read_line())  # RDY
        for _ in range(2):
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


def test_close_and_an_error_give_back_at_once_what_was_not_answered(server, subscribe):
    server.publish(BODIES[:3000])
    subscription = subscribe(server.tcp)
    subscription.set_rdy(2000)
    subscription.finish(subscription.fetch(WAIT, at_least=100).ids[: 60 * 16])
    subscription.close()
    assert subscription.unfinished == []
    until(lambda: server.counts() == (2940, 0))

    def fail():
        with subscribe(server.tcp) as failing:
            failing.set_rdy(200)
            failing.fetch(WAIT, at_least=200)
            raise RuntimeError("the reader of it")

    with pytest.raises(RuntimeError, match="the reader"):
        fail()
    until(lambda: server.counts() == (2940, 0))
    assert server.channel()["timeout_count"] == 0


def test_closing_twice_and_using_it_afterwards(server, subscribe):
    subscription = subscribe(server.tcp)
    subscription.close()
    subscription.close()
    subscription.abort()
    uses = (lambda: subscription.fetch(0.1), lambda: subscription.finish(bytes(16)), lambda: subscription.set_rdy(1))
    for use in uses:
        with pytest.raises(ConnectionClosed, match="not open"):
            use()
    ColumnSubscription(server.tcp, "t", "c", ConnectionConfig()).close()


# Layers, authorisation


def test_every_layer(real_nsqd, tls_files, subscribe):
    nsqd = real_nsqd(f"-tls-cert={tls_files['cert']}", f"-tls-key={tls_files['key']}")
    server = Server(nsqd.tcp_address, nsqd.http_address)
    server.publish(BODIES)
    tls = {"tls_v1": True, "tls_options": {"cafile": tls_files["ca"]}}
    bodies = []
    for options in (tls, {"snappy": True}, {"deflate": True}, {**tls, "snappy": True}, {**tls, "deflate": True}):
        with subscribe(server.tcp, **options) as subscription:
            subscription.set_rdy(500)
            bodies += drain(subscription, 500, 300)
        assert subscription.unfinished == []
        left = len(BODIES) - len(bodies)
        until(lambda left=left: server.counts() == (left, 0))
    assert len(set(bodies)) == len(bodies)
    assert set(bodies) <= set(BODIES)


@pytest.fixture
def auth_server():
    """Grants everything to who knows the secret."""
    grants = [{"topic": ".*", "channels": [".*"], "permissions": ["subscribe", "publish"]}]

    def script(question):
        known = "secret=geheim" in question.target
        question.answer({"ttl": 60, "identity": "me", "authorizations": grants if known else []})

    with scripted_http(script) as [server]:
        yield str(server.address)


def test_auth_at_servers(family, make_nsqd, auth_server, subscribe, tmp_path):
    is_original = family == "original"
    options = {"auth_http_address": auth_server} if is_original else {"auth_http_addresses": (auth_server,)}
    tcp = make_nsqd(**options).tcp_address
    with nsq_fast.Producer([tcp], auth_secret="geheim") as producer:
        producer.publish("t", b"one")
    with subscribe(tcp, auth_secret=b"geheim") as subscription:
        subscription.set_rdy(1)
        assert drain(subscription, 1) == [b"one"]
    file = tmp_path / "secret"
    file.write_text("geheim\n")
    with subscribe(tcp, auth_secret_file=str(file)):
        pass
    with pytest.raises(ConnectFailed, match="E_UNAUTHORIZED") as refused:
        subscribe(tcp, auth_secret="guessed")
    assert "guessed" not in str(refused.value)


# Servers that refuse, fail, or stall


PUSHED = encode_frame(0, b"OK") + encode_message(1, 1, bytes(16), b"unasked")


@pytest.mark.parametrize(
    ("play", "error"),
    [
        (lambda peer: (peer.handshake(auth_required=True), peer.read_all()), AuthFirst),
        (lambda peer: (peer.handshake(), peer.read_line()), ConnectionLost),
        (lambda peer: (peer.handshake(), peer.read_line(), peer.send(PUSHED), peer.read_all()), RemoteProtocolError),
        (lambda peer: (peer.handshake(), peer.read_all()), TimeoutError),
        (lambda peer: peer.read_all(), TimeoutError),
    ],
    ids=["demands AUTH", "ends", "pushes", "stalls", "says nothing"],
)
def test_open_fails_with_the_reason(servers, subscribe, play, error):
    server = servers(play, kind=PeerServer)
    limit = 0.2 if error is TimeoutError else WAIT
    with promptly(), pytest.raises(ConnectFailed) as failure:
        subscribe(server.address, connect_timeout=limit)
    assert error is TimeoutError or isinstance(failure.value.__cause__, error)


def test_a_refused_sub_is_the_servers_error(real_nsqd, subscribe):
    nsqd = real_nsqd("-max-channel-consumers=1")
    first = subscribe(nsqd.tcp_address)
    with pytest.raises(SubFailed):
        subscribe(nsqd.tcp_address)
    nsqd.kill()
    with pytest.raises(ConnectionLost):
        first.fetch(WAIT)
    assert not first.is_open


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (encode_message(1, 1, bytes(16), b"x") + encode_frame(1, b"E_INVALID whatever"), Invalid),
        (b"GARBAGE!" * 4, RemoteProtocolError),
    ],
    ids=["fatal", "garbage"],
)
def test_what_ends_it_is_raised_when_it_comes(script, subscribe, sent, error):
    subscription = subscribe(script(lambda peer: (peer.send(sent), peer.read_all())))
    with pytest.raises(error):
        subscription.fetch(WAIT, at_least=2)
    assert not subscription.is_open


def test_a_failed_requeue_is_none_of_the_unfinished(script, subscribe):
    failed = encode_frame(1, b"E_REQ_FAILED REQ 0123456789abcdef failed")
    subscription = subscribe(script(lambda peer: (peer.send(failed), peer.messages(1), peer.read_all())))
    assert subscription.fetch(WAIT).count == 1
    assert subscription.unfinished == []


@pytest.mark.slow
def test_silence_of_two_heartbeat_intervals(script, subscribe):
    subscription = subscribe(script(lambda peer: peer.read_all()), heartbeat_interval=1.0)
    with pytest.raises(HeartbeatMissed):
        until(lambda: subscription.fetch(0.1).count)
    assert not subscription.is_open


def test_a_close_that_is_not_confirmed_says_so(script, subscribe):
    subscription = subscribe(script(lambda peer: peer.read_all()))
    with pytest.raises(ConnectionLost, match=r"no CLOSE_WAIT within 0\.1 s"):
        subscription.close(timeout=0.1)
    assert not subscription.is_open


def test_messages_behind_close_wait_are_given_back(script, subscribe):
    heard = []

    def play(peer):
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


def test_a_peer_that_waits_for_us_to_read_is_read_from(script, subscribe):
    """Both sides write more than the system buffers: whoever only writes would wait for the other for ever."""
    flood = b"".join(encode_message(1, 1, b"%016x" % n, b"x" * 1000) for n in range(20_000))
    heard = []

    def play(peer):
        assert peer.read_line() == b"RDY 2500"
        peer.send(flood)
        heard.extend(len(peer.read(100_000)) for _ in range(105))
        peer.read_all()

    subscription = subscribe(script(play))
    subscription.set_rdy(2500)
    subscription.finish(bytes(16) * 500_000)
    assert subscription.fetch(WAIT, at_least=20_000).count == 20_000
    until(lambda: sum(heard) == 21 * 500_000)


def test_a_heartbeat_read_while_writing_is_answered_behind_what_is_written(script):
    """The peer takes nothing until its heartbeat was read, in the middle of the FINs."""
    heard, is_open = [], Event()

    def play(peer):
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


def test_a_partition_with_offsets_and_headers(subscribe):
    with RedesignedCluster(nodes=2, lookupds=1) as cluster:
        cluster.create_topic("t", partitions=2, replicas=1, channels=["c"], ext=True)
        with nsq_fast.Producer(lookupd_http_addresses=[cluster.lookupds[0].http_address]) as producer:
            for number in range(50):
                producer.publish("t", b"%d" % number, partition=number % 2, headers={"n": number})
        address = cluster.leader_of("t", 1).tcp_address
        with subscribe(address, partition=1, advanced=True, extend_support=True) as subscription:
            subscription.set_rdy(100)
            columns = subscription.fetch(WAIT, at_least=25)
            subscription.finish(columns.ids)
    assert subscription.dialect.name == "redesigned"
    assert bodies_of(columns) == [b"%d" % number for number in range(1, 50, 2)]
    offsets, sizes = memoryview(columns.offsets).cast("Q"), memoryview(columns.sizes).cast("I")
    assert all(offsets[n] + sizes[n] == offsets[n + 1] for n in range(24))
    assert columns.ext.startswith(b'{"n":1}')


def test_a_real_redesigned_nsqd(standalone_nsqd, subscribe):
    standalone_nsqd.create_topic("t")
    subscription = subscribe(standalone_nsqd.tcp_address, partition=0, advanced=True)
    subscription.set_rdy(100)
    bodies = [b"%d" % number for number in range(30)]
    NsqdHTTPClient(*standalone_nsqd.http_address).multipublish("t", bodies, binary=True, partition=0)
    columns = subscription.fetch(WAIT, at_least=30)
    assert bodies_of(columns) == bodies
    assert columns.offsets is not None
    subscription.finish(columns.ids[: 20 * 16] + pack(">QQ", 7, 7))
    subscription.close()
    assert subscription.unfinished == [pack(">QQ", 7, 7)]
    again = subscribe(standalone_nsqd.tcp_address, partition=0, advanced=True)
    again.set_rdy(100)
    assert bodies_of(again.fetch(WAIT, at_least=10)) == bodies[20:]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 7), st.booleans()), max_size=30), st.randoms())
def test_held_ids_are_those_received_and_not_answered(steps, random):
    held, expected, number = InFlightIds(), [], 0
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


PARTITIONS = 3
Producers = Callable[..., ColumnProducer]


@pytest.fixture
def producer() -> Iterator[Producers]:
    """A factory of started producers that retry quickly."""
    made: list[ColumnProducer] = []

    def make(*addresses: Any, **options: Any) -> ColumnProducer:
        defaults = {"publish_timeout": 5.0, "retry_base_delay": 0.001, "lookupd_refresh_interval": 0.05}
        made.append(ColumnProducer(addresses, **{**defaults, **options}))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.close(timeout=0.5)


def offsets_of(entries: list[bytes]) -> array[int]:
    return array("i", accumulate(map(len, entries), initial=0))


def records_of(bodies: list[bytes], trace_ids: list[int] | None = None, headers: list[bytes] | None = None) -> Records:
    return Records(
        offsets_of(bodies),
        b"".join(bodies),
        trace_ids=None if trace_ids is None else array("Q", trace_ids),
        header_offsets=None if headers is None else offsets_of(headers),
        headers=None if headers is None else b"".join(headers),
    )


def test_rows_become_commands(publish_nsqd: Nsqds, producer: Producers) -> None:
    nsqd = publish_nsqd()
    sender = producer(nsqd.address)
    records = records_of(numbers(10))
    rows = array("i", [7, 1, 1]).tobytes()
    results = [sender.publish_rows("t", records), sender.publish_rows("t", records, rows)]
    results.append(sender.publish_rows("t", records, None, 2, 4))
    results.append(sender.publish_rows("t", records, rows, 1))
    assert [result.get(timeout=WAIT).messages for result in results] == [10, 3, 2, 2]
    assert [command.name for command in nsqd.commands] == ["MPUB"] * 4
    assert [command.bodies for command in nsqd.commands] == [
        numbers(10),
        [b"7", b"1", b"1"],
        [b"2", b"3"],
        [b"1", b"1"],
    ]
    assert sender.stats()["held"] == 0


def test_rows_that_make_no_command_are_refused_at_once(publish_nsqd: Nsqds, producer: Producers) -> None:
    nsqd = publish_nsqd()
    sender = producer(nsqd.address, max_body_size=50)
    records = records_of([bytes(20)] * 3)
    for kind, match, arguments in [
        (errors.ConfigError, "rows must be", (array("i", [3]).tobytes(),)),
        (errors.ConfigError, "stop", (None, 0, 4)),
        (errors.ConfigError, "stop", (None, 2, 1)),
        (errors.BodyInvalid, "empty", (None, 1, 1)),
        (errors.BodyInvalid, "max_body_size=50", (None, 0, 3)),
    ]:
        with pytest.raises(kind, match=match):
            sender.publish_rows("t", records, *arguments)
    with pytest.raises(errors.NameInvalid):
        sender.publish_rows("t t", records, None, 0, 1)
    with pytest.raises(errors.ConfigError, match="partition"):
        sender.publish_rows("t", records, None, 0, 1, partition=1024)
    assert sender.stats()["held"] == 0
    assert not nsqd.commands


def test_a_broken_connection_is_tried_again_with_the_same_rows(publish_nsqd: Nsqds, producer: Producers) -> None:
    def answer(peer: Peer, command: Command) -> None:
        if len(nsqd.commands) == 1:
            peer.sock.shutdown(2)
        else:
            peer.ok()

    nsqd = publish_nsqd(answer)
    result = producer(nsqd.address).publish_rows("t", records_of(numbers(5)))
    assert result.get(timeout=WAIT).messages == 5
    assert [command.bodies for command in nsqd.commands] == [numbers(5)] * 2
    nsqd.commands.clear()
    result = producer(nsqd.address, retry_unknown_outcome=False).publish_rows("t", records_of(numbers(5)))
    with pytest.raises(errors.PublishFailed, match="may have been stored") as failure:
        result.get(timeout=WAIT)
    assert failure.value.possibly_stored


def test_what_original_servers_cannot_take(publish_nsqd: Nsqds, producer: Producers) -> None:
    nsqd = publish_nsqd()
    sender = producer(nsqd.address)
    traced = records_of([b"1"], [5])
    for arguments, match in [
        ({"records": traced}, "leave trace_id out"),
        ({"records": records_of([b"1"], None, [b"{}"])}, "leave headers and tag out"),
        ({"records": records_of([b"1"]), "partition": 0}, "no partitions"),
    ]:
        with pytest.raises(errors.ConfigError, match=match):
            sender.publish_rows("t", **arguments).get(timeout=WAIT)
    assert not nsqd.commands
    assert sender.publish_rows("t", traced, is_trace_optional=True).get(timeout=WAIT).receipts == []
    assert [command.name for command in nsqd.commands] == ["MPUB"]


def test_layout_without_lookup_is_that_of_the_nsqd(publish_nsqd: Nsqds, producer: Producers) -> None:
    assert producer(publish_nsqd().address).layout("t") == (False, 0, None)
    assert producer(publish_nsqd(version=REDESIGNED).address).layout("t") == (True, 0, None)
    with pytest.raises(errors.NameInvalid):
        producer(publish_nsqd().address).layout("t t")


def test_layout_of_a_cluster(
    cluster: RedesignedCluster, lookups: dict[str, Any], producer: Producers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsq_fast.client.routing.ABSENT_AFTER", WAIT)
    sender = producer(**lookups)
    later = gevent.spawn(sender.layout, "ext")
    cluster.create_topic("t", PARTITIONS, 1, channels=["ch"])
    assert sender.layout("t") == (True, PARTITIONS, False)
    cluster.create_topic("ext", 1, 1, ext=True, channels=["ch"])
    assert later.get(timeout=WAIT) == (True, 1, True)
    monkeypatch.setattr("nsq_fast.client.routing.ABSENT_AFTER", 0.0)
    with pytest.raises(errors.NoNsqd, match="'absent' does not exist"):
        sender.layout("absent", 3600.0)
    cluster.create_topic("absent", 1, 1, channels=["ch"])
    monkeypatch.setattr("nsq_fast.client.routing.ABSENT_AFTER", 2 * WAIT)
    assert sender.layout("absent") == (True, 1, False)


def test_receipts_of_traced_rows_and_their_records(
    cluster: RedesignedCluster, lookups: dict[str, Any], producer: Producers, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic("t", 1, 1, channels=["ch"])
    trace = TraceLog()
    trace.enable("t")
    sender = producer(**lookups, trace=trace)
    with caplog.at_level(logging.INFO, "nsq_fast.trace"):
        stored = sender.publish_rows("t", records_of([b"a", b"bb", b"ccc"], [5, 0, 2**64 - 1])).get(timeout=WAIT)
    log = cluster.partition("t", 0).log.read(0, 10)
    leader = cluster.leader_of("t", 0).tcp_address
    wanted = [Receipt(log[n].internal_id, log[n].trace_id, log[n].offset, log[n].size, 0, leader) for n in (0, 2)]
    assert stored == (3, 0, wanted)
    written = [json.loads(record.getMessage()) for record in caplog.records]
    assert [(line["internal_id"], line["trace_id"], line["partition"]) for line in written] == [
        (receipt.internal_id, receipt.trace_id, 0) for receipt in wanted
    ]


def test_headers_on_an_extended_topic(cluster: RedesignedCluster, lookups: dict[str, Any], producer: Producers) -> None:
    cluster.create_topic("t", 1, 1, ext=True, channels=["ch"])
    sender = producer(**lookups)
    result = sender.publish_rows("t", records_of([b"a", b"b"], None, [b'{"n":1}', b"{}"]))
    assert result.get(timeout=WAIT) == (2, 0, [])
    assert [record.ext[3:] for record in cluster.partition("t", 0).log.read(0, 10)] == [b'{"n":1}', b"{}"]
