"""The Producer of asyncio: it waits with the loop, may be cancelled, and survives what happens to loops."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import time
from typing import Any

import pytest
from support.waiting import until

from nsq_fast.aio import Consumer, Producer
from nsq_fast.errors import NoNsqd, NotRunning
from nsq_fast.threads import Consumer as ThreadsConsumer

WAIT = 30.0


def bodies_of(address: str, topic: str, count: int) -> list[bytes]:
    found: list[bytes] = []
    with ThreadsConsumer(topic, "c", address, max_in_flight=200) as consumer:
        for message in consumer:
            found.append(message.body)
            if len(found) == count:
                message.finish()
                break
    return found


def test_another_loop_may_not_use_it_and_has_its_own(nsqd_process: Any) -> None:
    async def use(producer: Producer) -> None:
        await producer.publish("t", b"other loop")

    async def main() -> None:
        async with Producer(nsqd_process.address) as producer:
            await producer.publish("t", b"here")
            with pytest.raises(NotRunning, match="another event loop"):
                await asyncio.to_thread(lambda: asyncio.run(use(producer)))
            await asyncio.to_thread(lambda: asyncio.run(_publish(nsqd_process.address, b"own")))

    asyncio.run(main())
    assert sorted(bodies_of(nsqd_process.address, "t", 2)) == [b"here", b"own"]


async def _publish(address: str, body: bytes) -> None:
    async with Producer(address) as producer:
        await producer.publish("t", body)


def test_a_cancelled_publish_that_was_not_sent_is_withdrawn(nsqd_process: Any) -> None:
    async def main() -> None:
        async with Producer("127.0.0.1:1") as producer:
            task = asyncio.create_task(producer.publish("t", b"x"))
            while not producer.stats()["pending"]:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
            assert _first(caught.value).possibly_stored is False
            assert producer.stats()["pending"] == 0

    asyncio.run(main())


def test_a_cancelled_publish_that_was_sent_may_be_stored(nsqd_process: Any) -> None:
    async def main() -> None:
        async with Producer(nsqd_process.address) as producer:
            await producer.publish("t", b"first")
            nsqd_process.freeze()
            errors: list[asyncio.CancelledError] = []

            async def publish() -> None:
                try:
                    await producer.publish("t", b"x")
                except asyncio.CancelledError as error:
                    errors.append(error)
                    raise

            task = asyncio.create_task(publish())
            while not producer.stats()["pending"]:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)  # sleep: the loop has its turns meanwhile
            task.cancel()
            await asyncio.wait((task,))
            assert errors[0].possibly_stored is True  # type: ignore[attr-defined]
            nsqd_process.thaw()

    asyncio.run(main())


def test_a_publish_that_is_cancelled_twice_says_so_all_the_same(nsqd_process: Any) -> None:
    async def main() -> None:
        async with Producer(nsqd_process.address) as producer:
            await producer.publish("t", b"first")
            nsqd_process.freeze()
            raised: list[asyncio.CancelledError] = []

            async def publish() -> None:
                try:
                    await producer.publish("t", b"2")
                except asyncio.CancelledError as error:
                    raised.append(error)

            task = asyncio.create_task(publish())
            while not producer.stats()["pending"]:
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)  # sleep: it is sent
            task.cancel()
            task.cancel()
            await task
            nsqd_process.thaw()
            assert raised[0].possibly_stored is True  # type: ignore[attr-defined]

    asyncio.run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout is of Python 3.11")
def test_a_timeout_of_asyncio_says_whether_it_may_be_stored() -> None:
    async def main() -> None:
        async with Producer("127.0.0.1:1") as producer:
            with pytest.raises(TimeoutError) as caught:
                async with asyncio.timeout(0.05):
                    await producer.publish("t", b"x")
            assert caught.value.__cause__.possibly_stored is False  # type: ignore[union-attr]
            with pytest.raises(NoNsqd):
                await producer.publish("t", b"x", timeout=0.05)

    asyncio.run(main())


def _first(error: BaseException) -> Any:
    """The error of the publish, which a task may have raised again."""
    while not hasattr(error, "possibly_stored") and error.__context__ is not None:
        error = error.__context__
    return error


def test_the_context_of_a_call_is_that_of_its_result(nsqd_process: Any) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")

    async def main() -> None:
        async with Producer(nsqd_process.address) as producer:

            async def publish(number: int) -> int:
                variable.set(number)
                await producer.publish("t", b"x")
                return variable.get()

            assert await asyncio.gather(*(publish(number) for number in range(20))) == list(range(20))
            seen: list[int] = []
            variable.set(7)
            future = producer.publish_nowait("t", b"x")
            future.add_done_callback(lambda _: seen.append(variable.get()))
            await future
            await asyncio.sleep(0)
            assert seen == [7]

    asyncio.run(main())


def test_a_loop_that_was_blocked_publishes_on(nsqd_process: Any) -> None:
    """Longer than two heartbeat intervals: nsqd closes then, since nobody has answered it."""

    async def main() -> None:
        async with Producer(nsqd_process.address, heartbeat_interval=1.0) as producer:
            await producer.publish("t", b"first")
            result = producer.publish_nowait("t", b"x")
            time.sleep(4.0)  # sleep: keeps the loop
            assert await result == b"OK"
            assert await producer.publish("t", b"later") == b"OK"

    asyncio.run(main())


def test_a_loop_that_is_closed_ends_it(nsqd_process: Any) -> None:
    loop = asyncio.new_event_loop()
    producer = Producer(nsqd_process.address)
    loop.run_until_complete(producer.start())
    loop.run_until_complete(producer.publish("t", b"x"))
    loop.run_until_complete(_forget(producer))
    loop.close()
    until(lambda: not producer.is_running)


async def _forget(producer: Producer) -> None:
    producer.publish_nowait("t", b"forgotten")


def test_the_names_are_imported_when_they_are_used() -> None:
    import nsq_fast.aio

    assert dir(nsq_fast.aio) == ["Consumer", "Producer"]
    assert nsq_fast.aio.Consumer is Consumer
