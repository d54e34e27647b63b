"""Redesigned clusters through threads and asyncio: order, keys, receipts, headers."""

from __future__ import annotations

from collections import defaultdict

import pytest
from support.faces import FACES, Asyncio, Threads
from support.fleet import Fleet
from support.waiting import WAIT, until

from nsq_fast import Message, Receipt
from nsq_fast.errors import RequeueMessage
from nsq_fast.protocol.publishing import IDEMPOTENCE_HEADER

KEYS = [f"key {number}" for number in range(5)]
COUNT = 100


@pytest.fixture(params=FACES, ids=lambda face: str(face.name))
def face(request: pytest.FixtureRequest) -> Threads | Asyncio:
    found: Threads | Asyncio = request.param
    return found


def test_ordered_partitions_come_in_order_one_at_a_time_with_their_receipts(
    fleet: Fleet, face: Threads | Asyncio
) -> None:
    topic = f"ordered_{face.name}"
    fleet.create_topic(topic, 2, 2, channels=("ch",), ordered=True)
    seen: dict[int | None, list[int]] = defaultdict(list)
    of_key: dict[str, set[int | None]] = defaultdict(set)
    traced: dict[int, Message] = {}
    running: set[int | None] = set()
    overlaps: list[int | None] = []

    def handle(message: Message) -> None:
        if message.partition in running:
            overlaps.append(message.partition)
        running.add(message.partition)
        number = int(message.body)
        seen[message.partition].append(number)
        of_key[KEYS[number % len(KEYS)]].add(message.partition)
        traced[number] = message
        running.discard(message.partition)

    receipts = {}
    with face.publishing(lookupd_http_addresses=fleet.lookupds) as publish:
        for number in range(COUNT):
            key = KEYS[number % len(KEYS)]
            receipts[number] = publish(topic, b"%d" % number, timeout=WAIT, key=key, trace_id=number + 1)
    assert all(isinstance(receipt, Receipt) for receipt in receipts.values())
    options = {"ordered": True, "max_in_flight": 20}
    with face.consuming(topic, "ch", handle, lookupd_http_addresses=fleet.lookupds, **options):
        until(lambda: len(traced) == COUNT)
    assert overlaps == []
    for numbers in seen.values():
        assert list(dict.fromkeys(numbers)) == sorted(set(numbers))
    assert all(len(partitions) == 1 for partitions in of_key.values())
    for number, message in traced.items():
        assert message.trace_id == receipts[number].trace_id == number + 1
        assert message.internal_id == receipts[number].internal_id


def test_headers_and_tags_go_through(fleet: Fleet, face: Threads | Asyncio) -> None:
    topic = f"ext_{face.name}"
    fleet.create_topic(topic, 1, 2, channels=("ch",), ext=True)
    headers: dict[bytes, dict[str, str]] = {}
    with face.publishing(lookupd_http_addresses=fleet.lookupds) as publish:
        for number in range(10):
            publish(topic, b"%d" % number, timeout=WAIT, headers={"number": str(number)})
    with face.consuming(
        topic,
        "ch",
        lambda message: headers.update({message.body: dict(message.headers)}),
        lookupd_http_addresses=fleet.lookupds,
        max_in_flight=10,
    ):
        until(lambda: len(headers) == 10)
    assert all(found["number"] == body.decode() for body, found in headers.items())


def test_copies_of_a_write_that_was_tried_again_are_suppressed(fleet: Fleet, face: Threads | Asyncio) -> None:
    """The second attempt comes whole, to another partition; handlers fail, and leaders move."""
    topic = f"suppressed_{face.name}"
    fleet.create_topic(topic, 2, 2, channels=("ch",), ext=True, multi_part=True)
    everything = {b"%d" % number for number in range(COUNT)}
    ids: dict[bytes, set[bytes]] = defaultdict(set)
    handled: set[bytes] = set()

    def handle(message: Message) -> None:
        ids[message.body].add(message.id)
        if message.attempts == 1 and int(message.body) % 2:
            raise RequeueMessage(0.01)
        handled.add(message.body)

    options = {"max_in_flight": 20, "suppress_retried": COUNT}
    with (
        face.publishing(lookupd_http_addresses=fleet.lookupds) as publish,
        face.consuming(topic, "ch", handle, lookupd_http_addresses=fleet.lookupds, **options) as consumer,
    ):

        def write(numbers: range, partition: int) -> None:
            for number in numbers:
                headers = {IDEMPOTENCE_HEADER: f"write-{number}"}
                publish(topic, b"%d" % number, timeout=WAIT, partition=partition, headers=headers)

        for numbers in (range(COUNT // 2), range(COUNT // 2, COUNT)):
            write(numbers, 0)
            write(numbers, 1)
            fleet.wait_stable()
            until(lambda: fleet.move_leader(topic, 0))
        # A leader that has moved may deliver a copy again: more than COUNT may be suppressed.
        until(
            lambda: (
                handled == everything
                and fleet.unanswered(topic, "ch") == 0
                and consumer.stats().totals.suppressed >= COUNT
            ),
            about=lambda: (len(handled), fleet.unanswered(topic, "ch"), consumer.stats()),
        )
    assert {body: len(found) for body, found in ids.items()} == dict.fromkeys(everything, 1)
