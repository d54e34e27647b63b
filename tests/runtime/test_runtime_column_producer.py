"""Publishing columns: every row once, in order where it is promised, with the errors and receipts of a producer."""

from __future__ import annotations

import json
import logging
import random
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import gevent
import pytest
from support.peers import Peer
from support.publishing import REDESIGNED, Command, Nsqds
from support.waiting import WAIT

from nsq_fast import ColumnProducer, Receipt, TraceLog, errors
from nsq_fast._codec import Records, group_rows
from nsq_fast.broker.redesigned.cluster import RedesignedCluster

PARTITIONS = 3
Producers = Callable[..., ColumnProducer]


@pytest.fixture
def producer() -> Iterator[Producers]:
    """A factory of started producers that retry quickly."""
    made: list[ColumnProducer] = []

    def make(*addresses: Any, **options: Any) -> ColumnProducer:
        defaults = {"publish_timeout": 5.0, "retry_base_delay": 0.001, "lookupd_refresh_interval": 0.05}
        made.append(ColumnProducer(addresses, **{**defaults, **options}))
        made[-1].start()
        return made[-1]

    yield make
    for each in made:
        each.close(timeout=0.5)


def lookupds(cluster: RedesignedCluster) -> list[str]:
    return [str(lookupd.http_address) for lookupd in cluster.lookupds]


def offsets_of(entries: list[bytes]) -> array[int]:
    return array("i", accumulate(map(len, entries), initial=0))


def records_of(bodies: list[bytes], trace_ids: list[int] | None = None, headers: list[bytes] | None = None) -> Records:
    return Records(
        offsets_of(bodies),
        b"".join(bodies),
        trace_ids=None if trace_ids is None else array("Q", trace_ids),
        header_offsets=None if headers is None else offsets_of(headers),
        headers=None if headers is None else b"".join(headers),
    )


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_rows_become_commands(publish_nsqd: Nsqds, producer: Producers) -> None:
    nsqd = publish_nsqd()
    sender = producer(nsqd.address)
    records = records_of(numbered(10))
    rows = array("i", [7, 1, 1]).tobytes()
    results = [sender.publish_rows("t", records), sender.publish_rows("t", records, rows)]
    results.append(sender.publish_rows("t", records, None, 2, 4))
    results.append(sender.publish_rows("t", records, rows, 1))
    assert [result.get(timeout=WAIT).messages for result in results] == [10, 3, 2, 2]
    assert [command.name for command in nsqd.commands] == ["MPUB"] * 4
    assert [command.bodies for command in nsqd.commands] == [
        numbered(10),
        [b"7", b"1", b"1"],
        [b"2", b"3"],
        [b"1", b"1"],
    ]
    assert sender.stats()["held"] == 0


def test_rows_that_make_no_command_are_refused_at_once(publish_nsqd: Nsqds, producer: Producers) -> None:
    nsqd = publish_nsqd()
    sender = producer(nsqd.address, max_body_size=50)
    records = records_of([bytes(20)] * 3)
    for kind, match, arguments in [
        (errors.ConfigError, "rows must be", (array("i", [3]).tobytes(),)),
        (errors.ConfigError, "stop", (None, 0, 4)),
        (errors.ConfigError, "stop", (None, 2, 1)),
        (errors.BodyInvalid, "empty", (None, 1, 1)),
        (errors.BodyInvalid, "max_body_size=50", (None, 0, 3)),
    ]:
        with pytest.raises(kind, match=match):
            sender.publish_rows("t", records, *arguments)
    with pytest.raises(errors.NameInvalid):
        sender.publish_rows("t t", records, None, 0, 1)
    with pytest.raises(errors.ConfigError, match="partition"):
        sender.publish_rows("t", records, None, 0, 1, partition=1024)
    assert sender.stats()["held"] == 0
    assert not nsqd.commands


def test_a_broken_connection_is_tried_again_with_the_same_rows(publish_nsqd: Nsqds, producer: Producers) -> None:
    def answer(peer: Peer, command: Command) -> None:
        if len(nsqd.commands) == 1:
            peer.sock.shutdown(2)
        else:
            peer.ok()

    nsqd = publish_nsqd(answer)
    result = producer(nsqd.address).publish_rows("t", records_of(numbered(5)))
    assert result.get(timeout=WAIT).messages == 5
    assert [command.bodies for command in nsqd.commands] == [numbered(5)] * 2
    nsqd.commands.clear()
    result = producer(nsqd.address, retry_unknown_outcome=False).publish_rows("t", records_of(numbered(5)))
    with pytest.raises(errors.PublishFailed, match="may have been stored") as failure:
        result.get(timeout=WAIT)
    assert failure.value.possibly_stored


