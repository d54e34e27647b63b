"""Handlers that block the process: what they finish leaves all the same, and the rest of the client lives on.

The servers are processes of their own: an embedded one in this process would be blocked, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import gevent
import pytest
from support.outside_nsqd import Server, handle_many, second_server, server
from support.waiting import until

from nsq_fast import Consumer, Producer
from nsq_fast._codec import Message

__all__ = ["handle_many", "second_server", "server"]  # fixtures
BLOCK = 0.02


@pytest.mark.parametrize("options", [{}, {"concurrency": 1}, {"concurrency": 20}], ids=str)
def test_the_fin_of_a_slow_handler_leaves_before_the_next_handler_begins(
    server: Server, handle_many: Callable[..., Consumer], options: dict[str, Any]
) -> None:
    handled: list[Message] = []

    def handler(consumer: Consumer, message: Message) -> None:
        server.wait_finished(len(handled))
        time.sleep(BLOCK)  # sleep: a handler that blocks
        handled.append(message)

    consumer = handle_many(20, message_handler=handler, **options)
    until(lambda: len(handled) == 20, 30)
    until(lambda: consumer.stats().totals.finished == 20)
    assert consumer.stats().totals.received == 20


def test_so_does_an_answer_that_the_handler_gives_itself(server: Server, handle_many: Callable[..., Consumer]) -> None:
    handled: list[Message] = []

    def handler(consumer: Consumer, message: Message) -> None:
        server.wait_finished(len(handled))
        handled.append(message)
        message.finish()
        time.sleep(BLOCK)  # sleep: a handler that blocks

    handle_many(5, message_handler=handler)
    until(lambda: len(handled) == 5, 30)


def test_so_do_those_of_a_slow_batch_handler(server: Server, handle_many: Callable[..., Consumer]) -> None:
    handled: list[Message] = []

    def handler(consumer: Consumer, messages: list[Message]) -> None:
        server.wait_finished(len(handled))
        time.sleep(BLOCK)  # sleep: a handler that blocks
        handled.extend(messages)

    handle_many(20, batch_handler=handler, batch_size=3)
    until(lambda: len(handled) == 20, 30)


def test_so_do_those_of_an_iteration(server: Server) -> None:
    with Producer([server.tcp]) as producer:
        producer.multipublish("t", [b"x"] * 10)
    with Consumer("t", "c", server.tcp, max_in_flight=10) as consumer:
        for number, _ in enumerate(consumer):
            server.wait_finished(number)
            if number == 9:
                break
            time.sleep(BLOCK)  # sleep: a handler that blocks


def test_where_slow_and_quick_handlers_take_turns_no_fin_waits_for_a_slow_one(
    server: Server, handle_many: Callable[..., Consumer]
) -> None:
    handled: list[Message] = []
    slow: list[int] = []

    def handler(consumer: Consumer, message: Message) -> None:
        if len(handled) % 5 == 0:
            if slow:  # the first slow one nobody could know of
                server.wait_finished(len(handled))
            slow.append(len(handled))
            time.sleep(BLOCK)  # sleep: a handler that blocks
        handled.append(message)

    handle_many(30, message_handler=handler)
    until(lambda: len(handled) == 30, 30)
    assert len(slow) == 6


@pytest.mark.parametrize("options", [{}, {"concurrency": 50}], ids=str)
def test_heartbeats_are_answered_between_handlers(
    server: Server, handle_many: Callable[..., Consumer], options: dict[str, Any]
) -> None:
    handled: list[Message] = []
    errors: list[Exception] = []

    def handler(consumer: Consumer, message: Message) -> None:
        time.sleep(0.3)  # sleep: a handler that blocks
        handled.append(message)

    options |= {"heartbeat_interval": 1.0, "message_handler": handler}
    consumer = handle_many(9, **options)
    consumer.on_error.connect(lambda consumer, error: errors.append(error), weak=False)
    until(lambda: len(handled) == 9, 30)
    until(lambda: consumer.stats().totals.finished == 9)
    assert errors == []
    assert consumer.stats().totals.received == 9


@pytest.mark.parametrize("options", [{}, {"concurrency": 50}, {"raises": True}, {"batch": True}], ids=str)
def test_timers_have_their_turn_between_handlers(
    server: Server, handle_many: Callable[..., Consumer], options: dict[str, Any]
) -> None:
    handled = 0
    at_turns = [0]
    is_raising, is_batch = options.pop("raises", False), options.pop("batch", False)

    def handler(consumer: Consumer, message: object) -> None:
        nonlocal handled
        time.sleep(0.012)  # sleep: a handler that blocks for two time slices
        handled += 1
        if is_raising:
            message.enable_async()  # type: ignore[attr-defined]
            raise RuntimeError("on purpose")

    def take_turns() -> None:
        while handled < 60:
            gevent.sleep(0.0001)  # sleep: a timer that is always due
            at_turns.append(handled)

    turns = gevent.spawn(take_turns)
    name = "batch_handler" if is_batch else "message_handler"
    consumer = handle_many(60, **{name: handler}, **options, batch_size=1, max_backoff_duration=0, requeue_delay=60_000)
    assert consumer.is_running
    turns.get(timeout=30)
    between = [after - before for before, after in pairwise(at_turns)]
    assert max(between) <= 2
