"""Arguments: the faces have the same, and refuse wrong ones at once, before any room is taken."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from contextlib import aclosing
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import UNSET
from support.contract import WRONG_TIMES, Face
from support.held_publishes import PublishNsqd

import nsq_fast
from nsq_fast import aio, threads
from nsq_fast.errors import (
    AlreadyResponded,
    CallInvalid,
    ConfigError,
    NoLeader,
    NoNsqd,
    NsqError,
    PublishFailed,
    TypeInvalid,
)

ASYNCIO_LACKS = {"raise_error"}  # a coroutine is a promise already


def arguments_of(call: Any) -> list[tuple[str, Any, Any]]:
    return [
        (each.name, each.kind, each.default)
        for each in inspect.signature(call).parameters.values()
        if each.name not in ASYNCIO_LACKS
    ]


METHODS = {
    "Producer": ("publish", "publish_nowait", "multipublish", "start", "is_running"),
    "Consumer": ("pause", "resume"),
}
OF_BOTH = ("close", "join", "stats", "progress")


@pytest.mark.parametrize("package", [threads, aio])
@pytest.mark.parametrize("kind", METHODS)
def test_a_client_and_its_methods_take_the_same_arguments(package: Any, kind: str) -> None:
    ours, gevents = getattr(package, kind), getattr(nsq_fast, kind)
    assert inspect.signature(ours).parameters == inspect.signature(gevents).parameters
    for name in METHODS[kind] + OF_BOTH:
        one, other = getattr(ours, name), getattr(gevents, name)
        assert isinstance(one, property) == isinstance(other, property)
        assert isinstance(one, property) or arguments_of(one) == arguments_of(other), name


async def handler(message: object) -> None: ...


async def handle(consumer: object, message: object) -> None: ...


@pytest.mark.parametrize("package", [nsq_fast, threads, aio])
def test_arguments_in_the_wrong_place_are_told_in_names_that_people_know(package: Any) -> None:
    with pytest.raises(TypeError, match=r"^Consumer.__init__\(\) .*multiple values for argument 'nsqd_tcp_addresses'"):
        package.Consumer("t", "c", handler, nsqd_tcp_addresses=["127.0.0.1:4150"])
    with pytest.raises(TypeError, match="a handler is passed as message_handler="):
        package.Consumer("t", "c", handler)
    with pytest.raises(TypeError, match=r"^Producer.__init__\(\) .*positional"):
        package.Producer(["127.0.0.1:4150"], [], 5)


@pytest.mark.parametrize("package", [nsq_fast, threads, aio])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_client_is_neither_copied_nor_pickled(package: Any, copied: Any) -> None:
    for client in (package.Producer("127.0.0.1:4150"), package.Consumer("t", "c", "127.0.0.1:4150")):
        with pytest.raises(TypeInvalid, match=r"make another one"):
            copied(client)


def takes_one(message: object) -> None: ...


def takes_three(consumer: object, message: object, more: object) -> None: ...


def takes_names(*, consumer: object, message: object) -> None: ...


@pytest.mark.parametrize("package", [nsq_fast, threads, aio])
def test_a_handler_that_cannot_be_called_as_handlers_are_is_refused(package: Any) -> None:
    """Each of its messages would fail, and be given up."""

    def as_handler(function: Any) -> Any:
        @functools.wraps(function)
        async def handle(*arguments: Any) -> None:
            function(*arguments)

        handle.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        return handle if package is aio else function

    for wrong in (takes_one, takes_three, takes_names, functools.partial(takes_three, 1, 2)):
        for option in ("message_handler", "batch_handler"):
            with pytest.raises(ConfigError, match=f"{option}=.* must take two arguments"):
                package.Consumer("t", "c", "127.0.0.1:1", **{option: as_handler(wrong)})
        for option in ("give_up", "blocked_policy", "max_age_policy"):
            with pytest.raises(ConfigError, match=f"{option}=.* must take two arguments"):
                package.Consumer("t", "c", "127.0.0.1:1", **{option: wrong})
    for right in (functools.partial(takes_three, 1), print, lambda *arguments: None):
        package.Consumer("t", "c", "127.0.0.1:1", give_up=right)

    @functools.wraps(takes_one)
    async def wrapper(consumer: object, message: object) -> None:
        takes_one(message)

    package.Consumer("t", "c", "127.0.0.1:1", give_up=wrapper if package is aio else Mock())
    with pytest.raises(ConfigError, match=r"callback=.* must take two arguments"):
        nsq_fast.Discard(takes_one)


def takes_another_name(consumer: object, msg: object) -> None: ...


async def test_a_receiver_that_cannot_be_called_is_refused_when_the_consumer_starts(face: Face) -> None:
    if face.package is threads:
        pytest.skip("needs a handler")
    consumer = face.package.Consumer("t", "c", "127.0.0.1:1")
    consumer.on_message.connect(takes_another_name)
    with pytest.raises(ConfigError, match="must take the consumer, and message="):
        await face(consumer.start(**({} if face.package is aio else {"block": False})))


WRONG_DELAYS: list[Any] = [-1, 2**63, 10**400, 1.5, float("nan"), "1", b"1", True, []]


async def published(face: Face, producer: Any, method: str, *arguments: Any, **extras: Any) -> Any:
    """What becomes of a publish."""
    given = getattr(producer, method)(*arguments, **extras)
    return await (face.result if method == "publish_nowait" else face)(given)


async def test_wrong_addresses_and_calls_are_errors_of_ours(face: Face, nsqd_process: Any) -> None:
    """Also what was a bare TypeError or RuntimeError, and still is one."""
    for addresses in (None, 5, b"bytes", object()):
        for option in ("nsqd_tcp_addresses", "lookupd_http_addresses"):
            with pytest.raises(TypeInvalid, match=option):
                face.package.Producer(**{option: addresses})
            with pytest.raises(TypeInvalid, match=option):
                face.package.Consumer("t", "c", **{option: addresses})
    async with face.client("Consumer", "t", "c", nsqd_process.address, message_handler=handle) as consumer:
        with pytest.raises(CallInvalid, match="cannot be iterated"):
            await anext(face.messages(consumer))
    assert issubclass(TypeInvalid, (ConfigError, TypeError))
    assert issubclass(CallInvalid, (NsqError, RuntimeError))


async def check_timeouts(face: Face, client: Any) -> None:
    """Wrong ones of close and join are refused, and end nothing."""
    for value in WRONG_TIMES:
        for method in (client.close, client.join):
            with pytest.raises(ConfigError, match="timeout="):
                await face(method(timeout=value))
    with pytest.raises(ConfigError, match="timeout=UNSET"):  # what a close of a consumer leaves to an option
        await face(client.join(timeout=UNSET))
    assert client.is_running


async def test_a_wrong_timeout_of_close_or_join_is_refused_and_ends_nothing(face: Face, nsqd_process: Any) -> None:
    async with face.client("Producer", nsqd_process.address) as producer:
        await check_timeouts(face, producer)
        assert await published(face, producer, "publish", "t", b"the last") == b"OK"


async def test_a_timeout_of_0_waits_for_nothing(face: Face) -> None:
    """``join`` asks; ``close`` ends at once, and says of what is pending that it may be stored."""

    with PublishNsqd() as server:
        async with face.client("Producer", server.address) as producer:
            pending = producer.publish_nowait("t", b"one")
            await face.until(lambda: server.commands)
            assert await face(producer.join(timeout=0)) is False
            await face(producer.close(timeout=0))
            assert await face(producer.join(timeout=0)) is True
            with pytest.raises(PublishFailed) as caught:
                await face.result(pending)
            assert caught.value.possibly_stored
    async with face.client("Consumer", "t", "c", "127.0.0.1:1") as consumer:
        assert await face(consumer.join(timeout=0)) is False
        await face(consumer.close(timeout=0))
        assert await face(consumer.join(timeout=0)) is True


async def test_where_no_nsqd_is_that_is_a_publish_failed_and_nothing_is_stored(face: Face, closed_port: int) -> None:
    async with face.client("Producer", f"127.0.0.1:{closed_port}") as producer:
        for method, content, extras in (
            ("publish", b"one", {"block": False}),
            ("publish", b"one", {"timeout": 0.1}),
            ("publish_nowait", b"one", {"timeout": 0.1}),
            ("multipublish", [b"one"], {"block": False}),
        ):
            with pytest.raises(NoNsqd) as caught:
                await published(face, producer, method, "t", content, **extras)
            assert caught.value.possibly_stored is False
        for extras in ({"block": False}, {"timeout": 0.1}):  # a key waits no longer than its publish
            with pytest.raises(NoNsqd, match="no nsqd takes publishes now"):
                await published(face, producer, "publish", "t", b"one", key="a", **extras)
    assert issubclass(NoLeader, NoNsqd)
    assert issubclass(NoNsqd, PublishFailed)
    assert NoNsqd("none").possibly_stored is False


async def check_keys(face: Face, told: Any, *address: str, **options: Any) -> None:
    """The original NSQ takes every publish with a key, which is said once; ``partition=`` it has not."""
    async with face.client("Producer", *address, **options) as producer:  # the first comes before the connection
        for _ in range(2):
            assert await published(face, producer, "publish", "t", b"one", key="a") == b"OK"
            assert await published(face, producer, "multipublish", "t", [b"one", b"two"], key=b"b") == b"OK"
            assert await published(face, producer, "publish_nowait", "t", b"one", key="c") == b"OK"
            with pytest.raises(ConfigError, match="partition=0"):
                await published(face, producer, "publish", "t", b"one", partition=0)
    (said,) = told("keys_unordered")
    assert "[t]" in said
    assert "no order" in said


async def test_a_key_is_taken_by_an_nsqd_of_the_original_nsq_which_is_said_once(
    face: Face, nsqd_process: Any, told: Any
) -> None:
    await check_keys(face, told, nsqd_process.address)


async def test_a_key_is_taken_where_lookup_names_an_original_nsqd(
    face: Face, real_lookupd: Callable[..., Any], real_nsqd: Callable[..., Any], told: Any
) -> None:
    lookupd = real_lookupd()
    real_nsqd(f"-lookupd-tcp-address={lookupd.tcp_address}")
    await check_keys(face, told, lookupd_http_addresses=str(lookupd.http_address))


async def test_a_wrong_argument_of_a_response_or_of_close_is_refused_and_the_message_can_be_answered(
    face: Face, nsqd_process: Any
) -> None:
    async with face.client("Producer", nsqd_process.address) as producer:
        await face(producer.publish("t", b"body"))
    async with (
        face.client("Consumer", "t", "c", nsqd_process.address) as consumer,
        aclosing(face.messages(consumer)) as messages,
    ):
        message = await anext(messages)
        message.enable_async()
        await check_timeouts(face, consumer)
        for value in WRONG_DELAYS:
            with pytest.raises(ConfigError, match="time_ms="):
                message.requeue(value)
        for response in (message.finish, message.touch):
            with pytest.raises(TypeError):
                response(1)
        assert not message.has_responded()
        message.touch()
        message.finish()
        with pytest.raises(AlreadyResponded):
            message.requeue(0)
        assert await face(consumer.join(0.01)) is False
        assert consumer.is_running
