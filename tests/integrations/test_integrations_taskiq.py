"""taskiq on NSQ, with taskiq's own worker: tasks run, wait, fail and survive a server that restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from nsq_fast.aio import Consumer
from nsq_fast.errors import ConfigError

pytest.importorskip("taskiq")

from support.processes import until_async
from taskiq import SendTaskError
from taskiq.api import run_receiver_task

from nsq_fast.integrations.taskiq import NSQBroker


@asynccontextmanager
async def working(broker: NSQBroker) -> AsyncIterator[asyncio.Task[None]]:
    broker.is_worker_process = True
    await broker.startup()
    worker = asyncio.create_task(run_receiver_task(broker))
    try:
        yield worker
    finally:
        worker.cancel()
        await asyncio.wait((worker,))
        await broker.shutdown()


async def test_tasks_run_and_are_finished_however_long_they_take_and_a_broker_is_started_again(
    nsqd_process: Any,
) -> None:
    ran: list[int] = []
    broker = NSQBroker(nsqd_process.address, consumer={"msg_timeout": 1.0})

    @broker.task
    async def note(number: int, seconds: float) -> None:
        await asyncio.sleep(seconds)  # sleep: the work, of more than two timeouts of the message
        ran.append(number)

    for count, seconds in ((50, 0.0), (3, 2.2)):
        ran.clear()
        async with working(broker):
            for number in range(count):
                await note.kiq(number, seconds)
            await until_async(lambda count=count: broker._consumer.stats().totals.finished == count)
            assert broker._consumer.stats().totals.expired == 0
        assert sorted(ran) == list(range(count))


async def test_a_delayed_task_runs_later(real_nsqd: Any) -> None:
    ran: list[float] = []
    address = str(real_nsqd().tcp_address)
    broker = NSQBroker(address)

    @broker.task
    async def note() -> None:
        ran.append(time.monotonic())

    async with working(broker):
        kicked = time.monotonic()
        await note.kicker().with_labels(delay=0.5).kiq()
        await until_async(lambda: ran)
        assert ran[0] - kicked >= 0.5
        with pytest.raises(SendTaskError) as caught:
            await note.kicker().with_labels(delay="soon").kiq()
        assert isinstance(caught.value.__cause__, ConfigError)


async def test_a_task_that_was_begun_often_is_not_given_up(nsqd_process: Any) -> None:
    ran: list[int] = []

    async def begin_often() -> None:
        async with Consumer("taskiq", "taskiq", nsqd_process.address, max_tries=0) as dying:
            async for message in dying:
                message.requeue(0, backoff=False)
                if message.attempts > 6:
                    break

    broker = NSQBroker(nsqd_process.address)

    @broker.task
    async def note(number: int) -> None:
        ran.append(number)

    producer = NSQBroker(nsqd_process.address)
    await producer.startup()
    await note.kicker().with_broker(producer).kiq(1)
    await producer.shutdown()
    await begin_often()
    async with working(broker):
        await until_async(lambda: ran)
    assert ran == [1]


async def test_a_server_that_restarts_loses_no_task(nsqd_process: Any) -> None:
    begun: set[int] = set()
    ran: set[int] = set()
    has_restarted = asyncio.Event()
    options = {"retry_max_delay": 0.1, "max_backoff_duration": 0.1}
    broker = NSQBroker(nsqd_process.address, producer=options, consumer={"max_reconnect_delay": 0.1})

    @broker.task
    async def note(number: int) -> None:
        begun.add(number)
        if number >= 10:  # some run when nsqd ends
            await has_restarted.wait()
        ran.add(number)

    async with working(broker):
        for number in range(50):
            await note.kiq(number)
        # Not while it sends: a real nsqd may lose a message then that is in none of its queues just now.
        await until_async(lambda: len(begun) == 50 and len(ran) == 10)
        nsqd_process.stop()
        kicking = [asyncio.create_task(note.kiq(number)) for number in range(50, 100)]
        await asyncio.sleep(0)
        nsqd_process.start()
        has_restarted.set()
        await asyncio.gather(*kicking)
        await until_async(lambda: len(ran) == 100)
