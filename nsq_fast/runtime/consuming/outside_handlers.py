"""Handlers that run elsewhere than in the hub's thread: on native threads, or in an event loop.

Everything else stays in the hub's thread. A worker greenlet hands over a ``Batch``
of messages and waits for it; elsewhere the handler is called for one message
after the other, and the outcomes come back. So whatever follows a handler (FIN,
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
from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.errors import NotRunning, RequeueMessage
from nsq_fast.runtime.fork import tell_forks
from nsq_fast.runtime.loop_turns import SLICE

from .timing import Sample

QUICK = 0.001
"""Seconds for a whole batch below which the next one may be twice as large."""


class Batch:
    """Work to be done elsewhere, and what came of it.

    Args:
        handle: called with one item after the other, elsewhere.
        begins: called with each item before, elsewhere; it says whether the item is still to be handled.

    Attributes:
        items: what no handler has begun with; taken from the left.
        current: what a handler has begun with and not ended; None when there is none.
        outcomes: each item that was handled, with what its handler raised, or None.
        calls: functions with their arguments, which the handler wants called in the hub's thread.
        is_done: whether nothing of it runs any more.
        sample: times the handler of the first item; None: none is timed.
        changed: set when there is something new to look at.
    """

    __slots__ = ("begins", "calls", "changed", "current", "handle", "is_done", "items", "outcomes", "sample")

    def __init__(self, handle: Callable[[Any], object], begins: Callable[[Any], bool], items: deque[Any]) -> None:
        self.handle = handle
        self.begins = begins
        self.items = items
        self.current: Any = None
        self.outcomes: deque[tuple[Any, BaseException | None]] = deque()
        self.calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.is_done = False
        self.sample: Sample | None = None
        self.changed = Event()

    def take(self) -> Any:
        """Begin with the next item; None when there is none, or the others were taken back."""
        while True:
            try:
                item = self.items.popleft()
            except IndexError:
                return None
            if self.begins(item):
                self.current = item
                if self.sample is not None:
                    self.sample.begin(item)
                return item

    def end(self, outcome: BaseException | None) -> None:
        """The handler of ``current`` has ended: it raised ``outcome``, or None. Without effect when there is none."""
        item, self.current = self.current, None
        if self.sample is not None:
            self.sample.end()
        if item is not None:
            self.outcomes.append((item, outcome))


class OutsideHandlers:
    """Runs batches elsewhere. Made and used in the hub's thread, but for what says otherwise.

    A subclass has ``_begin(batch)``, which brings a batch to where it runs. There ``_done(batch)`` is called at its
    end, in any thread.

    Attributes:
        max_batch: the most messages that a batch may hold.
        spare: how many more batches than run at once may be handed over: a handler that ends there finds the next.
    """

    max_batch = 64
    spare = 0

    def __init__(self) -> None:
        self._loop = get_hub().loop
        self._notices: deque[Batch] = deque()
        self._is_stopped = False
        self._is_copy = False
        self._is_waking = False
        self._running: set[Batch] = set()
        tell_forks(self)

    def run(self, batch: Batch, on_slow: Callable[[], object]) -> None:
        """Have a batch run elsewhere; return when it is done. Calls of its handlers are made here.

        ``on_slow`` is called when that takes longer than a time slice. Once the handlers are stopped, nothing is run.
        """
        if self._is_stopped:
            return
        self._running.add(batch)
        # There is nothing to take back of one item: no timer for each message where handlers are slow.
        patience: float | None = SLICE if len(batch.items) > 1 else None
        self._begin(batch)
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
            self._running.discard(batch)

    def worker(self) -> OutsideWorker:
        """What one more worker has its messages handled with."""
        return OutsideWorker(self)

    def stop(self) -> None:
        """Begin with no batch any more."""
        self._is_stopped = True

    def abandon(self) -> None:
        """Where handlers ran, nothing runs any more: what they had begun with is requeued."""
        self.stop()
        for batch in self._running:
            if batch.current is not None:
                batch.end(RequeueMessage(0.0, backoff=False))
            batch.is_done = True
            batch.changed.set()

    def forked(self) -> None:
        """In the child of a fork: where handlers run is the parent's."""
        self._is_stopped = self._is_copy = True

    def leave(self) -> None:
        """The hub runs no more: what ends from now on is told to nobody. Does not block."""
        self._is_stopped = self._is_copy = True

    def _begin(self, batch: Batch) -> None:
        raise NotImplementedError

    # In any thread

    def _call(self, batch: Batch, function: Callable[..., object], *arguments: Any) -> None:
        """Have the hub's thread call a function, for a handler of the batch."""
        batch.calls.append((function, arguments))
        self._notify(batch)

    def _done(self, batch: Batch) -> None:
        """Nothing of the batch runs any more."""
        batch.is_done = True
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


class OutsideWorker:
    """What one worker uses to have messages handled elsewhere.

    Attributes:
        size: how many messages the next batch may hold.
    """

    def __init__(self, handlers: OutsideHandlers) -> None:
        self._handlers = handlers
        self.size = 1

    def handle(
        self,
        handler: Callable[[Any], object],
        begins: Callable[[Any], bool],
        items: deque[Any],
        finish: Callable[[Any, BaseException | None], object],
        take_back: Callable[[deque[Any]], object],
        sample: Sample | None = None,
    ) -> None:
        """Handle ``items`` elsewhere.

        Args:
            handler: called with each item, elsewhere.
            begins: called with each item before, elsewhere; it says whether the item is still to be handled.
            items: what to handle; others may take from it what no handler has begun with.
            finish: called with each item and what its handler raised, or None.
            take_back: called with ``items`` when handlers are slow; what is left there is handled then.
            sample: times the handler of the first item.
        """
        began = monotonic()
        batch = Batch(handler, begins, items)
        batch.sample = sample

        def finish_some() -> None:
            while batch.outcomes:
                finish(*batch.outcomes.popleft())

        def on_slow() -> None:
            take_back(items)
            finish_some()

        self._handlers.run(batch, on_slow)
        finish_some()
        self.size = min(2 * self.size, self._handlers.max_batch) if monotonic() - began < QUICK else 1

    def call(
        self,
        handler: Callable[[Any, Any], object],
        sample: Sample | None,
        consumer: object,
        item: Message | list[Message],
    ) -> None:
        """Have a handler called elsewhere with one message, or one list, and timed. Raises what it raises."""
        errors: list[BaseException | None] = []

        def finish(item: Any, error: BaseException | None) -> None:
            errors.append(error)

        self.handle(partial(handler, consumer), _is_due, deque((item,)), finish, _ignore, sample)
        if not errors:
            raise NotRunning("the consumer is closed: its handlers run no more")
        if errors[0] is not None:
            raise errors[0]


def _ignore(item: object) -> None:
    pass


def _is_due(item: object) -> bool:
    return True
