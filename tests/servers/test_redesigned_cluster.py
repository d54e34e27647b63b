"""Publishing and consuming on a redesigned cluster, from end to end. What is done to it meanwhile: test_bad_days.

On the embedded cluster it takes seconds. With ``--run-real-cluster`` it runs on real servers too (``make proof``).
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import monotonic
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from gevent import get_hub
from support.fleet import Fleet
from support.ledger import Kind
from support.scenarios import Scale, consuming, expected, ext, following, mixed, new_topic, traced
from support.waiting import PROMPT, until

from nsq_fast import Message, Producer
from nsq_fast.client.trace import ConsumeRecord, PublishRecord, ReceiveRecord


def test_records_of_publishing_and_consuming_join_one_to_one(fleet: Fleet, small: Scale, report: list[str]) -> None:
    ledger, records = traced(fleet, small)
    published, received, consumed = (
        Counter(records.of(kind)) for kind in (PublishRecord, ReceiveRecord, ConsumeRecord)
    )  # fmt: skip
    joined = published.keys() & consumed.keys()
    report.append(f"records: {published.total()} of publishes, {consumed.total()} of deliveries, {len(joined)} joined")
    assert published.keys() == consumed.keys()
    assert len(published) == published.total() == ledger.totals[Kind.STORED] == small.messages
    assert received == consumed
    # Real servers deliver a message twice that waited before the first ordered subscription: a record of each.
    assert consumed.total() == ledger.totals[Kind.BEGUN]
    assert {record.outcome for record in records.all if isinstance(record, ConsumeRecord)} == {"FIN"}


def test_filters_and_tags_of_an_ext_topic_let_through_what_they_should(
    fleet: Fleet, small: Scale, report: list[str]
) -> None:
    seen = ext(fleet, small)
    numbers = range(small.messages)
    report.append(", ".join(f"{name} {len(counts)}" for name, counts in seen.items()))
    assert seen == {name: Counter(number for number in numbers if expected(name, number)) for name in seen}


def test_an_original_nsqd_beside_the_partitions_is_consumed_too(
    fleet: Fleet, small: Scale, report: list[str], folder: Path
) -> None:
    ledger, sources = mixed(fleet, small, folder)
    report.append(f"{sources[None]} from the original nsqd, {sources[0]} and {sources[1]} from partitions")
    assert ledger.missing == []
    assert sources[None] >= small.messages // 2
    assert min(sources[0], sources[1]) > 0


def upgrade(url: str) -> None:
    with suppress(HTTPError), urlopen(Request(url, method="POST")):  # only the leading nsqlookupd takes it
        pass


def test_a_topic_that_has_just_got_headers_takes_them(fleet: Fleet, report: list[str]) -> None:
    """An operator upgrades a topic under a producer that has asked lookup about it a moment ago."""
    topic = new_topic("upgraded")
    fleet.create_topic(topic, 2, 1, channels=("ch",))
    seen: Counter[str] = Counter()

    def handle(_consumer: object, message: Message) -> None:
        seen[str((message.headers or {}).get("color"))] += 1

    with Producer((), fleet.lookupds, publish_timeout=120.0) as producer:
        for _ in range(2):
            producer.publish(topic, b"plain")
        for address in fleet.lookupds:
            get_hub().threadpool.apply(upgrade, (f"http://{address}/topic/meta/update?topic={topic}&upgradeext=true",))
        began = monotonic()
        producer.publish(topic, b"with headers", headers={"color": "red"})
        report.append(f"published with headers {monotonic() - began:.2f} s after the upgrade")
    with consuming(fleet, topic, handle):
        until(lambda: seen.total() == 3, 120)
    assert seen == {"None": 2, "red": 1}


def test_a_consumer_follows_a_leader_within_two_seconds(fleet: Fleet, small: Scale, report: list[str]) -> None:
    seconds = following(fleet, small)
    report.append(f"{seconds:.2f} s after lookup knows the new leader")
    assert seconds < (2.0 if fleet.is_real else PROMPT)  # embedded servers are as slow as the machine


def test_more_instances_and_restarts_leave_a_channel_where_it_is(fleet: Fleet, report: list[str]) -> None:
    """Each says where the channel begins: only the first of them is heard."""
    topic = new_topic("start")
    fleet.create_topic(topic, 1, 1, channels=("other",))
    seen: Counter[bytes] = Counter()

    def handle(_consumer: object, message: Message) -> None:
        seen[message.body] += 1

    def publish(first: int, count: int) -> None:
        with Producer((), fleet.lookupds, publish_timeout=120.0) as producer:
            producer.multipublish(topic, [b"%d" % number for number in range(first, first + count)])

    publish(0, 20)
    for turn, position in enumerate(("offset:0", "end", "end"), 1):
        with consuming(fleet, topic, handle, start_position=position):
            until(lambda turn=turn: len(seen) == 20 * turn, 120)
            until(lambda: fleet.unanswered(topic, "ch") == 0, 60)
        publish(20 * turn, 20)
    report.append(f"{len(seen)} messages in three starts")
    assert len(seen) == 60
