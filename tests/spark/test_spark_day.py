"""A day in a minute: publishers run while everything around queries restarts in random order; then ids are counted.

One query of each reader, side by side in one driver, so that it is started once for both. NSQ_FAST_DAY_SECONDS=300
makes the day as long as five minutes, NSQ_FAST_DAY_SEED another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.servers import RealLookupd, RealNsqd, find_server
from support.spark_day import SECONDS, Day, Query
from support.spark_driver import Driver
from support.spark_ledger import Delivered
from support.spark_publisher import Publisher
from support.spark_settings import LOCAL_CLUSTER

from nsq_fast.broker import BrokerProcess, ClusterProcess

RATE = 400
MSG_TIMEOUT = 5
OTHER_TIME = 900  # before and after the day: JVMs, and what was in flight when something died
Cleanup = ExitStack


@pytest.fixture
def cleanup() -> Iterator[Cleanup]:
    with ExitStack() as stack:
        yield stack


class EmbeddedOriginal:
    """Two nsqds and an nsqlookupd, each a process of its own."""

    def __init__(self, folder: Path, cleanup: Cleanup) -> None:
        self.lookupd = cleanup.enter_context(BrokerProcess(nsqds=0))
        registered = (str(self.lookupd.lookupd.tcp),)
        self.nsqds = [
            cleanup.enter_context(
                BrokerProcess(
                    lookupd=False,
                    data_path=folder / f"nsqd{number}",
                    lookupd_tcp_addresses=registered,
                    msg_timeout=MSG_TIMEOUT,
                    node_id=number,
                )
            )
            for number in range(2)
        ]
        self.lookupd_address = str(self.lookupd.lookupd.http)


class RealOriginal:
    """The same of real servers."""

    def __init__(self, folder: Path, cleanup: Cleanup) -> None:
        self.lookupd = RealLookupd()
        cleanup.callback(self.lookupd.kill)
        self.nsqds = []
        for number in range(2):
            path = folder / f"nsqd{number}"
            path.mkdir()
            flags = (f"-lookupd-tcp-address={self.lookupd.tcp_address}", f"-msg-timeout={MSG_TIMEOUT}s")
            self.nsqds.append(RealNsqd(path, *flags, f"-node-id={number}"))
            cleanup.callback(self.nsqds[-1].kill)
        self.lookupd_address = str(self.lookupd.http_address)


class Redesigned:
    """A cluster of three, each partition on two of them."""

    def __init__(self, cleanup: Cleanup) -> None:
        self.cluster = cleanup.enter_context(ClusterProcess(nodes=3, msg_timeout=MSG_TIMEOUT, kind=True))
        self.cluster.create_topic("day", partitions=2, replicas=2, multi_part=True, channels=["spark"])
        self.lookupd_address = ",".join(str(each.http) for each in self.cluster.lookupds)

    def restart_node(self, chance: random.Random) -> None:
        node = chance.randrange(3)
        self.cluster.kill_node(node)
        self.cluster.restart_node(node)

    def move_leader(self, chance: random.Random) -> None:
        self.cluster.move_leader("day", chance.randrange(2))

    def fail_lookupd(self, _: random.Random) -> None:
        self.cluster.set_faults("lookupd0.http", refuse_connections=True)
        self.cluster.set_faults("lookupd0.http", refuse_connections=False)


def make_query(folder: Path, cleanup: Cleanup, lookupd: str, **options: Any) -> Query:
    """A query of the topic ``day``, for which two publish from now on."""
    folder.mkdir()
    publishers = [Publisher(folder, f"p{n}", "day", RATE, lookupd_http_addresses=lookupd) for n in range(2)]
    for publisher in publishers:
        cleanup.callback(publisher.kill)
    options = {"topic": "day", "channel": "spark", "lookupd_http_addresses": lookupd, **options}
    return Query(folder, publishers, maxOffsetsPerTrigger=20000, **options)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + OTHER_TIME)
def test_a_day_loses_and_doubles_nothing_and_keeps_order(
    spark_driver: Callable[..., Driver], tmp_path: Path, cleanup: Cleanup
) -> None:
    """On original servers and on a redesigned cluster."""
    original: Any = (RealOriginal if find_server("nsqd") else EmbeddedOriginal)(tmp_path, cleanup)
    redesigned = Redesigned(cleanup)

    def restart_nsqd(chance: random.Random) -> None:
        nsqd = chance.choice(original.nsqds)
        nsqd.stop()  # SIGTERM: an original nsqd that is killed forgets what it held in memory
        nsqd.start()

    happenings = {
        "original nsqd restarted": restart_nsqd,
        "original lookupd restarted": lambda _: original.lookupd.restart(),
        "redesigned nsqd killed and restarted": redesigned.restart_node,
        "leader moved": redesigned.move_leader,
        "redesigned lookupd gone for a moment": redesigned.fail_lookupd,
    }
    journalled = make_query(
        tmp_path / "journalled", cleanup, original.lookupd_address, journal=tmp_path / "journalled" / "journal"
    )
    replayable = make_query(tmp_path / "replayable", cleanup, redesigned.lookupd_address, startingOffsets="earliest")
    day = Day(spark_driver, LOCAL_CLUSTER, [journalled, replayable], happenings)
    day.run(SECONDS)
    print(f"\n{day}")  # noqa: T201  # figures of a long day are wanted
    for query in (journalled, replayable):
        query.account().check()
        query.delivered.check_replays()
    check_order(replayable.delivered)


def check_order(delivered: Delivered) -> None:
    """Each partition was read without a gap: every message begins where the one before ends."""
    expected: dict[int, int] = {}
    rows = zip(*(delivered.column(name) for name in ("partition", "offset", "size")), strict=True)
    for partition, offset, size in rows:
        assert offset == expected.get(partition, offset), (partition, offset, expected[partition])
        expected[partition] = offset + size
    assert len(expected) == 2
