"""The task of a consumer is cancelled, or Ctrl-C comes: handlers are cancelled, and what is held is requeued."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from support.loops import LOOPS, NewLoop, run, until_async

from nsq_fast import ConfigDocument, Message
from nsq_fast.aio import Consumer

WAIT = 30.0
FILLED = 10
SLOW = 25.0
"""Seconds that handlers take: less than ``close`` waits by default, and far more than a cancelled consumer may."""
SOON = 8.0
"""Seconds that mean: it was not waited for handlers. A second, and what this machine may be late."""


async def taken_again(address: str) -> set[bytes]:
    """What the channel still has, or gets back."""
    found: set[bytes] = set()

    async def take() -> None:
        async with Consumer("t", "c", address) as consumer:
            async for message in consumer:
                found.add(message.body)
                if len(found) == 10:
                    message.finish()
                    break

    await asyncio.wait_for(take(), WAIT)
    return found


async def cancelled(task: asyncio.Task[Any]) -> float:
    """Cancel it; return how long it took to end."""
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return time.monotonic() - began


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("is_obstinate", [False, True])
def test_handlers_are_cancelled_with_the_task_of_their_consumer(
    filled: str, new_loop: NewLoop, is_obstinate: bool
) -> None:
    ended: list[str] = []
    begun = asyncio.Event()

    async def handle(consumer: Consumer, message: Message) -> None:
        begun.set()
        try:
            await asyncio.sleep(SLOW)  # sleep: a slow handler
        except asyncio.CancelledError:
            ended.append("cancelled")
            if is_obstinate:
                await asyncio.sleep(SLOW)  # sleep: it does not want to end
            raise

    async def consume() -> None:
        async with Consumer("t", "c", filled, message_handler=handle, concurrency=3, max_in_flight=5):
            await asyncio.sleep(WAIT)  # sleep: until it is cancelled

    async def main() -> None:
        task = asyncio.create_task(consume())
        await begun.wait()
        assert await cancelled(task) < SOON
        assert ended
        assert await taken_again(filled) == {b"%d" % number for number in range(10)}

    run(main(), new_loop)


def test_a_handler_that_ignores_it_gets_no_other_message(filled: str) -> None:
    handled: list[bytes] = []
    begun = asyncio.Event()

    async def handle(consumer: Consumer, message: Message) -> None:
        handled.append(message.body)
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(SLOW)  # sleep: a slow handler

    async def consume() -> None:
        async with Consumer("t", "c", filled, message_handler=handle, max_in_flight=5) as consumer:
            await consumer.join()

    async def main() -> None:
        task = asyncio.create_task(consume())
        await begun.wait()
        assert await cancelled(task) < SOON

    asyncio.run(main())
    assert len(handled) == 1


def test_asynchronous_messages_and_those_of_other_tasks_are_requeued(filled: str) -> None:
    held: list[Message] = []

    async def handle(consumer: Consumer, message: Message) -> None:
        message.enable_async()
        held.append(message)

    async def hold() -> None:
        async with Consumer("t", "c", filled, message_handler=handle, max_in_flight=10):
            await asyncio.sleep(WAIT)  # sleep: until it is cancelled

    async def take(consumer: Consumer) -> None:
        async for message in consumer:
            held.append(message)
            await asyncio.sleep(SLOW)  # sleep: a slow task

    async def iterate() -> None:
        async with Consumer("t", "c", filled, max_in_flight=10, concurrency=3) as consumer:
            other = asyncio.create_task(take(consumer))
            try:
                await take(consumer)
            finally:
                other.cancel()

    async def main() -> None:
        for program, count in ((hold, 10), (iterate, 2)):
            held.clear()
            task = asyncio.create_task(program())
            await until_async(lambda count=count: len(held) >= count)  # type: ignore[misc]
            assert await cancelled(task) < SOON
        assert await taken_again(filled) == {b"%d" % number for number in range(10)}

    asyncio.run(main())


def test_to_be_cancelled_ends_a_close_that_waits_and_says_so(filled: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    begun = asyncio.Event()

    async def handle(consumer: Consumer, message: Message) -> None:
        begun.set()
        await asyncio.sleep(SLOW)  # sleep: a slow handler

    async def consume() -> None:
        async with Consumer("t", "c", filled, message_handler=handle):
            await begun.wait()

    def told() -> list[str]:
        return [each.getMessage() for each in caplog.records if getattr(each, "event", "") == "close_waits"]

    async def main() -> None:
        task = asyncio.create_task(consume())
        await until_async(told)
        assert await cancelled(task) < SOON
        (text,) = told()
        assert "waits for 1 messages" in text
        assert "s more" in text

    asyncio.run(main())


class Silent:
    """A config source that says nothing before ``over`` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def next(self, last: ConfigDocument | None) -> ConfigDocument:
        self.over.wait(WAIT)
        return ConfigDocument({}, 1)


def test_a_start_that_is_cancelled_leaves_nothing_behind(filled: str) -> None:
    source = Silent()

    async def main() -> None:
        consumer = Consumer("t", "c", filled, config_source=source)
        before = asyncio.all_tasks()
        task = asyncio.create_task(consumer.start())
        await until_async(lambda: len(asyncio.all_tasks()) > len(before) + 1)
        await cancelled(task)
        assert not consumer.is_running
        await until_async(lambda: asyncio.all_tasks() <= before)

    try:
        asyncio.run(main())
    finally:
        source.over.set()


def test_a_policy_that_is_cancelled_with_who_iterates_loses_no_message(filled: str) -> None:
    called: list[bytes] = []

    async def give_up(consumer: Consumer, message: Message) -> None:
        called.append(message.body)
        await asyncio.sleep(SLOW)  # sleep: a slow policy

    async def take() -> None:
        async with Consumer(
            "t", "c", filled, max_in_flight=5, max_tries=1, give_up=give_up, max_backoff_duration=0
        ) as consumer:
            async for message in consumer:
                message.requeue(0)

    async def main() -> None:
        task = asyncio.create_task(take())
        await until_async(lambda: called)
        assert await cancelled(task) < SOON
        assert await taken_again(filled) == {b"%d" % number for number in range(10)}

    asyncio.run(main())


INTERRUPTED = """
import asyncio, signal, sys
from nsq_fast.aio import Consumer

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored for what runs in its background

async def handle(consumer, message):
    print("begun", flush=True)
    await asyncio.sleep(25)  # sleep: a slow handler

async def main():
    async with Consumer("t", "c", sys.argv[1], message_handler=handle):
        await asyncio.sleep(60)  # sleep: until it is interrupted

try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_ends_a_program_whose_handler_is_slow(filled: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, filled], stdout=subprocess.PIPE, text=True, stderr=subprocess.STDOUT
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "begun\n"
        began = time.monotonic()
        os.kill(program.pid, signal.SIGINT)
        assert program.wait(WAIT) == 0
        assert time.monotonic() - began < SOON
        assert program.stdout.read() == "interrupted\n"
    assert asyncio.run(taken_again(filled)) == {b"%d" % number for number in range(10)}
