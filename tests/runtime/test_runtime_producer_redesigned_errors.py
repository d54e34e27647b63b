"""What a publish to the redesigned NSQ fails with: the cause is named; what can be known at once is said at once."""

from __future__ import annotations

import logging
from typing import Any
from urllib.request import Request, urlopen

import gevent
import pytest
from support.cluster import Standalone
from support.partitions import topology
from support.publishing import REDESIGNED, LookupProducers, Nsqds, agree, stay_mute
from support.waiting import until
from support.wire import WireClient

from nsq_fast import Producer, errors
from nsq_fast.broker.redesigned.cluster import RedesignedCluster

LONG = 600.0
"""Seconds: the timeout of publishes that are expected to fail long before it."""
LARGEST = 10_000


def producer_of(cluster: RedesignedCluster, **options: Any) -> Producer:
    lookupds = [str(lookupd.http_address) for lookupd in cluster.lookupds]
    return Producer(lookupd_http_addresses=lookupds, lookupd_refresh_interval=0.05, **options)


# What lookup says


def test_a_topic_that_does_not_exist_is_an_error_long_before_the_timeout(cluster: RedesignedCluster) -> None:
    with producer_of(cluster) as producer:
        for arguments in ({}, {"key": "k"}, {"partition": 0}):
            with pytest.raises(errors.NoNsqd, match=r"topic 'absent' does not exist \(lookup says: Key not found\)"):
                producer.publish("absent", b"x", timeout=LONG, **arguments)
        with pytest.raises(errors.NoNsqd, match="create it, or mend the name"):
            producer.multipublish("absent", [b"x", b"y"], timeout=LONG)
        assert producer.stats()["held"] == producer.stats()["waiting"] == 0
        cluster.create_topic("absent", 2, 1, channels=["ch"])
        until(lambda: _is_stored(producer, "absent"))


def _is_stored(producer: Producer, topic: str) -> bool:
    try:
        return producer.publish(topic, b"x", timeout=LONG) == b"OK"
    except errors.NoNsqd:
        return False


def test_a_topic_that_is_just_being_created_is_waited_for(cluster: RedesignedCluster) -> None:
    with producer_of(cluster) as producer:
        result = producer.publish_nowait("new", b"x", timeout=LONG)
        until(lambda: producer.stats()["waiting"] == 1)
        cluster.create_topic("new", 2, 1, channels=["ch"])
        assert result.get(timeout=30) == b"OK"


def test_a_topic_without_a_channel_is_named_and_waited_for(
    cluster: RedesignedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic("bare", 2, 1)
    with producer_of(cluster) as producer, caplog.at_level(logging.WARNING):
        result = producer.publish_nowait("bare", b"x", timeout=LONG)
        until(lambda: "publishes to topic bare wait for an nsqd: lookup names no partition" in caplog.text)
        with pytest.raises(errors.NoNsqd, match="Topic has no channel, should init at least one"):
            producer.publish("bare", b"x", timeout=0.3)
        with pytest.raises(errors.NoNsqd, match="Topic has no channel"):
            producer.publish("bare", b"x", block=False)
        assert not result.ready()
        for number in range(2):
            cluster.partition("bare", number).channel("ch")
        assert result.get(timeout=30) == b"OK"


# What servers said last


@pytest.mark.parametrize("arguments", [{"key": "k"}, {}], ids=["key", "no key"])
@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (b"E_FAILED_ON_NOT_LEADER ", errors.NotLeader),
        (b"E_FAILED_ON_NOT_WRITABLE ", errors.NotWritable),
        (b"E_PUB_FAILED exiting", errors.PubFailed),
    ],
)
def test_a_timeout_names_the_last_refusal_and_whom_lookup_names(
    lookup_producer: LookupProducers,
    publish_nsqd: Nsqds,
    refusal: bytes,
    kind: type[errors.ServerError],
    arguments: dict[str, str],
) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd}), publish_timeout=LONG, retry_max_delay=0.01)
    assert sender.publish("t", b"first", **arguments) == b"OK"
    nsqd.answer = lambda peer, command: peer.frame(1, refusal)
    error, timeout = errors.PublishTimeout(""), 0.1
    while error.attempts < 3:
        timeout *= 2
        with pytest.raises(errors.PublishTimeout) as caught:
            sender.publish("t", b"x", timeout=timeout, **arguments)
        error = caught.value
    assert isinstance(error.__cause__, kind)
    assert f"after {error.attempts} attempts, the last failure: {refusal.decode().strip()}" in str(error)
    assert f"lookup names {nsqd.address} as the leader" in str(error)
    assert error.possibly_stored or kind is not errors.NotWritable


def test_a_timeout_says_who_has_not_replied(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd}), publish_timeout=LONG)
    assert sender.publish("t", b"first", key="k") == b"OK"
    nsqd.answer = stay_mute
    sent = sender.publish_nowait("t", b"x", key="k", timeout=0.5)
    behind = sender.publish_nowait("t", b"y", key="k", timeout=0.5)
    gevent.joinall([sent, behind], timeout=30)
    assert f"no reply before its deadline, from {nsqd.address}; it may have been stored" in str(sent.exception)
    assert "its time was over before it was sent" in str(behind.exception)
    assert not behind.exception.possibly_stored


# What is wrong in itself


