"""What is proved of a redesigned cluster: traces, headers, tags and filters, an old nsqd beside, leaders followed."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from gevent import Greenlet, joinall, sleep, spawn

from nsq_fast import Address, Consumer, Message, Producer
from nsq_fast.client.trace import TraceLog

from .fleet import Fleet
from .ledger import HEAD, Ledger, body
from .waiting import until

CHANNEL = "ch"
PIPELINE = 5
"""Publishes of one key on their way at once."""

TAKEOVER = 30.0
"""Seconds after which a killed nsqd is started again in any case: without it the others may not take publishes."""


@dataclass(frozen=True)
class Scale:
    """How much, and how many seconds one thing may take."""

    messages: int
    keys: int = 20
    partitions: int = 3
    patience: float = 20.0


def new_topic(kind: str) -> str:
    return f"{kind}-{uuid4().hex[:8]}"


@contextmanager
def consuming(fleet: Fleet, topic: str, handler: Any, **options: Any) -> Iterator[Consumer]:
    """A consumer that is closed at the end, with every connection made."""
    options = {"channel": CHANNEL, "lookupd_poll_interval": 2.0, "max_tries": 0, "max_backoff_duration": 0, **options}
    consumer = Consumer(topic, lookupd_http_addresses=fleet.lookupds, message_handler=handler, **options)
    consumer.start(block=False)
    try:
        yield consumer
    finally:
        consumer.close()


def new_producer(fleet: Fleet, scale: Scale, **options: Any) -> Producer:
    """A producer that gives no publish up."""
    return Producer(
        lookupd_http_addresses=fleet.lookupds,
        publish_timeout=scale.patience * 2,
        max_publish_attempts=1000,
        retry_max_delay=0.5,
        lookupd_poll_interval=2.0,
        **options,
    )


def publish_keys(producer: Producer, topic: str, ledger: Ledger, scale: Scale) -> list[Greenlet[..., Any]]:
    """One greenlet a key; each has several publishes on their way. A publish that fails is an error of its greenlet."""

    def publish(key: int) -> None:
        count = scale.messages // scale.keys
        for first in range(0, count, PIPELINE):
            numbers = range(first, min(count, first + PIPELINE))
            results = [producer.publish_nowait(topic, body(key, number), key=f"key{key}") for number in numbers]
            for number, result in zip(numbers, results, strict=True):
                result.get()
                ledger.stored(key, number)

    return [spawn(publish, key) for key in range(scale.keys)]


def settle(ledger: Ledger, scale: Scale) -> None:
    """Wait until every stored message came; give up when nothing comes any more."""
    seen, since = -1, time.monotonic()
    while ledger.missing and time.monotonic() - since < scale.patience:
        sleep(0.02)  # sleep: looks again and again
        if ledger.totals.total() != seen:
            seen, since = ledger.totals.total(), time.monotonic()


def kill_and_restart(fleet: Fleet, topic: str, partition: int, patience: float) -> None:
    """SIGKILL the nsqd that leads a partition; start it again when another leads, or after a while."""
    before = fleet.leaders(topic)[partition]
    node = fleet.kill_leader(topic, partition)
    with suppress(AssertionError):
        until(lambda: fleet.leaders(topic).get(partition, before) != before, min(TAKEOVER, patience), every=0.1)
    fleet.restart(node)


def following(fleet: Fleet, scale: Scale) -> float:
    """Seconds from when lookup knows a new leader until a consumer is subscribed there."""

    def is_at(leader: Address) -> bool:
        return any(each.is_connected and each.address == leader for each in consumer.subscribers)

    topic = new_topic("followed")
    fleet.create_topic(topic, 1, 2, channels=(CHANNEL,), ordered=True)
    fleet.wait_stable()
    before = fleet.leaders(topic)[0]
    with consuming(fleet, topic, Ledger().handle, lookupd_poll_interval=60.0) as consumer:
        until(lambda: is_at(before), scale.patience)
        until(lambda: fleet.move_leader(topic, 0), scale.patience, every=0.5 if fleet.is_real else 0.02)
        until(lambda: fleet.leaders(topic).get(0, before) != before, scale.patience)
        began, leader = time.monotonic(), fleet.leaders(topic)[0]
        until(lambda: is_at(leader), scale.patience)
        return time.monotonic() - began


# Traces


class Records(logging.Handler):
    """Trace records, kept."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record.msg)

    def of(self, kind: type[Any]) -> Iterator[tuple[Any, ...]]:
        """What the two records of a message of an ordered topic have in common, of the records of a kind."""
        for each in self.all:
            if isinstance(each, kind):
                place = (each.topic, each.partition, each.internal_id, each.trace_id)
                yield (*place, each.offset, each.size, each.nsqd)


