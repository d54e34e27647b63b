"""Handlers on native threads, for code that blocks the thread in which it runs, and programs of threads that iterate.

Everything else stays in the hub's thread. A worker greenlet hands over a ``Batch``
of messages and waits for it; on the thread the handler is called for one message
after the other, and the outcomes come back. So whatever follows a handler (FIN,
REQ, giving up, signals) is done by the worker, as always.

A batch may hold many messages while handlers are quick: waking up two threads
takes longer than such a handler. After a time slice the worker takes what there
is of outcomes, and takes back what no handler has begun with, so that neither a
FIN nor a message waits for a handler that turns out to be slow.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from types import FrameType
from typing import Any

from gevent import get_hub
from gevent._hub_local import get_hub_if_exists
from gevent.event import Event
from gevent.monkey import get_original  # patches nothing: it finds what a program may have patched

from nsq_fast._codec import Message
from nsq_fast._dispatch import InboundQueue
from nsq_fast.client.greenlets import OwnerThread, get_ident, tell_forks
from nsq_fast.client.loop import SLICE
from nsq_fast.client.workers import Pool, Sample, Worker, refuse_deferred, thread_frames
from nsq_fast.errors import NotRunning
from nsq_fast.log_events import INTERNAL_ERROR

logger: logging.Logger = logging.getLogger(__name__)

LONGEST_END = 1.0
"""Seconds that idle threads get to end."""

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
        is_done: whether nothing of it runs any more.
        sample: times the handler of the first item; None: none is timed.
        ended: set then.
        thread: the number of the native thread in which it runs; 0 before.
    """

    __slots__ = ("begins", "current", "ended", "handle", "is_done", "items", "outcomes", "sample", "thread")

    def __init__(self, handle: Callable[[Any], object], begins: Callable[[Any], bool], items: deque[Any]) -> None:
        self.handle: Callable[[Any], object] = handle
        self.begins: Callable[[Any], bool] = begins
        self.items: deque[Any] = items
        self.current: Any = None
        self.outcomes: deque[tuple[Any, BaseException | None]] = deque()
        self.is_done: bool = False
        self.sample: Sample | None = None
        self.ended: Event = Event()
        self.thread: int = 0

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

    A subclass has ``_begin(batch)``, which brings a batch to where it runs. There ``done(batch)`` is called at its
    end, in any thread.

    Attributes:
        max_batch: the most messages that a batch may hold.
    """

    max_batch = 64

    def __init__(self) -> None:
        self._loop = get_hub().loop
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_stopped = False
        self._is_copy = False
        self._is_waking = False
        self._running: set[Batch] = set()
        tell_forks(self)

    def run(self, batch: Batch, on_slow: Callable[[], object]) -> None:
        """Have a batch run elsewhere; return when it is done.

        ``on_slow`` is called when that takes longer than a time slice. Once the handlers are stopped, nothing is run.
        """
        if self._is_stopped:
            return
        self._running.add(batch)
        # There is nothing to take back of one item: no timer for each message where handlers are slow.
        patience: float | None = SLICE if len(batch.items) > 1 else None
        self._begin(batch)
        try:
            while not batch.is_done:
                if not batch.ended.wait(patience):
                    patience = None
                    on_slow()
        finally:
            self._running.discard(batch)

    def stop(self) -> None:
        """Begin with no batch any more."""
        self._is_stopped = True

    def forked(self) -> None:
        """In the child of a fork: where handlers run is the parent's."""
        self._is_stopped = self._is_copy = True

    def leave(self) -> None:
        """The hub runs no more: what ends from now on is told to nobody. Does not block."""
        self._is_stopped = self._is_copy = True

    def _begin(self, batch: Batch) -> None:
        raise NotImplementedError

    # In any thread

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have the hub's thread call a function, which must not block: in the order in which it is asked to."""
        self._calls.append((function, arguments))
        if not self._is_waking and not self._is_copy:
            self._is_waking = True
            with suppress(ValueError):  # the hub was destroyed: nobody waits any more
                self._loop.run_callback_threadsafe(self._make_calls)

    def done(self, batch: Batch) -> None:
        """Nothing of the batch runs any more."""
        batch.is_done = True
        self.call(batch.ended.set)

    # In the hub's thread again

    def _make_calls(self) -> None:
        self._is_waking = False  # before the calls are looked at: none can come in between and not be seen
        while self._calls:
            function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except Exception:  # one call must not harm the others
                logger.exception("nsq_fast itself failed in %r", function, extra=INTERNAL_ERROR)


class OutsideWorker(Worker):
    """A worker greenlet whose messages are handled elsewhere."""

    __slots__ = ("_batch", "_outside", "_size")

    def __init__(self, pool: Pool, outside: OutsideHandlers) -> None:
        super().__init__(pool)
        self._outside = outside
        self._size = 1  # how many messages the next batch may hold
        self._batch: Batch | None = None

    def frames(self) -> list[FrameType]:
        batch = self._batch
        return [] if batch is None else thread_frames(batch.thread)

    def calling(self, handler: Callable[[Any, Any], object], sample: Sample | None) -> Callable[[Any, Any], object]:
        return partial(self._call, handler, sample)

    def _call(
        self, handler: Callable[[Any, Any], object], sample: Sample | None, consumer: object, item: Any
    ) -> object:
        """Have a handler called elsewhere with one message, or one list, and timed. Raises what it raises."""
        batch = self._batch = Batch(partial(handler, consumer), lambda item: True, deque((item,)))
        batch.sample = sample
        self._outside.run(batch, lambda: None)
        self._batch = None
        errors = [error for _, error in batch.outcomes]
        if not errors:
            raise NotRunning("the consumer is closed: its handlers run no more")
        if errors[0] is not None:
            raise errors[0]
        return None

    def _handle_single(self, inbound: InboundQueue, sample: Sample | None) -> None:
        """Have some messages handled elsewhere; do what follows the handlers. It is said there what is ``current``."""
        acknowledger, waiting, handed = self._acknowledger, inbound.waiting, deque[Message]()
        while waiting and len(handed) < self._size:
            message = waiting.popleft()
            if not acknowledger.is_given_up(inbound, message):
                handed.append(message)
        if not handed:
            return
        returned = acknowledger.slice_of(inbound).returned
        began = monotonic()
        handle = partial(acknowledger.present_handler(), acknowledger.consumer)
        batch = self._batch = Batch(handle, self._begins, handed)
        batch.sample = sample

        def finish_some() -> None:
            while batch.outcomes:
                message, error = batch.outcomes.popleft()
                if sample is not None:
                    sample.count()
                if error is None:
                    returned(message)
                else:
                    acknowledger.failed(message, error)

        def take_back() -> None:
            while handed:
                with suppress(IndexError):  # the thread took it just now
                    waiting.appendleft(handed.pop())
            if waiting:
                self._pool.put(inbound, len(waiting))

        def on_slow() -> None:
            take_back()
            finish_some()

        inbound.handed.append(handed)
        try:
            self._outside.run(batch, on_slow)
            finish_some()
        finally:
            self._batch = None
            inbound.handed.remove(handed)
            take_back()
        self._size = min(2 * self._size, self._outside.max_batch) if monotonic() - began < QUICK else 1

    def _begins(self, message: Message) -> bool:
        if message.has_expired() and self._acknowledger.consumer.config.drop_expired:
            return False  # it expired while it waited for a thread: nsqd has taken it back
        self.current: Message = message
        return True


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
        batch.thread = get_ident()
        try:
            with self._owner.served_by(self.call):
                _run(batch)
        except BaseException as error:  # as above
            batch.end(error)
        finally:
            self.done(batch)


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
