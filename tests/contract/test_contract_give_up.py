"""What no handler gets, on any face, however it is consumed: messages that failed too often, or are too old."""

from __future__ import annotations

import logging
from contextlib import aclosing
from time import time_ns
from typing import Any

import pytest
from support.contract import Face
from support.scripted_nsqd import ScriptedNsqd

from nsq_fast import Message, NsqdHTTPClient
from nsq_fast.client.give_up import PublishTo
from nsq_fast.errors import ConfigError


def test_the_producer_of_what_was_given_up_closes_with_the_consumer(face: Face, nsqd_process: Any) -> None:
    async def fail(_consumer: Any, _message: Any) -> None:
        raise ValueError("a handler's own")

    def stats() -> dict[str, Any]:
        with NsqdHTTPClient(*nsqd_process.http) as client:
            return client.stats()

    def is_published() -> bool:
        return any(topic["topic_name"] == "dead" and topic["message_count"] for topic in stats()["topics"])

    async def main() -> None:
        async with face.client("Producer", nsqd_process.address) as producer:
            await face(producer.publish("t", b"x"))
        options = {"max_tries": 1, "requeue_delay": 0, "max_backoff_duration": 0, "give_up": PublishTo("dead")}
        async with face.client("Consumer", "t", "c", nsqd_process.address, message_handler=fail, **options):
            await face.until(is_published)
            await face.until(lambda: len(stats()["producers"] or ()) == 1)  # that of the first publish has gone
        await face.until(lambda: not stats()["producers"])

    face.run(main())


HOUR = 3600 * 10**9
AGES = {1: 0, 2: 3, 3: 1, 4: 5, 5: 0, 6: 9}
"""Message -> hours since its publish; two hours are allowed."""
OLD, YOUNG = [2, 4, 6], [1, 3, 5]
OPTIONS = {"max_age": 7200, "max_in_flight": 10, "max_backoff_duration": 0, "requeue_delay": 0}


async def push(face: Face, nsqd: ScriptedNsqd, failed_too_often: int = 0) -> Any:
    """Send all of them; the connection."""
    await face.until(lambda: nsqd.connections and nsqd.connections[0].rdy)
    connection = nsqd.connections[0]

    def send() -> None:
        for number, hours in AGES.items():
            attempts = 9 if number == failed_too_often else 1
            connection.push(number, body=b"%d" % number, timestamp=time_ns() - hours * HOUR, attempts=attempts)

    await face.do(send)
    return connection


@pytest.mark.parametrize("way", ["one by one", "batches", "iteration", "concurrent"])
def test_no_handler_gets_what_is_too_old_and_the_rest_is_handled(
    face: Face, nsqd: ScriptedNsqd, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[int] = []

    async def handle(consumer: Any, message: Message) -> None:
        found.append(int(message.body))

    async def handle_batch(consumer: Any, messages: list[Message]) -> None:
        found.extend(int(message.body) for message in messages)

    handlers: dict[str, Any] = {
        "one by one": {"message_handler": handle},
        "batches": {"batch_handler": handle_batch},
        "iteration": {},
        "concurrent": {"message_handler": handle, "concurrency": 3},
    }

    async def main() -> None:
        async with face.client("Consumer", "t", "c", str(nsqd.address), **OPTIONS, **handlers[way]) as consumer:

            async def iterate() -> None:
                async with aclosing(face.messages(consumer)) as messages:
                    async for message in messages:
                        await handle(consumer, message)

            join = await face.begin(iterate) if way == "iteration" else None
            await check(consumer)
            await face(consumer.close())
            if join is not None:
                await join()

    async def check(consumer: Any) -> None:
        connection = await push(face, nsqd, failed_too_often=6)  # it goes where those go that are too old
        await face.until(lambda: sorted(connection.answered(b"FIN")) == sorted(AGES), consumer.stats)
        assert sorted(found) == YOUNG
        assert (consumer.stats().outdated, consumer.outdated, consumer.stats().given_up) == (3, 3, 0)
        assert not connection.answered(b"REQ")

    with caplog.at_level(logging.WARNING):
        face.run(main())
    told = [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "message_outdated"]
    assert len(told) == 2, "of the first and the second"
    assert "of t/c is 1.08e+04 s old, max_age=7200; it is the 1th" in told[0]


@pytest.mark.parametrize("is_batch", [False, True], ids=["one by one", "batches"])
def test_what_is_too_old_may_go_to_a_policy_and_stays_if_that_fails(
    face: Face, nsqd: ScriptedNsqd, is_batch: bool
) -> None:
    got: list[int] = []

    def policy(consumer: Any, message: Message) -> None:
        got.append(int(message.body))
        if message.body == b"4":
            raise OSError("no room")

    async def handle(consumer: Any, item: Any) -> None: ...

    async def main() -> None:
        options: dict[str, Any] = {"batch_handler" if is_batch else "message_handler": handle, "max_age_policy": policy}
        async with face.client("Consumer", "t", "c", str(nsqd.address), **OPTIONS, **options) as consumer:
            connection = await push(face, nsqd)
            await face.until(lambda: sorted(connection.answered(b"FIN")) == [1, 2, 3, 5, 6], consumer.stats)
            await face.until(lambda: connection.answered(b"REQ") == [4])
            assert got == OLD
            assert (consumer.stats().outdated, consumer.stats().given_up) == (2, 0)

    face.run(main())


def test_what_is_too_old_may_go_where_that_goes_which_failed_too_often(face: Face, nsqd: ScriptedNsqd) -> None:
    got: list[int] = []

    def give_up(consumer: Any, message: Message) -> None:
        got.append(int(message.body))

    async def handle(consumer: Any, message: Message) -> None: ...

    async def main() -> None:
        options: dict[str, Any] = {"message_handler": handle, "give_up": give_up, "max_age_policy": "give_up"}
        async with face.client("Consumer", "t", "c", str(nsqd.address), **OPTIONS, **options) as consumer:
            connection = await push(face, nsqd)
            await face.do(lambda: connection.push(7, body=b"7", attempts=6, timestamp=time_ns()))
            await face.until(lambda: sorted(connection.answered(b"FIN")) == [1, 2, 3, 4, 5, 6, 7], consumer.stats)
            assert got == [*OLD, 7]
            assert (consumer.stats().outdated, consumer.stats().given_up) == (3, 1)

    face.run(main())


def test_without_it_nothing_is_too_old(face: Face, nsqd: ScriptedNsqd) -> None:
    found: list[int] = []

    async def handle(consumer: Any, message: Message) -> None:
        found.append(int(message.body))

    async def main() -> None:
        async with face.client("Consumer", "t", "c", str(nsqd.address), message_handler=handle, max_in_flight=10):
            await push(face, nsqd)
            await face.until(lambda: sorted(found) == sorted(AGES))

    face.run(main())


def test_a_policy_that_is_none_is_refused(face: Face) -> None:
    for policy in ("drop", None, 5):
        with pytest.raises(ConfigError, match="max_age_policy"):
            face.package.Consumer("t", "c", "127.0.0.1:1", max_age_policy=policy)
