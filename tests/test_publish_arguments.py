"""What no argument may be: refused at once, before any room is taken, on every face."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import nsq_fast
from nsq_fast import Message, aio, threads
from nsq_fast.errors import AlreadyResponded, ConfigError, NoLeader, NoNsqd, PublishFailed

NAN = float("nan")
WRONG_TIMES: list[Any] = [-1, NAN, "1", b"1", [], True]
WRONG: dict[str, list[Any]] = {
    "defer": [2**63, 2**64, 10**400, -1, 1.5, NAN, "1", True, []],
    "timeout": [0, *WRONG_TIMES],
    "partition": [-1, 2**63, 10**400, 1.5, NAN, "1", True],
    "key": [1.5, NAN, [], object()],
    "trace_id": [-1, 2**64, 10**400, 1.5, NAN, "1", True],
    "headers": [1, "a", [1], {1: "a"}],
    "tag": [1, 1.5, b"a", [], ""],
}
ALL = [(name, value) for name, values in WRONG.items() for value in values]
MOST = 3

Call = Callable[..., Any]


class Blocking:
    """A face whose methods return when they are done."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @contextmanager
    def producer(self, address: str | tuple[()] = (), **options: Any) -> Iterator[tuple[Any, Call]]:
        """A producer whose room is small, and what calls its methods."""
        with self._module.Producer(address, max_pending=MOST, **options) as producer:
            yield producer, partial(self._call, producer)

    @contextmanager
    def consumer(self, address: str) -> Iterator[tuple[Any, Call, Message]]:
        """A consumer, what calls its methods, and a message of it that is not responded to."""
        with self._module.Consumer("t", "c", address) as consumer:
            messages = iter(consumer)
            message = next(messages)
            message.enable_async()
            yield consumer, partial(self._call, consumer), message

    @staticmethod
    def _call(client: Any, method: str, *arguments: Any, **extras: Any) -> Any:
        return getattr(client, method)(*arguments, **extras)


class Asyncio:
    """As ``Blocking``, in a loop of its own."""

    @contextmanager
    def producer(self, address: str | tuple[()] = (), **options: Any) -> Iterator[tuple[Any, Call]]:
        with self._running(aio.Producer(address, max_pending=MOST, **options)) as (producer, call):
            yield producer, call

    @contextmanager
    def consumer(self, address: str) -> Iterator[tuple[Any, Call, Message]]:
        async def begin() -> tuple[Any, Message]:
            messages = aiter(consumer)
            return messages, await anext(messages)

        with self._running(aio.Consumer("t", "c", address)) as (consumer, call):
            _messages, message = call(begin)
            message.enable_async()
            yield consumer, call, message

    @contextmanager
    def _running(self, client: Any) -> Iterator[tuple[Any, Call]]:
        loop = asyncio.new_event_loop()

        async def awaited(method: Any, arguments: Any, extras: Any) -> Any:
            called = getattr(client, method) if isinstance(method, str) else method
            return await asyncio.wait_for(called(*arguments, **extras), 30)

        def call(method: Any, *arguments: Any, **extras: Any) -> Any:
            return loop.run_until_complete(awaited(method, arguments, extras))

        call("start")
        yield client, call
        call("close")
        loop.close()


FACES: dict[str, Any] = {"gevent": Blocking(nsq_fast), "threads": Blocking(threads), "aio": Asyncio()}


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> Any:
    return FACES[request.param]


def result(value: Any) -> Any:
    """What an outcome that comes later is."""
    if hasattr(value, "result"):
        return value.result(30)
    return value.get(timeout=30) if hasattr(value, "get") else value


def test_a_wrong_argument_is_refused_and_takes_no_room(nsqd_process: Any, face: Any) -> None:
    with face.producer(nsqd_process.address) as (_, call):
        call("publish", "t", b"the first")
        taken = []
        for name, value in ALL:
            for method, content in (("publish", b"one"), ("publish_nowait", b"one"), ("multipublish", [b"one"])):
                if method == "multipublish" and name == "defer":
                    continue
                for _ in range(MOST):
                    try:
                        result(call(method, "t", content, **{name: value}))
                        taken.append((method, name, value))
                    except (ConfigError, TypeError):  # noqa: PERF203
                        pass
                    except Exception as error:
                        taken.append((method, name, value, repr(error)))
        assert not taken
        assert call("publish", "t", b"the last") == b"OK"


