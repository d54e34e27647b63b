"""The faces for programs without gevent, in one shape: a scenario runs through threads and through asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nsq_fast import Message, aio, threads

from .waiting import WAIT, until

Handle = Callable[[Message], object]
Publish = Callable[..., Any]


class Threads:
    """``nsq_fast.threads``."""

    name = "threads"

    @contextmanager
    def consuming(self, topic: str, channel: str, handle: Handle, **options: Any) -> Iterator[threads.Consumer]:
        """A consumer that runs; ``handle`` is called with each message."""
        with threads.Consumer(
            topic, channel, message_handler=lambda _, message: handle(message), handler_threads=2, **options
        ) as consumer:
            yield consumer

    @contextmanager
    def publishing(self, **options: Any) -> Iterator[Publish]:
        """``publish`` of a producer that runs."""
        with threads.Producer(**options) as producer:
            yield producer.publish


class Asyncio:
    """``nsq_fast.aio``, in a loop of its own, in a thread of its own."""

    name = "asyncio"

    @contextmanager
    def consuming(self, topic: str, channel: str, handle: Handle, **options: Any) -> Iterator[aio.Consumer]:
        """As of threads; handlers give up the loop once before they call ``handle``."""

        async def handle_later(consumer: aio.Consumer, message: Message) -> None:
            await asyncio.sleep(0)
            handle(message)

        consumer = aio.Consumer(topic, channel, message_handler=handle_later, **options)
        with _running_loop() as call:
            call(consumer.start)
            yield consumer
            call(consumer.close)

    @contextmanager
    def publishing(self, **options: Any) -> Iterator[Publish]:
        """As of threads."""
        producer = aio.Producer(**options)
        with _running_loop() as call:
            call(producer.start)
            yield lambda *arguments, **extras: call(lambda: producer.publish(*arguments, **extras))
            call(producer.close)


@contextmanager
def _running_loop() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """A loop in a thread; gives what runs a coroutine function there and returns its result."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(function: Callable[[], Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(function(), loop)
        until(future.done)  # servers of the test may run in the calling thread
        return future.result()

    try:
        yield call
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT)
        loop.close()


FACES = [Threads(), Asyncio()]
