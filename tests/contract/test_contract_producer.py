"""What every Producer does, whichever face it has."""

from __future__ import annotations

import itertools
from contextlib import aclosing, suppress
from typing import Any

import pytest
from support.contract import Face
from support.waiting import WAIT

from nsq_fast.errors import ConfigError, NotRunning, PublishFailed, PublishTimeout

NOBODY = "127.0.0.1:1"


async def bodies_of(face: Face, address: str, count: int) -> list[bytes]:
    """The bodies of so many messages, each finished."""
    found: list[bytes] = []
    async with (
        face.client("Consumer", "t", "c", address, max_in_flight=200) as consumer,
        aclosing(face.messages(consumer)) as messages,
    ):
        async for message in messages:
            found.append(message.body)
            if len(found) == count:
                await face(message.finish())
                break
    return found


def test_a_body_is_what_it_was_at_the_call(face: Face, nsqd_process: Any) -> None:
    async def main() -> None:
        async with face.client("Producer", nsqd_process.address) as producer:
            body = bytearray(b"before")
            promise = producer.publish_nowait("t", body)
            body[:] = b"behind"
            await face.result(promise)
        assert await bodies_of(face, nsqd_process.address, 1) == [b"before"]

    face.run(main())


def test_wrong_options_are_refused_where_the_producer_is_made(face: Face) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_pending'"):
        face.package.Producer(NOBODY, max_pendin=3)
    with pytest.raises(ConfigError, match="nowhere to publish to"):
        face.package.Producer()


def test_it_publishes_between_start_and_close_only(face: Face) -> None:
    async def main() -> None:
        producer = face.package.Producer(NOBODY)
        with pytest.raises(NotRunning, match="start"):
            await face(producer.publish("t", b"x"))
        await face(producer.start())
        await face(producer.close())
        with pytest.raises(NotRunning, match="closed"):
            await face(producer.publish("t", b"x"))
        with pytest.raises(NotRunning, match="closed"):
            producer.publish_nowait("t", b"x")
        assert await face(producer.join(WAIT))

    face.run(main())


def test_max_pending_blocks_those_who_wait_and_refuses_the_others(face: Face, nsqd_process: Any) -> None:
    async def main() -> None:
        async with face.client("Producer", nsqd_process.address, max_pending=10) as producer:
            await face(producer.publish("t", b"first"))
            nsqd_process.freeze()
            promises: list[Any] = []
            with pytest.raises(PublishFailed, match="max_pending=10"):
                promises.extend(producer.publish_nowait("t", b"%d" % number) for number in range(1000))
            assert len(promises) <= 10 + 1
            with pytest.raises(PublishTimeout, match="max_pending=10"):
                await face(producer.publish("t", b"waits", timeout=0.05))

            async def publish() -> Any:
                return await face(producer.publish("t", b"last"))

            waiting = await face.begin(publish)
            await face.until(lambda: producer.stats()["held"] == 10)
            nsqd_process.thaw()
            assert await waiting() == b"OK"
            for promise in promises:
                assert await face.result(promise) == b"OK"
        assert len(await bodies_of(face, nsqd_process.address, len(promises) + 2)) == len(promises) + 2

    face.run(main())


async def all_of(face: Face, address: str, wanted: set[bytes]) -> None:
    """Consume until all of them came."""
    missing = set(wanted)
    async with (
        face.client("Consumer", "t", "c", address, max_in_flight=100) as consumer,
        aclosing(face.messages(consumer)) as messages,
    ):
        async for message in messages:
            missing.discard(message.body)
            if not missing:
                await face(message.finish())
                return


def test_a_server_that_restarts_loses_no_publish(face: Face, nsqd_process: Any) -> None:
    async def main() -> None:
        async with face.client(
            "Producer", nsqd_process.address, retry_max_delay=0.1, max_backoff_duration=0.1
        ) as producer:
            await face(producer.publish("t", b"begin"))
            await face.do(nsqd_process.stop)

            async def publish(number: int) -> None:
                for each in range(10):
                    await face(producer.publish("t", b"%d-%d" % (number, each)))

            jobs = [await face.begin(lambda number=number: publish(number)) for number in range(4)]  # type: ignore[misc]
            await face.until(lambda: producer.stats()["pending"] == 4)
            await face.do(nsqd_process.start)
            for join in jobs:
                await join()
        several = {b"%d-%d" % pair for pair in itertools.product(range(4), range(10))}
        await all_of(face, nsqd_process.address, several | {b"begin"})

    face.run(main())


@pytest.mark.kill
def test_a_server_that_is_killed_has_every_confirmed_publish(face: Face, nsqd_process: Any) -> None:
    confirmed: set[bytes] = set()

    async def main() -> None:
        over: list[int] = []
        async with face.client(
            "Producer", nsqd_process.address, retry_max_delay=0.1, max_backoff_duration=0.1
        ) as producer:

            async def publish(number: int) -> None:
                for each in itertools.count():
                    if over:
                        return
                    body = b"%d-%d" % (number, each)
                    with suppress(PublishFailed):  # whether that one is stored is unknown
                        await face(producer.publish("t", body))
                        confirmed.add(body)

            async def until_more() -> None:
                count = len(confirmed)
                await face.until(lambda: len(confirmed) >= count + 50)

            jobs = [await face.begin(lambda number=number: publish(number)) for number in range(4)]  # type: ignore[misc]
            for _ in range(2):
                await until_more()
                await face.do(nsqd_process.kill)
                await face.do(nsqd_process.start)
            await until_more()
            over.append(1)
            for join in jobs:
                await join()
        await all_of(face, nsqd_process.address, confirmed)

    face.run(main())