def test_a_wrong_timeout_of_close_or_join_is_refused_and_ends_nothing(nsqd_process: Any, face: Any) -> None:
    with face.producer(nsqd_process.address) as (producer, call):
        for value in WRONG_TIMES:
            for method in ("close", "join"):
                with pytest.raises(ConfigError, match="timeout="):
                    call(method, timeout=value)
        assert producer.is_running
        assert call("publish", "t", b"the last") == b"OK"


def test_where_no_nsqd_is_that_is_a_publish_failed_and_nothing_is_stored(closed_port: int, face: Any) -> None:
    with face.producer(f"127.0.0.1:{closed_port}") as (_, call):
        for method, content, extras in (
            ("publish", b"one", {"block": False}),
            ("publish", b"one", {"timeout": 0.1}),
            ("publish_nowait", b"one", {"timeout": 0.1}),
            ("multipublish", [b"one"], {"block": False}),
        ):
            with pytest.raises(PublishFailed) as caught:
                result(call(method, "t", content, **extras))
            assert caught.value.possibly_stored is False
    assert issubclass(NoLeader, NoNsqd)
    assert NoNsqd("none").possibly_stored is False


def publish_with_keys(call: Call) -> None:
    """Every way to publish with a key; then ``partition=``, which a topic of the original NSQ has not."""
    assert call("publish", "t", b"one", key="a") == b"OK"
    assert call("multipublish", "t", [b"one", b"two"], key=b"b") == b"OK"
    assert result(call("publish_nowait", "t", b"one", key="c")) == b"OK"
    with pytest.raises(ConfigError, match="partition=0"):
        call("publish", "t", b"one", partition=0)


def said_of_keys(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged of keys that give no order."""
    return [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "keys_unordered"]


def test_a_key_is_taken_by_an_nsqd_of_the_original_nsq_which_is_said_once(
    nsqd_process: Any, face: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with face.producer(nsqd_process.address) as (_, call):  # the first comes before the connection is up
        publish_with_keys(call)
        publish_with_keys(call)
    (said,) = said_of_keys(caplog)
    assert "[t]" in said
    assert "no order" in said


def test_a_key_is_taken_where_lookup_names_an_original_nsqd(
    real_lookupd: Callable[..., Any], real_nsqd: Callable[..., Any], face: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    lookupd = real_lookupd()
    real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}", "-broadcast-address=127.0.0.1")
    with face.producer(lookupd_http_addresses=f"{lookupd.http_address}") as (_, call):
        publish_with_keys(call)
        publish_with_keys(call)
    assert len(said_of_keys(caplog)) == 1


def test_a_key_waits_for_an_nsqd_no_longer_than_its_publish(closed_port: int, face: Any) -> None:
    with face.producer(f"127.0.0.1:{closed_port}") as (_, call):
        for extras in ({"block": False}, {"timeout": 0.1}):
            with pytest.raises(NoNsqd, match="no nsqd takes publishes now"):
                call("publish", "t", b"one", key="a", **extras)


# Consumers and their messages


WRONG_DELAYS: list[Any] = [-1, 2**63, 10**400, 1.5, NAN, "1", b"1", True, []]


@pytest.fixture
def filled(nsqd_process: Any) -> str:
    """An nsqd with one message in the topic t."""
    with nsq_fast.Producer(nsqd_process.address) as producer:
        producer.publish("t", b"body")
    return str(nsqd_process.address)


def test_a_wrong_argument_of_a_response_is_refused_and_the_message_can_be_answered(filled: str, face: Any) -> None:
    with face.consumer(filled) as (consumer, call, message):
        for value in WRONG_DELAYS:
            with pytest.raises(ConfigError, match="time_ms="):
                message.requeue(value)
        for response in (message.finish, message.touch):
            with pytest.raises(TypeError):
                response(1)  # type: ignore[call-arg]
        assert not message.has_responded()
        message.touch()
        message.finish()
        with pytest.raises(AlreadyResponded):
            message.requeue(0)
        assert call("join", 0.01) is False
        assert consumer.is_running


def test_a_wrong_timeout_of_a_consumer_is_refused_and_ends_nothing(filled: str, face: Any) -> None:
    with face.consumer(filled) as (consumer, call, message):
        for value in WRONG_TIMES:
            for method in ("close", "join"):
                with pytest.raises(ConfigError, match="timeout="):
                    call(method, timeout=value)
        assert consumer.is_running
        message.finish()
