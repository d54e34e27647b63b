"""Administration by name: on every partition, with a result for each, on embedded and real servers."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner
from support.http import ask
from support.redesigned import Consumer, publish, sized
from support.waiting import until
from support.wire import WireClient

from nsq_fast import ClusterAdmin, errors
from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.cli import main


class Place(NamedTuple):
    """An nsqd that leads partition 0 of ``t``, which has the channel ``c``, and an nsqlookupd that knows it."""

    nsqd: Any
    lookupd: str

    @property
    def admin(self) -> ClusterAdmin:
        return ClusterAdmin(self.lookupd)


@pytest.fixture(params=["embedded", "real"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "real":
        server = request.getfixturevalue("standalone_nsqd")
        server.create_topic("t")
        yield Place(server, str(server.lookupd_address))
        return
    with RedesignedCluster(nodes=1, lookupds=1) as cluster:
        cluster.create_topic("t", channels=["c"])
        yield Place(cluster.nsqds[0], str(cluster.lookupds[0].http_address))


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    """Three nodes; ``t`` has two partitions with two replicas, and the channel ``c``."""
    with RedesignedCluster(nodes=3, lookupds=2, readiness=0.02, move_step=0.0) as cluster:
        cluster.create_topic("t", 2, 2, ordered=True, channels=["c"])
        cluster.wait_stable()
        yield cluster


def admin_of(cluster: RedesignedCluster) -> ClusterAdmin:
    # The second one does not lead: the admin finds the one that does.
    return ClusterAdmin([str(cluster.lookupds[1].http_address)])


def put(place: Place, *bodies: bytes) -> None:
    client = WireClient(place.nsqd.tcp_address)
    for body in bodies:
        assert client.command(b"PUB t 0\n" + sized(body)) == b"OK"
    client.close()


def take(consumer: Consumer) -> bytes:
    frame = consumer.receive()
    consumer.finish(frame)
    return frame.body


def test_an_offset_is_set_forward_and_back(cluster: RedesignedCluster) -> None:
    admin, node = admin_of(cluster), cluster.leader_of("t", 0)
    publish(cluster, "t", b"a", b"b", b"c")
    consumer = Consumer(node, "SUB_ORDERED t c 0")
    assert [take(consumer)[-1:] for _ in range(3)] == [b"a", b"b", b"c"]
    [result] = admin.set_offset("t", "c", "offset:31", partition=0)
    assert (result.partition, result.is_done, result.error) == (0, True, "")
    assert [take(consumer)[-1:] for _ in range(2)] == [b"b", b"c"]
    assert admin.pause("t", "c", partition=0)[0].is_done
    publish(cluster, "t", b"d")
    assert [(result.partition, result.is_done) for result in admin.set_offset("t", "c", {0: "end"})] == [(0, True)]
    assert admin.unpause("t", "c", partition=0)[0].is_done
    publish(cluster, "t", b"e")
    assert take(consumer)[-1:] == b"e"
    consumer.close()


def test_a_paused_channel_delivers_nothing_until_it_is_unpaused(place: Place) -> None:
    assert place.admin.pause("t", "c")[0].is_done
    put(place, b"a")
    consumer = Consumer(place.nsqd, "SUB t c 0")
    assert consumer.is_quiet()
    assert place.admin.unpause("t", "c", partition=0)[0].is_done
    assert take(consumer) == b"a"
    consumer.close()


def test_a_skipped_channel_loses_what_comes(place: Place) -> None:
    consumer = Consumer(place.nsqd, "SUB t c 0")
    assert place.admin.skip("t", "c")[0].is_done
    put(place, b"lost")
    assert consumer.is_quiet()
    assert place.admin.unskip("t", "c")[0].is_done
    put(place, b"kept")
    assert take(consumer) == b"kept"
    consumer.close()


def test_order_and_rate_are_taken(place: Place) -> None:
    assert place.admin.set_order("t", "c", True)[0].is_done
    consumer = Consumer(place.nsqd, "SUB t c 0", rdy=2)
    put(place, b"a", b"b")
    first = consumer.receive()
    assert consumer.is_quiet()  # one at a time
    consumer.finish(first)
    assert take(consumer) == b"b"
    consumer.close()
    assert place.admin.limit_rate("t", "c", 1024)[0].is_done


def test_what_a_server_refuses_stands_in_the_result(place: Place) -> None:
    [result] = place.admin.pause("t", "unknown")
    assert not result.is_done
    assert "CHANNEL_NOT_FOUND" in result.error


def test_what_cannot_be_is_said_before_anything_is_sent(place: Place) -> None:
    for wrong in (None, "somewhere", "offset:-1", {}, datetime):
        with pytest.raises(errors.ConfigError, match="position"):
            place.admin.set_offset("t", "c", wrong)
    with pytest.raises(errors.ConfigError, match="kilobytes=0"):
        place.admin.limit_rate("t", "c", 0)
    with pytest.raises(errors.NsqError, match="leads partition 7"):
        place.admin.pause("t", "c", partition=7)
    with pytest.raises(errors.ConfigError, match="at least one nsqlookupd"):
        ClusterAdmin([])


def test_each_partition_has_a_result(cluster: RedesignedCluster) -> None:
    for number in range(2):
        publish(cluster, "t", b"x", partition=number)
    cluster.partition("t", 1).delete_channel("c")
    done, failed = admin_of(cluster).set_offset("t", "c", "end")
    assert (done.partition, done.is_done, failed.partition, failed.is_done) == (0, True, 1, False)
    assert cluster.partition("t", 0).channel("c").depth == 0


def test_the_leading_lookupd_moves_and_expands(cluster: RedesignedCluster) -> None:
    admin = admin_of(cluster)
    partition = cluster.partition("t", 0)
    former = admin.leader_id("t", 0)
    assert former == partition.leader
    follower = next(node for node in partition.replicas if node != former)
    spare = next(node.id for node in cluster.nsqds if node.id not in partition.replicas)
    admin.move_leader("t", 0, follower)
    assert admin.leader_id("t", 0) == follower
    until(lambda: admin.stats().is_stable)
    admin.move_replica("t", 0, former, spare)
    assert set(partition.in_sync) == {follower, spare}
    until(lambda: admin.stats().is_stable)
    admin.expand("t", 3)
    assert len(cluster.state.topics["t"]) == 3
    until(lambda: admin.stats().is_stable)
    assert all(0 <= node.leader_load <= node.node_load for node in admin.stats().nodes)


def test_moves_are_refused_while_the_cluster_is_not_stable() -> None:
    with RedesignedCluster(nodes=2, lookupds=1, readiness=30.0) as cluster:
        admin = ClusterAdmin(str(cluster.lookupds[0].http_address))
        assert not admin.stats().is_stable
        lookupd = cluster.lookupds[0].http_address
        assert ask(lookupd, "POST", "/topic/create?topic=t&partition_num=1&replicator=1").status == 200
        with pytest.raises(errors.HttpError, match="unstable"):
            admin.move_replica("t", 0, "a", "b")
        with pytest.raises(errors.HttpError):
            admin.expand("t", 2)


def test_channels_of_the_original_are_paused_and_have_no_leading_lookupd() -> None:
    with Broker(nsqds=2) as broker:
        for nsqd in broker.nsqds:
            client = WireClient(nsqd.tcp_address)
            client.publish("t", b"x")
            assert client.command(b"SUB t c\n") == b"OK"
            client.close()
        assert all(nsqd.wait_registered(20) for nsqd in broker.nsqds)
        admin = ClusterAdmin(str(broker.lookupd.http_address))
        assert [result.partition for result in admin.pause("t", "c") if result.is_done] == [None, None]
        with pytest.raises(errors.NsqError):
            admin.stats()


def test_the_command_line(cluster: RedesignedCluster) -> None:
    server = ["--lookupd-http-address", str(cluster.lookupds[0].http_address)]

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(main, ["admin", *arguments, *server])

    for words in (["pause"], ["unpause"], ["skip"], ["unskip"], ["set-offset", "end"], ["rate-limit", "64"]):
        done = run(words[0], "t", "c", *words[1:])
        assert (done.exit_code, done.output.count(": done")) == (0, 2), done.output
    assert run("set-order", "t", "c", "off", "--partition", "1").output.endswith("partition 1: done\n")
    assert run("pause", "t", "unknown").exit_code == 1
    assert run("set-offset", "t", "c", "nowhere").exit_code == 2
    assert run("cluster").output.startswith("stable\n")
    leader = cluster.partition("t", 0).leader
    other = next(node for node in cluster.partition("t", 0).replicas if node != leader)
    assert run("move-leader", "t", "0", other).exit_code == 0
    assert cluster.partition("t", 0).leader == other
    cluster.wait_stable()
    assert run("expand", "t", "3").exit_code == 0
    cluster.wait_stable()
    refused = run("move-replica", "t", "0", "nobody", "else")
    assert (refused.exit_code, "has no replica for the topic" in refused.output) == (1, True)
