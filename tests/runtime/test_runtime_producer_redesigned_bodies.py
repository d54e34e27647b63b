"""Publishing: compressed bodies, a result for each message of a batch, and partitions by a function of the user's."""

from __future__ import annotations

import logging
import os
import pickle
from typing import Any

import pytest
from gevent.event import Event
from support.partitions import topology
from support.publishing import REDESIGNED, LookupProducers, Nsqds, Producers, agree, receipt
from support.waiting import until

from nsq_fast import Consumer, Producer, Receipt, errors
from nsq_fast._codec import Message
from nsq_fast.broker.redesigned.cluster import RedesignedCluster
from nsq_fast.client.subscription import decompressed
from nsq_fast.config import ProducerConfig
from nsq_fast.protocol.partitioner import key_partitioner

BODY = b"a body that repeats itself, " * 100
CODECS = {"gzip": "1", "snappy": "2", "lz4": "3"}
NOISE = os.urandom(3000)


def lookupds(cluster: RedesignedCluster) -> list[str]:
    return [str(lookupd.http_address) for lookupd in cluster.lookupds]


def known(producer: Producer, topic: str) -> None:
    """Let the producer learn from lookup what the topic is."""
    assert producer.publish(topic, b"first") == b"OK"


# Compression


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_compressed_arrives_as_it_was(cluster: RedesignedCluster, codec: str, ordered: bool) -> None:
    cluster.create_topic("t", 1, 1, ext=True, ordered=ordered, channels=["ch"])
    seen: list[tuple[bytes, dict[str, Any]]] = []
    with Producer(lookupd_http_addresses=lookupds(cluster), body_compression=codec) as producer:
        producer.publish("t", b"first", partition=0)
        receipt_of_one = producer.publish("t", BODY, partition=0, headers={"k": "v"}, trace_id=9)
        producer.publish("t", b"small", partition=0)
        producer.publish("t", NOISE, partition=0)
        producer.multipublish("t", [BODY, b"small", BODY * 2], partition=0, tag="red")
        producer.multipublish("t", [b"small", BODY], partition=0)
        pipelined = [producer.publish_nowait("t", BODY, partition=0) for _ in range(3)]
        assert [result.get(timeout=30) for result in pipelined] == [b"OK"] * 3
    records = cluster.partition("t", 0).log.read(0, 1_000_000)
    stored_bodies = [len(record.body) for record in records]
    assert stored_bodies[:4:3] == [5, len(NOISE)]  # what is small, or does not become smaller, is sent as it is
    assert all(size < len(BODY) / 3 for size in (stored_bodies[1], stored_bodies[4], stored_bodies[8]))
    assert isinstance(receipt_of_one, Receipt)
    assert (receipt_of_one.internal_id, receipt_of_one.size) == (records[1].internal_id, records[1].size)
    is_done = Event()

    def handle(consumer: Consumer, message: Any) -> None:
        seen.append((message.body, dict(message.headers)))
        if len(seen) == len(records):
            is_done.set()

    for record in records:
        if record.header and b"compress" in record.header:
            assert b'"nsq.client.compress":"%s"' % CODECS[codec].encode() in record.header
    consumer = Consumer("t", "ch", lookupd_http_addresses=lookupds(cluster), message_handler=handle)
    consumer.start(block=False)
    try:
        assert is_done.wait(30)
    finally:
        consumer.close()
    bodies = [b"first", BODY, b"small", NOISE, BODY, b"small", BODY * 2, b"small", BODY, BODY, BODY, BODY]
    assert sorted(body for body, _ in seen) == sorted(bodies)
    assert ("v", "9") in [(headers.get("k"), headers.get("##trace_id")) for _, headers in seen]


GO_BODY = b"hello, hello, hello, " * 10
GO_COMPRESSED = {
    "1": "1f8b08000000000000ffca48cdc9c9d751184614200000ffff4bc0699cd2000000",
    "2": "d2011868656c6c6f2c20fe0700fe0700fe07001d07",
    "3": "7f68656c6c6f2c200700a200b600010700d0656c6c6f2c2068656c6c6f2c20",
}
"""What youzan's Go client (fc140f84) makes of that body, by the number of the codec."""


@pytest.mark.parametrize("number", GO_COMPRESSED)
def test_what_the_go_client_compressed_is_read(number: str) -> None:
    header = b'{"nsq.client.compress":"%s","nsq.msg.size":"%d"}' % (number.encode(), len(GO_BODY))
    message = Message(1, 1, b"i" * 16, bytes.fromhex(GO_COMPRESSED[number]), ext=header)
    assert decompressed(message, 1000).body == GO_BODY


def test_a_topic_without_headers_gets_bodies_as_they_are_and_a_warning(
    cluster: RedesignedCluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.create_topic("t", 1, 1, channels=["ch"])
    with (
        caplog.at_level(logging.WARNING),
        Producer(lookupd_http_addresses=lookupds(cluster), body_compression="gzip") as producer,
    ):
        known(producer, "t")
        producer.publish("t", BODY)
        producer.multipublish("t", [BODY, BODY])
    bodies = [record.body for record in cluster.partition("t", 0).log.read(0, 1_000_000)]
    assert bodies == [b"first", BODY, BODY, BODY]
    assert caplog.text.count("bodies are not compressed") == 1


def test_original_servers_get_bodies_as_they_are(publish_nsqd: Nsqds, new_producer: Producers) -> None:
    nsqd = publish_nsqd()
    sender = new_producer(nsqd, body_compression="snappy")
    assert sender.publish("t", BODY) == b"OK"
    assert nsqd.bodies == [BODY]


def test_what_is_passed_on_compressed_is_not_compressed_again(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd}, extend_support=True), body_compression="gzip")
    known(sender, "t")
    sender.publish("t", BODY, headers={"nsq.client.compress": "2", "nsq.msg.size": "5000"})
    assert nsqd.bodies[-1] == BODY


