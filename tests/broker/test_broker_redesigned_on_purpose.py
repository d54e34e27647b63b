"""What the embedded cluster does otherwise than the real servers, on purpose: the rows of docs/broker.md.

Those that a real cluster shows without trouble are in tests/servers/test_redesigned_on_purpose.py, for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redesigned import Consumer, publish
from support.waiting import until

from nsq_fast.broker import RedesignedCluster

ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster() -> Iterator[RedesignedCluster]:
    with RedesignedCluster(2, 1, readiness=0.0, takeover_delay=0.02, migrate_delay=3600.0) as cluster:
        cluster.create_topic("t", 1, 2, channels=["ch"])
        yield cluster


def test_what_a_killed_node_had_not_flushed_is_kept_here(cluster: RedesignedCluster) -> None:
    publish(cluster, "t", b"1", b"2")
    leader = cluster.leader_of("t", 0)
    cluster.restart_node(leader)
    until(lambda: len(cluster.partition("t", 0).in_sync) == 2)
    consumer = Consumer(cluster.leader_of("t", 0), "SUB t ch 0")
    assert [consumer.receive().body, consumer.receive().body] == [b"1", b"2"]
    consumer.close()


def test_a_fin_is_taken_while_too_few_replicas_are_in_sync_here(cluster: RedesignedCluster) -> None:
    publish(cluster, "t", b"1")
    partition = cluster.partition("t", 0)
    consumer = Consumer(cluster.leader_of("t", 0), "SUB t ch 0")
    cluster.kill_node(next(node for node in partition.replicas if node != partition.leader))
    until(lambda: len(partition.in_sync) == 1)
    consumer.finish(consumer.receive())
    until(lambda: partition.channel("ch").depth == 0)
    consumer.close()


def test_each_row_names_a_test() -> None:
    _, redesigned = (ROOT / "docs" / "broker.md").read_text().split("## The redesigned cluster")
    table = redesigned.split("Different on purpose:")[1]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*/test_*redesigned*.py"))
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert all(named)
    assert [name for names in named for name in names if f"def {name}(" not in tests] == []
