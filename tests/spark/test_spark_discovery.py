"""The servers of a topic, found through lookup services and nsqds of both families; which reader that gives."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from support.cluster import Standalone

import nsq_fast
from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.errors import ConfigError, HttpError, LookupFailed
from nsq_fast.spark.discovery import TopicServers, discover, in_cluster, nsqd_client
from nsq_fast.spark.options import SourceOptions
from nsq_fast.spark.source import choose


def options_of(*, lookupds: Any = (), nsqds: Any = (), **others: str) -> SourceOptions:
    """Options that name servers by their parts of a broker."""
    servers = {"lookupd_http_addresses": ",".join(str(each.http_address) for each in lookupds)} if lookupds else {}
    if nsqds:
        servers["nsqd_tcp_addresses"] = ",".join(str(each.tcp_address) for each in nsqds)
        servers["nsqd_http_addresses"] = ",".join(str(each.http_address) for each in nsqds)
    return SourceOptions.parse({"topic": "t", "channel": "c", **servers, **others})


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(nsqds=2) as broker:
        yield broker


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(nodes=3, lookupds=2, kind=True) as cluster:
        cluster.create_topic("t", partitions=3, replicas=1, channels=["c"], ext=True)
        yield cluster


@pytest.mark.parametrize("way", ["lookup", "direct"])
def test_an_original_topic(broker: Broker, way: str) -> None:
    for nsqd in broker.nsqds:
        with nsq_fast.NsqdHTTPClient(*nsqd.http_address) as client:
            client.create_topic("t")
    options = options_of(lookupds=[broker.lookupd]) if way == "lookup" else options_of(nsqds=broker.nsqds)
    servers = discover(options)
    assert {nsqd.tcp for nsqd in servers.nsqds} == {nsqd.tcp_address for nsqd in broker.nsqds}
    assert {nsqd.http.address for nsqd in servers.nsqds} == {nsqd.http_address for nsqd in broker.nsqds}
    assert (servers.leaders, servers.meta, servers.is_redesigned) == ({}, None, False)
    assert (servers.has_ext, servers.is_ordered) == (False, False)
    with nsqd_client(options, servers.nsqds[0]) as client:
        assert client.ping() == b"OK"


@pytest.mark.parametrize("way", ["lookup", "direct"])
def test_a_redesigned_topic(cluster: RedesignedCluster, way: str) -> None:
    options = options_of(lookupds=cluster.lookupds) if way == "lookup" else options_of(nsqds=cluster.nsqds)
    servers = discover(options)
    leaders = {number: cluster.leader_of("t", number).tcp_address for number in range(3)}
    assert {number: nsqd.tcp for number, nsqd in servers.leaders.items()} == leaders
    assert servers.is_redesigned
    assert (servers.has_ext, servers.is_ordered) == (True, False)
    assert all(nsqd.is_redesigned for nsqd in servers.nsqds)


def test_a_leader_that_has_moved_is_found_anew(cluster: RedesignedCluster) -> None:
    cluster.create_topic("u", partitions=1, replicas=2)
    options = SourceOptions.parse(
        {"topic": "u", "channel": "c", "lookupd_http_addresses": str(cluster.lookupds[0].http_address)}
    )
    before = discover(options).leaders[0]
    cluster.move_leader("u", 0)
    after = discover(options).leaders[0]
    assert after.tcp == cluster.leader_of("u", 0).tcp_address != before.tcp


def test_an_unknown_topic_has_no_servers(broker: Broker, cluster: RedesignedCluster) -> None:
    assert discover(options_of(lookupds=[broker.lookupd])) == TopicServers((), {}, None, False)
    unknown = options_of(lookupds=cluster.lookupds, topic="unknown")
    servers = discover(unknown)
    assert (servers.nsqds, servers.is_redesigned) == ((), True)
    with pytest.raises(LookupFailed, match="topic 'unknown' is not known"):
        choose(unknown, is_stream=True)


def test_a_lookup_service_that_is_away_is_asked_again(broker: Broker) -> None:
    with nsq_fast.NsqdHTTPClient(*broker.nsqds[0].http_address) as client:
        client.create_topic("t")
    options = options_of(lookupds=[broker.lookupd])
    gevent.sleep(0.05)  # sleep: the lookupd learns of the topic
    broker.lookupd.stop()
    back = gevent.spawn_later(0.6, broker.lookupd.start)
    start = time.monotonic()
    discover(options)
    assert time.monotonic() - start > 0.3
    back.join()


@pytest.mark.parametrize("way", ["lookup", "direct"])
def test_nobody_answers(way: str) -> None:
    names = {"lookup": ("lookupd_http_addresses",), "direct": ("nsqd_tcp_addresses", "nsqd_http_addresses")}[way]
    options = SourceOptions.parse({"topic": "t", "channel": "c", **dict.fromkeys(names, "127.0.0.1:1")})
    start = time.monotonic()
    with pytest.raises((LookupFailed, HttpError), match=r"127\.0\.0\.1:1"):
        discover(options, timeout=0.5)
    assert time.monotonic() - start < 3.0


@pytest.mark.parametrize("family", ["original", "redesigned"])
def test_one_nsqd_that_is_away_hides_no_other(broker: Broker, cluster: RedesignedCluster, family: str) -> None:
    nsqds = broker.nsqds if family == "original" else cluster.nsqds
    options = options_of(nsqds=nsqds)
    away = nsqds[0].tcp_address
    nsqds[0].stop()
    servers = discover(options, timeout=1.0)
    assert [nsqd.tcp for nsqd in servers.nsqds] == [nsqd.tcp_address for nsqd in nsqds]
    assert servers.is_redesigned == (family == "redesigned")
    assert away not in {nsqd.tcp for nsqd in servers.leaders.values()}
    assert len(servers.leaders) == (0 if family == "original" else 2)
    assert in_cluster(options, servers) == (family == "redesigned")


# The choice


def test_which_reader(broker: Broker, cluster: RedesignedCluster) -> None:
    original, redesigned = {"nsqds": broker.nsqds}, {"lookupds": cluster.lookupds}
    with nsq_fast.NsqdHTTPClient(*broker.nsqds[0].http_address) as client:
        client.create_topic("t")
    assert choose(options_of(**redesigned), is_stream=True) == "replayable"
    assert choose(options_of(**redesigned), is_stream=False) == "replayable"
    assert choose(options_of(**redesigned, startingOffsets='{"0": 5}'), is_stream=True) == "replayable"
    assert choose(options_of(**redesigned, journal="/j"), is_stream=True) == "journalled"
    assert choose(options_of(**original, journal="/j"), is_stream=True) == "journalled"
    assert choose(options_of(**original), is_stream=False) == "journalled"
    with pytest.raises(ConfigError, match="journal: is required"):
        choose(options_of(**original), is_stream=True)
    with pytest.raises(ConfigError, match="journal: is required"):
        choose(options_of(**original, consume="true"), is_stream=False)
    with pytest.raises(ConfigError, match="startingOffsets: the journalled reader cannot"):
        choose(options_of(**original, journal="/j", startingOffsets="earliest"), is_stream=True)


def test_a_cluster_is_told_by_lookup_and_by_its_nsqds(broker: Broker, cluster: RedesignedCluster) -> None:
    for options in (options_of(lookupds=cluster.lookupds), options_of(nsqds=cluster.nsqds)):
        assert in_cluster(options, discover(options))
        assert choose(options, is_stream=True) == "replayable"
    options = options_of(nsqds=broker.nsqds)
    assert not in_cluster(options, discover(options))


def test_a_redesigned_nsqd_without_a_cluster_gets_a_journal(standalone_nsqd: Standalone) -> None:
    standalone_nsqd.create_topic("t")
    lookup = SimpleNamespace(http_address=standalone_nsqd.lookupd_address)
    for options in (options_of(lookupds=[lookup]), options_of(nsqds=[standalone_nsqd])):
        servers = discover(options)
        assert servers.is_redesigned
        assert {number: nsqd.tcp for number, nsqd in servers.leaders.items()} == {0: standalone_nsqd.tcp_address}
        assert not in_cluster(options, servers)
        assert choose(options, is_stream=False) == "journalled"


def test_a_reader_that_is_asked_for_needs_no_server() -> None:
    nowhere = {"lookupd_http_addresses": "127.0.0.1:1"}
    options = SourceOptions.parse({"topic": "t", "channel": "c", "reader": "replayable", **nowhere})
    assert choose(options, is_stream=True) == "replayable"
