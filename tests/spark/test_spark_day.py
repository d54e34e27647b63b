"""A day in a minute: publishers run while everything around a query restarts in random order; then ids are counted.

NSQ_FAST_DAY_SECONDS=300 makes each day as long as five minutes, NSQ_FAST_DAY_SEED another one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.servers import RealLookupd, RealNsqd, find_server
from support.spark_day import SECONDS, Day, day_program
from support.spark_driver import Driver
from support.spark_ledger import Delivered
from support.spark_publisher import Publisher
from support.spark_settings import LOCAL_CLUSTER

from nsq_fast.broker import BrokerProcess, ClusterProcess

SHORT = 15.0
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


def publishers(folder: Path, cleanup: Cleanup, topic: str, lookupd: str) -> list[Publisher]:
    """Two, running."""
    made = [Publisher(folder, f"p{n}", topic, RATE, lookupd_http_addresses=lookupd) for n in range(2)]
    for publisher in made:
        cleanup.callback(publisher.kill)
    return made


@pytest.mark.slow
@pytest.mark.timeout(max(SECONDS, SHORT) + OTHER_TIME)
def test_a_day_on_original_servers_loses_and_doubles_nothing(
    spark_driver: Callable[..., Driver], tmp_path: Path, cleanup: Cleanup
) -> None:
    servers: Any = (RealOriginal if find_server("nsqd") else EmbeddedOriginal)(tmp_path, cleanup)

    def restart_nsqd(chance: random.Random) -> None:
        nsqd = chance.choice(servers.nsqds)
        nsqd.stop()  # SIGTERM: an original nsqd that is killed forgets what it held in memory
        nsqd.start()

    source = {
        "topic": "day",
        "channel": "spark",
        "lookupd_http_addresses": servers.lookupd_address,
        "journal": tmp_path / "journal",
        "maxOffsetsPerTrigger": 20000,
    }
    driver = day_program(spark_driver, LOCAL_CLUSTER, tmp_path, **source)
    happenings = {"nsqd restarted": restart_nsqd, "lookupd restarted": lambda _: servers.lookupd.restart()}
    running = publishers(tmp_path, cleanup, "day", servers.lookupd_address)
    day = Day(driver, tmp_path / "out", running, happenings)
    outcome = day.run(SECONDS or SHORT)
    print(f"\n{outcome}\n{day}")  # noqa: T201  # figures of a long day are wanted
    outcome.check()
    Delivered(tmp_path / "out").check_replays()


@pytest.mark.slow
@pytest.mark.timeout(max(SECONDS, SHORT) + OTHER_TIME)
def test_a_day_on_a_redesigned_cluster_loses_and_doubles_nothing_and_keeps_order(
    spark_driver: Callable[..., Driver], tmp_path: Path, cleanup: Cleanup
) -> None:
    cluster = cleanup.enter_context(ClusterProcess(nodes=3, msg_timeout=MSG_TIMEOUT, kind=True))
    cluster.create_topic("day", partitions=2, replicas=2, multi_part=True, channels=["spark"])

    def restart_node(chance: random.Random) -> None:
        node = chance.randrange(3)
        cluster.kill_node(node)
        cluster.restart_node(node)

    def fail_lookupd(_: random.Random) -> None:
        cluster.set_faults("lookupd0.http", refuse_connections=True)
        cluster.set_faults("lookupd0.http", refuse_connections=False)

    lookupd = ",".join(str(each.http) for each in cluster.lookupds)
    source = {"topic": "day", "channel": "spark", "lookupd_http_addresses": lookupd, "startingOffsets": "earliest"}
    driver = day_program(spark_driver, LOCAL_CLUSTER, tmp_path, **source, maxOffsetsPerTrigger=20000)
    happenings = {
        "nsqd killed and restarted": restart_node,
        "leader moved": lambda chance: cluster.move_leader("day", chance.randrange(2)),
        "lookupd gone for a moment": fail_lookupd,
    }
    running = publishers(tmp_path, cleanup, "day", lookupd)
    day = Day(driver, tmp_path / "out", running, happenings)
    outcome = day.run(SECONDS or SHORT)
    print(f"\n{outcome}\n{day}")  # noqa: T201
    outcome.check()
    delivered = Delivered(tmp_path / "out")
    delivered.check_replays()
    check_order(delivered)


def check_order(delivered: Delivered) -> None:
    """Each partition was read without a gap: every message begins where the one before ends."""
    expected: dict[int, int] = {}
    rows = zip(*(delivered.column(name) for name in ("partition", "offset", "size")), strict=True)
    for partition, offset, size in rows:
        assert offset == expected.get(partition, offset), (partition, offset, expected[partition])
        expected[partition] = offset + size
    assert len(expected) == 2
