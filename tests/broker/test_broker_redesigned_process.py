"""The embedded cluster in a process of its own, through nsq_fast's own lookups."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.http import ask
from support.ports import free_address
from support.redesigned import sized
from support.waiting import until
from support.wire import WireClient

from nsq_fast.broker import ClusterProcess, RedesignedCluster
from nsq_fast.errors import ConfigError, NsqError

_GROUPS = ("nsqds", "lookupds")
ACCEPT = {"Accept": "application/vnd.nsq; version=1.0"}


@pytest.fixture(scope="module")
def process() -> Iterator[ClusterProcess]:
    """Three nodes, two nsqlookupds, a topic."""
    with ClusterProcess(nodes=3, lookupds=2, takeover_delay=0.05) as process:
        process.create_topic("t", 3, 2, ordered=True, channels=["ch"])
        yield process


def leaders(process: ClusterProcess) -> dict[str, int]:
    """The number of the node that leads each partition."""
    reply = ask(process.lookupds[1].http, "GET", "/lookup?topic=t&access=w", **ACCEPT).json
    ports = [nsqd.tcp.port for nsqd in process.nsqds]
    return {number: ports.index(node["tcp_port"]) for number, node in reply["partitions"].items()}


def test_leaders_move_and_nodes_die(process: ClusterProcess) -> None:
    before = leaders(process)
    assert sorted(before.values()) == [0, 1, 2]
    process.move_leader("t", 0)
    moved = leaders(process)
    assert moved["0"] != before["0"]
    process.kill_node(moved["0"])
    until(lambda: len(now := leaders(process)) == 3 and now["0"] != moved["0"])
    process.restart_node(moved["0"])
    client = WireClient(process.nsqds[leaders(process)["1"]].tcp)
    until(lambda: client.command(b"PUB t 1\n" + sized(b"x")) == b"OK")  # its replica may have been on that node
    client.close()


def test_faults_of_nodes(process: ClusterProcess) -> None:
    process.set_faults("lookupd1.http", lie="<html>")
    assert ask(process.lookupds[1].http, "GET", "/topics").body == b"<html>"
    process.set_faults("lookupd1.http", lie=None)


def test_what_cannot_be(process: ClusterProcess) -> None:
    with pytest.raises(NsqError, match="there is no node 7"):
        process.kill_node(7)
    with pytest.raises(NsqError, match="No node is available"):
        process.create_topic("large", 3, 3)
    with pytest.raises(ConfigError, match="did you mean 'takeover_delay'"):
        RedesignedCluster(takeover_delays=1)
    with pytest.raises(ConfigError, match="nodes=0"):
        RedesignedCluster(nodes=0)


def test_a_restart_takes_the_same_addresses() -> None:
    servers = {name: [{"tcp": free_address(), "http": free_address()} for _ in range(2)] for name in _GROUPS}
    with ClusterProcess(nodes=2, lookupds=2, addresses=servers) as process:
        nsqds, lookupds = process.nsqds, process.lookupds
        process.restart()
        assert (process.nsqds, process.lookupds) == (nsqds, lookupds)