def test_a_traced_batch_keeps_its_receipts_and_is_not_compressed(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd}, extend_support=True), body_compression="gzip")
    known(sender, "t")
    nsqd.answer = lambda peer, command: peer.frame(0, receipt(1, 0, 0, 2 * (30 + len(BODY))))
    receipts = sender.multipublish("t", [BODY, BODY], trace_id=[1, 2])
    assert [each.trace_id for each in receipts] == [1, 2]
    assert nsqd.bodies[-2:] == [BODY, BODY]


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="body_compression='zip': must be one of gzip, snappy, lz4, or None"):
        ProducerConfig(body_compression="zip")


# A result for each message of a batch


def test_the_error_of_a_batch_that_was_cut_says_what_became_of_each_message(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    def answer(peer: Any, command: Any) -> None:
        peer.frame(1, b"E_PUB_FAILED no space") if b"bad" in command.bodies[0] else agree(peer, command)

    nsqd = publish_nsqd(answer, version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd}), max_body_size=64, max_publish_attempts=1)
    bodies = [b"1" * 20, b"2" * 20, b"bad" * 7, b"4" * 20, b"5" * 20]
    with pytest.raises(errors.PublishFailed) as caught:
        sender.multipublish("t", bodies)
    results = caught.value.results
    assert results is not None
    assert [result if result == b"OK" else type(result).__mro__[1] for result in results] == [
        b"OK", b"OK", errors.PublishRefused, errors.PublishRefused, b"OK",
    ]  # fmt: skip
    assert caught.value.possibly_stored
    again = pickle.loads(pickle.dumps(caught.value))
    assert len(again.results) == 5
    assert again.results[2] is again


def test_a_batch_of_one_command_fails_as_a_whole(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    nsqd = publish_nsqd(lambda peer, command: peer.frame(1, b"E_MPUB_FAILED no space"), version=REDESIGNED)
    sender, _ = lookup_producer(topology({0: nsqd}), max_publish_attempts=1)
    result = sender.multipublish("t", [b"a", b"b", b"c"], raise_error=False)
    with pytest.raises(errors.PublishFailed) as caught:
        result.get(timeout=30)
    assert caught.value.results == [caught.value] * 3
    with pytest.raises(errors.PublishFailed) as caught:
        sender.publish("t", b"one")
    assert caught.value.results is None


def test_a_batch_of_which_a_part_was_never_sent_says_that_the_rest_is_stored(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds
) -> None:
    nsqd = publish_nsqd(version=REDESIGNED)
    sender, lookup = lookup_producer(topology({0: nsqd}), max_body_size=64, publish_timeout=60.0)
    known(sender, "t")

    def store_one_and_leave(peer: Any, command: Any) -> None:
        peer.ok()
        nsqd.stop()

    nsqd.answer = store_one_and_leave
    result = sender.multipublish("t", [b"1" * 40, b"2" * 40], key="k", timeout=1.0, raise_error=False)
    with pytest.raises(errors.PublishFailed) as caught:
        result.get(timeout=30)
    assert caught.value.possibly_stored
    assert caught.value.results is not None
    assert caught.value.results[0] == b"OK"
    assert isinstance(caught.value.results[1], errors.NsqError)
    assert lookup.refreshed


# A function of one's own


def test_keys_go_where_a_function_of_the_user_says(lookup_producer: LookupProducers, publish_nsqd: Nsqds) -> None:
    leaders = {number: publish_nsqd(version=REDESIGNED) for number in range(3)}
    asked: list[int] = []

    def by_shop(key: Any, partition_num: int) -> int:
        asked.append(partition_num)
        return key["shop"] % partition_num if isinstance(key, dict) else len(key) % partition_num

    sender, _ = lookup_producer(topology(leaders), key_strategy=by_shop)
    for _ in range(2):  # before lookup has answered, and then
        sender.publish("t", b"shop 4", key={"shop": 4})
        sender.publish("t", b"name", key="four")
        sender.multipublish("t", [b"batch"], key={"shop": 5})
    assert leaders[1].bodies == [b"shop 4", b"name"] * 2
    assert leaders[2].bodies == [b"batch"] * 2
    assert set(asked) == {3}


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda key, count: count, "is 3: must be a whole number, 0 to 2"),
        (lambda key, count: "1", "is '1': must be a whole number"),
        (lambda key, count: True, "is True: must be"),
        (lambda key, count: -1, "is -1: must be"),
        (lambda key, count: 1 // 0, "failed: ZeroDivisionError"),
    ],
)
def test_what_such_a_function_does_wrong_is_told(
    lookup_producer: LookupProducers, publish_nsqd: Nsqds, function: Any, text: str
) -> None:
    sender, _ = lookup_producer(
        topology({number: publish_nsqd(version=REDESIGNED) for number in range(3)}), key_strategy=function
    )
    for _ in range(2):
        with pytest.raises(errors.ConfigError, match=text):
            sender.publish("t", b"x", key="k")
        assert sender.publish("t", b"free") == b"OK"
    until(lambda: sender.stats()["held"] == 0)


def test_a_name_that_is_no_strategy_is_refused() -> None:
    with pytest.raises(errors.ConfigError, match="key_strategy='md5': must be one of murmur3, hashcode"):
        ProducerConfig(key_strategy="md5")
    with pytest.raises(errors.ConfigError):
        ProducerConfig(key_strategy=5)
    assert key_partitioner(lambda key, count: 0)("k", 4) == 0
