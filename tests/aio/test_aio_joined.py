"""Publishes of several tasks that left as one command, of which some are cancelled; what has ended is freed."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import pytest
from support.contract import AsyncioFace, Joined, joined
from support.held_publishes import OK, PublishNsqd
from support.loops import until_async
from support.waiting import WAIT

from nsq_fast.aio import Producer
from nsq_fast.errors import BodyInvalid, NotRunning

TASKS = 20
BODIES = [b"%d" % number for number in range(TASKS)]
FACE = AsyncioFace("asyncio", asyncio.new_event_loop)


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
def test_one_that_is_cancelled_may_be_stored_and_leaves_the_others_alone(is_lost: bool) -> None:
    async def then(joined: Joined) -> None:
        nsqd, answered = joined.nsqd, 0
        if is_lost:
            answered = len(nsqd.commands)
            nsqd.commands[0][0].shutdown(socket.SHUT_RDWR)
            await until_async(lambda: len(nsqd.commands) > answered)
        cancelled = joined.jobs.pop(BODIES[3])
        cancelled.cancel()
        assert await possibly_stored(cancelled()) is True
        nsqd.react = lambda sock, _: sock.sendall(OK)
        for number in range(answered, len(nsqd.commands)):
            nsqd.reply(number)
        assert set((await joined.ends()).values()) == {b"OK"}
        await until_async(lambda: joined.stats("held") == (0,))

    joined(FACE, then, BODIES)


def test_one_that_is_cancelled_before_it_was_sent_is_not_sent() -> None:
    async def main() -> None:
        with PublishNsqd(lambda sock, _: sock.sendall(OK)) as nsqd:
            async with Producer(nsqd.address, linger=WAIT, linger_max_messages=TASKS + 1) as producer:
                tasks = [asyncio.create_task(producer.publish("t", body)) for body in BODIES]
                await until_async(lambda: producer.stats()["waiting"] == TASKS)
                cancelled = tasks.pop(3)
                cancelled.cancel()
                assert await possibly_stored(cancelled) is False
                tasks.append(asyncio.create_task(producer.publish("t", b"last")))
                assert await asyncio.gather(*tasks) == TASKS * [b"OK"]
            assert nsqd.bodies == [sorted([b"last", *(body for body in BODIES if body != BODIES[3])])]

    asyncio.run(main())


def test_one_that_may_not_be_sent_is_refused_alone() -> None:
    async def main() -> None:
        with PublishNsqd(lambda sock, _: sock.sendall(OK)) as nsqd:
            async with Producer(nsqd.address) as producer:
                await producer.publish("t", b"first")
                bodies = [*BODIES, b""]
                *good, bad = await asyncio.gather(
                    *(producer.publish("t", body) for body in bodies), return_exceptions=True
                )
                assert good == TASKS * [b"OK"]
                assert isinstance(bad, BodyInvalid)

    asyncio.run(main())


def test_those_of_a_task_stay_in_order() -> None:
    async def main() -> None:
        with PublishNsqd(lambda sock, _: sock.sendall(OK)) as nsqd:
            async with Producer(nsqd.address) as producer:

                async def publish(name: int) -> None:
                    for number in range(30):
                        await producer.publish("t", b"%d %d" % (name, number))

                await asyncio.gather(*(publish(name) for name in range(TASKS)))
            bodies = [body for _, bodies in nsqd.commands for body in bodies]
        for name in range(TASKS):
            mine = [int(body.split()[1]) for body in bodies if body.startswith(b"%d " % name)]
            assert mine == list(range(30))

    asyncio.run(main())


@pytest.mark.parametrize("together", [1, TASKS])
def test_what_has_ended_is_freed_at_once(together: int) -> None:
    """Without the garbage collector, which would keep a program waiting for what it has to look through."""

    async def main() -> None:
        with PublishNsqd(lambda sock, _: sock.sendall(OK)) as nsqd:
            async with Producer(nsqd.address) as producer:

                async def publish(count: int) -> None:
                    for _ in range(count):
                        await asyncio.gather(*(producer.publish("t", b"x") for _ in range(together)))

                await publish(10)
                gc.collect()
                before = _ours()
                gc.disable()
                try:
                    await publish(100)
                    assert _ours() < before + 50
                finally:
                    gc.enable()

    asyncio.run(main())


def _ours() -> int:
    return sum(str(type(each).__module__).startswith("nsq_fast") for each in gc.get_objects())


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
