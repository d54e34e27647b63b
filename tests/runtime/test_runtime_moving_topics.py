"""A topic moves from one cluster to another while it is published to: nothing is lost, and no key is in two places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from gevent import joinall, spawn
from gevent.event import Event
from support.waiting import holds, until

from nsq_fast import ConfigDocument, Consumer, Producer, threads
from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.errors import ConfigError, NoNsqd
from nsq_fast.protocol.gradation import bucket_of


class Told:
    """A source of the test's own: ``tell`` gives it a document."""

    def __init__(self) -> None:
        self._told = Event()
        self.tell({})

    def tell(self, document: dict[str, Any]) -> None:
        self._last = ConfigDocument(document, object())
        told, self._told = self._told, Event()
        told.set()

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        while self._last is last:
            self._told.wait()
        return self._last


class Clusters(NamedTuple):
    """Where a topic is, and where it moves to: their nsqlookupds."""

    old: list[str]
    new: list[str]
    source: Told
    create: Callable[[int], None]

    def move(self, percent: float, **more: Any) -> None:
        self.source.tell({"routes": {"topic": {"lookupds": self.new, "percent": percent, **more}}})

    @property
    def options(self) -> dict[str, Any]:
        return {"lookupd_http_addresses": self.old, "config_source": self.source, "lookupd_poll_interval": 0.2}


@pytest.fixture
def redesigned() -> Iterator[Clusters]:
    with RedesignedCluster(nodes=2, kind=True) as old, RedesignedCluster(nodes=2, kind=True) as new:

        def create(number: int) -> None:
            (old, new)[number].create_topic("topic", 2, channels=["channel"])

        lookupds = [[str(each.http_address) for each in cluster.lookupds] for cluster in (old, new)]
        yield Clusters(*lookupds, Told(), create)


@pytest.fixture
def original() -> Iterator[Clusters]:
    with Broker() as old, Broker() as new:
        yield Clusters([str(old.lookupd.http_address)], [str(new.lookupd.http_address)], Told(), lambda number: None)


class Taken:
    """What one cluster has, as a consumer of its own sees it."""

    def __init__(self, start_consumer: Callable[..., Consumer], lookupds: list[str]) -> None:
        self.bodies: list[bytes] = []
        start_consumer(
            "topic",
            "channel",
            lookupd_http_addresses=lookupds,
            lookupd_poll_interval=0.2,
            message_handler=lambda _, message: self.bodies.append(message.body),
        )

    def of_key(self, key: str) -> list[int]:
        return [int(number) for each, number in (body.split() for body in self.bodies) if each == key.encode()]


def change(producer: Producer, count: int) -> None:
    until(lambda: producer.stats()["config"]["changes"] == count)


def percent_of(producer: Producer) -> float:
    found: dict[str, Any] = producer.stats()["config"]["routes"]
    return float(found["topic"]["percent"]) if found else 0.0


@pytest.mark.parametrize("family", ["original", "redesigned"])
def test_publishes_without_a_key_are_shared_out(
    family: str, request: pytest.FixtureRequest, start_consumer: Callable[..., Consumer]
) -> None:
    clusters: Clusters = request.getfixturevalue("original" if family == "original" else "redesigned")
    for number in (0, 1):
        clusters.create(number)
    old, new = Taken(start_consumer, clusters.old), Taken(start_consumer, clusters.new)
    with Producer(**clusters.options) as producer:
        for number in range(100):
            producer.publish("topic", b"none %d" % number)
        clusters.move(25)
        change(producer, 1)
        for number in range(100, 200):
            producer.publish("topic", b"none %d" % number)
        producer.publish("other" if family == "original" else "topic", b"none 1000")
        clusters.move(100)
        change(producer, 2)
        for number in range(200, 300):
            producer.publish("topic", b"none %d" % number)
        clusters.source.tell({})
        change(producer, 3)
        producer.publish("topic", b"none 300")
        assert producer.stats()["stored"] == 302
    until(lambda: len(old.bodies) + len(new.bodies) >= 301)
    assert len(set(new.of_key("none")) & set(range(100, 200))) == 25
    assert set(range(200, 300)) <= set(new.of_key("none"))
    assert {*range(100), 300} <= set(old.of_key("none"))
    assert set(old.of_key("none")) | set(new.of_key("none")) >= set(range(301))


