"""What a topic is created with, and what that means: retention, and how often messages go to the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.http import ask
from support.redesigned import Consumer, publish
from support.waiting import until

from nsq_fast.broker import RedesignedCluster

DAY = 24 * 3600 * 1_000_000_000


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(2, 2, readiness=0.0) as cluster:
        cluster.create_topic("a", 1, 1, channels=["ch"])
        yield cluster


def post(lookupd: Any, path: str) -> tuple[int, str]:
    answer = ask(lookupd.http_address, "POST", path)
    return answer.status, answer.json["message"] if answer.body else ""


def test_what_is_set_is_kept(cluster: RedesignedCluster) -> None:
    lookupd = cluster.lookupds[0]
    assert post(lookupd, "/topic/create?topic=t&partition_num=1&replicator=1&syncdisk=5000&retention=3")[0] == 200
    meta = cluster.partition("t", 0).meta
    assert (meta.sync_every, meta.retention_days) == (4000, 3)
    assert post(lookupd, "/topic/meta/update?topic=t&syncdisk=10")[0] == 200
    assert (meta.sync_every, meta.retention_days) == (10, 3)
    assert post(lookupd, "/topic/meta/update?topic=t&syncdisk=-1&retention=9")[0] == 200
    assert (meta.sync_every, meta.retention_days) == (10, 9)


def test_messages_go_after_their_retention_when_all_channels_are_done(cluster: RedesignedCluster) -> None:
    partition = cluster.partition("a", 0)
    publish(cluster, "a", b"1", b"2", b"3")
    assert post(cluster.lookupds[0], "/topic/meta/update?topic=a&retention=2")[0] == 200
    later = time.time_ns() + 2 * DAY
    partition.clean(later)
    assert partition.log.first == 0  # nobody is done with them
    consumer = Consumer(cluster.leader_of("a", 0), "SUB a ch 0", rdy=1)
    for _ in range(2):
        consumer.finish(consumer.receive())
    until(lambda: partition.channel("ch").depth == 1)
    partition.clean(later - DAY)
    assert partition.log.first == 0  # too young
    partition.clean(later)
    assert partition.log.first == 2
    consumer.finish(consumer.receive())
    consumer.close()


def test_without_a_channel_nothing_goes(cluster: RedesignedCluster) -> None:
    cluster.create_topic("bare")
    publish(cluster, "bare", b"1")
    cluster.partition("bare", 0).clean(time.time_ns() + 100 * DAY)
    assert cluster.partition("bare", 0).log.first == 0
