"""Handlers on native threads, for code that blocks the thread in which it runs."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from gevent._hub_local import get_hub_if_exists
from gevent.event import Event
from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

from nsq_fast.runtime.loop_turns import SLICE
from nsq_fast.runtime.owner_thread import OwnerThread

from .handlers import refuse_deferred
from .outside_handlers import Batch, OutsideHandlers

LONGEST_END = 1.0
"""Seconds that idle threads get to end."""


class HandlerThreads(OutsideHandlers):
    """A fixed number of native threads that run batches.

    Args:
        size: how many threads.
        owner: the thread that owns what handlers may call; those calls come back to it.
    """

    def __init__(self, size: int, owner: OwnerThread) -> None:
        super().__init__()
        self._size = size
        self._owner = owner
        self._waiting: deque[Batch | None] = deque()  # None: a thread is to end
        self._count: Any = get_original("queue", "SimpleQueue")()  # as many items as are waiting
        self._ended: deque[None] = deque()
        self._all_ended = Event()
        for _ in range(size):
            get_original("_thread", "start_new_thread")(self._serve, ())

    def stop(self) -> None:
        """End each thread after the batches that it was given; wait for that, unless handlers still run."""
        super().stop()
        self._put(*[None] * self._size)
        if not self._running:  # a program that ends now must not meet threads that are half gone
            self._all_ended.wait(LONGEST_END)

    def leave(self) -> None:
        """As of every kind of them; each thread ends after its handler."""
        super().leave()
        self._put(*[None] * self._size)

    def _begin(self, batch: Batch) -> None:
        self._put(batch)

    def _put(self, *batches: Batch | None) -> None:
        for batch in batches:
            self._waiting.append(batch)
            self._count.put(None)

    # In the native threads

    def _serve(self) -> None:
        while not self._is_copy:
            try:
                self._count.get()
            except BaseException:  # raised in the thread from outside it, as some timeouts are
                self._count.put(None)  # nothing of what waits is taken yet
                continue
            batch = self._waiting.popleft()
            if batch is None:
                break
            self._serve_batch(batch)
        hub = get_hub_if_exists()
        if hub is not None:  # a handler has used gevent here
            hub.destroy(True)
        self._ended.append(None)
        if len(self._ended) == self._size and not self._is_copy:
            with suppress(ValueError):
                self._loop.run_callback_threadsafe(self._all_ended.set)

    def _serve_batch(self, batch: Batch) -> None:
        try:
            with self._owner.served_by(partial(self._call, batch)):
                _run(batch)
        except BaseException as error:  # as above
            batch.end(error)
        finally:
            self._done(batch)


def _run(batch: Batch) -> None:
    """Handle one item, and more until there is none or the time slice is over."""
    end = monotonic() + SLICE
    while (item := batch.take()) is not None:
        batch.end(_outcome(batch, item))
        if monotonic() > end:
            return


def _outcome(batch: Batch, item: Any) -> BaseException | None:
    try:
        refuse_deferred(batch.handle(item))
    except BaseException as error:
        return error
    return None
