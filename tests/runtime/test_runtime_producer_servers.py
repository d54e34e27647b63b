"""The producer on whole servers of both families: nothing that was answered OK is lost or out of order."""

from __future__ import annotations

import random
import struct
from collections import Counter

import gevent
import pytest
from gevent.event import Event
from support.http import ask
from support.waiting import WAIT, until

from nsq_fast import Consumer, Producer, Receipt, errors
from nsq_fast.protocol.partitioner import murmur3_partition

KEYS = [f"key-{number}" for number in range(20)]
PARTITIONS = 3


def depth(server, topic):
    """Messages stored in a topic without channels."""
    stats = ask(server.http_address, "GET", f"/stats?format=json&topic={topic}").json
    return sum(int(each["depth"]) for each in stats["topics"] or ())


def everything(topic, server, enough):
    """Consume a topic until ``enough`` different messages were seen."""
    seen = Counter()
    handle = lambda _, message: seen.update([message.body])  # noqa: E731
    with Consumer(topic, "c", [server.tcp_address], message_handler=handle, max_in_flight=100):
        until(lambda: len(seen) >= enough)
    return seen


def test_every_kind_of_publish(real_nsqd):
    server = real_nsqd()
    with Producer(str(server.tcp_address)) as producer:
        assert producer.publish("t", b"single") == b"OK"
        assert producer.multipublish("t", (b"%d" % number for number in range(1000))) == b"OK"
        assert producer.publish("later", b"x", defer=20) == b"OK"
        assert producer.publish("t", b"x" * 1024 * 1024) == b"OK"
        big = [struct.pack(">I", number) + bytes(1_000_000) for number in range(12)]
        assert producer.multipublish("t", big) == b"OK"
    seen = everything("t", server, enough=1014)
    assert max(seen.values()) == 1
    assert set(big) < set(seen)


def test_what_the_server_refuses_fails_alone(real_nsqd):
    server = real_nsqd("-max-msg-size=100", "-max-req-timeout=1s")
    for options in ({}, {"linger": 0.005}):
        with Producer([server.tcp_address], retry_unknown_outcome=True, **options) as producer:
            results = [producer.publish_nowait("t", b"x" * (101 if number == 50 else 10)) for number in range(100)]
            gevent.joinall(results, timeout=WAIT)
            assert [number for number, result in enumerate(results) if not result.successful()] == [50]
            assert isinstance(results[50].exception, errors.PublishFailed)
            with pytest.raises(errors.PublishFailed, match="E_INVALID"):
                producer.publish("t", b"x", defer=100_000)
            assert producer.publish("t", b"x") == b"OK"
    assert depth(server, "t") == 200


# Discovery


def known_at(lookupd, topic):
    until(lambda: ask(lookupd.http_address, "GET", f"/lookup?topic={topic}").status == 200)


def test_an_unknown_topic_goes_to_any_nsqd_and_a_known_one_to_those_that_have_it(real_nsqd, real_lookupd):
    lookupd = real_lookupd()
    with Producer(lookupd_http_addresses=[str(lookupd.http_address)], lookupd_poll_interval=0.05) as producer:
        with pytest.raises(errors.NoNsqd, match="'first'"):
            producer.publish("first", b"x", timeout=0.2)
        first = producer.publish_nowait("first", b"x")  # while there is no nsqd
        servers = [real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}") for _ in range(2)]
        assert first.get(timeout=WAIT) == b"OK"
        until(lambda: len(ask(lookupd.http_address, "GET", "/nodes").json["producers"]) == 2)
        ask(servers[1].http_address, "POST", "/topic/create?topic=known")
        known_at(lookupd, "known")
        for _ in range(4):
            assert producer.publish("known", b"x") == b"OK"
        assert producer.publish("unknown", b"x") == b"OK"
    assert [depth(server, "known") for server in servers] == [0, 4]
    assert sum(depth(server, "unknown") for server in servers) == 1


