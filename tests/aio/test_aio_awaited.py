"""A task awaits its publish as it would a future: what it is cancelled with, its context, what another one raises."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Coroutine
from typing import Any

import pytest
from support.loops import LOOPS, NewLoop, run

from nsq_fast.aio import Producer

COUNT = 20
number_of = contextvars.ContextVar[int]("number_of")


@pytest.mark.parametrize("new_loop", LOOPS)
def test_each_task_goes_on_in_its_own_context(nsqd_process: Any, new_loop: NewLoop) -> None:
    async def main() -> None:
        async with Producer(nsqd_process.address) as producer:

            async def publish(number: int) -> None:
                number_of.set(number)
                for _ in range(5):
                    assert await producer.publish("t", b"x") == b"OK"
                    assert number_of.get() == number
                    assert asyncio.current_task() is tasks[number]

            tasks = [asyncio.ensure_future(publish(number)) for number in range(COUNT)]
            await asyncio.gather(*tasks)

    run(main(), new_loop)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_task_gets_what_it_is_cancelled_with(nsqd_process: Any, new_loop: NewLoop) -> None:
    errors: list[Any] = []

    async def main() -> None:
        async with Producer(nsqd_process.address, linger=60.0) as producer:
            producer.publish_nowait("t", b"the topic is known from now on")

            async def publish() -> None:
                try:
                    await producer.publish("t", b"x")
                except asyncio.CancelledError as error:
                    errors.append(error)
                    raise

            tasks = [asyncio.ensure_future(publish()) for _ in range(2)]
            await asyncio.sleep(0)
            tasks[0].cancel("for a reason")
            tasks[1].cancel()
            await asyncio.wait(tasks)
            assert all(task.cancelled() for task in tasks)
            assert producer.stats()["pending"] == 1

    run(main(), new_loop)
    assert [error.args for error in errors] == [("for a reason",), ()]
    assert [error.possibly_stored for error in errors] == [False, False]


def test_one_that_was_cancelled_and_confirmed_in_the_same_moment_ends_once(nsqd_process: Any) -> None:
    async def main() -> None:
        async with Producer(nsqd_process.address) as producer:
            tasks = [asyncio.ensure_future(producer.publish("t", b"x")) for _ in range(COUNT)]
            first = asyncio.ensure_future(producer.publish("t", b"first"))
            first.add_done_callback(lambda _: [task.cancel() for task in tasks])
            found = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(each == b"OK" or isinstance(each, asyncio.CancelledError) for each in found)
            assert await producer.publish("t", b"later") == b"OK"
            assert producer.stats()["pending"] == producer.stats()["held"] == 0

    asyncio.run(main())


def test_a_task_that_ends_the_program_keeps_no_other_waiting(nsqd_process: Any) -> None:
    """What is no Exception goes through the loop, which a program may run again."""
    loop = asyncio.new_event_loop()
    producer = Producer(nsqd_process.address)
    loop.run_until_complete(producer.start())

    async def publish(number: int) -> bytes:
        stored = await producer.publish("t", b"x")
        if number == COUNT // 2:
            raise SystemExit("enough")
        return bytes(stored)

    tasks = [loop.create_task(publish(number)) for number in range(COUNT)]
    with pytest.raises(SystemExit, match="enough"):
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(asyncio.wait(tasks))
    assert [task.exception() is None for task in tasks].count(False) == 1
    loop.run_until_complete(producer.close())
    loop.close()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks that begin at once are new in 3.12")
def test_tasks_that_begin_at_once(nsqd_process: Any) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
        async with Producer(nsqd_process.address) as producer:
            each: list[Coroutine[Any, Any, Any]] = [producer.publish("t", b"x") for _ in range(COUNT)]
            assert await asyncio.gather(*each) == [b"OK"] * COUNT

    asyncio.run(main())