def test_the_largest_body_of_an_extended_topic_leaves_room_for_its_record(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    nsqd = publish_nsqd(agree, version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd}, extend_support=True), max_msg_size=LARGEST)
    assert sender.publish("t", b"first") == b"OK"
    header = len(b'{"a":1}')
    for size, arguments in ((LARGEST - 1, {}), (LARGEST - 1 - 2 - header, {"headers": {"a": 1}})):
        assert sender.publish("t", b"x" * size, **arguments) == b"OK"
        assert sender.multipublish("t", [b"x" * size], **arguments) == b"OK"
        before = len(nsqd.commands)
        for call in (
            lambda size=size, more=arguments: sender.publish("t", b"x" * (size + 1), **more),
            lambda size=size, more=arguments: sender.multipublish("t", [b"x" * (size + 1)], **more),
            lambda size=size, more=arguments: sender.publish_nowait("t", b"x" * (size + 1), **more),
        ):
            with pytest.raises(errors.BodyInvalid, match="less the 1 byte that an extended topic's records need"):
                call()
        assert len(nsqd.commands) == before


@pytest.mark.parametrize("call", ["publish", "multipublish"])
@pytest.mark.parametrize(
    ("room", "arguments"), [(0, {}), (0, {"key": "k"}), (2 + len(b'{"a":1}'), {"headers": {"a": 1}})], ids=str
)
def test_a_body_too_large_for_its_record_is_refused_from_the_first_publish_on(
    cluster: RedesignedCluster, call: str, room: int, arguments: dict[str, Any]
) -> None:
    cluster.create_topic("t", 2, 1, channels=["ch"], ext=True)

    def publish(size: int) -> object:
        body = b"x" * size
        return getattr(producer, call)("t", body if call == "publish" else [body], timeout=LONG, **arguments)

    with producer_of(cluster, max_msg_size=LARGEST) as producer:
        for _ in range(2):  # before it is known what the topic is, and then
            with pytest.raises(errors.BodyInvalid, match="less the 1 byte that an extended topic's records need"):
                publish(LARGEST - room)
        assert publish(LARGEST - room - 1) == b"OK"


def test_the_largest_body_follows_what_lookup_says(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(agree, version=REDESIGNED)
    sender, lookup = lookup_producer(topology({0: nsqd}), max_msg_size=LARGEST)
    assert sender.publish("t", b"first") == b"OK"
    for _ in range(2):  # answers of lookupds that do not agree at once
        lookup.tell(topology({0: nsqd}, extend_support=True))
        assert sender.publish("t", b"x" * (LARGEST - 1)) == b"OK"
        with pytest.raises(errors.BodyInvalid, match="less the 1 byte"):
            sender.publish("t", b"x" * LARGEST)
        lookup.tell(topology({0: nsqd}))
        assert sender.publish("t", b"x" * LARGEST) == b"OK"


def test_headers_on_a_topic_without_them_are_refused_from_the_first_publish_on(cluster: RedesignedCluster) -> None:
    cluster.create_topic("t", 2, 1, channels=["ch"])
    for arguments in ({"headers": {"a": 1}}, {"tag": "red"}):
        for more in ({}, {"key": "k"}):
            with producer_of(cluster) as producer:
                for _ in range(2):  # before it is known what the topic is, and then
                    with pytest.raises(errors.ConfigError, match="headers, tag: topic 't' carries no extended headers"):
                        producer.publish("t", b"x", timeout=LONG, **arguments, **more)
                    with pytest.raises(errors.ConfigError, match="carries no extended headers"):
                        producer.multipublish("t", [b"x", b"y"], timeout=LONG, **arguments, **more)
                assert producer.publish("t", b"plain", timeout=LONG) == b"OK"
    assert {record.body for number in range(2) for record in cluster.partition("t", number).log.read(0, 99_999)} == {
        b"plain"
    }


def upgrade(cluster: RedesignedCluster, topic: str) -> None:
    """Give a topic extended headers, as an operator does."""
    url = f"http://{cluster.lookupds[0].http_address}/topic/meta/update?topic={topic}&upgradeext=true"
    pool = gevent.get_hub().threadpool  # the cluster runs in this thread
    with pool.apply(urlopen, (Request(url, method="POST"),)) as reply:
        assert reply.status == 200


@pytest.mark.parametrize("more", [{}, {"key": "k"}])
def test_a_topic_that_has_just_got_headers_takes_them(cluster: RedesignedCluster, more: dict[str, str]) -> None:
    for name, extras in {"t": {"headers": {"a": 1}}, "u": {"tag": "red"}}.items():
        cluster.create_topic(name, 2, 1, channels=["ch"])
        with producer_of(cluster) as producer:
            assert producer.publish(name, b"plain", timeout=LONG) == b"OK"
            upgrade(cluster, name)
            assert producer.publish(name, b"with headers", timeout=LONG, **extras, **more) == b"OK"
        records = [record.body for each in range(2) for record in cluster.partition(name, each).log.read(0, 99_999)]
        assert sum(b"with headers" in body for body in records) == 1


def test_other_topics_take_a_body_of_the_whole_size(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(agree, version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd}), max_msg_size=LARGEST)
    for _ in range(2):
        assert sender.publish("t", b"x" * LARGEST) == b"OK"
    with pytest.raises(errors.BodyInvalid, match=rf"above max_msg_size={LARGEST}$"):
        sender.publish("t", b"x" * (LARGEST + 1))


def test_a_body_too_large_for_its_record_fails_at_once_on_a_real_server(standalone_nsqd: Standalone) -> None:
    client = WireClient(standalone_nsqd.tcp_address)
    assert client.command(b"INTERNAL_CREATE_TOPIC ext 0 true\n") == b"OK"
    client.close()
    largest = 1024 * 1024  # nsqd's default
    with Producer([standalone_nsqd.tcp_address], publish_timeout=60.0) as producer:
        assert producer.publish("ext", b"x" * (largest - 1), partition=0) == b"OK"
        with pytest.raises(errors.PubFailed, match=r"failed after 1 attempt: E_PUB_FAILED .*write size") as caught:
            producer.publish("ext", b"x" * largest, partition=0)
        assert not caught.value.possibly_stored
        assert producer.publish("ext", b"after", partition=0) == b"OK"
