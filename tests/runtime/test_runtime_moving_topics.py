"""A topic moves from one cluster to another while it is published to: nothing is lost, and no key is in two places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from gevent import joinall, spawn
from gevent.event import Event
from support.servers import RealLookupd, RealNsqd
from support.waiting import holds, until

from nsq_fast import ConfigDocument, Consumer, Producer, threads
from nsq_fast.broker import Broker, RedesignedCluster
from nsq_fast.errors import ConfigError, HttpError, NoNsqd
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


@pytest.fixture
def real(real_nsqd: Callable[..., RealNsqd], real_lookupd: Callable[..., RealLookupd]) -> Clusters:
    """Two clusters of an original nsqlookupd and nsqd each."""
    lookupds = [real_lookupd(), real_lookupd()]
    for lookupd in lookupds:
        real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    old, new = ([str(lookupd.http_address)] for lookupd in lookupds)
    return Clusters(old, new, Told(), lambda number: None)


@pytest.fixture(params=["original", "real", "redesigned"])
def clusters(request: pytest.FixtureRequest) -> Clusters:
    made: Clusters = request.getfixturevalue(request.param)
    for number in (0, 1):
        made.create(number)
    return made


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


def test_publishes_without_a_key_are_shared_out(
    clusters: Clusters, start_consumer: Callable[..., Consumer], request: pytest.FixtureRequest
) -> None:
    old, new = Taken(start_consumer, clusters.old), Taken(start_consumer, clusters.new)
    with Producer(**clusters.options) as producer:
        for number in range(100):
            producer.publish("topic", b"none %d" % number)
        clusters.move(25)
        change(producer, 1)
        for number in range(100, 200):
            producer.publish("topic", b"none %d" % number)
        has_partitions = "redesigned" in request.node.callspec.id
        producer.publish("topic" if has_partitions else "other", b"none 1000")
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


# Consumers


class Moving:
    """A consumer of the topic that follows the document, and what it has taken."""

    def __init__(self, start_consumer: Callable[..., Consumer], clusters: Clusters, **options: Any) -> None:
        self.bodies: list[bytes] = []
        self.consumer = start_consumer(
            "topic",
            "channel",
            message_handler=lambda _, message: self.bodies.append(message.body),
            **{**clusters.options, **options},
        )

    def ports(self) -> set[int]:
        return {each.address.port for each in self.consumer.stats().connections if each.is_connected}


def fill(lookupds: list[str], first: int, last: int, **where: Any) -> None:
    with Producer(lookupd_http_addresses=lookupds) as producer:
        for number in range(first, last):
            producer.publish("topic", b"none %d" % number, **where)


def numbers(bodies: list[bytes]) -> list[int]:
    return [int(body.split()[1]) for body in bodies]


def test_both_clusters_are_consumed_until_the_old_one_is_empty(
    clusters: Clusters,
    start_consumer: Callable[..., Consumer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("nsq_fast.runtime.consuming.moved_topics.LOOK_INTERVAL", 0.05)
    fill(clusters.old, 0, 100)
    fill(clusters.new, 100, 200)
    moving = Moving(start_consumer, clusters)
    until(lambda: len(moving.bodies) == 100)
    old_ports = moving.ports()
    clusters.move(50)
    until(lambda: len(moving.bodies) == 200)
    assert old_ports < moving.ports()
    clusters.move(100)
    until(lambda: moving.ports() and not old_ports & moving.ports())
    assert "topic topic is consumed from its new cluster only" in caplog.text
    fill(clusters.new, 200, 250)
    until(lambda: len(moving.bodies) == 250)
    fill(clusters.old, 250, 260)  # somebody who has not read the document
    until(lambda: len(moving.bodies) == 260)
    assert "is consumed from its old cluster again" in caplog.text
    until(lambda: not old_ports & moving.ports())
    clusters.source.tell({})
    until(lambda: moving.ports() == old_ports)
    assert sorted(numbers(moving.bodies)) == list(range(260))
    assert moving.consumer.stats().totals.finished == 260


def test_the_order_of_keys_that_move_is_kept_where_the_old_cluster_comes_first(
    redesigned: Clusters, start_consumer: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsq_fast.runtime.consuming.moved_topics.LOOK_INTERVAL", 0.05)
    for number in (0, 1):
        redesigned.create(number)
    keys = [f"key{number}" for number in range(8)]
    redesigned.move(0, consume="old_first")
    moving = Moving(start_consumer, redesigned, ordered=True)
    sent: dict[str, int] = defaultdict(int)
    with Producer(**redesigned.options) as producer:
        for percent in (0.0, 50.0, 100.0):
            redesigned.move(percent, consume="old_first")
            until(lambda: percent_of(producer) == percent)  # noqa: B023
            for _ in range(20):
                for key in keys:
                    producer.publish("topic", b"%s %d" % (key.encode(), sent[key]), key=key)
                    sent[key] += 1
    until(lambda: len(moving.bodies) == sum(sent.values()))
    for key in keys:
        assert [int(body.split()[1]) for body in moving.bodies if body.split()[0] == key.encode()] == list(range(60))
    assert moving.consumer.stats().order_violations == 0


def test_only_the_new_cluster_is_consumed_where_the_document_says_so(
    redesigned: Clusters, start_consumer: Callable[..., Consumer]
) -> None:
    for number in (0, 1):
        redesigned.create(number)
    fill(redesigned.old, 0, 10)
    fill(redesigned.new, 10, 20)
    redesigned.move(100, consume="new")
    moving = Moving(start_consumer, redesigned)
    until(lambda: len(moving.bodies) == 10)
    assert set(numbers(moving.bodies)) == set(range(10, 20))
    redesigned.source.tell({})
    until(lambda: len(moving.bodies) == 20)


def test_that_keys_lose_their_order_is_said(
    redesigned: Clusters, start_consumer: Callable[..., Consumer], caplog: pytest.LogCaptureFixture
) -> None:
    for number in (0, 1):
        redesigned.create(number)
    redesigned.move(50)
    Moving(start_consumer, redesigned, ordered=True)
    until(lambda: "may be handled out of order" in caplog.text)


def test_a_consumer_without_lookup_refuses_routes(original: Clusters, start_consumer: Callable[..., Consumer]) -> None:
    original.move(100)
    consumer = start_consumer(
        "topic",
        "channel",
        ["127.0.0.1:1"],
        message_handler=lambda *_: None,
        config_source=original.source,
    )
    until(lambda: (consumer.stats().config or {}).get("refused") == 1)
    assert "cannot leave its nsqds" in (consumer.stats().config or {})["refusal"]


def test_an_old_cluster_that_cannot_be_asked_is_not_taken_for_empty(
    redesigned: Clusters,
    start_consumer: Callable[..., Consumer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("nsq_fast.runtime.consuming.moved_topics.LOOK_INTERVAL", 0.05)

    def refuse(*_: Any, **__: Any) -> Any:
        raise HttpError("http://nsqd/stats", 500, "no")

    monkeypatch.setattr("nsq_fast.runtime.admin.NsqdHTTPClient.stats", refuse)
    for number in (0, 1):
        redesigned.create(number)
    redesigned.move(100)
    moving = Moving(start_consumer, redesigned)
    # two partitions in each cluster
    until(lambda: sum(each.is_connected for each in moving.consumer.stats().connections) == 4)
    until(lambda: "it cannot be told whether that is empty" in caplog.text)
    before = moving.ports()
    holds(lambda: moving.ports() == before, 0.3)
    assert caplog.text.count("it cannot be told") == 1
