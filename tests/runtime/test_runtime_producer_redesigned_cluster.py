"""The producer and the embedded cluster: leaders move and die, and nothing is lost or out of order."""

from __future__ import annotations

import json
import random
from typing import Any

import gevent
import pytest
from gevent.event import Event
from support.waiting import WAIT, until

from nsq_fast import Producer, Receipt, errors
from nsq_fast.broker.redesigned.cluster import RedesignedCluster
from nsq_fast.protocol.partitioner import murmur3_partition

KEYS = [f"key-{number}" for number in range(20)]
PARTITIONS = 3


def new_producer(cluster: RedesignedCluster, **options: Any) -> Producer:
    lookupds = [str(lookupd.http_address) for lookupd in cluster.lookupds]
    return Producer(lookupd_http_addresses=lookupds, lookupd_refresh_interval=0.05, **options)


def stored(cluster: RedesignedCluster, topic: str) -> dict[int, list[Any]]:
    """The records of every partition, in order."""
    found = {}
    for number in range(PARTITIONS):
        log = cluster.partition(topic, number).log
        found[number] = log.read(0, 1_000_000)
    return found


def trouble(cluster: RedesignedCluster, topic: str) -> None:
    """Move every leader twice; kill a node and bring it back."""
    chance = random.Random(5)
    for _ in range(2):
        for number in range(PARTITIONS):
            cluster.move_leader(topic, number)
            gevent.sleep(chance.uniform(0.005, 0.05))  # sleep: trouble at any moment
    node = cluster.leader_of(topic, 1)
    cluster.kill_node(node)
    gevent.sleep(0.1)  # sleep: a node that is away for a time
    cluster.restart_node(node)
    gevent.sleep(0.05)  # sleep: trouble at any moment
    cluster.move_leader(topic, 2)


@pytest.mark.parametrize(
    "options", [{"coalesce": False}, {}, {"linger": 0.002}], ids=["one by one", "coalesced", "lingering"]
)
@pytest.mark.parametrize("is_traced", [False, True], ids=["plain", "traced"])
def test_keys_keep_their_order_while_leaders_move_and_die(
    cluster: RedesignedCluster, options: dict[str, Any], is_traced: bool
) -> None:
    cluster.create_topic("t", PARTITIONS, 2, ordered=True, channels=["ch"])
    per_key, window = 60, 5
    acknowledged: set[bytes] = set()
    is_over = Event()

    def work(key: str) -> None:
        for first in range(0, per_key, window):
            bodies = [f"{key} {number}".encode() for number in range(first, first + window)]
            results = [
                producer.publish_nowait("t", body, key=key, trace_id=7 if is_traced else None) for body in bodies
            ]
            for body, result in zip(bodies, results, strict=True):
                assert isinstance(result.get(timeout=20), Receipt) is is_traced
                acknowledged.add(body)
            is_over.wait(0.03)

    with new_producer(cluster, **options) as producer:
        workers = [gevent.spawn(work, key) for key in KEYS]
        until(lambda: acknowledged)
        trouble(cluster, "t")
        is_over.set()
        gevent.joinall(workers, timeout=30, raise_error=True)
        assert producer.stats()["held"] == 0

    assert len(acknowledged) == per_key * len(KEYS)
    bodies = {number: [record.body for record in records] for number, records in stored(cluster, "t").items()}
    assert acknowledged <= {body for each in bodies.values() for body in each}
    for key in KEYS:
        mine = [body for body in bodies[murmur3_partition(key, PARTITIONS)] if body.startswith(key.encode() + b" ")]
        assert list(dict.fromkeys(mine)) == [f"{key} {number}".encode() for number in range(per_key)]


def test_a_rolling_restart_under_load_fails_no_publish(cluster: RedesignedCluster) -> None:
    cluster.create_topic("t", PARTITIONS, 2, ordered=True, channels=["ch"])
    counts = [0] * 10
    is_over = Event()

    def work(number: int) -> None:
        while not is_over.is_set():
            body = f"{number} {counts[number]}".encode()
            assert producer.publish("t", body, key=f"k{number}" if number % 2 else None) == b"OK"
            counts[number] += 1

    def progress(by: int) -> None:
        """Wait until each caller has published ``by`` messages more."""
        before = list(counts)
        until(lambda: all(now >= then + by for now, then in zip(counts, before, strict=True)), 60.0)

    with new_producer(cluster, publish_timeout=120.0) as producer:
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
    bodies = {record.body for records in stored(cluster, "t").values() for record in records}
    assert bodies == {f"{number} {index}".encode() for number, count in enumerate(counts) for index in range(count)}


