"""Clients of asyncio: handlers are coroutines, a publish is awaited, and a loop may be blocked, be another, and end."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import re
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from support.held_publishes import PublishNsqd
from support.processes import LOOPS, NewLoop, run, run_quietly, until_async
from support.waiting import WAIT, until
from support.wire import OK

from nsq_fast import Message, threads
from nsq_fast.aio import Consumer, Producer
from nsq_fast.errors import ConfigError, NotRunning, WrongThread

COUNT = 20
number_of = contextvars.ContextVar[int]("number_of")


# Whose loop and whose context


def test_another_loop_is_told_that_it_may_not_use_them_and_has_its_own(filled: str) -> None:
    first = asyncio.new_event_loop()
    consumer, producer = Consumer("t", "c", filled), Producer(filled)
    first.run_until_complete(consumer.start())
    first.run_until_complete(producer.start())

    async def in_another_loop() -> None:
        publish = partial(producer.publish, "t", b"x")
        for call in (consumer.close, consumer.join, producer.close, producer.join, publish):
            with pytest.raises(NotRunning, match="another event loop"):
                await call()
        async with Producer(filled) as own:
            assert await own.publish("t", b"own") == b"OK"

    asyncio.run(in_another_loop())
    first.run_until_complete(asyncio.to_thread(lambda: asyncio.run(in_another_loop())))
    assert consumer.is_running
    assert producer.is_running
    assert (producer.stats()["pending"], producer.stats()["stored"]) == (0, 0)
    first.close()

    async def after_its_end() -> None:
        await consumer.close()
        await producer.close()
        await until_async(lambda: not consumer.is_running and not producer.is_running)

    asyncio.run(after_its_end())


async def without_a_loop(call: Any) -> None:
    """Take a coroutine to its end where asyncio has no loop, as a program of trio would."""

    def run() -> None:
        with pytest.raises(WrongThread, match=r"no event loop runs.*needs a running loop of asyncio, or uvloop"):
            call().send(None)

    await asyncio.to_thread(run)


async def test_without_a_loop_of_asyncio_every_call_says_that_it_needs_one(filled: str) -> None:
    async with Producer(filled) as producer, Consumer("t", "c", filled) as consumer:
        calls = [
            Producer(filled).start, lambda: producer.publish("t", b"x"), lambda: producer.multipublish("t", [b"x"]),
            producer.start, producer.join, producer.close,
            Consumer("t", "c", filled).start, consumer.start, consumer.join, consumer.close,
        ]  # fmt: skip
        for call in calls:
            await without_a_loop(call)
        with pytest.raises(WrongThread, match="no event loop runs"):
            await asyncio.to_thread(producer.publish_nowait, "t", b"x")
        assert producer.is_running
        assert consumer.is_running
        assert (producer.stats()["pending"], producer.stats()["stored"]) == (0, 0)


UNCLOSED = ["left in a loop", "not closed", "with handlers"]
CLOSED = ["closed", "a with block", "a with block that is cancelled", "not started"]


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("cancels", [True, False])
@pytest.mark.parametrize("nsqd_process", ["embedded"], indirect=True)  # it is a warning of ours
def test_the_end_of_the_loop_warns_of_a_consumer_that_nobody_closed(
    nsqd_process: Any, new_loop: NewLoop, cancels: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """Where the loop is closed only, and where all tasks are cancelled before, as by ``asyncio.run``."""

    async def handle(consumer: Consumer, message: Message) -> None:
        await asyncio.sleep(WAIT)  # sleep: a handler that the end of the loop cancels

    async def within(consumer: Consumer) -> None:
        async with consumer:
            await consumer.join()

    async def main(way: str, topic: str) -> None:
        is_handled = way in ("with handlers", "a with block that is cancelled")
        consumer = Consumer(topic, "c", nsqd_process.address, message_handler=handle if is_handled else None)
        if way == "a with block":
            async with consumer:
                return
        if way == "a with block that is cancelled":
            keep.append(asyncio.create_task(within(consumer)))
            await until_async(lambda: consumer.total_in_flight)
        elif way != "not started":
            await consumer.start()
            await until_async(lambda: consumer.total_in_flight)
        if way == "left in a loop":
            async for message in consumer:
                assert message.body
                break
        if way == "closed":
            await consumer.close()
        if cancels:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    keep: list[Any] = []
    ways = [way for way in (*UNCLOSED, *CLOSED) if cancels or way != "a with block that is cancelled"]
    with threads.Producer(nsqd_process.address) as producer:
        for number in range(len(ways)):
            producer.multipublish(f"t{number}", [b"x"] * 5)
    for number, way in enumerate(ways):
        run(main(way, f"t{number}"), new_loop)
    keep.clear()
    gc.collect()
    told = [str(each.message) for each in recwarn if each.category is ResourceWarning]
    unclosed = sorted(text for text in told if "unclosed consumer <nsq_fast.aio.Consumer" in text)
    assert [text.partition("Consumer ")[2].partition(">")[0] for text in unclosed] == ["t0 c", "t1 c", "t2 c"]


async def test_each_message_has_a_context_of_its_own(filled: str) -> None:
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

    async with Consumer("t", "c", filled, message_handler=handle, max_in_flight=100) as consumer:
        await until_async(lambda: consumer.stats().totals.finished == 100)
    assert seen == 100 * [0]


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_each_task_goes_on_in_its_own_context(nsqd_process: Any, new_loop: NewLoop) -> None:
    async with Producer(nsqd_process.address) as producer:

        async def publish(number: int) -> None:
            number_of.set(number)
            for _ in range(5):
                assert await producer.publish("t", b"x") == b"OK"
                assert number_of.get() == number
                assert asyncio.current_task() is tasks[number]

        tasks = [asyncio.ensure_future(publish(number)) for number in range(COUNT)]
        await asyncio.gather(*tasks)
        seen: list[int] = []
        number_of.set(COUNT)
        promise = producer.publish_nowait("t", b"x")
        promise.add_done_callback(lambda _: seen.append(number_of.get()))
        await promise
        await asyncio.sleep(0)
        assert seen == [COUNT]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="tasks that begin at once are new in 3.12")
async def test_tasks_that_begin_at_once(nsqd_process: Any) -> None:
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    async with Producer(nsqd_process.address) as producer:
        each: list[Coroutine[Any, Any, Any]] = [producer.publish("t", b"x") for _ in range(COUNT)]
        assert await asyncio.gather(*each) == [b"OK"] * COUNT


# The end of a loop


@pytest.mark.parametrize("cancels", [True, False], ids=["asyncio.run", "closed in the middle"])
def test_the_end_of_the_loop_gives_back_what_handlers_hold(
    filled: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], cancels: bool
) -> None:
    """Nobody closes the consumer. ``asyncio.run`` cancels what runs before it closes the loop."""
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
        if cancels:
            asyncio.run(main())
        else:
            loop = asyncio.new_event_loop()
            loop.run_until_complete(main())
            loop.close()
        until(lambda: not consumer.is_running and consumer.total_in_flight == 0)
        del handle, main
        gc.collect()
    assert not [record for record in caplog.records if re.search("never retrieved|destroyed", record.message)]
    assert "destroyed" not in capfd.readouterr().err
    totals = consumer.stats().totals
    assert (totals.finished, totals.requeued) == (0, totals.received)
    if not cancels:  # a handler that was cancelled has failed: its message comes again after a delay
        rest: set[bytes] = set()
        with threads.Consumer("t", "c", filled, message_handler=lambda _, m: rest.add(m.body), max_in_flight=100):
            until(lambda: len(rest) == 100)


def test_a_loop_that_is_closed_with_one_on_its_way_ends_the_producer() -> None:
    with PublishNsqd() as nsqd:
        loop = asyncio.new_event_loop()
        producer = Producer(nsqd.address)
        loop.run_until_complete(producer.start())

        async def begin() -> None:
            producer.publish_nowait("t", b"last")
            await until_async(lambda: nsqd.commands)

        loop.run_until_complete(begin())
        loop.close()
        assert not producer.is_running
        assert (producer.stats()["stored"], producer.stats()["pending"]) == (0, 1)
        with pytest.raises(NotRunning):
            asyncio.run(producer.publish("t", b"x"))
        asyncio.run(producer.close())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_the_end_of_the_loop_ends_the_connections_of_a_producer_that_nobody_closed(
    new_loop: NewLoop, recwarn: pytest.WarningsRecorder
) -> None:
    """As with one loop for each test of a program, and a producer of its module. Another loop may start it again."""

    async def main(producer: Producer, way: str) -> None:
        if way == "a with block":
            async with producer:
                await producer.publish("t", b"x")
            return
        await producer.start()
        await producer.publish("t", b"x")
        if way == "closed":
            await producer.close()

    def told() -> set[str]:
        gc.collect()
        return {str(each.message).partition(" <")[0] for each in recwarn if each.category is ResourceWarning}

    gc.disable()  # which would close sockets that nobody knows
    try:
        for way in ("closed", "a with block", "left in its loop"):
            assert told() == set()
            with PublishNsqd(lambda sock, _: sock.sendall(OK)) as nsqd:
                producer = Producer(nsqd.address)
                for count in range(1, 4 if way == "left in its loop" else 2):
                    run(main(producer, way), new_loop)
                    until(lambda nsqd=nsqd, count=count: nsqd.over == count)  # type: ignore[misc]
                    assert not producer.is_running
                    assert not producer.is_connected
    finally:
        gc.enable()
    assert told() == {"unclosed producer"}


def test_a_handler_that_exits_ends_the_program_without_another_word(nsqd_process: Any) -> None:
    program = f"""
