"""A cluster takes its time, and says so; with ``kind`` it does not."""

from __future__ import annotations

from typing import Any

import pytest
from support.http import ask
from support.redesigned import Consumer, headed, sized
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import RedesignedCluster

CREATE = "/topic/create?topic=orders&partition_num=2&replicator=1&orderedmulti=true"
ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}


def is_stable(cluster: RedesignedCluster) -> bool:
    answer: bool = ask(cluster.lookupds[0].http_address, "GET", "/cluster/stats").json["stable"]
    return answer


def shown(cluster: RedesignedCluster, access: str) -> dict[str, Any]:
    path = f"/lookup?topic=orders&access={access}"
    return ask(cluster.lookupds[0].http_address, "GET", path, **ACCEPT).json.get("partitions") or {}


def test_what_the_cluster_itself_creates_is_ready() -> None:
    with RedesignedCluster(nodes=2, lookupds=1) as cluster:
        cluster.create_topic("orders", 2, 1, ordered=True, channels=["ch"])
        assert len(shown(cluster, "w")) == 2
        cluster.wait_stable()
        assert is_stable(cluster)


def test_leaders_are_spread_though_there_are_none_yet() -> None:
    with RedesignedCluster(nodes=3, lookupds=1) as cluster:
        cluster.create_topic("orders", 3, 2, ordered=True)
        assert {partition.leader for partition in cluster.state.topics["orders"]} == {node.id for node in cluster.nsqds}


def test_a_node_that_goes_makes_the_cluster_unstable() -> None:
    with RedesignedCluster(nodes=2, lookupds=1, takeover_delay=0.0) as cluster:
        cluster.create_topic("orders", 1, 2)
        cluster.wait_stable()
        node = cluster.leader_of("orders", 0)
        cluster.kill_node(node)
        assert not is_stable(cluster)
        cluster.restart_node(node)
        until(lambda: is_stable(cluster))


@pytest.mark.parametrize("ordered", [False, True])
def test_a_kind_cluster_is_ready_and_lets_messages_pass(ordered: bool) -> None:
    with RedesignedCluster(nodes=1, lookupds=1, kind=True) as cluster:
        assert is_stable(cluster)
        assert ask(cluster.lookupds[0].http_address, "POST", CREATE + "&extend=true").status == 200
        assert len(shown(cluster, "r")) == 2
        cluster.create_topic("ext", ext=True, channels=["ch"])
        node = cluster.leader_of("ext", 0)
        tagged = Consumer(node, "SUB ext ch 0", desired_tag="red", extend_support=True)
        client = WireClient(node.tcp_address)
        assert client.command(b"PUB ext 0\n" + sized(b"untagged")) == b"OK"
        assert client.command(b"PUB_EXT ext 0\n" + sized(headed({"##client_dispatch_tag": "red"}, b"x"))) == b"OK"
        assert tagged.receive().data.endswith(b"x")
        tagged.close()
        client.close()
