"""The consumers of asyncio in a process of a worker: they run in an event loop on a native thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

from nsq_fast.runtime import Reply

_start_thread = get_original("_thread", "start_new_thread")
_BEAT = 1.0


class EventLoop:
    """Runs asyncio Consumers until it is told to close them. Its methods belong to the main greenlet.

    Args:
        on_end: called, in the loop's thread, with the error of a consumer that ended by itself, or None.

    Attributes:
        beat: when the loop last turned; monotonic.
    """

    def __init__(self, consumers: Sequence[Any], on_end: Callable[[BaseException | None], object]) -> None:
        self._consumers = consumers
        self._on_end = on_end
        self._started = Reply()
        self._ended = Reply()
        self._close_timeout = 0.0
        self.beat = monotonic()

    def start(self) -> None:
        """Start all; return when they are started. Raises what the first one raised that could not."""
        _start_thread(self._run, ())
        self._started.get()

    def begin_closing(self, timeout: float) -> None:
        """Close all at once, within ``timeout`` seconds. Does not block."""
        self._close_timeout = timeout
        self._loop.call_soon_threadsafe(self._stop.set)

    def wait(self) -> None:
        """Wait until all are closed."""
        self._ended.wait()

    # In the thread

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if not self._started.is_set:
                self._started.set_exception(error)
            self._on_end(error)
        finally:
            self._ended.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        for consumer in self._consumers:
            await consumer.start()
        self._started.set()
        tasks = [asyncio.create_task(self._watch(consumer)) for consumer in self._consumers]
        tasks.append(asyncio.create_task(self._beat()))
        await self._stop.wait()
        await asyncio.gather(*(consumer.close(timeout=self._close_timeout) for consumer in self._consumers))
        for task in tasks:
            task.cancel()

    async def _watch(self, consumer: Any) -> None:
        try:
            await consumer.join()
        except Exception as error:
            self._on_end(error)
        else:
            if not self._stop.is_set():
                self._on_end(None)

    async def _beat(self) -> None:
        while True:
            self.beat = monotonic()
            await asyncio.sleep(_BEAT)