import asyncio
from nsq_fast.aio import Consumer, Producer
async def handle(consumer, message):
    raise SystemExit  # asyncio.run cancels what runs
async def main():
    consumer = Consumer("t", "c", {nsqd_process.address!r}, message_handler=handle)
    await consumer.start()
    async with Producer({nsqd_process.address!r}) as producer:
        await producer.publish("t", b"x")
    await consumer.join()
asyncio.run(main())
"""
    run_quietly(program)
    with threads.Consumer("t", "c", nsqd_process.address) as consumer:
        assert next(iter(consumer)).attempts == 2, "the exit has cost one"


def test_a_handler_that_exits_leaves_what_waits_in_the_loop_to_others(nsqd_process: Any) -> None:
    handled: list[bytes] = []

    async def handle(consumer: Consumer, message: Message) -> None:
        while not handled and consumer.stats().totals.received < 2:
            await asyncio.sleep(0.001)  # sleep: until another message waits behind this one
        handled.append(message.body)
        if len(handled) == 1:
            await message.finish()  # nothing comes in its place
            raise SystemExit(3)

    with threads.Producer(nsqd_process.address) as producer:
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


# What is made and freed


@pytest.mark.parametrize("is_async", [False, True])
async def test_receivers_of_on_message_may_take_the_place_of_a_handler(filled: str, is_async: bool) -> None:
    heard: set[bytes] = set()

    def hear(consumer: Consumer, message: Message) -> None:
        heard.add(message.body)

    async def wait_and_hear(consumer: Consumer, message: Message) -> None:
        await asyncio.sleep(0)
        hear(consumer, message)

    consumer = Consumer("t", "c", filled, max_in_flight=50)
    consumer.on_message.connect(wait_and_hear if is_async else hear)
    async with consumer:
        await until_async(lambda: consumer.stats().totals.finished == 100)
    assert len(heard) == 100


async def test_close_waits_for_a_receiver_that_has_responded(filled: str) -> None:
    ended: list[bytes] = []
    may_end = asyncio.Event()

    async def hear(consumer: Consumer, message: Message) -> None:
        message.finish()
        await may_end.wait()
        ended.append(message.body)

    consumer = Consumer("t", "c", filled, max_in_flight=1)
    consumer.on_message.connect(hear)
    await consumer.start()
    await until_async(lambda: consumer.stats().totals.finished > 0)
    closing = asyncio.create_task(consumer.close())
    done, _ = await asyncio.wait([closing], timeout=0.1)
    assert not done
    may_end.set()
    await closing
    assert ended


async def test_an_iteration_can_be_closed_and_its_message_comes_again(filled: str) -> None:
    async with Consumer("t", "c", filled, max_in_flight=1) as consumer:
        async with aclosing(aiter(consumer)) as messages:
            left = await anext(messages)
        with pytest.raises(StopAsyncIteration):
            await anext(messages)
        await until_async(lambda: consumer.stats().totals.requeued == 1)
        again = [message.body async for message in _first(consumer, 100)]
        assert left.body in again
        assert len(set(again)) == 100


async def _first(consumer: Consumer, count: int) -> AsyncIterator[Message]:
    async for message in consumer:
        yield message
        count -= 1
        if not count:
            message.finish()
            return


async def test_what_has_ended_is_freed_at_once() -> None:
    """Without the garbage collector, which would keep a program waiting for what it has to look through."""
    with PublishNsqd(lambda sock, _: sock.sendall(OK)) as nsqd:
        async with Producer(nsqd.address) as producer:

            async def publish(together: int, count: int) -> None:
                for _ in range(count):
                    await asyncio.gather(*(producer.publish("t", b"x") for _ in range(together)))

            for together in (1, COUNT):
                await publish(together, 10)
                gc.collect()
                before = _ours()
                gc.disable()
                try:
                    await publish(together, 100)
                    assert _ours() < before + 50
                finally:
                    gc.enable()


def _ours() -> int:
    return sum(str(type(each).__module__).startswith("nsq_fast") for each in gc.get_objects())


async def handle_later(consumer: Consumer, message: Message, more: object = None) -> None:
    """A handler."""


class Later:
    async def __call__(self, consumer: Consumer, message: Message) -> None:
        """Another."""


def test_a_handler_that_is_not_async_is_refused_with_the_cure(closed_port: int) -> None:
    address = f"127.0.0.1:{closed_port}"
    for argument in ("message_handler", "batch_handler"):
        for wrong in (lambda consumer, message: None, partial(lambda more, consumer, message: None, 1), print):
            with pytest.raises(ConfigError, match=f"{argument}=.*write `async def`"):
                Consumer("t", "c", address, **{argument: wrong})
        for right in (handle_later, Later(), partial(handle_later, more=1), partial(Later())):
            Consumer("t", "c", address, **{argument: right})
    with pytest.raises(NotRunning, match="start"):
        aiter(Consumer("t", "c", address))
