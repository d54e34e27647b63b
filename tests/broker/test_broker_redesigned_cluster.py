"""Leaders that move and nodes that die: what clients see, in which order, and that nothing is lost."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
from gevent import sleep, socket, spawn
from support.http import ask
from support.redesigned import Consumer, detail, publish, sized
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import RedesignedCluster
from nsq_fast.broker.redesigned.coordinator import ClusterError

ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}
NOT_LEADER, NOT_WRITABLE = b"E_FAILED_ON_NOT_LEADER ", b"E_FAILED_ON_NOT_WRITABLE "


def shown(cluster: RedesignedCluster, topic: str, access: str = "w") -> dict[str, int]:
    """The TCP port that lookups show for each partition."""
    reply = ask(cluster.lookupds[1].http_address, "GET", f"/lookup?topic={topic}&access={access}", **ACCEPT).json
    return {number: node["tcp_port"] for number, node in (reply.get("partitions") or {}).items()}


def replica_of(cluster: RedesignedCluster, topic: str, number: int) -> Any:
    partition = cluster.partition(topic, number)
    return cluster.node(next(node for node in partition.replicas if node != partition.leader))


def replies_until(client: WireClient, last: bytes) -> list[bytes]:
    """Publish until the reply is ``last``; the replies, each kind once."""
    replies = []
    while not replies or replies[-1] != last:
        replies.append(client.command(b"PUB ord 0\n" + sized(b"x")))
        sleep(0.001)  # sleep: publishes again and again
    return [reply for reply, _ in itertools.groupby(replies)]


def test_what_producers_see_of_a_move(cluster: RedesignedCluster) -> None:
    old, new = (WireClient(node.tcp_address) for node in (cluster.leader_of("ord", 0), replica_of(cluster, "ord", 0)))
    assert old.command(b"PUB ord 0\n" + sized(b"x")) == b"OK"
    assert new.command(b"PUB ord 0\n" + sized(b"x")) == NOT_LEADER
    to_old, to_new = spawn(replies_until, old, NOT_LEADER), spawn(replies_until, new, b"OK")
    cluster.move_leader("ord", 0)
    # The connections live on: a publish that is refused ends nothing.
    assert to_old.get()[-2:] == [NOT_WRITABLE, NOT_LEADER]
    assert to_new.get()[-2:] == [NOT_WRITABLE, b"OK"]
    assert shown(cluster, "ord")["0"] == cluster.leader_of("ord", 0).tcp_address.port
    old.close()
    new.close()


def test_what_consumers_see_of_a_move(cluster: RedesignedCluster) -> None:
    publish(cluster, "ord", b"a", b"b")
    consumer = Consumer(cluster.leader_of("ord", 0), "SUB_ORDERED ord ch 0")
    first = consumer.receive()
    consumer.finish(first)
    second = consumer.receive()
    cluster.move_leader("ord", 0)
    assert consumer.reader.read() == b""  # the end, without an error
    consumer.close()
    consumer = Consumer(cluster.leader_of("ord", 0), "SUB_ORDERED ord ch 0")
    again = consumer.receive()
    assert (again.id, again.attempts, detail(again)) == (second.id, 1, detail(second))
    consumer.close()


def test_lookups_during_a_move(cluster: RedesignedCluster) -> None:
    old = cluster.leader_of("ord", 0)
    move = spawn(cluster.move_leader, "ord", 0)
    until(lambda: cluster.leader_of("ord", 0) is not old)
    # For writing it is left out; whoever reads is sent to the new leader already.
    assert set(shown(cluster, "ord")) == {"1", "2"}
    assert shown(cluster, "ord", "r")["0"] == cluster.leader_of("ord", 0).tcp_address.port
    move.get()
    assert shown(cluster, "ord")["0"] != old.tcp_address.port


@pytest.mark.parametrize("step", [0, 0.005, 0.015, 0.025])
@pytest.mark.parametrize("dies", ["old", "new"])
def test_a_death_during_a_move(cluster: RedesignedCluster, step: float, dies: str) -> None:
    old, new = cluster.leader_of("ord", 0), replica_of(cluster, "ord", 0)
    move = spawn(_move_or_fail, cluster)
    sleep(step)  # sleep: the death comes at each stage of the move
    cluster.kill_node(old if dies == "old" else new)
    move.get()
    port = (new if dies == "old" else old).tcp_address.port
    until(lambda: shown(cluster, "ord").get("0") == port and len(shown(cluster, "ord")) == 3)
    client = WireClient(cluster.leader_of("ord", 0).tcp_address)
    # Refused until the dead one is known to be dead: it is in sync, and does not confirm.
    until(lambda: client.command(b"PUB ord 0\n" + sized(b"x")) == b"OK")
    client.close()


def _move_or_fail(cluster: RedesignedCluster) -> None:
    with suppress(ClusterError):
        cluster.move_leader("ord", 0)


def test_an_ephemeral_channel_goes_with_its_last_client(cluster: RedesignedCluster) -> None:
    channels = cluster.partition("plain", 0).channels
    for _ in range(2):
        consumer = Consumer(cluster.leader_of("plain", 0), "SUB plain e#ephemeral 0")
        assert "e#ephemeral" in channels
        consumer.close()
        until(lambda: "e#ephemeral" not in channels)
    consumer = Consumer(cluster.leader_of("plain", 0), "SUB plain e#ephemeral 0")
    query = "topic=plain&channel=e%23ephemeral"
    assert ask(cluster.leader_of("plain", 0).http_address, "POST", f"/channel/delete?{query}").status == 200
    assert consumer.reader.read() == b""
    consumer.close()


def test_a_partition_moves_to_a_node_that_had_nothing_of_it(cluster: RedesignedCluster) -> None:
    publish(cluster, "ext", b"kept")
    other = next(node for node in cluster.nsqds if node is not cluster.leader_of("ext", 0))
    cluster.move_leader("ext", 0, other)
    consumer = Consumer(other, "SUB ext ch 0", extend_support=True)
    assert consumer.receive().data.endswith(b"kept")
    consumer.close()


def test_a_killed_node_resets_its_connections(cluster: RedesignedCluster) -> None:
    node = cluster.leader_of("ord", 0)
    producer, consumer = WireClient(node.tcp_address), Consumer(node, "SUB_ORDERED ord ch 0")
    cluster.kill_node(node)
    for client in (producer, consumer):
        with pytest.raises(ConnectionResetError):
            client.reader.read()
        client.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(node.tcp_address)


@pytest.mark.parametrize("cluster", [3.0], indirect=True)
def test_a_replica_takes_over(cluster: RedesignedCluster) -> None:
    publish(cluster, "ord", b"a", b"b")
    dead, heir = cluster.leader_of("ord", 0), replica_of(cluster, "ord", 0)
    cluster.kill_node(dead)
    assert "0" not in shown(cluster, "ord")
    assert "0" not in shown(cluster, "ord", "r")
    until(lambda: shown(cluster, "ord").get("0") == heir.tcp_address.port)
    consumer = Consumer(heir, "SUB_ORDERED ord ch 0")
    assert detail(consumer.receive()) == (0, 31, b"a")
    publish(cluster, "ord", b"c")
    cluster.restart_node(dead)
    # It is a replica now, on the ports it had.
    client = WireClient(dead.tcp_address)
    assert client.command(b"PUB ord 0\n" + sized(b"x")) == NOT_LEADER
    cluster.move_leader("ord", 0, dead)
    publish(cluster, "ord", b"d")
    client.close()
    consumer.close()


def test_lookupds_share_what_they_know(cluster: RedesignedCluster) -> None:
    first, second = cluster.lookupds
    listed = ask(second.http_address, "GET", "/listlookup", **ACCEPT).json
    assert [node["HttpPort"] for node in listed["lookupdnodes"]] == [
        str(item.http_address.port) for item in (first, second)
    ]
    assert listed["lookupdleader"] == listed["lookupdnodes"][0]
    assert set(listed["lookupdleader"]) == {"ID", "NodeIP", "TcpPort", "HttpPort", "RpcPort", "Epoch"}
    create = "/topic/create?topic=new&partition_num=1&replicator=1"
    assert ask(second.http_address, "POST", create).json == {"message": "E_FAILED_ON_NOT_LEADER"}
    first.stop()
    assert ask(second.http_address, "POST", create).status == 200
    first.start()
    assert "0" in ask(first.http_address, "GET", "/lookup?topic=new", **ACCEPT).json["partitions"]