def test_lookup_goes_down_and_what_was_known_stays(real_nsqd, real_lookupd, caplog):
    lookupd = real_lookupd()
    server = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    with Producer(lookupd_http_addresses=[str(lookupd.http_address)], lookupd_poll_interval=0.02) as producer:
        assert producer.publish("t", b"x") == b"OK"
        lookupd.kill()
        until(lambda: "fails" in caplog.text)  # a poll
        assert producer.publish("t", b"x") == b"OK"
        server.restart()
        assert producer.publish("t", b"x") == b"OK"


def failure_of(producer, text):
    """What a publish fails with, as soon as it says ``text``."""

    def failure():
        with pytest.raises(errors.NoNsqd) as caught:
            producer.publish("t", b"x", timeout=0.05)
        return caught.value if text in str(caught.value) else None

    return until(failure)


def test_the_error_says_why_lookup_leads_nowhere(real_nsqd, real_lookupd):
    with Producer(lookupd_http_addresses="127.0.0.1:1") as producer:
        error = failure_of(producer, "lookup failed: http://127.0.0.1:1")
        assert "refused" in str(error)
        assert isinstance(error.__cause__, errors.LookupFailed)
    lookupd = real_lookupd()
    lookupds = [str(lookupd.http_address)]
    with Producer(lookupd_http_addresses=lookupds) as producer:
        assert isinstance(failure_of(producer, "lookup does not know the topic").__cause__, errors.LookupFailed)
    server = real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    ask(server.http_address, "POST", "/topic/create?topic=t")
    known_at(lookupd, "t")
    server.freeze()  # nsqlookupd goes on naming it
    with Producer(lookupd_http_addresses=lookupds, connect_timeout=0.05) as producer:
        assert isinstance(failure_of(producer, f"{server.tcp_address}: ").__cause__, errors.ConnectFailed)


# The embedded cluster: leaders move and die


@pytest.fixture
def producing(cluster):
    """A factory of producers of the cluster, as context managers."""
    lookupds = [str(lookupd.http_address) for lookupd in cluster.lookupds]
    return lambda **options: Producer(lookupd_http_addresses=lookupds, lookupd_refresh_interval=0.05, **options)


def stored(cluster):
    """The records of every partition of t, in order."""
    return {number: cluster.partition("t", number).log.read(0, 1_000_000) for number in range(PARTITIONS)}


def trouble(cluster):
    """Move every leader twice; kill a node and bring it back."""
    chance = random.Random(5)
    for _ in range(2):
        for number in range(PARTITIONS):
            cluster.move_leader("t", number)
            gevent.sleep(chance.uniform(0.005, 0.05))  # sleep: trouble at any moment
    node = cluster.leader_of("t", 1)
    cluster.kill_node(node)
    gevent.sleep(0.1)  # sleep: a node that is away for a time
    cluster.restart_node(node)
    gevent.sleep(0.05)  # sleep: trouble at any moment
    cluster.move_leader("t", 2)


@pytest.mark.parametrize(
    "options", [{"coalesce": False}, {}, {"linger": 0.002}], ids=["one by one", "coalesced", "lingering"]
)
@pytest.mark.parametrize("is_traced", [False, True], ids=["plain", "traced"])
def test_keys_keep_their_order_while_leaders_move_and_die(cluster, producing, options, is_traced):
    cluster.create_topic("t", PARTITIONS, 2, ordered=True, channels=["ch"])
    per_key, window = 60, 5
    acknowledged, is_over = set(), Event()

    def work(key):
        for first in range(0, per_key, window):
            bodies = [f"{key} {number}".encode() for number in range(first, first + window)]
            trace_id = 7 if is_traced else None
            results = [producer.publish_nowait("t", body, key=key, trace_id=trace_id) for body in bodies]
            for body, result in zip(bodies, results, strict=True):
                assert isinstance(result.get(timeout=WAIT), Receipt) is is_traced
                acknowledged.add(body)
            is_over.wait(0.03)

    with producing(**options) as producer:
        workers = [gevent.spawn(work, key) for key in KEYS]
        until(lambda: acknowledged)
        trouble(cluster)
        is_over.set()
        gevent.joinall(workers, timeout=WAIT, raise_error=True)
        assert producer.stats()["held"] == 0

    assert len(acknowledged) == per_key * len(KEYS)
    bodies = {number: [record.body for record in records] for number, records in stored(cluster).items()}
    assert acknowledged <= {body for each in bodies.values() for body in each}
    for key in KEYS:
        mine = [body for body in bodies[murmur3_partition(key, PARTITIONS)] if body.startswith(key.encode() + b" ")]
        assert list(dict.fromkeys(mine)) == [f"{key} {number}".encode() for number in range(per_key)]


