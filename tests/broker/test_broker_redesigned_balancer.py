"""Nodes that come and leave, partitions that are moved, and what is refused to administrators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from gevent import spawn
from support.http import ask
from support.redesigned import publish
from support.waiting import WAIT, until

from nsq_fast.broker import RedesignedCluster

ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}
OPTIONS = {"readiness": 0.0, "move_step": 0.0, "takeover_delay": 0.02}


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    """Two nodes, two nsqlookupds."""
    with RedesignedCluster(2, 2, **OPTIONS) as cluster:
        yield cluster


def leaders(cluster: RedesignedCluster) -> dict[str, int]:
    return Counter(str(partition.leader) for partition in cluster.state.all_partitions())


def replicas(cluster: RedesignedCluster) -> dict[str, int]:
    return Counter(node for partition in cluster.state.all_partitions() for node in partition.replicas)


def bodies(cluster: RedesignedCluster) -> list[list[bytes]]:
    return [[record.body for record in each.log.read(0, 99)] for each in cluster.state.topics["t"]]


def post(lookupd: Any, path: str) -> tuple[int, Any]:
    answer = ask(lookupd.http_address, "POST", path)
    return answer.status, answer.json["message"] if answer.body else ""


def test_a_node_that_is_removed_is_emptied_first(cluster: RedesignedCluster) -> None:
    cluster.add_node()
    cluster.create_topic("t", 3, 2, multi_part=True, channels=["ch"])
    for number in range(3):
        publish(cluster, "t", b"%d" % number, partition=number)
    before, removed = bodies(cluster), cluster.nsqds[0]
    assert post(cluster.lookupds[1], "/cluster/node/remove?remove_node=" + removed.id) == (400, "Not nsqlookup leader")
    assert post(cluster.lookupds[0], "/cluster/node/remove?remove_node=" + removed.id) == (200, "")
    until(lambda: removed.id not in replicas(cluster))
    assert all(len(partition.in_sync) == 2 for partition in cluster.state.all_partitions())
    assert bodies(cluster) == before
    cluster.create_topic("new", 2, 2, multi_part=True)
    assert removed.id not in replicas(cluster)
    cluster.remove_node(removed)
    assert not removed.is_running
    removed.start()  # as a new one
    cluster.create_topic("newer", 3, 3, multi_part=True)
    assert replicas(cluster)[removed.id] > 0


def test_it_is_said_once_what_a_node_that_is_removed_waits_for(
    cluster: RedesignedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic("t", 2, 2, multi_part=True, channels=["ch"])
    publish(cluster, "t", b"0")
    removed = cluster.nsqds[0]
    removal = spawn(cluster.remove_node, removed)
    until(lambda: "is to leave, and stays for now" in caplog.text)
    assert "no other node can take t-0, t-1" in caplog.text
    assert leaders(cluster) == {cluster.nsqds[1].id: 2}
    cluster.create_topic("u", 1, 1)
    assert removed.id not in cluster.partition("u", 0).replicas
    added = cluster.add_node()
    removal.get(timeout=WAIT)
    assert not removed.is_running
    assert replicas(cluster)[added.id] >= 2
    assert caplog.text.count("is to leave") == 1
    assert bodies(cluster)[0] == [b"0"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/cluster/node/remove?remove_node=x", 200, ""),
        ("/topic/partition/move?topic=t&partition=0&move_from=x&move_to=x", 400,
         "move to and from node can not be the same"),
        ("/topic/partition/move?topic=t&partition=-1", 400, "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("/topic/partition/move?topic=t&partition=255", 400, "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("/topic/partition/move?topic=none&partition=0&move_from=x&move_to=y", 400, "Key not found"),
        ("/topic/partition/move?topic=t&partition=0&move_from={leader}&move_to={other}", 400,
         "can not move leader without moveleader param"),
        ("/topic/partition/move?topic=t&partition=0&move_from=x&move_to={other}", 400,
         "the move source node has no replica for the topic"),
        ("/topic/partition/move?topic=t&partition=0&move_from={other}&move_to={leader}", 400,
         "the move destination has the topic data already"),
        ("/topic/partition/move?topic=t&partition=0&move_from={other}&move_to=x", 400,
         "the move destination is not found in cluster"),
        ("/topic/partition/move?topic=t&partition=0&move_from={other}&move_to={leader}&move_leader=true", 400,
         "move from not the topic leader"),
        ("/topic/partition/move?topic=apart&partition=0&move_from={apart}&move_to={other_apart}&move_leader=true", 400,
         "destination node is excluded for topic"),
        ("/topic/partition/expand?topic=none&partition_num=2", 500, "topic is not created"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_the_words_of_the_real_server(
    cluster: RedesignedCluster, path: str, status: int, message: str
) -> None:
    cluster.create_topic("t", 1, 2)
    cluster.create_topic("apart", 2, 1)
    leader, apart = cluster.leader_of("t", 0).id, cluster.leader_of("apart", 0).id
    other = next(node.id for node in cluster.nsqds if node.id != leader)
    other_apart = cluster.leader_of("apart", 1).id
    cluster.wait_stable()
    path = path.format(leader=leader, other=other, apart=apart, other_apart=other_apart)
    assert post(cluster.lookupds[0], path) == (status, message)
