"""The Consumer of asyncio: handlers are coroutines, and a loop may be blocked, cancelled and closed."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.loops import LOOPS, NewLoop, run, until_async
from support.scripted_nsqd import ScriptedNsqd
from support.waiting import PROCESS, until

from nsq_fast import Message
from nsq_fast.aio import Consumer
from nsq_fast.aio import Producer as AioProducer
from nsq_fast.errors import ConfigError, NotRunning
from nsq_fast.threads import Producer

ROOT = Path(__file__).parent.parent.parent
WAIT = 30.0


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_message_that_comes_while_the_last_handler_ends_is_handled(nsqd_process: Any, new_loop: NewLoop) -> None:
    handled: list[bytes] = []
    with Producer(nsqd_process.address) as producer:
        producer.publish("t", b"first")

        async def handle(consumer: Consumer, message: Message) -> None:
            if not handled:
                producer.publish("t", b"second")
                while consumer.stats().totals.received < 2:
                    await asyncio.sleep(0.001)  # sleep: until another message waits behind this one
            handled.append(message.body)

        async def main() -> None:
            async with Consumer("t", "c", nsqd_process.address, message_handler=handle, max_in_flight=2, concurrency=1):
                await until_async(lambda: handled == [b"first", b"second"])

        run(main(), new_loop)


def test_what_waits_in_the_loop_for_a_handler_is_given_back(filled: str) -> None:
    begun: list[bytes] = []

    async def main() -> None:
        gate = asyncio.Event()

        async def handle(consumer: Consumer, message: Message) -> None:
            begun.append(message.body)
            await gate.wait()

        consumer = Consumer("t", "c", filled, message_handler=handle, concurrency=2, max_in_flight=10)
        await consumer.start()
        await until_async(lambda: len(begun) == 2 and consumer.total_in_flight == 10)
        closing = asyncio.create_task(consumer.close())
        await until_async(lambda: consumer.stats().totals.requeued == 8)
        gate.set()
        await closing
        assert consumer.stats().totals.finished == 2

    asyncio.run(main())
    assert len(begun) == 2


def test_no_handler_gets_a_message_that_expired_while_it_waited_in_the_loop() -> None:
    server = ScriptedNsqd({"msg_timeout": 300})
    begun: list[int] = []
    are_expired, over = threading.Event(), threading.Event()

    async def handle(consumer: Consumer, message: Message) -> None:
        begun.append(int(message.id, 16))
        if begun == [1]:
            await asyncio.to_thread(are_expired.wait, WAIT)

    options: dict[str, Any] = {"concurrency": 1, "max_in_flight": 10, "max_backoff_duration": 0}
    consumer = Consumer("t", "c", str(server.address), message_handler=handle, **options)

    async def main() -> None:
        async with consumer:
            await asyncio.to_thread(over.wait, WAIT)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        connection = server.connection()
        connection.push(1, 2, 3)
        until(lambda: consumer.stats().totals.expired == 3)
        are_expired.set()
        connection.push(4)
        until(lambda: begun[-1] == 4)
        assert begun == [1, 4]
    finally:
        are_expired.set()
        over.set()
        until(lambda: not thread.is_alive())
        server.stop()


def test_close_lets_the_other_tasks_that_iterate_finish_their_messages(filled: str) -> None:
    async def main() -> None:
        found: dict[bytes, int] = {}
        async with Consumer("t", "c", filled, max_in_flight=20, concurrency=2) as consumer:
            at_a_message, go_on = asyncio.Event(), asyncio.Event()

            async def take() -> None:
                async for message in consumer:
                    found[message.body] = message.attempts
                    at_a_message.set()
                    await go_on.wait()

            task = asyncio.create_task(take())
            await at_a_message.wait()
            closing = asyncio.create_task(consumer.close())
            await asyncio.sleep(0)
            await until_async(lambda: consumer.total_in_flight == 1)
            go_on.set()
            await closing
            await task
            assert len(found) == 1
            assert consumer.stats().totals.finished == 1

    asyncio.run(main())


def test_a_handler_that_exits_leaves_what_waits_in_the_loop_to_others(nsqd_process: Any) -> None:
    handled: list[bytes] = []

    async def handle(consumer: Consumer, message: Message) -> None:
        while not handled and consumer.stats().totals.received < 2:
            await asyncio.sleep(0.001)  # sleep: until another message waits behind this one
        handled.append(message.body)
        if len(handled) == 1:
            await message.finish()  # nothing comes in its place
            raise SystemExit(3)

    with Producer(nsqd_process.address) as producer:
        producer.multipublish("t", [b"1", b"2"])
    loop = asyncio.new_event_loop()
    options: dict[str, Any] = {"max_in_flight": 2, "concurrency": 1}
    consumer = Consumer("t", "c", nsqd_process.address, message_handler=handle, **options)
    loop.run_until_complete(consumer.start())
    with pytest.raises(SystemExit):
        loop.run_until_complete(until_async(lambda: len(handled) == 2))
    loop.run_until_complete(until_async(lambda: len(handled) == 2))  # a program that goes on all the same
    loop.run_until_complete(consumer.close())
    loop.close()
    assert sorted(handled) == [b"1", b"2"]


def test_another_loop_is_told_that_it_may_not_close_it(filled: str) -> None:
    first = asyncio.new_event_loop()
    consumer, producer = Consumer("t", "c", filled), AioProducer(filled)
    first.run_until_complete(consumer.start())
    first.run_until_complete(producer.start())

    async def in_another_loop() -> None:
        for call in (consumer.close, consumer.join, producer.close, producer.join):
            with pytest.raises(NotRunning, match="another event loop"):
                await call()

    asyncio.run(in_another_loop())
    assert consumer.is_running
    assert producer.is_running
    first.close()

    async def after_its_end() -> None:
        await consumer.close()
        await producer.close()
        await until_async(lambda: not consumer.is_running and not producer.is_running)

    asyncio.run(after_its_end())


def test_a_join_that_is_cancelled_leaves_nothing_behind(filled: str) -> None:
    async def main() -> None:
        async with Consumer("t", "c", filled, max_in_flight=1) as consumer, AioProducer(filled) as producer:
            consumer.stats()
            before = asyncio.all_tasks()
            for _ in range(100):
                for join in (consumer.join, producer.join):
                    with pytest.raises(asyncio.TimeoutError):
                        await asyncio.wait_for(join(), 0.001)
            await until_async(lambda: asyncio.all_tasks() <= before)

    asyncio.run(main())


def test_each_message_has_a_context_of_its_own(filled: str) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    seen: list[int] = []

    async def handle(consumer: Consumer, message: Message) -> None:
        before = variable.get()
        token = variable.set(1)
        if len(seen) % 3 == 0:
            await asyncio.sleep(0)
        variable.reset(token)
        variable.set(2)
        seen.append(before)

    async def main() -> None:
        async with Consumer("t", "c", filled, message_handler=handle, max_in_flight=100) as consumer:
            await until_async(lambda: consumer.stats().totals.finished == 100)

    asyncio.run(main())
    assert seen == 100 * [0]


def test_what_a_handler_waited_for_is_cancelled_and_only_that_message_fails(filled: str) -> None:
    count = 0

    async def handle(consumer: Consumer, message: Message) -> None:
        nonlocal count
        count += 1
        if count == 1:
            inner = asyncio.ensure_future(asyncio.sleep(WAIT))  # sleep: what is cancelled
            inner.cancel()
            await inner

    async def main() -> None:
        options: dict[str, Any] = {"max_in_flight": 10, "requeue_delay": 0, "max_backoff_duration": 0}
        async with Consumer("t", "c", filled, message_handler=handle, **options) as consumer:
            await until_async(lambda: consumer.stats().totals.finished == 100)
            assert consumer.is_running

    asyncio.run(main())


def test_the_end_of_the_loop_gives_back_what_handlers_hold(
    filled: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    began = 0

    async def handle(consumer: Consumer, message: Message) -> None:
        nonlocal began
        began += 1
        await asyncio.sleep(WAIT)  # sleep: a handler that does not end

    consumer = Consumer("t", "c", filled, message_handler=handle, max_in_flight=10, concurrency=5)

    async def main() -> None:
        await consumer.start()
        await until_async(lambda: began == 5)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())  # nobody closes it: asyncio cancels what runs, and closes the loop
        until(lambda: not consumer.is_running and consumer.total_in_flight == 0)
        gc.collect()
    assert began == 5
    assert not [record for record in caplog.records if "never retrieved" in record.message]
    assert "destroyed" not in capfd.readouterr().err
    totals = consumer.stats().totals
    assert (totals.finished, totals.requeued) == (0, totals.received)


def test_a_loop_that_is_closed_in_the_middle_loses_nothing(filled: str, caplog: pytest.LogCaptureFixture) -> None:
    began = threading.Event()

    async def handle(consumer: Consumer, message: Message) -> None:
        began.set()
        await asyncio.sleep(WAIT)  # sleep: a handler that does not end

    loop = asyncio.new_event_loop()
    consumer = Consumer("t", "c", filled, message_handler=handle, max_in_flight=10)
    loop.run_until_complete(consumer.start())
    loop.run_until_complete(until_async(began.is_set))
    with caplog.at_level(logging.ERROR):
        loop.close()
        del handle
        gc.collect()
    consumer_of_rest: set[bytes] = set()

    async def rest(other: Consumer, message: Message) -> None:
        consumer_of_rest.add(message.body)

    async def main() -> None:
        async with Consumer("t", "c", filled, message_handler=rest, max_in_flight=100):
            await until_async(lambda: len(consumer_of_rest) == 100)

    asyncio.run(main())
    assert not [record for record in caplog.records if "destroyed" in record.message]


def test_it_is_not_iterated_before_it_is_started() -> None:
    with pytest.raises(NotRunning, match="start"):
        aiter(Consumer("t", "c", "127.0.0.1:1"))


def test_the_interpreter_ends_without_a_word(filled: str) -> None:
    program = f"""
import asyncio
from nsq_fast.aio import Consumer
async def handle(consumer, message):
    await asyncio.sleep(100)  # sleep: a program that is ended
async def main():
    consumer = Consumer("t", "c", {filled!r}, message_handler=handle, max_in_flight=5)
    await consumer.start()
    while not consumer.total_in_flight:
        await asyncio.sleep(0.01)  # sleep: looks again and again
asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


async def handle_later(consumer: Consumer, message: Message, more: object = None) -> None:
    """A handler."""


class Later:
    async def __call__(self, consumer: Consumer, message: Message) -> None:
        """Another."""


def test_a_handler_that_is_not_async_is_refused_with_the_cure(closed_port: int) -> None:
    for argument in ("message_handler", "batch_handler"):
        for wrong in (lambda consumer, message: None, partial(lambda more, consumer, message: None, 1), print):
            with pytest.raises(ConfigError, match=f"{argument}=.*write `async def`"):
                Consumer("t", "c", f"127.0.0.1:{closed_port}", **{argument: wrong})
        for right in (handle_later, Later(), partial(handle_later, more=1), partial(Later())):
            Consumer("t", "c", f"127.0.0.1:{closed_port}", **{argument: right})
