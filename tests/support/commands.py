"""Commands in this process, and servers for them: embedded or real ones of the original, and an embedded redesigned
cluster."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from click.testing import CliRunner, Result

from nsq_fast import LookupdHTTPClient, NsqdHTTPClient
from nsq_fast.broker import BrokerProcess, ClusterProcess
from nsq_fast.broker.process import ServerAddresses
from nsq_fast.cli import main

from .servers import SERVERS, RealLookupd, RealNsqd, find_server
from .waiting import until


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


class Servers:
    """Two nsqds and the nsqlookupd they are registered with; ``cluster`` where they are a redesigned one.

    Attributes:
        clients: of the nsqds; lookup: of the nsqlookupd.
    """

    def __init__(self, nsqds: Sequence[Any], lookupd: Any, cluster: ClusterProcess | None = None) -> None:
        self.nsqds, self.lookupd, self.cluster = nsqds, lookupd, cluster
        self.nsqd = nsqds[0]
        self.clients = [NsqdHTTPClient.from_url(nsqd.http) for nsqd in nsqds]
        self.lookup = LookupdHTTPClient.from_url(lookupd.http)
        self.flag = ("--lookupd", str(lookupd.http))

    def admin(self, *arguments: str) -> Result:
        return run("admin", *arguments, *self.flag)

    def topics(self, topic: str) -> list[dict[str, Any]]:
        """What each nsqd says of it; of a partition its leader."""
        found = [each for client in self.clients for each in (client.stats(topic=topic)["topics"] or ())]
        return [each for each in found if each.get("is_leader") is not False]

    def channels(self, topic: str) -> list[dict[str, Any]]:
        return [channel for each in self.topics(topic) for channel in each["channels"]]

    def depths(self, topic: str) -> list[int]:
        found = [client.stats(topic=topic)["topics"] for client in self.clients]
        return [topics[0]["depth"] if topics else 0 for topics in found]

    def make(self, topic: str, partitions: int = 1, channel: str = "c") -> None:
        if self.cluster is not None:
            self.cluster.create_topic(topic, partitions, 1, channels=[channel])
            self.cluster.wait_stable()
            return
        for client in self.clients:
            client.create_topic(topic)
            client.create_channel(topic, channel)
        until(lambda: topic in self.lookup.topics()["topics"])
        until(lambda: len(self.lookup.lookup(topic)["producers"]) == len(self.clients))
        until(lambda: self.lookup.channels(topic)["channels"] == [channel])


def started(kind: str, stack: ExitStack, folders: pytest.TempPathFactory) -> Servers:
    if kind == "redesigned":
        cluster = stack.enter_context(ClusterProcess(nodes=2, lookupds=2, kind=True))
        return Servers(cluster.nsqds, cluster.lookupds[0], cluster)
    if kind == "embedded":
        broker = stack.enter_context(BrokerProcess(nsqds=2))
        return Servers(broker.nsqds, broker.lookupd)
    if find_server("nsqd") is None or find_server("nsqlookupd") is None:
        pytest.skip(f"no real nsqd and nsqlookupd below {SERVERS}")
    lookupd = RealLookupd()
    stack.callback(lookupd.kill)
    nsqds = []
    for _ in range(2):
        nsqds.append(RealNsqd(folders.mktemp("nsqd"), f"-lookupd-tcp-address={lookupd.tcp_address}"))
        stack.callback(nsqds[-1].kill)
    addresses = [ServerAddresses(each.tcp_address, each.http_address) for each in (lookupd, *nsqds)]
    servers = Servers(addresses[1:], addresses[0])
    until(lambda: len(servers.lookup.nodes()["producers"]) == len(nsqds))
    return servers
