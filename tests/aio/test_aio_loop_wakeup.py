"""How the hub thread wakes a loop: whatever the loop and the system have for it, nothing is missed or left behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from support.loops import LOOPS, NewLoop, run
from support.waiting import WAIT

from nsq_fast import Message
from nsq_fast.aio import Consumer, Producer
from nsq_fast.aio.loop_wakeup import LoopWakeup

DESCRIPTORS = Path("/proc/self/fd")


def in_thread(function: Any) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(WAIT)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_it_is_rung_in_another_thread_before_and_after_it_is_closed(new_loop: NewLoop) -> None:
    async def main() -> None:
        event = asyncio.Event()
        wakeup = LoopWakeup(asyncio.get_running_loop(), event.set)
        for _ in range(3):
            in_thread(wakeup.ring)
            await asyncio.wait_for(event.wait(), WAIT)
            event.clear()
        in_thread(wakeup.close)
        in_thread(wakeup.ring)
        await asyncio.wait_for(event.wait(), WAIT)
        await asyncio.sleep(0)
        event.clear()
        in_thread(wakeup.ring)
        await asyncio.wait_for(event.wait(), WAIT)
        wakeup.close()  # twice does no harm

    run(main(), new_loop)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_closed_loop_is_told_of(new_loop: NewLoop) -> None:
    made = []

    async def main() -> None:
        made.append(LoopWakeup(asyncio.get_running_loop(), gc.collect))

    run(main(), new_loop)
    with pytest.raises(RuntimeError):
        made[0].ring()
    made[0].close()


def test_without_a_descriptor_it_works_all_the_same(nsqd_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("no descriptor is left")

    monkeypatch.setattr(os, "eventfd", refuse, raising=False)

    async def main() -> None:
        async with Producer(nsqd_process.address) as producer:
            assert await producer.publish("t", b"x") == b"OK"

    asyncio.run(main())


def test_what_calls_handlers_has_not_the_context_of_who_started_it(nsqd_process: Any) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="nobody's")
    seen: list[str] = []

    async def main() -> None:
        handled = asyncio.Event()

        async def handle(consumer: Consumer, message: Message) -> None:
            seen.append(variable.get())
            handled.set()

        variable.set("the starter's")
        async with (
            Producer(nsqd_process.address) as producer,
            Consumer("t", "c", nsqd_process.address, message_handler=handle),
        ):
            await producer.publish("t", b"x")
            await asyncio.wait_for(handled.wait(), WAIT)

    asyncio.run(main())
    assert seen == ["nobody's"]


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="descriptors can be counted on Linux")
def test_clients_of_a_loop_that_goes_on_leave_no_descriptor(nsqd_process: Any) -> None:
    async def use_one() -> None:
        async with Producer(nsqd_process.address) as producer:
            await producer.publish("t", b"x")
        async with Consumer("t", "c", nsqd_process.address) as consumer:
            async for message in consumer:
                assert message.body == b"x"
                break

    def count() -> int:
        gc.collect()
        return len(list(DESCRIPTORS.iterdir()))

    async def main() -> None:
        await use_one()
        before = count()
        for _ in range(5):
            await use_one()
        for _ in range(1000):  # sockets are closed in the hub thread
            if count() <= before:
                return
            await asyncio.sleep(0.01)  # sleep: looks again and again
        assert count() <= before

    asyncio.run(main())


def test_all_who_wait_for_the_end_are_told(nsqd_process: Any) -> None:
    async def main() -> None:
        for _ in range(20):
            async with Producer(nsqd_process.address) as producer:
                joining = [asyncio.create_task(producer.join()) for _ in range(5)]
                await asyncio.sleep(0)
            assert await asyncio.wait_for(asyncio.gather(*joining), WAIT) == [True] * 5

    asyncio.run(main())