def test_publishes_without_key_lose_nothing(cluster: RedesignedCluster) -> None:
    cluster.create_topic("t", PARTITIONS, 2, multi_part=True, channels=["ch"])
    bodies = {b"%d" % number for number in range(600)}
    with new_producer(cluster) as producer:
        results = []
        mover = gevent.spawn(trouble, cluster, "t")
        for body in sorted(bodies):
            results.append(producer.publish_nowait("t", body))
            if len(results) % 20 == 0:
                gevent.sleep(0.01)  # sleep: publishes that are spread over the trouble
        gevent.joinall([mover, *results], timeout=20, raise_error=True)
    assert all(result.get(block=False) == b"OK" for result in results)
    assert {record.body for records in stored(cluster, "t").values() for record in records} == bodies


def test_receipts_name_the_record(cluster: RedesignedCluster) -> None:
    cluster.create_topic("t", PARTITIONS, 1, ordered=True, channels=["ch"])
    with new_producer(cluster) as producer:
        one = producer.publish("t", b"one", key="a", trace_id=77)
        many = producer.multipublish("t", [b"a", b"bb", b"ccc"], key="a", trace_id=[5, 6, 7])
        gathered = [producer.publish_nowait("t", b"x" * n, key="a", trace_id=n) for n in range(1, 8)]
        receipts = [one, *many, *(result.get(timeout=WAIT) for result in gathered)]
    partition = murmur3_partition("a", PARTITIONS)
    leader = cluster.leader_of("t", partition).tcp_address
    assert receipts == [
        Receipt(record.internal_id, record.trace_id, record.offset, record.size, partition, leader)
        for record in stored(cluster, "t")[partition]
    ]


def test_headers_tags_and_traces_on_an_extended_topic(cluster: RedesignedCluster) -> None:
    cluster.create_topic("t", PARTITIONS, 1, ordered=True, ext=True, channels=["ch"])
    with new_producer(cluster) as producer:
        assert producer.publish("t", b"0", partition=0, headers={"a": 1}) == b"OK"
        receipt = producer.publish("t", b"1", partition=0, tag="red", trace_id=9)
        assert isinstance(receipt, Receipt)
        again = producer.publish("t", b"2", partition=0, trace_id=8)
        assert isinstance(again, Receipt)
        assert again.trace_id == 8
        assert producer.multipublish("t", [b"3", b"4"], partition=0, headers=[{"n": 3}, {}]) == b"OK"
        assert producer.publish("t", b"5", partition=0) == b"OK"
    records = stored(cluster, "t")[0]
    assert [record.body for record in records] == [b"%d" % number for number in range(6)]
    assert (records[1].internal_id, records[1].trace_id) == (receipt.internal_id, 9)
    assert [json.loads(record.header or b"null") for record in records] == [
        {"a": 1},
        {"##client_dispatch_tag": "red", "##trace_id": "9"},
        {"##trace_id": "8"},
        {"n": 3},
        {},
        None,
    ]


def test_a_dead_leader_without_replicas_is_waited_for(cluster: RedesignedCluster) -> None:
    cluster.create_topic("t", PARTITIONS, 1, ordered=True, channels=["ch"])
    with new_producer(cluster) as producer:
        assert producer.publish("t", b"0", partition=1) == b"OK"
        node = cluster.leader_of("t", 1)
        cluster.kill_node(node)
        waiting = producer.publish_nowait("t", b"1", partition=1)
        until(lambda: str(node.tcp_address) not in producer.stats()["connected"])
        with pytest.raises(errors.NoLeader):
            producer.publish("t", b"x", partition=1, block=False)
        with pytest.raises(errors.NoLeader, match="partition 1 of topic 't'"):
            producer.publish("t", b"x", partition=1, timeout=0.2)
        assert producer.publish("t", b"2", partition=0) == b"OK"
        cluster.restart_node(node)
        assert waiting.get(timeout=WAIT) == b"OK"
    assert b"1" in [record.body for record in stored(cluster, "t")[1]]
