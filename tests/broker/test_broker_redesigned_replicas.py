"""Replicas on nodes that die, are cut off, and come back: what clients see, and that nothing confirmed is lost."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
from gevent import sleep, spawn
from support.http import ask
from support.redesigned import Consumer, publish, sized
from support.waiting import WAIT, until
from support.wire import WireClient

from nsq_fast.broker import RedesignedCluster
from nsq_fast.broker.redesigned.coordinator import ClusterError

ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}
NOT_LEADER, NOT_WRITABLE = b"E_FAILED_ON_NOT_LEADER ", b"E_FAILED_ON_NOT_WRITABLE "
NEVER = 3600.0


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    """Three nodes; ``t`` has one partition with two replicas. A replica is not given to another node by itself."""
    with RedesignedCluster(takeover_delay=0.05, move_step=0.0, readiness=0.02, migrate_delay=NEVER) as cluster:
        cluster.create_topic("t", 1, 2, channels=["ch"])
        yield cluster


def put(client: WireClient, body: bytes = b"x") -> bytes:
    return client.command(b"PUB t 0\n" + sized(body))


def client_of(node: Any) -> WireClient:
    return WireClient(node.tcp_address)


def follower_of(cluster: RedesignedCluster) -> Any:
    partition = cluster.partition("t", 0)
    return cluster.node(next(node for node in partition.replicas if node != partition.leader))


def stored(cluster: RedesignedCluster) -> list[bytes]:
    log = cluster.partition("t", 0).log
    return [record.body for record in log.read(0, log.end)]


def test_a_leader_that_is_cut_off_confirms_nothing(cluster: RedesignedCluster) -> None:
    publish(cluster, "t", b"before")
    former = cluster.leader_of("t", 0)
    client = client_of(former)
    epoch = cluster.partition("t", 0).epoch
    cluster.isolate_node(former)
    assert put(client, b"refused") == NOT_WRITABLE
    until(lambda: cluster.leader_of("t", 0) is not former)
    assert cluster.partition("t", 0).epoch > epoch
    assert put(client, b"refused") == NOT_LEADER  # it was not told, but its lease has ended
    cluster.heal_node(former)
    until(lambda: len(cluster.partition("t", 0).in_sync) == 2)
    assert put(client, b"refused") == NOT_LEADER
    publish(cluster, "t", b"after")
    assert stored(cluster) == [b"before", b"after"]
    client.close()


def test_a_leader_that_is_cut_off_stops_to_lead_before_it_is_replaced() -> None:
    with RedesignedCluster(2, 1, readiness=0.0, takeover_delay=NEVER) as cluster:
        cluster.create_topic("t", 1, 1, channels=["ch"])
        leader = cluster.leader_of("t", 0)
        client = client_of(leader)
        cluster.isolate_node(leader)
        assert put(client, b"1") == b"OK"  # it is the only one in sync, and has a lease
        client.close()
    with RedesignedCluster(2, 1, readiness=0.0, takeover_delay=0.5) as cluster:
        cluster.create_topic("t", 1, 1, channels=["ch"])
        leader = cluster.leader_of("t", 0)
        client = client_of(leader)
        cluster.isolate_node(leader)
        until(lambda: put(client, b"x") == NOT_LEADER)
        confirmed = len(stored(cluster))
        cluster.restart_node(leader)  # it is still cut off
        until(lambda: cluster.partition("t", 0).leader is None)
        again = client_of(leader)
        assert put(again, b"refused") == NOT_LEADER
        cluster.heal_node(leader)
        assert put(again, b"last") == b"OK"
        assert len(stored(cluster)) == confirmed + 1
        client.close()
        again.close()


def test_too_few_replicas_in_sync_take_no_publishes(cluster: RedesignedCluster) -> None:
    client = client_of(cluster.leader_of("t", 0))
    follower = follower_of(cluster)
    assert put(client, b"1") == b"OK"
    cluster.kill_node(follower)
    until(lambda: len(cluster.partition("t", 0).in_sync) == 1)
    assert put(client, b"2") == NOT_WRITABLE
    cluster.restart_node(follower)
    until(lambda: put(client, b"3") == b"OK")
    cluster.kill_node(cluster.leader_of("t", 0))
    until(lambda: cluster.leader_of("t", 0) is follower)
    assert stored(cluster) == [b"1", b"3"]
    client.close()


def test_another_node_gets_the_replicas_of_one_that_stays_away() -> None:
    with RedesignedCluster(takeover_delay=0.02, readiness=0.02, migrate_delay=0.05) as cluster:
        cluster.create_topic("t", 1, 2, channels=["ch"])
        publish(cluster, "t", b"1")
        away = follower_of(cluster)
        client = client_of(cluster.leader_of("t", 0))
        cluster.kill_node(away)
        until(lambda: put(client, b"2") == b"OK")
        assert away.id not in cluster.partition("t", 0).replicas
        leader = cluster.leader_of("t", 0)
        cluster.kill_node(leader)
        until(lambda: cluster.leader_of("t", 0) not in (leader, away))
        assert stored(cluster) == [b"1", b"2"]
        client.close()


def test_a_partition_without_live_replica_is_gone_until_its_node_is_back(cluster: RedesignedCluster) -> None:
    publish(cluster, "t", b"kept")
    nodes = [cluster.node(node) for node in cluster.partition("t", 0).replicas]
    lookupd = cluster.lookupds[0].http_address
    path = "/lookup?topic=t&access=r"
    for node in nodes:
        cluster.kill_node(node)
    until(lambda: ask(lookupd, "GET", path, **ACCEPT).json["partitions"] == {})
    for node in nodes:
        cluster.restart_node(node)
    until(lambda: ask(lookupd, "GET", path, **ACCEPT).json["partitions"] != {})
    consumer = Consumer(cluster.leader_of("t", 0), "SUB t ch 0")
    assert consumer.receive().body == b"kept"
    consumer.close()


def test_a_replica_that_was_away_does_not_lead_before_it_has_caught_up(cluster: RedesignedCluster) -> None:
    leader, follower = cluster.leader_of("t", 0), follower_of(cluster)
    cluster.kill_node(follower)
    until(lambda: len(cluster.partition("t", 0).in_sync) == 1)
    cluster.kill_node(leader)
    cluster.restart_node(follower)
    until(lambda: cluster.partition("t", 0).leader is None)
    cluster.restart_node(leader)
    until(lambda: cluster.leader_of("t", 0) is leader and len(cluster.partition("t", 0).in_sync) == 2)


def test_a_replica_is_moved_by_http(cluster: RedesignedCluster) -> None:
    publish(cluster, "t", b"1")
    partition = cluster.partition("t", 0)
    leader, follower = cluster.leader_of("t", 0), follower_of(cluster)
    third = next(node for node in cluster.nsqds if node.id not in partition.replicas)
    cluster.wait_stable()
    path = f"/topic/partition/move?topic=t&partition=0&move_leader=false&move_from={follower.id}"
    lookupd = cluster.lookupds[0].http_address
    assert ask(lookupd, "POST", f"{path}&move_to={third.id}").status == 200
    assert set(partition.replicas) == set(partition.in_sync) == {leader.id, third.id}
    cluster.wait_stable()
    refused = ask(lookupd, "POST", f"{path}&move_to={third.id}")
    assert (refused.status, refused.json["message"]) == (400, "the move source node has no replica for the topic")
    rows = ask(leader.http_address, "GET", "/coordinator/stats?topic=t").json["topic_coord_stats"]
    assert {row["node_id"] for row in rows[0]["isr_stats"]} == {leader.id, third.id}
    cluster.kill_node(leader)
    until(lambda: cluster.leader_of("t", 0) is third)
    assert stored(cluster) == [b"1"]


@pytest.mark.parametrize("seed", range(6))
def test_nothing_that_was_confirmed_is_lost_whatever_happens(seed: int) -> None:
    dice = random.Random(seed)
    options = {"takeover_delay": 0.01, "move_step": 0.0, "readiness": 0.005, "migrate_delay": dice.choice((0.0, 0.02))}
    with RedesignedCluster(nodes=4, lookupds=1, **options) as cluster:
        cluster.create_topic("t", 1, 3, channels=["ch"])
        confirmed: list[bytes] = []
        down: set[Any] = set()
        for turn in range(60):
            node = dice.choice(cluster.nsqds)
            if node in down:
                (cluster.restart_node if not node.is_running else cluster.heal_node)(node)
                down.discard(node)
            elif len(down) < 3:
                dice.choice((cluster.kill_node, cluster.isolate_node))(node)
                down.add(node)
            if dice.random() < 0.2:
                with contextlib.suppress(ClusterError):  # it may be unstable
                    cluster.move_leader("t", 0)
            for other in cluster.nsqds:
                if other.is_running:
                    client = client_of(other)
                    body = b"%d-%s" % (turn, other.id.encode())
                    # A node that does not have the partition answers with an error that ends the connection.
                    confirmed += [body] if put(client, body) == b"OK" else []
                    client.close()
            sleep(dice.choice((0.0, 0.005, 0.03)))  # sleep: trouble at any moment
        for node in down:
            (cluster.restart_node if not node.is_running else cluster.heal_node)(node)
        until(lambda: len(cluster.partition("t", 0).in_sync) >= 3)
        kept = stored(cluster)
        assert [body for body in kept if body in set(confirmed)] == confirmed
        assert confirmed


def test_what_is_finished_around_a_change_of_leader_is_counted_once(cluster: RedesignedCluster) -> None:
    """Records that the old leader has delivered come again; whoever finishes them, the depth is what is not done."""
    channel = cluster.partition("t", 0).channel("ch")
    for _ in range(5):
        first = cluster.leader_of("t", 0)
        publisher = WireClient(first.tcp_address)
        for number in range(20):
            assert publisher.command(b"PUB t 0\n" + sized(b"%d" % number)) == b"OK"
        publisher.close()
        old = Consumer(first, "SUB t ch 0", rdy=20)
        frames = [old.receive() for _ in range(20)]
        moving = spawn(cluster.move_leader, "t", 0)
        for frame in frames[::2]:  # some before it moves, some in between, some too late
            with contextlib.suppress(OSError):
                old.finish(frame)
            assert channel.depth >= 0
            sleep(0)
        moving.get(timeout=WAIT)
        second = cluster.leader_of("t", 0)
        assert second is not first
        new = Consumer(second, "SUB t ch 0", rdy=20)
        finishing = spawn(finish_all, new)
        until(lambda: channel.depth <= 0)
        assert channel.depth == 0
        finishing.kill()
        (shown,) = [
            each
            for topic in ask(second.http_address, "GET", "/stats?format=json&topic=t").json["data"]["topics"]
            for each in topic["channels"]
            if topic["is_leader"]
        ]
        assert shown["depth"] == 0
        old.close()
        new.close()


def finish_all(consumer: Consumer) -> None:
    while True:
        consumer.finish(consumer.receive())