def test_a_rolling_restart_under_load_fails_no_publish(cluster, producing):
    cluster.create_topic("t", PARTITIONS, 2, ordered=True, channels=["ch"])
    counts, is_over = [0] * 10, Event()

    def work(number):
        while not is_over.is_set():
            body = f"{number} {counts[number]}".encode()
            assert producer.publish("t", body, key=f"k{number}" if number % 2 else None) == b"OK"
            counts[number] += 1

    def progress(by):
        """Wait until each caller has published ``by`` messages more."""
        before = list(counts)
        until(lambda: all(now >= then + by for now, then in zip(counts, before, strict=True)))

    with producing(publish_timeout=120.0) as producer:
        workers = [gevent.spawn(work, number) for number in range(10)]
        try:
            for node in cluster.nsqds:
                progress(5)
                node.stop()
                progress(5)  # others lead what it led
                node.start()
        finally:
            is_over.set()
            gevent.joinall(workers, raise_error=True)
    bodies = {record.body for records in stored(cluster).values() for record in records}
    assert bodies == {f"{number} {index}".encode() for number, count in enumerate(counts) for index in range(count)}


def test_publishes_without_key_lose_nothing(cluster, producing):
    cluster.create_topic("t", PARTITIONS, 2, multi_part=True, channels=["ch"])
    bodies = {b"%d" % number for number in range(600)}
    with producing() as producer:
        results = []
        mover = gevent.spawn(trouble, cluster)
        for body in sorted(bodies):
            results.append(producer.publish_nowait("t", body))
            if len(results) % 20 == 0:
                gevent.sleep(0.01)  # sleep: publishes that are spread over the trouble
        gevent.joinall([mover, *results], timeout=WAIT, raise_error=True)
    assert all(result.get(block=False) == b"OK" for result in results)
    assert {record.body for records in stored(cluster).values() for record in records} == bodies


def test_receipts_name_the_record(cluster, producing):
    cluster.create_topic("t", PARTITIONS, 1, ordered=True, channels=["ch"])
    with producing() as producer:
        one = producer.publish("t", b"one", key="a", trace_id=77)
        many = producer.multipublish("t", [b"a", b"bb", b"ccc"], key="a", trace_id=[5, 6, 7])
        gathered = [producer.publish_nowait("t", b"x" * n, key="a", trace_id=n) for n in range(1, 8)]
        receipts = [one, *many, *(result.get(timeout=WAIT) for result in gathered)]
    partition = murmur3_partition("a", PARTITIONS)
    leader = cluster.leader_of("t", partition).tcp_address
    assert receipts == [
        Receipt(record.internal_id, record.trace_id, record.offset, record.size, partition, leader)
        for record in stored(cluster)[partition]
    ]


def test_a_dead_leader_without_replicas_is_waited_for(cluster, producing):
    cluster.create_topic("t", PARTITIONS, 1, ordered=True, channels=["ch"])
    with producing() as producer:
        assert producer.publish("t", b"0", partition=1) == b"OK"
        node = cluster.leader_of("t", 1)
        cluster.kill_node(node)
        waiting = producer.publish_nowait("t", b"1", partition=1)
        until(lambda: str(node.tcp_address) not in producer.stats()["connected"])
        for options in ({"block": False}, {"timeout": 0.2}):
            with pytest.raises(errors.NoLeader, match="partition 1 of topic 't'"):
                producer.publish("t", b"x", partition=1, **options)
        assert producer.publish("t", b"2", partition=0) == b"OK"
        cluster.restart_node(node)
        assert waiting.get(timeout=WAIT) == b"OK"
    assert b"1" in [record.body for record in stored(cluster)[1]]
