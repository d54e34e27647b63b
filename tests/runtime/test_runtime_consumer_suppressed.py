"""``suppress_retried``: copies that a second attempt at a write has published are finished unhandled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.partitions import PartitionNsqd, answers, push_record, topology
from support.waiting import until

from nsq_fast import Consumer, Message
from nsq_fast.client.give_up import PublishTo
from nsq_fast.errors import ConfigError
from nsq_fast.protocol.publishing import IDEMPOTENCE_HEADER

CONSUME = {"topic": "t", "channel": "c", "requeue_delay": 1}
NSQD = PartitionNsqd

Consume = Callable[..., Consumer]


def header(key: object) -> bytes:
    return json.dumps({"n": 1, IDEMPOTENCE_HEADER: key}).encode()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_copy_is_finished_and_no_handler_sees_it(nsqd: PartitionNsqd, consume: Consume, ordered: bool) -> None:
    seen: list[bytes] = []
    consumer = consume(
        lambda _, message: seen.append(message.body),
        found=topology({0: nsqd}, extend_support=True, ordered=ordered),
        suppress_retried=100,
    )
    connection = nsqd.subscriber(0)
    for sequence, ext in enumerate((header("a"), header("b"), header("a"), b"", header("b"), b'{"n":1}'), 1):
        push_record(connection, sequence, body=b"%d" % sequence, ext=ext)
    connection.wait_for(lambda: sorted(answers(connection, b"FIN")) == [1, 2, 3, 4, 5, 6])
    assert seen == [b"1", b"2", b"4", b"6"]
    until(lambda: consumer.stats().totals.finished == 6)
    assert (consumer.stats().totals.suppressed, consumer.stats().totals.skipped) == (2, 0)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_message_that_is_delivered_again_is_no_copy_of_itself(
    nsqd: PartitionNsqd, consume: Consume, ordered: bool
) -> None:
    """Its handler failed, or its time was over: nobody has handled it yet."""
    seen: list[int] = []

    def handle(consumer: Consumer, message: Message) -> None:
        seen.append(message.attempts)
        if message.attempts == 1:
            raise ValueError("once")

    consume(handle, found=topology({0: nsqd}, extend_support=True, ordered=ordered), suppress_retried=100)
    connection = nsqd.subscriber(0)
    push_record(connection, 1, ext=header("a"))
    connection.wait_for(lambda: answers(connection, b"REQ") == [1])
    push_record(connection, 1, attempts=2, ext=header("a"))
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    assert seen == [1, 2]


def test_partitions_share_the_keys(consume: Consume) -> None:
    """A second attempt may publish a row to another partition."""
    nsqds = [PartitionNsqd(), PartitionNsqd()]
    seen: list[Any] = []
    try:
        consume(
            lambda _, message: seen.append(message.partition),
            found=topology(dict(enumerate(nsqds)), extend_support=True),
            suppress_retried=100,
        )
        for partition in (1, 0):
            connection = nsqds[partition].subscriber(partition)
            push_record(connection, 5, ext=header("a"))
            connection.wait_for(lambda connection=connection: answers(connection, b"FIN") == [5])
    finally:
        for each in nsqds:
            each.stop()
    assert seen == [1]


@pytest.mark.parametrize("key", [None, 7, ["a"], {"a": 1}, True])
def test_what_is_no_key_suppresses_nothing(nsqd: PartitionNsqd, consume: Consume, key: object) -> None:
    seen: list[bytes] = []
    consume(
        lambda _, message: seen.append(message.body),
        found=topology({0: nsqd}, extend_support=True),
        suppress_retried=100,
    )
    connection = nsqd.subscriber(0)
    for sequence in (1, 2):
        push_record(connection, sequence, body=b"%d" % sequence, ext=header(key))
    connection.wait_for(lambda: sorted(answers(connection, b"FIN")) == [1, 2])
    assert seen == [b"1", b"2"]


def test_without_the_option_and_beyond_the_window_copies_are_handled(nsqd: PartitionNsqd, consume: Consume) -> None:
    seen: dict[int, list[bytes]] = {0: [], 1: []}
    for window, found in seen.items():
        consume(
            lambda _, message, found=found: found.append(message.body),
            found=topology({window: nsqd}, extend_support=True),
            suppress_retried=window,
        )
        connection = nsqd.subscriber(window)
        for sequence, key in enumerate("aabba", 1):
            push_record(connection, sequence, body=key.encode(), ext=header(key))
        connection.wait_for(lambda connection=connection: sorted(answers(connection, b"FIN")) == [1, 2, 3, 4, 5])
    assert seen == {0: [b"a", b"a", b"b", b"b", b"a"], 1: [b"a", b"b", b"a"]}


def test_a_batch_handler_gets_no_copies(nsqd: PartitionNsqd, consume: Consume) -> None:
    seen: list[bytes] = []
    consume(
        None,
        found=topology({0: nsqd}, extend_support=True),
        batch_handler=lambda _, messages: seen.extend(each.body for each in messages),
        suppress_retried=100,
    )
    connection = nsqd.subscriber(0)
    for sequence, key in enumerate("abab", 1):
        push_record(connection, sequence, body=b"%d" % sequence, ext=header(key))
    connection.wait_for(lambda: sorted(answers(connection, b"FIN")) == [1, 2, 3, 4])
    assert seen == [b"1", b"2"]


class Published:
    """Stands for a producer."""

    def __init__(self) -> None:
        self.headers: list[Any] = []

    def publish(self, topic: str, body: bytes, **place: Any) -> None:
        self.headers.append(place["headers"])


def test_a_message_that_is_put_to_the_end_of_its_topic_is_no_copy_of_itself(
    nsqd: PartitionNsqd, consume: Consume
) -> None:
    producer = Published()
    consume(
        lambda _, message: None,
        found=topology({0: nsqd}, extend_support=True),
        give_up=PublishTo(producer=producer),
        max_tries=1,
    )
    connection = nsqd.subscriber(0)
    push_record(connection, 1, attempts=2, ext=header("a"))
    connection.wait_for(lambda: answers(connection, b"FIN") == [1])
    assert producer.headers == [{"n": 1}]


@pytest.mark.parametrize("has_headers", [False, True])
@pytest.mark.parametrize("option", [{"suppress_retried": 10}, {"skip_header": "test"}])
def test_a_topic_whose_messages_have_no_headers_is_told_of_once(
    consume: Consume, option: dict[str, Any], has_headers: bool, caplog: pytest.LogCaptureFixture
) -> None:
    nsqds = [PartitionNsqd(), PartitionNsqd()]
    try:
        consume(lambda _, message: None, found=topology(dict(enumerate(nsqds)), extend_support=has_headers), **option)
        for partition, nsqd in enumerate(nsqds):
            connection = nsqd.subscriber(partition)
            push_record(connection, 1, ext=b"" if has_headers else None)
            connection.wait_for(lambda connection=connection: answers(connection, b"FIN") == [1])
    finally:
        for each in nsqds:
            each.stop()
    (name,) = option
    told = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "option_idle"]
    assert len(told) == (0 if has_headers else 1), told
    assert all(each.startswith(f"{name}: has no effect on topic t") for each in told)


def test_a_window_below_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="suppress_retried=-1"):
        Consumer("t", "c", "127.0.0.1:4150", suppress_retried=-1)
