"""What is proved of a cluster that is not in trouble: traces, ext headers with tags and filters, an old nsqd beside."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gevent import joinall

from nsq_fast import Message, Producer
from nsq_fast.client.trace import TraceLog
from nsq_fast.client.trace_records import ConsumeRecord, PublishRecord

from .fleet import Fleet
from .judge import Judge, Verdict, body, parse
from .scenarios import CHANNEL, Scale, consuming, new_producer, new_topic, publish_keys, settle
from .waiting import until

CITIES = ("london", "leeds", "paris")
TAG = "red"
FILTERS: dict[str, dict[str, Any]] = {
    "exact": {"type": 1, "filter_ext_key": "city", "filter_data": "paris"},
    "inverse": {"type": 1, "inverse": True, "filter_ext_key": "city", "filter_data": "paris"},
    "regexp": {"type": 2, "filter_ext_key": "city", "filter_data": "^l"},
    "glob": {"type": 3, "filter_ext_key": "city", "filter_data": "l*s"},
    "all": {
        "type": 4,
        "filter_ext_key": "all",
        "filter_data_list": [
            {"filter_ext_key": "city", "filter_data": "paris"},
            {"filter_ext_key": "level", "filter_data": "3"},
        ],
    },
    "any": {
        "type": 4,
        "filter_ext_key": "any",
        "filter_data_list": [
            {"filter_ext_key": "city", "filter_data": "paris"},
            {"filter_ext_key": "level", "filter_data": "3"},
        ],
    },
}


class Records(logging.Handler):
    """Trace records, kept."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append(record.msg)

    def of(self, kind: type[Any]) -> Iterator[Any]:
        """The records of a kind."""
        return (record for record in self.all if isinstance(record, kind))


def new_trace_log(topic: str) -> tuple[TraceLog, Records]:
    """A trace log of its own, on for a topic; and its records."""
    log = logging.Logger(f"traces of {topic}")
    records = Records()
    log.addHandler(records)
    trace = TraceLog(log)
    trace.enable(topic)
    return trace, records


def traced(fleet: Fleet, scale: Scale) -> tuple[Verdict, Records]:
    """Publish and consume an ordered topic with tracing on."""
    topic = new_topic("traced")
    fleet.create_topic(topic, scale.partitions, 2, channels=(CHANNEL,), ordered=True)
    trace, records = new_trace_log(topic)
    judge = Judge()
    with (
        consuming(fleet, topic, judge.handle, max_in_flight=100, trace=trace),
        new_producer(fleet, scale, trace=trace) as producer,
    ):
        joinall(publish_keys(producer, topic, judge, scale), raise_error=True)
        settle(judge, scale)
    return judge.verdict(), records


def identity(record: PublishRecord | ConsumeRecord) -> tuple[Any, ...]:
    """What the two records of one message have in common, for an ordered topic."""
    return (
        record.topic,
        record.partition,
        record.internal_id,
        record.trace_id,
        record.offset,
        record.size,
        record.nsqd,
    )


def header(number: int) -> dict[str, str]:
    """The ext header of a message."""
    return {"city": CITIES[number % 3], "level": str(number % 10)}


def expected(name: str, number: int) -> bool:
    """Whether a filter lets a message through."""
    city, level = header(number).values()
    return {
        "exact": city == "paris",
        "inverse": city != "paris",
        "regexp": city.startswith("l"),
        "glob": city == "leeds",
        "all": city == "paris" and level == "3",
        "any": city == "paris" or level == "3",
    }[name]


def is_tagged(number: int) -> bool:
    """Whether a message has the tag."""
    return number % 4 == 0


def ext(fleet: Fleet, scale: Scale) -> dict[str, Counter[int]]:
    """Publish to an ext topic; the numbers that came through each filter, and to clients with and without the tag."""
    topic = new_topic("ext")
    fleet.create_topic(topic, 2, 1, channels=(*FILTERS, "tags"), ext=True)
    seen: dict[str, Counter[int]] = {name: Counter() for name in (*FILTERS, "tagged", "untagged")}
    with ExitStack() as stack:
        consumers = [
            stack.enter_context(
                consuming(fleet, topic, taker(seen[name]), channel=name, max_in_flight=50, ext_filter=ext_filter)
            )
            for name, ext_filter in FILTERS.items()
        ]
        for name, tag in (("tagged", TAG), ("untagged", None)):
            consumer = consuming(fleet, topic, taker(seen[name]), channel="tags", max_in_flight=50, desired_tag=tag)
            consumers.append(stack.enter_context(consumer))
        until(lambda: all(len(each.stats().connections) == 2 for each in consumers), scale.patience)
        until(lambda: all(one.is_connected for each in consumers for one in each.subscribers), scale.patience)
        with new_producer(fleet, scale) as producer:
            publish_with_headers(producer, topic, scale.messages)
        until(lambda: not any(fleet.unanswered(topic, name) for name in (*FILTERS, "tags")), scale.patience, every=0.1)
    return seen


def taker(seen: Counter[int]) -> Any:
    """A handler that counts the numbers of messages whose headers are as they were sent."""

    def handle(_consumer: Any, message: Message) -> None:
        number = parse(message)[1]
        sent = {name: value for name, value in message.headers.items() if not name.startswith("##")}
        if sent == header(number):
            seen[number] += 1

    return handle


def publish_with_headers(producer: Producer, topic: str, messages: int) -> None:
    """Each with its header, some with the tag."""
    results = [
        producer.publish_nowait(topic, body(0, number), headers=header(number), tag=TAG if is_tagged(number) else None)
        for number in range(messages)
    ]
    for result in results:
        result.get()


def mixed(fleet: Fleet, scale: Scale, path: Path) -> tuple[Verdict, Counter[Any]]:
    """A topic with partitions, and an original nsqd that has it too: one consumer takes both."""
    topic = new_topic("mixed")
    fleet.create_topic(topic, 2, 1, channels=(CHANNEL,))
    judge, sources = Judge(), Counter[Any]()

    def handle(consumer: Any, message: Message) -> None:
        sources[message.partition] += 1
        judge.handle(consumer, message)

    half = Scale(scale.messages // 2, scale.keys, 2, scale.patience)
    with fleet.original_nsqd(path) as old, Producer(nsqd_tcp_addresses=[old.tcp_address]) as to_old:
        to_old.publish(topic, body(scale.keys, 0))
        judge.was_stored(scale.keys, 0)
        with consuming(fleet, topic, handle, max_in_flight=100), new_producer(fleet, scale) as producer:
            publishers = publish_keys(producer, topic, judge, half)
            for number in range(1, half.messages):
                to_old.publish(topic, body(scale.keys, number))
                judge.was_stored(scale.keys, number)
            joinall(publishers, raise_error=True)
            settle(judge, scale)
    return judge.verdict(), sources
