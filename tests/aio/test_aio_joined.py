"""Publishes of several tasks that left as one command: each has the end that it would have had alone."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from support.held_publishes import OK, PublishNsqd
from support.waiting import WAIT

from nsq_fast.aio import Producer
from nsq_fast.errors import BodyInvalid, NotRunning, PublishFailed, PublishTimeout

TASKS = 20
BODIES = [b"%d" % number for number in range(TASKS)]

Results = list[Any]


async def happens(probe: Callable[[], object], about: str) -> None:
    """Wait until it is so, while the loop runs."""
    deadline = asyncio.get_running_loop().time() + WAIT
    while not probe():
        assert asyncio.get_running_loop().time() < deadline, about
        await asyncio.sleep(0.001)  # sleep: looks again and again


class Joined:
    """A producer whose next command, that the nsqd keeps, has publishes of several tasks."""

    def __init__(self, nsqd: PublishNsqd, producer: Producer, tasks: list[asyncio.Task[Any]]) -> None:
        self.nsqd, self.producer, self.tasks = nsqd, producer, tasks

    async def results(self) -> Results:
        return await asyncio.gather(*self.tasks, return_exceptions=True)


def joined(then: Callable[[Joined], Coroutine[Any, Any, None]], bodies: list[bytes] = BODIES, **options: Any) -> None:
    """Do it with publishes of these bodies, which the nsqd has, as its second command, and has not answered."""

    async def main() -> None:
        with PublishNsqd() as nsqd:
            async with Producer(nsqd.address, **options) as producer:
                first = asyncio.create_task(producer.publish("t", b"first"))
                await happens(lambda: nsqd.commands, "the first command")
                tasks = [asyncio.create_task(producer.publish("t", body)) for body in bodies]
                await happens(lambda: len(nsqd.commands) > 1, "the command of the others")
                assert nsqd.bodies[1:] == [sorted(bodies)]
                nsqd.reply(0)
                await first
                await then(Joined(nsqd, producer, tasks))
                nsqd.react = lambda sock, _: sock.sendall(OK)

    asyncio.run(main())


def stored_alone(joined: Joined) -> None:
    joined.nsqd.react = lambda sock, _: sock.sendall(OK)


def test_they_count_as_what_they_are() -> None:
    async def then(joined: Joined) -> None:
        stats = joined.producer.stats()
        assert (stats["pending"], stats["held"], stats["stored"]) == (TASKS, TASKS, 1)
        joined.nsqd.reply(1)
        assert await joined.results() == TASKS * [b"OK"]
        stats = joined.producer.stats()
        assert (stats["pending"], stats["held"], stats["stored"]) == (0, 0, TASKS + 1)

    joined(then)


def test_one_that_is_refused_fails_alone() -> None:
    async def then(joined: Joined) -> None:
        def refuse_the_bad(sock: socket.socket, bodies: list[bytes]) -> None:
            if b"bad" in bodies:
                joined.nsqd.refuse(sock, b"E_BAD_MESSAGE no")
            else:
                sock.sendall(OK)

        joined.nsqd.react = refuse_the_bad
        joined.nsqd.refuse(joined.nsqd.commands[1][0], b"E_BAD_MESSAGE no")
        *good, bad = await joined.results()
        assert good == TASKS * [b"OK"]
        assert isinstance(bad, PublishFailed)
        assert not bad.possibly_stored

    joined(then, [*BODIES, b"bad"])


def test_each_has_an_error_of_its_own_when_the_connection_is_lost() -> None:
    async def then(joined: Joined) -> None:
        joined.nsqd.commands[1][0].shutdown(socket.SHUT_RDWR)
        errors = await joined.results()
        assert all(isinstance(error, PublishFailed) and error.possibly_stored for error in errors)
        assert len({id(error) for error in errors}) == TASKS

    joined(then, retry_unknown_outcome=False)


def test_each_is_sent_again_when_the_connection_is_lost() -> None:
    async def then(joined: Joined) -> None:
        stored_alone(joined)
        joined.nsqd.commands[1][0].shutdown(socket.SHUT_RDWR)
        assert await joined.results() == TASKS * [b"OK"]
        assert sorted(body for bodies in joined.nsqd.bodies[2:] for body in bodies) == sorted(BODIES)

    joined(then)


def test_each_times_out() -> None:
    async def then(joined: Joined) -> None:
        errors = await joined.results()
        assert all(isinstance(error, PublishTimeout) and error.possibly_stored for error in errors)
        joined.nsqd.reply(-1)

    joined(then, publish_timeout=3.0)


def test_one_that_is_cancelled_may_be_stored_and_leaves_the_others_alone() -> None:
    async def then(joined: Joined) -> None:
        cancelled = joined.tasks.pop(3)
        cancelled.cancel()
        assert await _possibly_stored(cancelled) is True
        joined.nsqd.reply(1)
        assert await joined.results() == (TASKS - 1) * [b"OK"]
        assert joined.producer.stats()["held"] == 0

    joined(then)


def test_one_that_is_cancelled_after_the_connection_was_lost_may_be_stored() -> None:
    async def then(joined: Joined) -> None:
        sent = len(joined.nsqd.commands)
        joined.nsqd.commands[1][0].shutdown(socket.SHUT_RDWR)
        await happens(lambda: len(joined.nsqd.commands) > sent, "they are sent again")
        cancelled = joined.tasks.pop(3)
        cancelled.cancel()
        assert await _possibly_stored(cancelled) is True
        while not all(task.done() for task in joined.tasks):
            for number in range(sent, len(joined.nsqd.commands)):
                joined.nsqd.reply(number)
                sent = number + 1
            await asyncio.sleep(0.001)  # sleep: looks again and again
        assert await joined.results() == (TASKS - 1) * [b"OK"]

    joined(then)


async def _possibly_stored(task: asyncio.Task[Any]) -> bool:
    try:
        await task
    except asyncio.CancelledError as error:
        found: Any = error
        while not hasattr(found, "possibly_stored"):  # 3.10 raises it anew
            found = found.__context__
        stored: bool = found.possibly_stored
        return stored
    raise AssertionError("it was not cancelled")


def test_one_that_is_cancelled_before_it_was_sent_is_not_sent() -> None:
    async def main() -> None:
        with PublishNsqd(lambda sock, _: sock.sendall(OK)) as nsqd:
            async with Producer(nsqd.address, linger=WAIT, linger_max_messages=TASKS + 1) as producer:
                tasks = [asyncio.create_task(producer.publish("t", body)) for body in BODIES]
                await happens(lambda: producer.stats()["waiting"] == TASKS, "all wait")
                cancelled = tasks.pop(3)
                cancelled.cancel()
                assert await _possibly_stored(cancelled) is False
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
            await happens(lambda: nsqd.commands, "the publish")

        loop.run_until_complete(begin())
        loop.close()
        assert not producer.is_running
        assert (producer.stats()["stored"], producer.stats()["pending"]) == (0, 1)
        with pytest.raises(NotRunning):
            asyncio.run(producer.publish("t", b"x"))
        asyncio.run(producer.close())
