"""Closing while real servers do not answer: the timeout holds for all of it, however many servers there are."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest
from support.waiting import WAIT, until

from nsq_fast import Consumer, Producer
from nsq_fast.errors import PublishFailed

SERVERS = 6
SLACK = 8.0
"""Seconds: a machine that is busy. Before, each server added two."""


def test_a_consumer_of_frozen_servers(real_nsqd: Callable[..., Any]) -> None:
    servers = [real_nsqd() for _ in range(SERVERS)]
    bodies: list[bytes] = []
    consumer = Consumer(
        "topic",
        "channel",
        [str(server.tcp_address) for server in servers],
        message_handler=lambda _, message: bodies.append(message.body),
        max_in_flight=30,
    )
    consumer.start(block=False)
    for server in servers:
        with Producer(str(server.tcp_address)) as producer:
            producer.publish("topic", b"x")
    until(lambda: len(bodies) == SERVERS)
    for server in servers:
        server.freeze()
    began = monotonic()
    consumer.close(timeout=2)
    assert monotonic() - began < 2 + SLACK
    for server in servers:
        server.thaw()


@pytest.mark.parametrize("drain", [True, False])
def test_a_consumer_of_frozen_servers_that_has_no_time(real_nsqd: Callable[..., Any], drain: bool) -> None:
    servers = [real_nsqd() for _ in range(SERVERS)]
    consumer = Consumer(
        "topic", "channel", [str(server.tcp_address) for server in servers], message_handler=lambda *_: None
    )
    consumer.start(block=False)
    until(lambda: sum(each.is_connected for each in consumer.subscribers) == SERVERS)
    for server in servers:
        server.freeze()
    began = monotonic()
    consumer.close(drain=drain, timeout=0)
    assert monotonic() - began < SLACK
    for server in servers:
        server.thaw()


def test_a_producer_of_frozen_servers(real_nsqd: Callable[..., Any]) -> None:
    servers = [real_nsqd() for _ in range(SERVERS)]
    producer = Producer([str(server.tcp_address) for server in servers])
    producer.start()
    for _ in range(10):
        producer.publish("topic", b"x")
    for server in servers:
        server.freeze()
    result = producer.publish_nowait("topic", b"x")
    began = monotonic()
    producer.close(timeout=0.5)
    assert monotonic() - began < 0.5 + SLACK
    with pytest.raises(PublishFailed):
        result.get(timeout=WAIT)
    for server in servers:
        server.thaw()
