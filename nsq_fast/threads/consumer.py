"""The Consumer of threads: handlers run on native threads, and any thread may iterate, respond and close."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from nsq_fast._codec import Message
from nsq_fast.errors import NotRunning
from nsq_fast.runtime import Batch, CrossingConsumer, Cursor, OutsideConsumer, TakenBatches

if TYPE_CHECKING:
    from nsq_fast.keywords import ConsumerKeywords

CLOSE_TIMEOUT = 30.0

Handler: TypeAlias = Callable[["Consumer", Message], object]
BatchHandler: TypeAlias = Callable[["Consumer", list[Message]], object]


class Consumer(OutsideConsumer[Handler, BatchHandler]):
    """Consume one topic, or several, through a channel; handlers run on native threads.

    There are ``handler_threads`` of them, 1 by default. Arguments, options, guarantees and errors are those of
    ``nsq_fast.Consumer``. Handlers may block, and any thread may call the consumer and respond to its messages: a FIN,
    REQ or TOUCH leaves soon after the call.

    Instead of a handler, iterate: ``for message in consumer``. Asking for the next message finishes the one before.

    ``give_up``, ``blocked_policy`` and receivers of signals run in the hub thread: they must not block.
    """

    _taken: TakenBatches | None = None

    def _handler_options(self, options: ConsumerKeywords) -> dict[str, int]:
        threads = options.get("handler_threads") or options.get("concurrency") or 1
        return {**super()._handler_options(options), "handler_threads": threads}

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
        consumer, cursor = self._place.get(), Cursor(taken)
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

    def _new_handlers(self, consumer: CrossingConsumer) -> TakenBatches | None:
        if not self._is_iterated:
            return None
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._taken = TakenBatches(self._batches.put)
        return self._taken

    def _closed(self, sender: object) -> None:
        if self._taken is not None:
            self._batches.put(None)
