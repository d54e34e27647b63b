"""One scenario, written once as ``async def``, on every face of the client.

A face that blocks takes the scenario to its end with a single ``send(None)``: what is asked of a face with ``await``
blocks there, as the calls of its clients do. So nothing is awaited in a scenario but what a ``Face`` gives. A loop of
asyncio runs in a thread of its own: servers of the test live in the hub of the thread that runs the test.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any, NamedTuple

import gevent.event
import pytest
from gevent.util import wrap_errors

import nsq_fast
from nsq_fast import Message, aio, threads

from .held_publishes import PublishNsqd
from .processes import LOOPS, run
from .waiting import WAIT
from .wire import OK

Scenario = Coroutine[Any, Any, Any]


class Face:
    """A face that blocks.

    Args:
        package: has Producer and Consumer.
        spawn: begins a function elsewhere.
    """

    def __init__(self, name: str, package: Any, sleep: Callable[[float], object], spawn: Callable[..., Any]) -> None:
        self.name = name
        self.package = package
        self._sleep = sleep
        self._spawn = spawn

    def run(self, scenario: Scenario) -> Any:
        """Take a scenario to its end."""
        try:
            scenario.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("a scenario awaited what no face gave it")

    def taken(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options as consumers of this face take them: handlers are given as coroutine functions."""
        handlers = {name: self._blocking(each) for name, each in options.items() if inspect.iscoroutinefunction(each)}
        return options | handlers

    def _blocking(self, handler: Callable[[Any, Any], Scenario]) -> Any:
        return lambda consumer, item: self.run(handler(consumer, item))

    async def __call__(self, result: Any) -> Any:
        """What a call of a client gives: ``await face(producer.publish(...))``."""
        return result

    async def result(self, promise: Any) -> Any:
        """What a promise of ``publish_nowait`` gets."""
        return promise.get(timeout=WAIT) if hasattr(promise, "get") else promise.result(WAIT)

    async def sleep(self, seconds: float) -> None:  # sleep: of those who look again and again
        """Let others run."""
        self._sleep(seconds)  # sleep: as above

    async def do(self, function: Callable[[], Any]) -> Any:
        """Call what belongs to the thread of the test."""
        return function()

    async def until(self, probe: Callable[[], object], about: Callable[[], object] = str) -> None:
        """Wait until it is so, while others run; it is asked in the thread of the test."""
        end = time.monotonic() + WAIT
        while not await self.do(lambda: bool(probe())):  # in that thread: a list may fill up meanwhile
            assert time.monotonic() < end, about()
            await self.sleep(0.005)  # sleep: looks again and again

    async def begin(self, scenario: Callable[[], Scenario]) -> Callable[[], Scenario]:
        """Have it run beside the caller; await a call of what this returns to have its result, or what it raised."""
        ended: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                ended.append((self.run(scenario()), None))
            except BaseException as error:
                ended.append((None, error))

        self._spawn(work)

        async def join() -> Any:
            end = time.monotonic() + WAIT
            while not ended and time.monotonic() < end:  # to join a thread would hold up the servers of this one
                self._sleep(0.001)  # sleep: looks again and again
            ((value, error),) = ended
            if error is not None:
                raise error
            return value

        return join

    @asynccontextmanager
    async def client(self, kind: str, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        """A ``Producer``, or a ``Consumer`` whose handlers are coroutine functions, that runs."""
        with getattr(self.package, kind)(*arguments, **self.taken(options)) as client:
            yield client

    async def messages(self, consumer: Any) -> AsyncIterator[Any]:
        """What a consumer gives to who iterates. Close it: ``contextlib.aclosing``."""
        for message in consumer:
            yield message

    @asynccontextmanager
    async def consuming(
        self, way: str, handle: Callable[[Any, Message], Scenario], *addresses: object, topic: str = "t", **options: Any
    ) -> AsyncIterator[Any]:
        """A ``Consumer`` of the channel c whose messages ``handle`` gets: in "batches", "iterated", or one by one."""

        async def handle_batch(consumer: Any, messages: list[Message]) -> None:
            for message in messages:
                await handle(consumer, message)

        async def iterate() -> None:
            async with aclosing(self.messages(consumer)) as messages:
                async for message in messages:
                    await handle(consumer, message)

        handlers = {"batches": {"batch_handler": handle_batch}, "iterated": {}}
        options |= handlers.get(way, {"message_handler": handle})
        async with self.client("Consumer", topic, "c", *map(str, addresses), **options) as consumer:
            join = await self.begin(iterate) if way == "iterated" else None
            yield consumer
        if join is not None:
            await join()


class AsyncioFace(Face):
    """A face of asyncio, on one kind of loop."""

    def __init__(self, name: str, new_loop: Any) -> None:
        super().__init__(name, aio, time.sleep, threading.Thread)
        self._new_loop = new_loop

    def run(self, scenario: Scenario) -> Any:
        self._hub = gevent.get_hub()
        # Of an error the pool would say that nobody expects it, and the test would fail twice.
        error = self._hub.threadpool.apply(wrap_errors((BaseException,), run), (scenario, self._new_loop))
        if error is not None:
            raise error

    async def do(self, function: Callable[[], Any]) -> Any:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def call() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        self._hub.loop.run_callback_threadsafe(gevent.spawn, call)
        return await asyncio.wrap_future(answer)

    def taken(self, options: dict[str, Any]) -> dict[str, Any]:
        return options

    async def __call__(self, result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    async def result(self, promise: Any) -> Any:
        return await asyncio.wait_for(promise, WAIT)

    async def sleep(self, seconds: float) -> None:  # sleep: as above
        await asyncio.sleep(seconds)  # sleep: as above

    async def begin(self, scenario: Callable[[], Scenario]) -> Callable[[], Scenario]:
        task = asyncio.create_task(scenario())

        async def join() -> Any:
            return await asyncio.wait_for(task, WAIT)

        join.cancel = task.cancel  # type: ignore[attr-defined]  # for what asyncio alone has
        return join

    @asynccontextmanager
    async def client(self, kind: str, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
        async with getattr(self.package, kind)(*arguments, **options) as client:
            yield client

    async def messages(self, consumer: Any) -> AsyncIterator[Any]:
        async for message in consumer:
            yield message


BODIES = {b"%d" % number for number in range(100)}
WRONG_TIMES: list[Any] = [-1, float("nan"), "1", b"1", [], True]


class Place(NamedTuple):
    """Servers, as arguments of clients; and what creates a topic there, with so many partitions and the channel c."""

    servers: dict[str, Any]
    create: Callable[[str, int], object]
    takes_keys: bool = True
    """Its lookup says how many partitions there are, or there are none."""


class Topic:
    """A topic of a place, with the channel c."""

    _numbers = itertools.count()

    def __init__(self, place: Place, bodies: Iterable[bytes] = (), partitions: int = 1) -> None:
        self.name = f"contract{next(self._numbers)}"
        self.place, self.servers = place, place.servers
        place.create(self.name, partitions)
        self.publish(bodies)

    def publish(self, bodies: Iterable[bytes]) -> None:
        if stored := sorted(bodies):
            with threads.Producer(**self.servers) as producer:
                producer.multipublish(self.name, stored)

    def consumer(self, face: Face, **options: Any) -> AbstractAsyncContextManager[Any]:
        """A consumer of it, that runs."""
        return face.client("Consumer", self.name, "c", **self.servers, **options)

    def consuming(self, face: Face, way: str, handle: Any, **options: Any) -> AbstractAsyncContextManager[Any]:
        """The same with ``Face.consuming``."""
        return face.consuming(way, handle, topic=self.name, **self.servers, **options)

    async def consumed(self, face: Face, count: int) -> list[Message]:
        """So many messages; there are no others."""
        found: list[Message] = []

        async def handle(consumer: Any, message: Message) -> None:
            found.append(message)

        async with self.consumer(face, message_handler=handle, max_in_flight=20) as consumer:
            await face.until(lambda: consumer.stats().totals.finished >= count)
        assert len(found) == count
        return found


class Joined:
    """A producer, and an nsqd that has the publishes of several callers as one command, and has not replied.

    Attributes:
        jobs: body -> what joins its caller and gives what the publish returned, or the error.
    """

    def __init__(self, face: Face, nsqd: PublishNsqd, producer: Any) -> None:
        self.face, self.nsqd, self.producer = face, nsqd, producer
        self.jobs: dict[bytes, Any] = {}

    async def begin(self, body: bytes) -> None:
        """Publish it, in a caller of its own."""

        async def publish() -> Any:
            try:
                return await self.face(self.producer.publish("t", body))
            except Exception as error:
                return error

        self.jobs[body] = await self.face.begin(publish)

    async def ends(self) -> dict[bytes, Any]:
        """Body -> what became of its publish."""
        return {body: await join() for body, join in self.jobs.items()}

    def stats(self, *names: str) -> tuple[Any, ...]:
        """Of the producer."""
        stats = self.producer.stats()
        return tuple(stats[name] for name in names)


@asynccontextmanager
async def joined(face: Face, bodies: Sequence[bytes], **options: Any) -> AsyncIterator[Joined]:
    """Publishes of these bodies that have left as one command; what it has not replied to is stored in the end."""
    with PublishNsqd() as server:
        options |= {"linger": WAIT, "linger_max_messages": len(bodies)}
        async with face.client("Producer", server.address, **options) as producer:
            joined = Joined(face, server, producer)
            for body in bodies:
                await joined.begin(body)
            await face.until(lambda: server.commands)
            assert server.bodies == [sorted(bodies)]
            yield joined
            server.react = lambda sock, _: sock.sendall(OK)


def _sleep(seconds: float) -> None:  # sleep: as above
    is_main = threading.current_thread() is threading.main_thread()  # where servers of the test live
    (gevent.sleep if is_main else time.sleep)(seconds)


def _start_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


FACES: list[Any] = [
    Face("gevent", nsq_fast, gevent.sleep, gevent.spawn),
    Face("threads", threads, _sleep, _start_thread),
    *(
        pytest.param(AsyncioFace(str(loop.id), loop.values[0]), marks=loop.marks)  # type: ignore[attr-defined]
        for loop in LOOPS
    ),
]
