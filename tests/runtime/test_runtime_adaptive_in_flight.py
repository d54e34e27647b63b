"""adaptive_in_flight: fewer messages are asked for while they take long, and more again when they do not."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import gevent
import pytest
from support.waiting import until

from nsq_fast import Consumer, Message, Producer

Factory = Callable[..., Any]
MOST = 400


class Backend:
    """What messages wait for after their handlers have returned: it takes one after the other."""

    def __init__(self) -> None:
        self.at_once = 1
        self.done = 0
        self._waiting: deque[Message] = deque()
        self._greenlet = gevent.spawn(self._run)

    def handle(self, consumer: Consumer, message: Message) -> None:
        message.enable_async()
        self._waiting.append(message)

    def _run(self) -> None:
        while True:
            gevent.sleep(0.01)  # sleep: the work that a message is
            for _ in range(self.at_once):
                if self._waiting and not (message := self._waiting.popleft()).has_expired():
                    message.finish()
                    self.done += 1

    def stop(self) -> None:
        self._greenlet.kill()


def test_what_is_asked_for_follows_how_long_messages_take(
    make_nsqd: Factory, start_consumer: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    nsqd = make_nsqd()
    with Producer(str(nsqd.tcp_address)) as producer:
        producer.multipublish("t", [b"x"] * 40_000)
    backend = Backend()
    consumer = start_consumer(
        "t",
        "c",
        str(nsqd.tcp_address),
        message_handler=backend.handle,
        max_in_flight=MOST,
        msg_timeout=4.0,
        max_tries=0,
        adaptive_in_flight=True,
    )
    # 100 a second, and a quarter of 4 s: fewer than these can be responded to in time.
    until(lambda: consumer.stats().asked_in_flight <= 100)
    until(lambda: consumer.total_ready_count <= 100)
    assert consumer.stats().max_in_flight == MOST
    assert caplog.text.count("adaptive_in_flight, by how long messages take") == 1
    until(lambda: consumer.total_in_flight <= 100)
    backend.at_once = 25
    until(lambda: consumer.stats().asked_in_flight == MOST)
    until(lambda: consumer.total_ready_count == MOST)
    backend.stop()


def test_once_it_has_adapted_no_message_expires_any_more(make_nsqd: Factory, start_consumer: Factory) -> None:
    nsqd = make_nsqd()
    with Producer(str(nsqd.tcp_address)) as producer:
        producer.multipublish("t", [b"x"] * 5000)
    backend = Backend()
    consumer = start_consumer(
        "t",
        "c",
        str(nsqd.tcp_address),
        message_handler=backend.handle,
        max_in_flight=MOST,
        msg_timeout=2.0,
        max_tries=0,
        adaptive_in_flight=True,
    )
    quiet: list[tuple[int, int]] = [(0, 0)]

    def has_been_quiet() -> bool:
        """Whether 150 messages were responded to, at least one round more than three timeouts, and none expired."""
        expired = consumer.stats().totals.expired
        if expired != quiet[0][1]:
            quiet[0] = (backend.done, expired)
        return backend.done - quiet[0][0] >= 150 and expired > 0

    until(has_been_quiet)
    backend.stop()


def test_each_connection_keeps_one(servers: Factory, consume: Factory, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    nsqds = [servers({"msg_timeout": 1000}), servers({"msg_timeout": 1000})]
    kept: list[Message] = []

    def keep(_: Consumer, message: Message) -> None:
        message.enable_async()
        kept.append(message)

    consumer = consume(keep, *nsqds, max_in_flight=10, adaptive_in_flight=True)
    for nsqd in nsqds:
        nsqd.connection().wait_rdy(5)
        nsqd.connection().push(1)
    until(lambda: len(kept) == 2)
    gevent.sleep(0.3)  # sleep: a message is to take longer than a quarter of its timeout of 1 s
    kept[0].finish()
    for nsqd in nsqds:
        nsqd.connection().wait_rdy(1)
    assert consumer.stats().asked_in_flight == 2
    assert consumer.max_in_flight == 10
