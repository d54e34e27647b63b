"""The Consumer of threads: handlers run on native threads, and any thread may iterate, respond and close.

It is one of gevent's in the hub thread, held in another. In a child of a fork, and where the hub thread has failed, it
is made again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import signature
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from nsq_fast._codec import Message
from nsq_fast.bridge import HubThread, Place, Reply, arguments_of
from nsq_fast.client.consumer import ConsumerCore, ConsumerOptions, warn_unclosed
from nsq_fast.client.loop import SLICE, check_end_timeout
from nsq_fast.client.workers import check_handler
from nsq_fast.consumer import Consumer as GeventConsumer
from nsq_fast.errors import CallInvalid, NotRunning, RequeueMessage
from nsq_fast.handler_threads import Batch, OutsideHandlers

if TYPE_CHECKING:
    import blinker
    from typing_extensions import Self

    from nsq_fast.client.consumer import ConsumerStats
    from nsq_fast.client.progress import ConsumerProgress
    from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig

CLOSE_TIMEOUT = 30.0

T = TypeVar("T")
Handler: TypeAlias = Callable[["Consumer", Message], object]
BatchHandler: TypeAlias = Callable[["Consumer", list[Message]], object]

if TYPE_CHECKING:
    _as_every_consumer = ConsumerCore[Handler, BatchHandler].__init__
else:
    _as_every_consumer = ConsumerCore.__init__


_READABLE = {
    "channel", "config", "connection_config", "given_up", "is_paused", "is_running", "lookup_config", "name",
    "nsqd_tcp_addresses", "outdated", "topic", "topics",
}  # fmt: skip
"""What any thread may read of the consumer in the hub thread."""

_COUNTED = {"is_starved", "total_in_flight", "total_ready_count"}
"""What is counted in the hub thread: connections come and go meanwhile."""


class HubConsumer(GeventConsumer):
    """A Consumer in the hub thread that hands its messages to other threads. All of it belongs to that thread.

    Attributes:
        taken: brings messages to those who iterate, from the start on; None: handlers run on native threads.
    """

    taken: TakenBatches | None = None
    _is_iterated = False

    def live_in(self, hub_thread: HubThread, *, is_iterated: bool) -> HubConsumer:
        """Say in which thread it is, and whether threads take its messages by iterating."""
        self._is_iterated = is_iterated
        hub_thread.adopt(self)
        return self

    def _new_outside(self) -> OutsideHandlers | None:
        self.taken = TakenBatches() if self._is_iterated else None
        return self.taken

    def __repr__(self) -> str:
        return f"<{Consumer.__module__}.Consumer {self.topic} {self.channel}>"

    @property
    def is_left(self) -> bool:
        return self.taken is not None and not self.taken.at

    @property
    def is_started(self) -> bool:
        """Whether ``start`` was called, whatever has become of it since."""
        return self._is_started

    def _closed(self) -> None:
        try:
            super()._closed()
        finally:
            if self.taken is not None:
                self.taken.put(None)

    @property
    def is_calling(self) -> bool:
        """Whether the calling thread runs one of its handlers."""
        return self._thread.is_served_here

    def thread_ended(self, error: NotRunning) -> None:
        """The hub thread fails: nothing of it runs any more, and nsqd delivers again what it holds. Does not block."""
        if self._is_started and not self._is_closed:
            if self._outside is not None:
                self._outside.leave()
            self.failure: NotRunning = error
            self._closed()

    def close_at_exit(self, timeout: float) -> int:
        """Close within ``timeout`` seconds. Messages whose handlers run then are delivered again."""
        if self.is_running:
            warn_unclosed(self)
        self.close(drain=True, timeout=timeout)
        return 0

    def count_unconfirmed(self) -> int:
        """A consumer publishes nothing."""
        return 0


class TakenBatches(OutsideHandlers):
    """Brings messages to those who iterate.

    Attributes:
        at: those that somebody goes through, and in which thread.
    """

    max_batch = 256

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[Batch, int] = {}
        self._batches: deque[Batch | None] = deque()
        self._waiting: deque[Reply] = deque()

    def _begin(self, batch: Batch) -> None:
        self.put(batch)

    def put(self, batch: Batch | None) -> None:
        """Give the next who asks a batch; None: there are no more. In any thread."""
        self._batches.append(batch)
        self._wake_one()

    def next(self) -> Batch | None:
        """Wait for a batch. Where gevent runs, only the calling greenlet waits: a queue of Python's, patched or not,
        would keep the others from running, or never hear of what another thread puts in."""
        with suppress(IndexError):
            return self._batches.popleft()
        while True:
            reply = Reply()
            self._waiting.append(reply)
            try:
                if not self._batches:
                    reply.wait()
                with suppress(IndexError):  # another was faster
                    return self._batches.popleft()
            finally:
                with suppress(ValueError):
                    self._waiting.remove(reply)
                if self._batches:  # what woke this one, which may be interrupted, was perhaps for another
                    self._wake_one()

    def _wake_one(self) -> None:
        with suppress(IndexError):
            self._waiting.popleft().set()

    def is_held_here(self) -> bool:
        """Whether the calling thread iterates, and is at a message."""
        here = get_ident()
        return any(thread == here and batch.current is not None for batch, thread in list(self.at.items()))

    def messages(self, batch: Batch) -> Iterator[Message]:
        """Those of a batch, as far as a time slice allows: asking for the next finishes the one before."""
        self.at[batch] = batch.thread = get_ident()
        end = monotonic() + SLICE
        try:
            while (message := batch.take()) is not None:
                yield message
                batch.end(None)
                if monotonic() > end:
                    break
        finally:
            left = batch.current
            if left is not None:  # the loop is left early
                batch.end(None if left.is_async() else RequeueMessage(0.0, backoff=False))
            del self.at[batch]
            self.done(batch)


def _never_called(consumer: object, message: Message) -> None:
    """In place of the handler where threads iterate."""


class Consumer(ConsumerOptions):
    """Consume one topic, or several, through a channel; handlers run on native threads.

    There are ``handler_threads`` of them, 1 by default. Arguments, options, guarantees and errors are those of
    ``nsq_fast.Consumer``. Handlers may block, and any thread may call the consumer and respond to its messages: a FIN,
    REQ or TOUCH leaves soon after the call.

    Instead of a handler, iterate: ``for message in consumer``. Asking for the next message finishes the one before.

    ``give_up``, ``blocked_policy``, ``max_age_policy`` and receivers of signals run in the hub thread: they must not
    block. The sender of signals is the consumer there.
    """

    if TYPE_CHECKING:
        on_message: blinker.Signal
        on_response: blinker.Signal
        on_error: blinker.Signal
        on_finish: blinker.Signal
        on_requeue: blinker.Signal
        on_giving_up: blinker.Signal
        on_auth: blinker.Signal
        on_expired: blinker.Signal
        on_exception: blinker.Signal
        on_order_violation: blinker.Signal
        on_blocked: blinker.Signal
        on_close: blinker.Signal
        config: ConsumerConfig
        connection_config: ConnectionConfig
        lookup_config: LookupConfig
        topic: str
        topics: tuple[str, ...]
        channel: str
        name: str
        given_up: int
        outdated: int
        nsqd_tcp_addresses: set[str]
        is_paused: bool
        is_running: bool
        is_starved: bool
        total_ready_count: int
        total_in_flight: int

    @arguments_of(_as_every_consumer)
    def __init__(self, *arguments: Any, **options: Any) -> None:
        try:
            given = signature(GeventConsumer).bind(*arguments, **options).arguments
        except TypeError as error:
            raise TypeError(f"Consumer.__init__() {error}") from None
        given.update(given.pop("options", {}))
        handler, batch_handler = given.get("message_handler"), given.get("batch_handler")
        check_handler("message_handler", handler)
        check_handler("batch_handler", batch_handler)
        self._is_iterated = handler is None and batch_handler is None
        concurrency = given.get("concurrency") or 1
        given["handler_threads"] = given.get("handler_threads") or concurrency
        is_iterated = self._is_iterated
        if is_iterated:
            given["concurrency"] = concurrency
            given["message_handler"] = _never_called  # it must not hold what is to be collected: see __del__
        elif batch_handler is None:
            given["message_handler"] = self._with_self(handler)
        else:  # the consumer in the hub thread refuses both
            given["batch_handler"] = self._with_self(batch_handler)

        def make(thread: HubThread) -> HubConsumer:
            return HubConsumer(**given).live_in(thread, is_iterated=is_iterated)

        self._place: Place[HubConsumer] = Place(make)  # one that is made again has to be started

    def __del__(self) -> None:
        """One that is iterated is of no use without whoever iterates: nobody can take what it holds. Does not block."""
        place = vars(self).get("_place")  # none if its arguments were wrong
        if place is None or not self._is_iterated or place.thread.is_over:
            return
        consumer = place.get()
        if consumer.is_running:
            with suppress(NotRunning):  # the thread has just ended
                place.thread.submit(place.thread.start_job, consumer.close)
            warn_unclosed(consumer)

    def _with_self(self, handler: Any) -> Callable[[object, Any], object]:
        return lambda consumer, item: handler(self, item)

    def _call(self, function: Callable[[HubConsumer], T]) -> T:
        consumer = self._place.get()
        return self._place.thread.call(function, consumer)

    def _submit(self, function: Callable[[HubConsumer], object]) -> None:
        consumer = self._place.get()
        self._place.thread.submit(function, consumer)

    def __getattr__(self, name: str) -> Any:
        if name in _READABLE or name.startswith("on_"):
            return getattr(self._place.get(), name)
        if name in _COUNTED:
            return self._call(lambda consumer: getattr(consumer, name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.topic} {self.channel}>"

    # Running

    def start(self, block: bool = True) -> None:
        """Begin to consume. With ``block``, return only when the consumer is closed, as ``join``.

        Raises CallInvalid when there is no handler, NotRunning after close.
        """
        if self._is_iterated:
            raise CallInvalid("no message_handler or batch_handler: iterate over the consumer, or give it one")
        self._start()
        if block:
            self.join()

    def _start(self) -> None:
        self._call(lambda consumer: consumer.start(block=False))

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the consumer is closed; False if ``timeout`` seconds passed first."""
        return self._call(lambda consumer: consumer.join(timeout, raise_error))

    def close(self, drain: bool = True, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Stop consuming, gracefully, as ``nsq_fast.Consumer.close``.

        In any thread. In a handler, in a handler of ``signal.signal``, and in a thread that iterates and is at a
        message, it only begins to close; ``join`` waits for the end.
        """
        check_end_timeout(timeout)
        consumer = self._place.get()
        only_begins = consumer.is_calling or (consumer.taken is not None and consumer.taken.is_held_here())
        self._place.thread.call_or_begin(consumer.close, drain, timeout, only_begins=only_begins)

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Iterating

    def __iter__(self) -> Iterator[Message]:
        """Take messages one by one, until the consumer is closed; starts it if need be.

        Asking for the next message finishes the one before, unless it was responded to or made asynchronous. A message
        at which the loop is left early is requeued, unless it was responded to. Several threads may iterate. The
        consumer goes on after that, until it is closed; one that nobody can reach any more is closed with a
        ResourceWarning.
        """
        if not self._is_iterated:
            raise CallInvalid("a consumer with a handler cannot be iterated")
        if not self._place.get().is_started:
            self._start()
        return self._messages()

    def _messages(self) -> Iterator[Message]:
        consumer = self._place.get()
        taken = consumer.taken
        if taken is None:
            raise NotRunning("the consumer is closed")
        while (batch := taken.next()) is not None:
            yield from taken.messages(batch)
        taken.put(None)  # for the others that iterate
        if consumer.failure is not None:
            raise consumer.failure

    # Flow

    @property
    def max_in_flight(self) -> int:
        """Most messages held at once, over all connections. May be set at any time; takes effect soon after."""
        return self._place.get().max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, value: int | None) -> None:
        self.config.replace(max_in_flight=value)  # raises what is wrong with it
        self._submit(lambda consumer: setattr(consumer, "max_in_flight", value))

    def pause(self) -> None:
        """Ask for no more messages (RDY 0), soon. What has been received is still handled."""
        self._submit(HubConsumer.pause)

    def resume(self) -> None:
        """End ``pause``."""
        self._submit(HubConsumer.resume)

    def stats(self) -> ConsumerStats:
        """A snapshot of what was done and what is going on."""
        return self._call(HubConsumer.stats)

    def progress(self) -> ConsumerProgress:
        """What moves, and why nothing does, as ``nsq_fast.Consumer.progress``."""
        return self._call(HubConsumer.progress)
