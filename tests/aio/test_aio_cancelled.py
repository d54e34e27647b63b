"""The task of a consumer is cancelled, or Ctrl-C comes: its handlers are, too. And tasks that await a publish."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from support.contract import AsyncioFace, joined
from support.held_publishes import PublishNsqd
from support.processes import LOOPS, NewLoop, until_async
from support.scripted_nsqd import heard
from support.waiting import WAIT
from support.wire import OK

from nsq_fast import ConfigDocument, Message
from nsq_fast.aio import CANCEL_TIMEOUT, Consumer, Producer
from nsq_fast.errors import NoNsqd

FILLED = 10
ALL = {b"%d" % number for number in range(FILLED)}


SLOW = 25.0
"""Seconds that handlers take: less than ``close`` waits by default, and far more than a cancelled consumer may."""


SOON = 8.0
"""Seconds that mean: it was not waited for handlers. A second, and what this machine may be late."""


async def taken_again(address: str, count: int = FILLED) -> set[bytes]:
    """What the channel still has, or gets back: so many messages."""
    found: set[bytes] = set()

    async def take() -> None:
        async with Consumer("t", "c", address) as consumer:
            async for message in consumer:
                found.add(message.body)
                if len(found) == count:
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
@pytest.mark.parametrize("kind", ["slow", "does not want to end", "ignores it", "answers later"])
async def test_handlers_are_cancelled_with_the_task_of_their_consumer(
    filled: str, new_loop: NewLoop, kind: str
) -> None:
    """And none gets another message."""
    handled: list[bytes] = []
    ended: list[str] = []

    async def handle(consumer: Consumer, message: Message) -> None:
        handled.append(message.body)
        if kind == "answers later":
            message.enable_async()
            return
        try:
            await asyncio.sleep(SLOW)  # sleep: a slow handler
        except asyncio.CancelledError:
            ended.append(kind)
            if kind == "does not want to end":
                await asyncio.sleep(SLOW)  # sleep: longer than it is waited for
            if kind != "ignores it":
                raise

    async def consume() -> None:
        async with Consumer("t", "c", filled, message_handler=handle, concurrency=3, max_in_flight=5) as consumer:
            await consumer.join()

    task = asyncio.create_task(consume())
    await until_async(lambda: len(handled) == (5 if kind == "answers later" else 3))
    assert await cancelled(task) < SOON
    assert (len(handled), len(ended)) == ((5, 0) if kind == "answers later" else (3, 3))
    back = ALL - set(handled) if kind == "ignores it" else ALL  # then they are handled, as nothing says otherwise
    assert await taken_again(filled, len(back)) == back


@pytest.mark.parametrize("way", ["held by tasks", "given up"])
async def test_what_those_hold_who_iterate_is_requeued(filled: str, way: str) -> None:
    held: list[Message] = []

    async def give_up(consumer: Consumer, message: Message) -> None:
        held.append(message)
        await asyncio.sleep(SLOW)  # sleep: a slow policy

    async def take(consumer: Consumer) -> None:
        async for message in consumer:
            if way == "given up":
                message.requeue(0)
            else:
                held.append(message)
                await asyncio.sleep(SLOW)  # sleep: a slow task

    async def iterate() -> None:
        options: dict[str, Any] = {"max_tries": 1, "give_up": give_up} if way == "given up" else {}
        options |= {"max_in_flight": 10, "concurrency": 3, "max_backoff_duration": 0}
        async with Consumer("t", "c", filled, **options) as consumer:
            other = asyncio.create_task(take(consumer))
            try:
                await take(consumer)
            finally:
                other.cancel()

    task = asyncio.create_task(iterate())
    await until_async(lambda: len(held) == 2)
    assert await cancelled(task) < SOON
    assert await taken_again(filled) == ALL


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
    assert asyncio.run(taken_again(filled)) == ALL


async def test_a_join_that_is_cancelled_leaves_nothing_behind(filled: str) -> None:
    async with Consumer("t", "c", filled, max_in_flight=1) as consumer, Producer(filled) as producer:
        consumer.stats()
        before = asyncio.all_tasks()
        for _ in range(100):
            for join in (consumer.join, producer.join):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(join(), 0.001)
        await until_async(lambda: asyncio.all_tasks() <= before)


def _end_by_cancelling() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def _end_in_time(seconds: float) -> None:
    asyncio.get_running_loop().call_later(seconds, asyncio.current_task().cancel)  # type: ignore[union-attr]
    await asyncio.sleep(WAIT)  # sleep: until it is cancelled


async def _raise(error: BaseException, is_late: bool) -> None:
    if is_late:
        await asyncio.sleep(0)
    raise error


class Odd(BaseException):
    """What libraries derive from BaseException, as trio.Cancelled and pytest's outcomes are."""


