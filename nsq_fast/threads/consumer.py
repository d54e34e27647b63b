"""The Consumer of threads: handlers run on native threads, and any thread may iterate, respond and close.

It is one of gevent's in the hub thread, held in another. In a child of a fork, and where the hub thread has failed, it
is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import get_ident
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from nsq_fast._codec import Message
from nsq_fast.bridge import HubThread, Place
from nsq_fast.client.consumer import ConsumerOptions, check_timeout
from nsq_fast.client.greenlets import get_ident as get_thread
from nsq_fast.client.greenlets import is_interrupting
from nsq_fast.client.handlers import check_handler
from nsq_fast.client.workers import SLICE
from nsq_fast.consumer import Consumer as GeventConsumer
from nsq_fast.errors import ConfigError, NotRunning, RequeueMessage
from nsq_fast.handler_threads import Batch, OutsideHandlers
from nsq_fast.protocol.targets import TopicArgument

if TYPE_CHECKING:
    import blinker
    from typing_extensions import Unpack

    from nsq_fast.client.stats import ConsumerStats
    from nsq_fast.client.trace import TraceLog
    from nsq_fast.config import ConnectionConfig, ConsumerConfig, LookupConfig
    from nsq_fast.keywords import ConsumerKeywords

CLOSE_TIMEOUT = 30.0

T = TypeVar("T")
Handler: TypeAlias = Callable[["Consumer", Message], object]
BatchHandler: TypeAlias = Callable[["Consumer", list[Message]], object]
Addresses: TypeAlias = str | Iterable[str | tuple[str, int]]


class HubConsumer(GeventConsumer):
    """A Consumer in the hub thread that hands its messages to other threads. All of it belongs to that thread."""

    def live_in(self, hub_thread: HubThread, new_handlers: Callable[[], OutsideHandlers | None]) -> HubConsumer:
        """Say in which thread it is, and what makes the place where handlers run; None: native threads."""
        self._hub_thread = hub_thread
        self._new_outside = new_handlers
        hub_thread.close_at_exit(self)
        hub_thread.tell_end(self)
        return self

    def thread_ended(self, error: NotRunning) -> None:
        """The hub thread fails: nothing of it runs any more, and nsqd delivers again what it holds. Does not block."""
        if self._is_started and not self._is_closed:
            if self._outside is not None:
                self._outside.leave()
            self.failure = error
            self._closed()

    def close_from_outside(self, drain: bool, timeout: float | None) -> None:
        """``close``, in any thread; where that must not wait, it only begins to."""
        check_timeout(timeout)
        thread = self._hub_thread
        if self._thread.is_served_here or is_interrupting() or get_thread() == thread.ident:
            self.begin_closing_from_outside(drain, timeout)
        else:
            thread.call(self.close, drain, timeout)

    def begin_closing_from_outside(self, drain: bool, timeout: float | None) -> None:
        """Begin to ``close``, in any thread."""
        check_timeout(timeout)
        self._hub_thread.submit(self._hub_thread.start_job, self.close, drain, timeout)

    def close_at_exit(self, timeout: float) -> int:
        """Close within ``timeout`` seconds. Messages whose handlers run then are delivered again."""
        self.close(drain=True, timeout=timeout)
        return 0

    def count_unconfirmed(self) -> int:
        """A consumer publishes nothing."""
        return 0


class TakenBatches(OutsideHandlers):
    """Brings batches to those who iterate.

    Args:
        bring: called with each batch, in the hub thread; it does not block.

    Attributes:
        cursors: of those who iterate.
    """

    max_batch = 256

    def __init__(self, bring: Callable[[Batch], object]) -> None:
        super().__init__()
        self._bring = bring
        self.cursors: list[BatchCursor] = []

    def _begin(self, batch: Batch) -> None:
        self._bring(batch)

    def is_held_by(self, owner: object) -> bool:
        """Whether ``owner``, who iterates, is at a message."""
        return any(cursor.owner == owner and cursor.is_holding for cursor in list(self.cursors))

    def done(self, batch: Batch) -> None:
        """Nothing of the batch is used any more. In any thread."""
        self._done(batch)


class BatchCursor:
    """Goes through batches. All of it belongs to one thread, or one loop: that of who iterates.

    Attributes:
        owner: the task, or the thread, that took the batch.
    """

    def __init__(self, batches: TakenBatches) -> None:
        self.owner: object = None
        self._batches = batches
        self._batch: Batch | None = None
        self._end = 0.0
        batches.cursors.append(self)

    @property
    def is_holding(self) -> bool:
        """Whether it is at a message."""
        return self._batch is not None and self._batch.current is not None

    def begin(self, batch: Batch) -> None:
        """Go on with another batch. The one before is over."""
        self._batch = batch
        self._end = monotonic() + SLICE

    def next(self) -> Message | None:
        """The one before is done; take the next message of the batch. None: the batch is over."""
        batch = self._batch
        if batch is None:
            return None
        is_over = batch.current is not None and monotonic() > self._end
        batch.end(None)
        message: Message | None = None if is_over else batch.take()
        if message is None:
            self._leave_batch(batch)
        return message

    def leave(self) -> None:
        """The loop is left: give back the message of this round, unless it is responded to or asynchronous."""
        batch = self._batch
        if batch is None:
            return
        if batch.current is not None:
            batch.end(None if batch.current.is_async() else RequeueMessage(0.0, backoff=False))
        self._leave_batch(batch)

    def end(self) -> None:
        """Nobody goes on with it. Idempotent."""
        self.leave()
        if self in self._batches.cursors:
            self._batches.cursors.remove(self)

    def _leave_batch(self, batch: Batch) -> None:
        self._batch = None
        self._batches.done(batch)


class Consumer(ConsumerOptions):
    """Consume one topic, or several, through a channel; handlers run on native threads.

    There are ``handler_threads`` of them, 1 by default. Arguments, options, guarantees and errors are those of
    ``nsq_fast.Consumer``. Handlers may block, and any thread may call the consumer and respond to its messages: a FIN,
    REQ or TOUCH leaves soon after the call.

    Instead of a handler, iterate: ``for message in consumer``. Asking for the next message finishes the one before.

    ``give_up``, ``blocked_policy`` and receivers of signals run in the hub thread: they must not block. The sender of
    signals is the consumer there.
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
        nsqd_tcp_addresses: set[str]

    def __init__(
        self,
        topic: TopicArgument,
        channel: str,
        nsqd_tcp_addresses: Addresses = (),
        lookupd_http_addresses: Addresses = (),
        name: str | None = None,
        message_handler: Handler | None = None,
        max_tries: int = 5,
        max_in_flight: int | None = None,
        requeue_delay: int | None = None,
        lookupd_poll_interval: float = 60,
        lookupd_poll_jitter: float = 0.3,
        low_ready_idle_timeout: float = 10,
        max_backoff_duration: float = 128,
        backoff_on_requeue: bool = True,
        *,
        batch_handler: BatchHandler | None = None,
        give_up: Callable[[Any, Message], object] | None = None,
        blocked_policy: Any = "pause",
        start_position: Any = None,
        trace: TraceLog | None = None,
        **options: Unpack[ConsumerKeywords],
    ) -> None:
        check_handler("message_handler", message_handler)
        check_handler("batch_handler", batch_handler)
        if message_handler is not None and batch_handler is not None:
            raise ConfigError("message_handler and batch_handler are both given: choose one")
        self._is_iterated = message_handler is None and batch_handler is None
        threads = options.get("handler_threads") or options.get("concurrency") or 1
        arguments: dict[str, Any] = {
            "topic": topic,
            "channel": channel,
            "nsqd_tcp_addresses": nsqd_tcp_addresses,
            "lookupd_http_addresses": lookupd_http_addresses,
            "name": name,
            "message_handler": self._with_self(message_handler) if batch_handler is None else None,
            "max_tries": max_tries,
            "max_in_flight": max_in_flight,
            "requeue_delay": requeue_delay,
            "lookupd_poll_interval": lookupd_poll_interval,
            "lookupd_poll_jitter": lookupd_poll_jitter,
            "low_ready_idle_timeout": low_ready_idle_timeout,
            "max_backoff_duration": max_backoff_duration,
            "backoff_on_requeue": backoff_on_requeue,
            "batch_handler": None if batch_handler is None else self._with_self(batch_handler),
            "give_up": give_up,
            "blocked_policy": blocked_policy,
            "start_position": start_position,
            "trace": trace,
            **options,
            **({"concurrency": options.get("concurrency") or 1} if self._is_iterated else {}),
            "handler_threads": threads,
        }

        def make(thread: HubThread) -> HubConsumer:
            consumer = HubConsumer(**arguments).live_in(thread, self._new_handlers)
            consumer.on_close.connect(self._closed, weak=False)
            return consumer

        self._is_started = False
        self._taken: TakenBatches | None = None
        self._place: Place[HubConsumer] = Place(make, self._renewed)

    def _with_self(self, handler: Any) -> Callable[[object, Any], object]:
        return lambda consumer, item: handler(self, item)

    def _renewed(self, consumer: HubConsumer) -> None:
        self._is_started = False

    def _call(self, function: Callable[[HubConsumer], T]) -> T:
        consumer = self._place.get()
        return self._place.thread.call(function, consumer)

    def _submit(self, function: Callable[[HubConsumer], object]) -> None:
        consumer = self._place.get()
        self._place.thread.submit(function, consumer)

    def __getattr__(self, name: str) -> Any:
        if name in _READABLE or name == "given_up" or name.startswith("on_"):
            return getattr(self._place.get(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self.topic} {self.channel}>"

    # Running

    def start(self, block: bool = True) -> None:
        """Begin to consume. With ``block``, return only when the consumer is closed, as ``join``.

        Raises RuntimeError when there is no handler, NotRunning after close.
        """
        if self._is_iterated:
            raise RuntimeError("no message_handler or batch_handler: iterate over the consumer, or give it one")
        self._start()
        if block:
            self.join()

    def _start(self) -> None:
        self._call(lambda consumer: consumer.start(block=False))
        self._is_started = True

    def join(self, timeout: float | None = None, raise_error: bool = False) -> bool:
        """Wait until the consumer is closed; False if ``timeout`` seconds passed first."""
        return self._call(lambda consumer: consumer.join(timeout, raise_error))

    def close(self, drain: bool = True, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Stop consuming, gracefully, as ``nsq_fast.Consumer.close``.

        In any thread. In a handler, in a handler of ``signal.signal``, and in a thread that iterates and is at a
        message, it only begins to close; ``join`` waits for the end.
        """
        consumer = self._place.get()
        if self._taken is not None and self._taken.is_held_by(get_ident()):
            consumer.begin_closing_from_outside(drain, timeout)
        else:
            consumer.close_from_outside(drain, timeout)

    def __enter__(self) -> Consumer:
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
        at which the loop is left early is requeued, unless it was responded to. Several threads may iterate.
        """
        if not self._is_iterated:
            raise RuntimeError("a consumer with a handler cannot be iterated")
        if not self._is_started:
            self._start()
        return self._messages()

    def _messages(self) -> Iterator[Message]:
        taken = self._taken
        if taken is None:
            raise NotRunning("the consumer is closed")
        consumer, cursor = self._place.get(), BatchCursor(taken)
        try:
            while (batch := self._batches.get()) is not None:
                cursor.begin(batch)
                cursor.owner = get_ident()
                while (message := cursor.next()) is not None:
                    yield message
        finally:
            cursor.end()
        self._batches.put(None)  # for the others that iterate
        if consumer.failure is not None:
            raise consumer.failure

    def _new_handlers(self) -> TakenBatches | None:
        """Who is given the messages, made in the hub thread when the consumer starts; None: native threads."""
        if not self._is_iterated:
            return None
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._taken = TakenBatches(self._batches.put)
        return self._taken

    def _closed(self, sender: object) -> None:
        if self._taken is not None:
            self._batches.put(None)

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

    @property
    def is_paused(self) -> bool:
        """Whether ``pause`` was called, and ``resume`` not since."""
        return self._place.get().is_paused

    @property
    def is_running(self) -> bool:
        """Whether the consumer is started and not closed."""
        return self._place.get().is_running

    @property
    def is_starved(self) -> bool:
        """Whether some connection holds 85 % of what it may get."""
        return self._call(lambda consumer: consumer.is_starved)

    @property
    def total_ready_count(self) -> int:
        """Sum of the RDYs last sent."""
        return self._call(lambda consumer: consumer.total_ready_count)

    @property
    def total_in_flight(self) -> int:
        """Messages received and not responded to."""
        return self._call(lambda consumer: consumer.total_in_flight)

    def stats(self) -> ConsumerStats:
        """A snapshot of what was done and what is going on."""
        return self._call(HubConsumer.stats)


_READABLE = frozenset(
    ["config", "connection_config", "lookup_config", "topic", "topics", "channel", "name", "nsqd_tcp_addresses"]
)
