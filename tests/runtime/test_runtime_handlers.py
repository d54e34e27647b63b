"""Handlers that have not run when they return: refused when they are given, or when a message shows it."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from gevent.event import Event
from support.scripted_nsqd import ScriptedNsqd
from support.waiting import until

from nsq_fast import Consumer, errors
from nsq_fast.client.give_up import Discard
from nsq_fast.errors import ConfigError, HandlerDeferred


async def asynchronous(consumer: object, message: object) -> None:
    pass


def generator(consumer: object, message: object) -> Iterator[None]:
    yield


async def asynchronous_generator(consumer: object, message: object) -> AsyncIterator[None]:
    yield


class Called:
    async def __call__(self, consumer: object, message: object) -> None:
        pass

    async def method(self, consumer: object, message: object) -> None:
        pass


DEFERRED = [
    asynchronous,
    generator,
    asynchronous_generator,
    Called(),
    Called().method,
    functools.partial(asynchronous),
    functools.partial(functools.partial(generator), message=1),
    functools.partial(Called()),
]


@pytest.mark.parametrize("name", ["message_handler", "batch_handler", "give_up", "blocked_policy"])
@pytest.mark.parametrize("handler", DEFERRED, ids=range(len(DEFERRED)))
def test_functions_whose_call_runs_nothing_are_refused(name: str, handler: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=.* its body"):
        Consumer("t", "c", "127.0.0.1:4150", **{name: handler})


@pytest.mark.parametrize("handler", DEFERRED, ids=range(len(DEFERRED)))
def test_so_are_receivers_when_the_consumer_is_started(handler: Callable[..., Any]) -> None:
    consumer = Consumer("t", "c", "127.0.0.1:4150")
    consumer.on_message.connect(handler, weak=False)
    with pytest.raises(ConfigError, match=r"a receiver of on_message.* its body"):
        consumer.start()
    assert not consumer.is_running


@pytest.mark.parametrize("deferred", [asynchronous, generator, asynchronous_generator])
@pytest.mark.parametrize("kind", ["message", "batch", "receiver", "concurrency"])
def test_a_message_whose_handler_returns_such_work_is_requeued(
    deferred: Callable[..., Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = ScriptedNsqd()
    options: dict[str, Any] = {"max_in_flight": 10, "max_backoff_duration": 0}
    if kind != "receiver":
        options["batch_handler" if kind == "batch" else "message_handler"] = lambda c, m: deferred(c, m)
    if kind == "concurrency":
        options["concurrency"] = 3
    consumer = Consumer("t", "c", str(server.address), **options)
    if kind == "receiver":
        consumer.on_message.connect(lambda c, message: deferred(c, message), weak=False)
        consumer.on_message.connect(lambda c, message: None, weak=False, sender=consumer)
    failures: list[Exception] = []
    consumer.on_exception.connect(lambda c, message, error: failures.append(error), weak=False)
    with caplog.at_level(logging.ERROR), consumer:
        expected = b"REQ"
        connection = server.connection()
        connection.push(1)
        connection.wait_for(lambda: connection.answered(expected) == [1])
        connection.push(2)
        connection.wait_for(lambda: connection.answered(expected) == [1, 2])
        assert connection.answered(b"FIN") == []
    server.stop()
    assert [type(error) for error in failures] == [HandlerDeferred] * 2
    assert len([record for record in caplog.records if "nobody runs" in record.getMessage()]) == 1


@pytest.mark.parametrize("policy", [lambda c, m: asynchronous(c, m), Discard(lambda c, m: asynchronous(c, m))])
def test_a_give_up_policy_that_returns_such_work_keeps_the_message(policy: Callable[..., Any]) -> None:
    server = ScriptedNsqd()
    with Consumer(
        "t", "c", str(server.address), message_handler=lambda c, m: None, max_tries=1, give_up=policy
    ) as consumer:
        connection = server.connection()
        connection.push(1, attempts=2)
        connection.wait_for(lambda: connection.answered(b"REQ") == [1])
        assert consumer.stats().given_up == 0
    server.stop()


@pytest.mark.parametrize(
    "result", [True, 0, "x", [1], object(), lambda: None, Event()], ids=lambda each: type(each).__name__
)
def test_what_else_a_handler_returns_does_not_matter(result: object) -> None:
    server = ScriptedNsqd()
    with Consumer("t", "c", str(server.address), message_handler=lambda c, m: result) as consumer:
        connection = server.connection()
        connection.push(1)
        connection.wait_for(lambda: connection.answered(b"FIN") == [1])
        until(lambda: consumer.stats().totals.finished == 1)
    server.stop()


def test_the_error_is_both_ours_and_a_type_error() -> None:
    assert issubclass(HandlerDeferred, errors.NsqError)
    assert issubclass(HandlerDeferred, TypeError)
