"""What is proved on every redesigned cluster: what is published arrives, in order, while the cluster is in trouble.

A scenario takes a ``Fleet`` and a ``Scale``, and returns what a ``Judge`` says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from gevent import Greenlet, joinall, sleep, spawn

from nsq_fast import Address, Consumer, Producer

from .fleet import Fleet, until_moved
from .judge import Judge, Verdict, body
from .waiting import until

CHANNEL = "ch"
PIPELINE = 5
"""Publishes of one key on their way at once."""

TAKEOVER = 30.0
"""Seconds after which a killed nsqd is started again in any case: without it the others may not take publishes."""


@dataclass(frozen=True)
class Scale:
    """How much, and how long anything may take.

    Attributes:
        patience: s that one thing may take.
        pause: s between publishes of a key while there is trouble, so that the trouble finds messages on their way.
    """

    messages: int
    keys: int = 20
    partitions: int = 3
    patience: float = 20.0
    pause: float = 0.05


class Pace:
    """Spreads the publishing over the trouble: a share of it for each step, slow as long as the step lasts.

    Attributes:
        limit: how many messages may be published now.
        pause: s to wait between publishes of a key.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pause = 0.0

    def wait(self, judge: Judge) -> None:
        """Return when the next message may be published."""
        sleep(self.pause)  # sleep: keys are published for a time
        while judge.stored + judge.failed >= self.limit:
            sleep(0.01)  # sleep: looks again and again


@dataclass
class Report:
    """What happened in a scenario."""

    verdict: Verdict
    seconds: float
    events: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rate = self.verdict.distinct / self.seconds if self.seconds else 0
        return f"{self.verdict}; {self.seconds:.1f} s, {rate:,.0f}/s; " + ", ".join(self.events)


def new_topic(kind: str) -> str:
    """A name of its own."""
    return f"{kind}-{uuid4().hex[:8]}"


Step = Callable[[Fleet, str, Scale], str]
"""Trouble: does something to the cluster, and says what."""


def move(partition: int) -> Step:
    """Move the leader of a partition."""

    def step(fleet: Fleet, topic: str, scale: Scale) -> str:
        seconds = until_moved(fleet, topic, partition, scale.patience * 2)
        return f"leader of {partition} moved in {seconds:.1f} s"

    return step


def kill_and_restart(partition: int) -> Step:
    """SIGKILL the nsqd that leads a partition; start it again when another leads, or after a while."""

    def step(fleet: Fleet, topic: str, scale: Scale) -> str:
        before = fleet.leaders(topic)[partition]
        began = time.monotonic()
        node = fleet.kill_leader(topic, partition)
        try:
            until(
                lambda: fleet.leaders(topic).get(partition, before) != before, min(TAKEOVER, scale.patience), every=0.1
            )
        except AssertionError:
            taken_over = f"none took publishes instead for {TAKEOVER:.0f} s"
        else:
            taken_over = f"another leader after {time.monotonic() - began:.1f} s"
        fleet.restart(node)
        return f"nsqd {node} killed (leader of {partition}), {taken_over}, restarted"

    return step


TROUBLE: Sequence[Step] = (move(0), move(1), kill_and_restart(2), move(0))