def test_keys_move_as_a_whole_and_in_order(redesigned: Clusters, start_consumer: Callable[..., Consumer]) -> None:
    for number in (0, 1):
        redesigned.create(number)
    old, new = Taken(start_consumer, redesigned.old), Taken(start_consumer, redesigned.new)
    keys = [f"key{number}" for number in range(12)]
    sent: dict[str, int] = defaultdict(int)
    moves = [0.0, 30.0, 60.0, 100.0]
    with Producer(**redesigned.options) as producer:
        results = []
        for percent in moves:
            if percent:
                redesigned.move(percent, consume="old_first")
                until(lambda: percent_of(producer) == percent)  # noqa: B023
            for _ in range(50):
                for key in keys:
                    results.append(producer.publish_nowait("topic", b"%s %d" % (key.encode(), sent[key]), key=key))
                    sent[key] += 1
        joinall(results, raise_error=True)
        assert producer.stats()["stored"] == len(results)
    until(lambda: len(old.bodies) + len(new.bodies) == len(results))
    for key in keys:
        both = old.of_key(key) + new.of_key(key)
        assert both == list(range(sent[key])), key  # in order in the old one, then in the new one, no gap
    assert {bool(new.of_key(key)) for key in keys if bucket_of(key) < 30} == {True}


def test_a_key_waits_until_what_went_before_has_ended(
    redesigned: Clusters, start_consumer: Callable[..., Consumer]
) -> None:
    redesigned.create(1)
    old, new = Taken(start_consumer, redesigned.old), Taken(start_consumer, redesigned.new)
    with Producer(**redesigned.options, publish_timeout=60.0) as producer:
        before = producer.publish_nowait("topic", b"key 0", key="key")  # the old cluster does not have the topic yet
        redesigned.move(100)
        change(producer, 1)
        after = producer.publish_nowait("topic", b"key 1", key="key")
        free = producer.publish_nowait("topic", b"free 0")
        until(free.ready)
        redesigned.source.tell({})
        change(producer, 2)
        last = producer.publish_nowait("topic", b"key 2", key="key")
        with pytest.raises(NoNsqd, match="in another cluster before has not ended"):
            producer.publish("topic", b"key 9", key="key", block=False)
        holds(lambda: not before.ready() and not after.ready() and not last.ready())
        redesigned.create(0)
        joinall([before, after, last], raise_error=True)
    until(lambda: len(old.bodies) + len(new.bodies) == 4)
    assert (new.of_key("free"), sorted(old.of_key("key") + new.of_key("key"))) == ([0], [0, 1, 2])
    assert old.of_key("key")[0] == 0


def test_a_key_without_partition_in_the_new_cluster_is_refused_and_nothing_is_stuck(redesigned: Clusters) -> None:
    redesigned.create(0)
    with Broker() as plain:
        with Producer([plain.nsqd.tcp_address]) as creator:
            creator.publish("topic", b"first")
        redesigned.source.tell({"routes": {"topic": {"lookupds": [str(plain.lookupd.http_address)], "percent": 100}}})
        with Producer(**redesigned.options) as producer:
            producer.publish("topic", b"body")
            with pytest.raises(ConfigError, match="has no partitions"):
                producer.publish("topic", b"body", key="key")
            redesigned.source.tell({})
            change(producer, 2)
            producer.publish("topic", b"body", key="key")


def test_an_interrupted_caller_leaves_nothing_behind_in_the_new_cluster(redesigned: Clusters) -> None:
    redesigned.create(0)
    redesigned.move(100)
    with Producer(**redesigned.options, max_pending=2) as producer:
        callers = [spawn(producer.publish, "topic", b"body", key="key") for _ in range(2)]
        until(lambda: producer.stats()["held"] == 2)
        for caller in callers:
            caller.kill()
        assert producer.stats()["held"] == 0
        redesigned.create(1)
        producer.publish("topic", b"body", key="key")


def test_producers_of_threads_follow_routes(redesigned: Clusters, start_consumer: Callable[..., Consumer]) -> None:
    for number in (0, 1):
        redesigned.create(number)
    new = Taken(start_consumer, redesigned.new)
    path_options = {**redesigned.options, "config_source": _Fixed(redesigned.new)}
    done = Event()
    hub_result: list[Any] = []

    def publish() -> None:
        with threads.Producer(**path_options) as producer:
            hub_result.append(producer.publish("topic", b"none 1"))
        done.set()

    spawn(publish)
    until(done.is_set)
    until(lambda: new.of_key("none") == [1])
    assert hub_result == [b"OK"]


class _Fixed:
    """A source of one document, which blocks no thread but a greenlet of whoever asks."""

    def __init__(self, lookupds: list[str]) -> None:
        self._document = ConfigDocument({"routes": {"topic": {"lookupds": lookupds, "percent": 100}}}, 1)

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        if last is not None:
            Event().wait()
        return self._document