def test_what_original_servers_cannot_take(publish_nsqd: Nsqds, producer: Producers) -> None:
    nsqd = publish_nsqd()
    sender = producer(nsqd.address)
    traced = records_of([b"1"], [5])
    for arguments, match in [
        ({"records": traced}, "leave trace_id out"),
        ({"records": records_of([b"1"], None, [b"{}"])}, "leave headers and tag out"),
        ({"records": records_of([b"1"]), "partition": 0}, "no partitions"),
    ]:
        with pytest.raises(errors.ConfigError, match=match):
            sender.publish_rows("t", **arguments).get(timeout=WAIT)
    assert not nsqd.commands
    assert sender.publish_rows("t", traced, is_trace_optional=True).get(timeout=WAIT).receipts == []
    assert [command.name for command in nsqd.commands] == ["MPUB"]


def test_layout_without_lookup_is_that_of_the_nsqd(publish_nsqd: Nsqds, producer: Producers) -> None:
    assert producer(publish_nsqd().address).layout("t") == (False, 0, None)
    assert producer(publish_nsqd(version=REDESIGNED).address).layout("t") == (True, 0, None)
    with pytest.raises(errors.NameInvalid):
        producer(publish_nsqd().address).layout("t t")


def test_layout_of_a_cluster(cluster: RedesignedCluster, producer: Producers) -> None:
    sender = producer(lookupd_http_addresses=lookupds(cluster))
    later = gevent.spawn(sender.layout, "ext")
    cluster.create_topic("t", PARTITIONS, 1, channels=["ch"])
    assert sender.layout("t") == (True, PARTITIONS, False)
    cluster.create_topic("ext", 1, 1, ext=True, channels=["ch"])
    assert later.get(timeout=WAIT) == (True, 1, True)


def test_rows_of_a_partition_keep_their_order_while_leaders_move(
    cluster: RedesignedCluster, producer: Producers
) -> None:
    cluster.create_topic("t", PARTITIONS, 2, ordered=True, channels=["ch"])
    sender = producer(lookupd_http_addresses=lookupds(cluster), publish_timeout=20.0)
    count, chance = 1500, random.Random(3)
    records = records_of(numbered(count))
    groups = group_rows(array("i", [chance.randrange(PARTITIONS) for _ in range(count)]), PARTITIONS)

    def trouble() -> None:
        for number in range(PARTITIONS):
            cluster.move_leader("t", number)
            gevent.sleep(0.03)  # sleep: trouble that is spread over the publishes
        cluster.kill_node(cluster.leader_of("t", 1))

    mover = gevent.spawn(trouble)
    results = []
    for start in range(0, count, 20):
        for number, rows in enumerate(groups):
            if start * 4 < len(rows):
                stop = min(start + 20, len(rows) // 4)
                results.append(sender.publish_rows("t", records, rows, start, stop, partition=number))
        gevent.sleep(0.005)  # sleep: publishes that are spread over the trouble
    gevent.joinall([mover, *results], timeout=20, raise_error=True)
    assert sum(result.get(block=False).messages for result in results) == count
    for number, rows in enumerate(groups):
        stored = [record.body for record in cluster.partition("t", number).log.read(0, 100_000)]
        assert list(dict.fromkeys(stored)) == [b"%d" % row for row in array("i", rows)]


def test_receipts_of_traced_rows_and_their_records(
    cluster: RedesignedCluster, producer: Producers, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic("t", 1, 1, channels=["ch"])
    trace = TraceLog()
    trace.enable("t")
    sender = producer(lookupd_http_addresses=lookupds(cluster), trace=trace)
    with caplog.at_level(logging.INFO, "nsq_fast.trace"):
        stored = sender.publish_rows("t", records_of([b"a", b"bb", b"ccc"], [5, 0, 2**64 - 1])).get(timeout=WAIT)
    log = cluster.partition("t", 0).log.read(0, 10)
    leader = cluster.leader_of("t", 0).tcp_address
    wanted = [Receipt(log[n].internal_id, log[n].trace_id, log[n].offset, log[n].size, 0, leader) for n in (0, 2)]
    assert stored == (3, 0, wanted)
    written = [json.loads(record.getMessage()) for record in caplog.records]
    assert [(line["internal_id"], line["trace_id"], line["partition"]) for line in written] == [
        (receipt.internal_id, receipt.trace_id, 0) for receipt in wanted
    ]


def test_headers_on_an_extended_topic(cluster: RedesignedCluster, producer: Producers) -> None:
    cluster.create_topic("t", 1, 1, ext=True, channels=["ch"])
    sender = producer(lookupd_http_addresses=lookupds(cluster))
    result = sender.publish_rows("t", records_of([b"a", b"b"], None, [b'{"n":1}', b"{}"]))
    assert result.get(timeout=WAIT) == (2, 0, [])
    assert [record.ext[3:] for record in cluster.partition("t", 0).log.read(0, 10)] == [b'{"n":1}', b"{}"]