def traced(fleet: Fleet, scale: Scale) -> tuple[Ledger, Records]:
    """Publish and consume an ordered topic with tracing on."""
    topic = new_topic("traced")
    fleet.create_topic(topic, scale.partitions, 2, channels=(CHANNEL,), ordered=True)
    log, records, ledger = logging.Logger(f"traces of {topic}"), Records(), Ledger()
    log.addHandler(records)
    trace = TraceLog(log)
    trace.enable(topic)
    with (
        consuming(fleet, topic, ledger.handle, max_in_flight=100, trace=trace),
        new_producer(fleet, scale, trace=trace) as producer,
    ):
        joinall(publish_keys(producer, topic, ledger, scale), raise_error=True)
        settle(ledger, scale)
    return ledger, records


# Ext headers

CITIES = ("london", "leeds", "paris")
TAG = "red"
_BOTH = [{"filter_ext_key": "city", "filter_data": "paris"}, {"filter_ext_key": "level", "filter_data": "3"}]
FILTERS: dict[str, dict[str, Any]] = {
    "exact": {"type": 1, "filter_ext_key": "city", "filter_data": "paris"},
    "inverse": {"type": 1, "inverse": True, "filter_ext_key": "city", "filter_data": "paris"},
    "regexp": {"type": 2, "filter_ext_key": "city", "filter_data": "^l"},
    "glob": {"type": 3, "filter_ext_key": "city", "filter_data": "l*s"},
    "all": {"type": 4, "filter_ext_key": "all", "filter_data_list": _BOTH},
    "any": {"type": 4, "filter_ext_key": "any", "filter_data_list": _BOTH},
}


def header(number: int) -> dict[str, str]:
    """The ext header of a message."""
    return {"city": CITIES[number % 3], "level": str(number % 10)}


def expected(name: str, number: int) -> bool:
    """Whether a message comes through a filter, or to a client with the tag, or without."""
    city, level = header(number).values()
    return {
        "exact": city == "paris",
        "inverse": city != "paris",
        "regexp": city.startswith("l"),
        "glob": city == "leeds",
        "all": city == "paris" and level == "3",
        "any": city == "paris" or level == "3",
        "tagged": number % 4 == 0,
        "untagged": number % 4 != 0,
    }[name]


def ext(fleet: Fleet, scale: Scale) -> dict[str, Counter[int]]:
    """Publish to an ext topic; the numbers that came through each filter, and to clients with and without the tag."""
    topic = new_topic("ext")
    fleet.create_topic(topic, 2, 1, channels=(*FILTERS, "tags"), ext=True)
    seen: dict[str, Counter[int]] = {name: Counter() for name in (*FILTERS, "tagged", "untagged")}
    options: dict[str, Any] = {name: {"channel": name, "ext_filter": each} for name, each in FILTERS.items()}
    options |= {"tagged": {"channel": "tags", "desired_tag": TAG}, "untagged": {"channel": "tags"}}
    with ExitStack() as stack:
        consumers = [
            stack.enter_context(consuming(fleet, topic, _taker(seen[name]), max_in_flight=50, **each))
            for name, each in options.items()
        ]
        until(lambda: all(len(each.stats().connections) == 2 for each in consumers), scale.patience)
        until(lambda: all(one.is_connected for each in consumers for one in each.subscribers), scale.patience)
        with new_producer(fleet, scale) as producer:
            results = [
                producer.publish_nowait(
                    topic, body(0, each), headers=header(each), tag=TAG if expected("tagged", each) else None
                )
                for each in range(scale.messages)
            ]
            for result in results:
                result.get()
        until(lambda: not any(fleet.unanswered(topic, name) for name in (*FILTERS, "tags")), scale.patience, every=0.1)
    return seen


def _taker(seen: Counter[int]) -> Any:
    """A handler that counts the numbers of messages whose headers are as they were sent."""

    def handle(_consumer: Any, message: Message) -> None:
        number = HEAD.unpack_from(message.body)[1]
        if {name: value for name, value in message.headers.items() if not name.startswith("##")} == header(number):
            seen[number] += 1

    return handle


def mixed(fleet: Fleet, scale: Scale, path: Path) -> tuple[Ledger, Counter[Any]]:
    """A topic with partitions, and an original nsqd that has it too: one consumer takes both."""
    topic = new_topic("mixed")
    fleet.create_topic(topic, 2, 1, channels=(CHANNEL,))
    ledger, sources = Ledger(), Counter[Any]()

    def handle(consumer: Any, message: Message) -> None:
        sources[message.partition] += 1
        ledger.handle(consumer, message)

    half = Scale(scale.messages // 2, scale.keys, 2, scale.patience)
    with fleet.original_nsqd(path) as old, Producer(nsqd_tcp_addresses=[old.tcp_address]) as to_old:

        def publish_old(number: int) -> None:
            to_old.publish(topic, body(scale.keys, number))
            ledger.stored(scale.keys, number)

        publish_old(0)
        with consuming(fleet, topic, handle, max_in_flight=100), new_producer(fleet, scale) as producer:
            publishers = publish_keys(producer, topic, ledger, half)
            for number in range(1, half.messages):
                publish_old(number)
            joinall(publishers, raise_error=True)
            settle(ledger, scale)
    return ledger, sources
