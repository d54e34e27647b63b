"""Handlers on native threads, for code that blocks the thread in which it runs.

Everything else stays in the hub's thread. A worker greenlet hands over a ``Batch``
of messages and waits for it; a native thread calls the handler for one message
after the other and hands the outcomes back. So whatever follows a handler (FIN,
REQ, giving up, signals) is done by the worker, as always.

A batch may hold many messages while handlers are quick: waking up two threads
takes longer than such a handler. After a time slice the worker takes what there
is of outcomes, and takes back what no handler has begun with, so that neither a
FIN nor a message waits for a handler that turns out to be slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from gevent import get_hub
from gevent._hub_local import get_hub_if_exists
from gevent.event import Event
from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

from nsq_fast._codec import Message
from nsq_fast.errors import NotRunning
from nsq_fast.runtime.fork import tell_forks
from nsq_fast.runtime.loop_turns import SLICE
from nsq_fast.runtime.owner_thread import OwnerThread

from .handlers import refuse_deferred

QUICK = 0.001
"""Seconds for a whole batch below which the next one may be twice as large."""

MAX_BATCH = 64

LONGEST_END = 1.0
"""Seconds that idle threads get to end."""


class Batch:
    """Work for one thread, and what came of it.

    Args:
        handle: called with one item after the other, in the thread.
        begins: called with each item before, in the thread.

    Attributes:
        items: what no handler has begun with; taken from the left.
        outcomes: each item that was handled, with what its handler raised, or None.
        calls: functions with their arguments, which the handler wants called in the hub's thread.
        is_done: whether the thread is done with it.
        changed: set when there is something new to look at.
    """

    def __init__(self, handle: Callable[[Any], object], begins: Callable[[Any], object], items: deque[Any]) -> None:
        self._handle = handle
        self._begins = begins
        self.items = items
        self.outcomes: deque[tuple[Any, BaseException | None]] = deque()
        self.calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.is_done = False
        self.changed = Event()

    def run(self) -> None:
        """Handle one item, and more until there is none or the time slice is over. In a native thread."""
        end = monotonic() + SLICE
        while self.items:
            try:
                item = self.items.popleft()
            except IndexError:  # the others were taken back just now
                return
            self._begins(item)
            self.outcomes.append((item, self._outcome(item)))
            if monotonic() > end:
                return

    def _outcome(self, item: Any) -> BaseException | None:
        try:
            refuse_deferred(self._handle(item))
        except BaseException as error:
            return error
        return None


class HandlerThreads:
    """A fixed number of native threads that run batches. Made and used in the hub's thread.

    Args:
        size: how many threads.
        owner: the thread that owns what handlers may call; those calls come back to it.
    """

    def __init__(self, size: int, owner: OwnerThread) -> None:
        self._size = size
        self._owner = owner
        self._loop = get_hub().loop
        self._work: Any = get_original("queue", "SimpleQueue")()
        self._notices: deque[Batch] = deque()
        self._is_stopped = False
        self._is_copy = False
        self._is_waking = False
        self._running = 0
        self._ended: deque[None] = deque()
        self._all_ended = Event()
        tell_forks(self)
        for _ in range(size):
            get_original("_thread", "start_new_thread")(self._serve, ())

    def run(self, batch: Batch, on_slow: Callable[[], object]) -> None:
        """Have a thread run a batch; return when it is done with it. Calls of its handlers are made here.

        ``on_slow`` is called when that takes longer than a time slice. Once the threads are stopped, nothing is run.
        """
        if self._is_stopped:
            return
        self._work.put(batch)
        self._running += 1
        patience: float | None = SLICE
        try:
            while not batch.is_done or batch.calls:
                if not batch.changed.wait(patience):
                    patience = None
                    on_slow()
                batch.changed.clear()
                while batch.calls:
                    function, arguments = batch.calls.popleft()
                    function(*arguments)
        finally:
            self._running -= 1

    def stop(self) -> None:
        """End each thread after the batches that it was given; wait for that, unless handlers still run."""
        self._is_stopped = True
        for _ in range(self._size):
            self._work.put(None)
        if not self._running:  # a program that ends now must not meet threads that are half gone
            self._all_ended.wait(LONGEST_END)

    def forked(self) -> None:
        """In the child of a fork: the threads are the parent's."""
        self._is_stopped = self._is_copy = True

    # In the native threads

    def _serve(self) -> None:
        while not self._is_copy and (batch := self._work.get()) is not None:
            with self._owner.served_by(partial(self._call, batch)):
                batch.run()
            batch.is_done = True
            self._notify(batch)
        hub = get_hub_if_exists()
        if hub is not None:  # a handler has used gevent here
            hub.destroy(True)
        self._ended.append(None)
        if len(self._ended) == self._size and not self._is_copy:
            with suppress(ValueError):
                self._loop.run_callback_threadsafe(self._all_ended.set)

    def _call(self, batch: Batch, function: Callable[..., object], *arguments: Any) -> None:
        batch.calls.append((function, arguments))
        self._notify(batch)

    def _notify(self, batch: Batch) -> None:
        self._notices.append(batch)
        if not self._is_waking and not self._is_copy:
            self._is_waking = True
            with suppress(ValueError):  # the hub was destroyed: nobody waits any more
                self._loop.run_callback_threadsafe(self._wake)

    # In the hub's thread again

    def _wake(self) -> None:
        self._is_waking = False  # before the notices are looked at: none can come in between and not be seen
        while self._notices:
            self._notices.popleft().changed.set()


class ThreadedHandlers:
    """What one worker uses to have messages handled in threads.

    Attributes:
        size: how many messages the next batch may hold.
    """

    def __init__(self, threads: HandlerThreads) -> None:
        self._threads = threads
        self.size = 1

    def handle(
        self,
        handler: Callable[[Any], object],
        begins: Callable[[Any], object],
        items: deque[Any],
        finish: Callable[[Any, BaseException | None], object],
        take_back: Callable[[deque[Any]], object],
    ) -> None:
        """Handle ``items`` in one thread.

        Args:
            handler: called with each item, in the thread.
            begins: called with each item before, in the thread.
            items: what to handle; others may take from it what no handler has begun with.
            finish: called with each item and what its handler raised, or None.
            take_back: called with ``items`` when handlers are slow; what is left there is handled then.
        """
        began = monotonic()
        batch = Batch(handler, begins, items)

        def finish_some() -> None:
            while batch.outcomes:
                finish(*batch.outcomes.popleft())

        def on_slow() -> None:
            take_back(items)
            finish_some()

        self._threads.run(batch, on_slow)
        finish_some()
        self.size = min(2 * self.size, MAX_BATCH) if monotonic() - began < QUICK else 1

    def call(self, handler: Callable[[Any, Any], object], consumer: object, item: Message | list[Message]) -> None:
        """Call a handler with one message, or one list, in a thread. Raises what it raises."""
        errors: list[BaseException | None] = []
        self.handle(partial(handler, consumer), _ignore, deque((item,)), lambda _, error: errors.append(error), _ignore)
        if not errors:
            raise NotRunning("the consumer is closed: its handlers run no more")
        if errors[0] is not None:
            raise errors[0]


def _ignore(item: object) -> None:
    pass