async def _wait_for_what_is_cancelled() -> None:
    inner = asyncio.ensure_future(asyncio.sleep(WAIT))  # sleep: what is cancelled
    inner.cancel()
    await inner


ENDS: dict[str, Any] = {
    "raises CancelledError": lambda: _raise(asyncio.CancelledError(), False),
    "raises CancelledError later": lambda: _raise(asyncio.CancelledError(), True),
    "raises GeneratorExit": lambda: _raise(GeneratorExit(), False),
    "raises GeneratorExit later": lambda: _raise(GeneratorExit(), True),
    "raises another BaseException": lambda: _raise(Odd(), False),
    "raises another BaseException later": lambda: _raise(Odd(), True),
    "waits for what is cancelled": _wait_for_what_is_cancelled,
    "cancels its task": lambda: _end_by_cancelling() or asyncio.sleep(0),  # type: ignore[func-returns-value]
    "has its task cancelled": lambda: _end_in_time(0.001),
}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks of Python 3.10 cannot tell who is cancelled")
@pytest.mark.parametrize("kind", ["single", "batch", "shared"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("nsqd_process", ["embedded"], indirect=True)  # servers see a REQ like any other
async def test_a_handler_that_ends_in_an_odd_way_fails_alone(
    filled: str, kind: str, end: str, caplog: pytest.LogCaptureFixture
) -> None:
    failures = 0

    async def handle(consumer: Consumer, item: Any) -> None:
        nonlocal failures
        if failures < 3:
            failures += 1
            await ENDS[end]()

    options: dict[str, Any] = {"max_in_flight": 4, "requeue_delay": 0, "max_backoff_duration": 0}
    options["batch_handler" if kind == "batch" else "message_handler"] = handle
    if kind == "shared":
        options["concurrency"] = 2
    consumer = Consumer("t", "c", filled, **options)
    raised = heard(consumer, "on_exception")
    async with consumer:
        await until_async(lambda: consumer.stats().totals.finished == FILLED)
        assert consumer.is_running
        assert consumer.stats().totals.requeued >= 3
        assert len(raised) == failures == 3
    assert sum("handler failed on message" in each.getMessage() for each in caplog.records) == 3


async def test_a_consumer_that_is_cancelled_twice_leaves_nothing_behind(nsqd_process: Any, filled: str) -> None:
    """In each way to close it, with a handler that does not want to end, and a server that does not answer."""
    begun = asyncio.Event()

    async def handle(consumer: Consumer, message: Message) -> None:
        begun.set()
        try:
            await asyncio.sleep(SLOW)  # sleep: a slow handler
        finally:
            if is_twice:
                await asyncio.sleep(SLOW)  # sleep: it does not want to end

    async def within(consumer: Consumer) -> None:
        async with consumer:
            await consumer.join()

    async def at_the_end(consumer: Consumer) -> None:
        async with consumer:
            await begun.wait()

    async def by_close(consumer: Consumer) -> None:
        await consumer.start()
        await begun.wait()
        await consumer.close()

    before = asyncio.all_tasks()
    for program, is_twice in ((within, True), (at_the_end, True), (at_the_end, False), (by_close, True)):
        begun.clear()
        closed: list[Any] = []
        consumer = Consumer("t", "c", filled, message_handler=handle, max_in_flight=3)
        consumer.on_close.connect(closed.append, weak=False)
        task = asyncio.create_task(program(consumer))
        await begun.wait()
        await until_async(lambda consumer=consumer, program=program: program is within or not consumer.is_running)  # type: ignore[misc]
        nsqd_process.freeze()
        if is_twice:
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert await cancelled(task) < (CANCEL_TIMEOUT if is_twice else SOON)
        assert not consumer.is_running
        assert consumer.total_in_flight == 0
        await until_async(lambda: asyncio.all_tasks() <= before)
        assert len(closed) == 1
        nsqd_process.thaw()
    assert await taken_again(filled) == ALL


# Publishes


TASKS = 20


BODIES = [b"%d" % number for number in range(TASKS)]


@pytest.fixture
def face() -> AsyncioFace:
    return AsyncioFace("asyncio", asyncio.new_event_loop)


async def possibly_stored(ending: Any) -> bool:
    """What the cancelled publish says that is awaited."""
    try:
        await ending
    except asyncio.CancelledError as error:
        found: Any = error
        while not hasattr(found, "possibly_stored"):  # 3.10 raises it anew
            found = found.__context__
        stored: bool = found.possibly_stored
        return stored
    raise AssertionError("it was not cancelled")


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize("times", [1, 2])
async def test_one_that_is_cancelled_may_be_stored_and_leaves_the_others_alone(
    face: AsyncioFace, is_lost: bool, times: int
) -> None:
    async with joined(face, BODIES) as publishes:
        nsqd, answered = publishes.nsqd, 0
        if is_lost:
            answered = len(nsqd.commands)
            nsqd.commands[0][0].shutdown(socket.SHUT_RDWR)
            await until_async(lambda: len(nsqd.commands) > answered)
        cancelled = publishes.jobs.pop(BODIES[3])
        for _ in range(times):
            cancelled.cancel()
        assert await possibly_stored(cancelled()) is True
        nsqd.react = lambda sock, _: sock.sendall(OK)
        for number in range(answered, len(nsqd.commands)):
            nsqd.reply(number)
        assert set((await publishes.ends()).values()) == {b"OK"}
        await until_async(lambda: publishes.stats("held") == (0,))


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_one_that_is_cancelled_before_it_was_sent_is_not_sent(new_loop: NewLoop) -> None:
    """And its task gets what it is cancelled with."""
    errors: list[Any] = []

    async def publish(body: bytes) -> Any:
        try:
            return await producer.publish("t", body)
        except asyncio.CancelledError as error:
            errors.append(error)
            raise

    with PublishNsqd(lambda sock, _: sock.sendall(OK)) as nsqd:
        async with Producer(nsqd.address, linger=WAIT, linger_max_messages=TASKS + 2) as producer:
            tasks = [asyncio.ensure_future(publish(body)) for body in BODIES]
            await until_async(lambda: producer.stats()["waiting"] == TASKS)
            gone = [tasks.pop(3), tasks.pop(3)]
            gone[0].cancel("for a reason")
            gone[1].cancel()
            await asyncio.wait(gone)
            assert all(task.cancelled() for task in gone)
            assert producer.stats()["pending"] == TASKS - 2
            tasks += [asyncio.ensure_future(publish(b"last")) for _ in range(2)]
            assert await asyncio.gather(*tasks) == TASKS * [b"OK"]
        assert nsqd.bodies == [sorted([b"last", b"last", *(body for body in BODIES if body not in (b"3", b"4"))])]
    assert [(error.args, error.possibly_stored) for error in errors] == [(("for a reason",), False), ((), False)]


async def test_a_close_waits_for_no_publish_that_was_cancelled(nsqd_process: Any) -> None:
    async with Producer(nsqd_process.address, publish_timeout=600.0) as producer:
        await producer.publish("t", b"first")
        nsqd_process.freeze()
        publishes = (producer.publish("t", b"2"), producer.multipublish("t", [b"3", b"4"]))
        tasks = [asyncio.ensure_future(publish) for publish in publishes]
        await until_async(lambda: producer.stats()["pending"] == len(tasks))
        await asyncio.sleep(0.05)  # sleep: they are sent
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.wait_for(producer.close(), WAIT)
        nsqd_process.thaw()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout is of Python 3.11")
async def test_a_timeout_of_asyncio_says_whether_it_may_be_stored() -> None:
    async with Producer("127.0.0.1:1") as producer:
        other = asyncio.ensure_future(producer.publish("u", b"x"))
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.05):
                await producer.publish("t", b"x")
        assert caught.value.__cause__.possibly_stored is False  # type: ignore[union-attr]
        assert producer.stats()["waiting"] == 1
        other.cancel()
        with pytest.raises(NoNsqd):
            await producer.publish("t", b"x", timeout=0.05)


async def test_one_that_was_cancelled_and_confirmed_in_the_same_moment_ends_once(nsqd_process: Any) -> None:
    async with Producer(nsqd_process.address) as producer:
        tasks = [asyncio.ensure_future(producer.publish("t", b"x")) for _ in range(TASKS)]
        first = asyncio.ensure_future(producer.publish("t", b"first"))
        first.add_done_callback(lambda _: [task.cancel() for task in tasks])
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(each == b"OK" or isinstance(each, asyncio.CancelledError) for each in found)
        assert await producer.publish("t", b"later") == b"OK"
        assert producer.stats()["pending"] == producer.stats()["held"] == 0