def keyed(fleet: Fleet, scale: Scale, *, ordered: bool, trouble: Sequence[Step] = TROUBLE) -> Report:
    """Publish with keys and consume, with trouble spread over the publishing."""
    topic = new_topic("ordered" if ordered else "plain")
    # Without a mark for many partitions a topic that is not ordered would need a node for each replica of each.
    fleet.create_topic(
        topic, scale.partitions, 2, channels=(CHANNEL,), **{"ordered" if ordered else "multi_part": True}
    )
    fleet.wait_stable()
    judge, began = Judge(), time.monotonic()
    with consuming(fleet, topic, judge.handle, max_in_flight=100), new_producer(fleet, scale) as producer:
        pace = Pace(scale.messages // (len(trouble) + 1))
        publishers = publish_keys(producer, topic, judge, scale, pace)
        events = cause(fleet, topic, judge, scale, trouble, pace)
        joinall(publishers, raise_error=True)
        settle(judge, scale)
        seconds = time.monotonic() - began
        verdict = judge.verdict()
    return Report(verdict, seconds, events)


def cause(fleet: Fleet, topic: str, judge: Judge, scale: Scale, trouble: Sequence[Step], pace: Pace) -> list[str]:
    """Take the steps of trouble one by one, each when its share of the messages begins to be published."""
    events = []
    share = pace.limit
    for number, step in enumerate(trouble, 1):
        _await_publishes(judge, share * number, scale.patience * 4)
        pace.pause, pace.limit = scale.pause, share * (number + 1)
        before = judge.stored
        what = step(fleet, topic, scale)
        events.append(f"{what} (publishes {before}-{judge.stored})")
        pace.pause = 0.0
    pace.limit = scale.messages
    return events


@contextmanager
def consuming(fleet: Fleet, topic: str, handler: Any, **options: Any) -> Iterator[Consumer]:
    """A consumer that is closed at the end, with every connection made."""
    options = {"lookupd_poll_interval": 2.0, "max_tries": 0, "max_backoff_duration": 0, **options}
    consumer = Consumer(
        topic,
        options.pop("channel", CHANNEL),
        lookupd_http_addresses=fleet.lookupds,
        message_handler=handler,
        **options,
    )
    consumer.start(block=False)
    try:
        yield consumer
    finally:
        consumer.close()


def publish_keys(
    producer: Producer, topic: str, judge: Judge, scale: Scale, pace: Pace | None = None
) -> list[Greenlet[..., Any]]:
    """One greenlet a key; each has several publishes on their way."""
    each = scale.messages // scale.keys
    pace = pace or Pace(sys.maxsize)
    return [spawn(_publish_key, producer, topic, judge, key, each, pace) for key in range(scale.keys)]


def _publish_key(producer: Producer, topic: str, judge: Judge, key: int, messages: int, pace: Pace) -> None:
    for first in range(0, messages, PIPELINE):
        pace.wait(judge)
        results = [
            (number, producer.publish_nowait(topic, body(key, number), key=f"key{key}"))
            for number in range(first, min(messages, first + PIPELINE))
        ]
        for number, result in results:
            result.wait()
            if result.successful():
                judge.was_stored(key, number)
            else:
                judge.has_failed(result.exception)


def settle(judge: Judge, scale: Scale) -> None:
    """Wait until every stored message came; give up when nothing comes any more."""
    seen, since = -1, time.monotonic()
    while judge.missing and time.monotonic() - since < scale.patience:
        sleep(0.02)  # sleep: looks again and again
        if judge.handled != seen:
            seen, since = judge.handled, time.monotonic()


def _await_publishes(judge: Judge, count: int, timeout: float) -> None:
    until(lambda: judge.stored + judge.failed >= count, timeout, every=0.02)


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


def following(fleet: Fleet, scale: Scale) -> float:
    """Seconds from when lookup knows a new leader until a consumer is subscribed there."""
    topic = new_topic("followed")
    fleet.create_topic(topic, 1, 2, channels=(CHANNEL,), ordered=True)
    fleet.wait_stable()
    before = fleet.leaders(topic)[0]
    with consuming(fleet, topic, Judge().handle, lookupd_poll_interval=60.0) as consumer:
        until(lambda: _is_at(consumer, before), scale.patience)
        until_moved(fleet, topic, 0, scale.patience)
        until(lambda: fleet.leaders(topic).get(0, before) != before, scale.patience)
        began, leader = time.monotonic(), fleet.leaders(topic)[0]
        until(lambda: _is_at(consumer, leader), scale.patience)
        return time.monotonic() - began


def _is_at(consumer: Consumer, leader: Address) -> bool:
    return any(each.is_connected and each.address == leader for each in consumer.subscribers)
