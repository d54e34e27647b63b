"""A cluster with ``timings="real"`` takes its time as three real nodes do: here with a hundredth of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from gevent import spawn
from support.http import ask
from support.redesigned import publish, sized
from support.waiting import WAIT, holds, until
from support.wire import WireClient

from nsq_fast.broker import RedesignedCluster
from nsq_fast.broker.options import TIMINGS
from nsq_fast.cli.broker import command
from nsq_fast.errors import ConfigError

ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}
SCALED = {name: seconds / 100 for name, seconds in TIMINGS["real"].items()}


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    """Three nodes, and the topic ``t`` with one partition of three replicas, which takes publishes."""
    with RedesignedCluster(3, 1, timings="real", **SCALED) as cluster:
        cluster.create_topic("t", 1, 3, channels=["ch"])
        yield cluster


def shown(cluster: RedesignedCluster, access: str, topic: str = "t") -> Any:
    """What lookup shows to readers, or to writers."""
    path = f"/lookup?topic={topic}&access={access}"
    return ask(cluster.lookupds[0].http_address, "GET", path, **ACCEPT).json.get("partitions") or {}


def test_a_new_topic_is_writable_after_half_of_the_longest_time(cluster: RedesignedCluster) -> None:
    path = "/topic/create?topic=new&partition_num=1&replicator=1"
    began = time.monotonic()
    assert ask(cluster.lookupds[0].http_address, "POST", path).status == 200
    cluster.partition("new", 0).channel("ch")
    client = WireClient(cluster.node(cluster.partition("new", 0).replicas[0]).tcp_address)
    refusal = client.command(b"PUB new 0\n" + sized(b"x"))
    assert refusal == b"E_FAILED_ON_NOT_LEADER " or time.monotonic() - began >= 0.55
    until(lambda: shown(cluster, "w", "new"))
    assert time.monotonic() - began >= 0.55
    assert client.command(b"PUB new 0\n" + sized(b"x")) == b"OK"
    client.close()


def test_lookup_is_empty_then_for_readers_only_after_the_death_of_a_leader(cluster: RedesignedCluster) -> None:
    publish(cluster, "t", b"before")
    leader = cluster.leader_of("t", 0)
    began = time.monotonic()
    cluster.kill_node(leader)
    assert (shown(cluster, "r"), shown(cluster, "w")) == ({}, {}) or time.monotonic() - began >= 0.22
    until(lambda: shown(cluster, "r"))
    assert time.monotonic() - began >= 0.22
    client = WireClient(cluster.leader_of("t", 0).tcp_address)
    answer, is_shown = client.command(b"PUB t 0\n" + sized(b"x")), bool(shown(cluster, "w"))
    assert (answer, is_shown) == (b"E_FAILED_ON_NOT_WRITABLE ", False) or time.monotonic() - began >= 0.96
    until(lambda: shown(cluster, "w"))
    assert time.monotonic() - began >= 0.96
    assert client.command(b"PUB t 0\n" + sized(b"after")) == b"OK"
    client.close()
    assert cluster.leader_of("t", 0) is not leader


def test_the_first_publish_after_the_death_of_a_follower_hangs_and_fails(cluster: RedesignedCluster) -> None:
    leader = cluster.leader_of("t", 0)
    cluster.kill_node(next(node for node in cluster.nsqds if node is not leader))
    clients = [WireClient(leader.tcp_address) for _ in range(2)]
    began = time.monotonic()
    answers = [spawn(client.command, b"PUB t 0\n" + sized(b"x")) for client in clients]
    assert [each.get(timeout=WAIT) for each in answers] == [b"E_FAILED_ON_NOT_LEADER "] * 2
    assert time.monotonic() - began >= 0.12
    assert clients[0].command(b"PUB t 0\n" + sized(b"x")) == b"OK"  # two of three are in sync
    assert [record.body for record in cluster.partition("t", 0).log.read(0, 9)] == [b"x"]
    for client in clients:
        client.close()


def test_a_publish_goes_on_when_the_follower_is_back_in_time() -> None:
    with RedesignedCluster(
        2, 1, timings="real", **{**SCALED, "publish_patience": WAIT, "takeover_delay": WAIT}
    ) as cluster:
        cluster.create_topic("t", 1, 2, channels=["ch"])
        leader = cluster.leader_of("t", 0)
        follower = next(node for node in cluster.nsqds if node is not leader)
        cluster.isolate_node(follower)
        client = WireClient(leader.tcp_address)
        answer = spawn(client.command, b"PUB t 0\n" + sized(b"x"))
        holds(lambda: not answer.ready())
        cluster.heal_node(follower)
        assert answer.get(timeout=WAIT) == b"OK"
        client.close()


def test_a_single_time_is_changed_by_its_option() -> None:
    with RedesignedCluster(1, 1, timings="real", readiness=0.0) as cluster:
        assert (cluster.options.readiness, cluster.options.takeover_delay) == (0.0, 22.0)
    assert RedesignedCluster(1, 1).options.takeover_delay == 0.5
    with pytest.raises(ConfigError, match="timings='slow': must be one of 'fast', 'real'"):
        RedesignedCluster(1, 1, timings="slow")


def test_the_command_line_takes_them() -> None:
    found = CliRunner().invoke(command, ["--redesigned", "--timings", "slow"])
    assert found.exit_code == 2
    assert "must be one of 'fast', 'real'" in found.output


@pytest.mark.nsq_cluster(nodes=1, timings="real", readiness=0.0)
def test_the_fixture_takes_them(nsq_cluster: Any) -> None:
    nsq_cluster.create_topic("t")
    assert nsq_cluster.leader_of("t", 0).is_running
