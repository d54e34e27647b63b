"""The Consumer of asyncio: handlers are coroutine functions, or messages are taken by ``async for``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import TypeAlias

from nsq_fast._codec import Message
from nsq_fast.errors import ConfigError, NotRunning, NsqError
from nsq_fast.runtime import (
    Batch,
    CrossingConsumer,
    Cursor,
    OutsideConsumer,
    OutsideHandlers,
    TakenBatches,
)

from .gate import LoopGate
from .handlers import LoopHandlers

CLOSE_TIMEOUT = 30.0

Handler: TypeAlias = Callable[["Consumer", Message], Awaitable[object]]
BatchHandler: TypeAlias = Callable[["Consumer", list[Message]], Awaitable[object]]


class Consumer(OutsideConsumer[Handler, BatchHandler]):
    """Consume one topic, or several, through a channel, in the loop in which it was started.

    Arguments, options, guarantees and errors are those of ``nsq_fast.Consumer``. Handlers are coroutine functions:
    one at a time for each nsqd, in the order of arrival; ``concurrency=N`` has N at work over all. The message is
    finished when its coroutine returns, and requeued when it raises. ``message.finish()`` and the other methods of
    messages may be awaited, and need not be. A plain function is called in the loop, and must not block.

    Instead of a handler, iterate: ``async for message in consumer``. Asking for the next message finishes the one
    before. A message at which the loop is left early is requeued, unless it was responded to.

    A handler that is cancelled with its loop has its message requeued. Each message has a context of its own
    (``contextvars``), which begins as that in which the loop takes messages. Several handlers may share a task.

    ``give_up``, ``blocked_policy`` and receivers of signals run in the hub thread: they must not block.
    """

    _gate: LoopGate | None = None
    _handlers: LoopHandlers | None = None
    _messages: _Messages | None = None

    def _check_handler(self, name: str, handler: Handler | BatchHandler | None) -> None:
        if handler is not None and not callable(handler):
            raise ConfigError(f"{name}={handler!r}: must be callable")

    # Running

    async def start(self) -> None:
        """Begin to consume, in the running loop. Raises NotRunning after ``close``."""
        consumer = self._place.get()
        if self._gate is None:
            self._gate = LoopGate(self._place.thread, repr(self), consumer.abandon_handlers)
        try:
            await self._gate.call(consumer.start, False)
        except NsqError:
            if not self._is_started:  # nothing has begun: nobody need look whether the loop runs
                self._gate.close()
            raise
        self._is_started = True

    async def join(self, timeout: float | None = None) -> bool:
        """Wait until the consumer is closed; False if ``timeout`` seconds passed first."""
        consumer = self._place.get()
        return await self._gate_of().wait(consumer.join, timeout)

    async def close(self, drain: bool = True, timeout: float | None = CLOSE_TIMEOUT) -> None:
        """Stop consuming, gracefully, as ``nsq_fast.Consumer.close``. In a handler it only begins to close.

        The message at which the calling task iterates is requeued, unless it was responded to; those of other tasks
        are finished when they ask for the next.
        """
        consumer, gate = self._place.get(), self._gate
        if gate is None or gate.loop.is_closed():
            consumer.begin_closing_from_outside(drain, timeout)
            return
        gate.check_loop("Consumer.close()")
        if self._messages is not None:
            self._messages.leave_current()
        if self._handlers is not None and self._handlers.is_current:
            consumer.begin_closing_from_outside(drain, timeout)
            return
        await gate.call(consumer.close, drain, timeout)

    async def __aenter__(self) -> Consumer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def _gate_of(self) -> LoopGate:
        if self._gate is None:
            raise NotRunning("the consumer is not running: await start(), or use it with `async with`")
        return self._gate

    def _renewed(self, consumer: CrossingConsumer) -> None:
        super()._renewed(consumer)
        self._gate = self._handlers = self._messages = None  # in a child of a fork, whose loop is another one

    # Iterating

    def __aiter__(self) -> AsyncIterator[Message]:
        """Take messages one by one, until the consumer is closed. Several tasks may iterate.

        Raises NotRunning before ``start``: iterate within ``async with``.
        """
        if not self._is_iterated:
            raise RuntimeError("a consumer with a handler cannot be iterated")
        self._gate_of().check_loop("Consumer.iter()")
        if self._messages is None:
            raise NotRunning("the consumer is closed")
        return _Iteration(self._messages)

    # In the hub thread

    def _new_handlers(self, consumer: CrossingConsumer) -> OutsideHandlers:
        gate = self._gate_of()
        if self._is_iterated:
            self._messages = _Messages(gate, consumer)
            return self._messages.batches
        self._handlers = LoopHandlers(gate, consumer.close_in_background, consumer.config.concurrency)
        gate.is_used = self._handlers.is_running
        return self._handlers

    def _closed(self, sender: object) -> None:
        gate = self._gate
        if gate is None:
            return
        if self._messages is not None:
            gate.post(self._messages.end)
        gate.close()


class _Messages:
    """The messages of a consumer that is iterated. All of it belongs to the loop, but for what says otherwise."""

    def __init__(self, gate: LoopGate, consumer: CrossingConsumer) -> None:
        self.batches = TakenBatches(lambda batch: gate.post(self._take, batch))
        self.is_over = False
        self._gate = gate
        self._consumer = consumer
        self._waiting: deque[Batch] = deque()
        self._takers: deque[asyncio.Future[None]] = deque()

    def _take(self, batch: Batch) -> None:
        self._waiting.append(batch)
        if self.is_over:
            self._leave_waiting()
        self._wake_one()

    async def next(self, cursor: Cursor) -> Message:
        """The next message for ``cursor``. Raises StopAsyncIteration when there are no more."""
        while True:
            message = cursor.next()
            if message is not None:
                return message
            if self._waiting:
                cursor.begin(self._waiting.popleft())
                cursor.owner = asyncio.current_task()
            elif self.is_over:
                if self._consumer.failure is not None:
                    raise self._consumer.failure
                raise StopAsyncIteration
            else:
                await self._more()

    async def _more(self) -> None:
        taker: asyncio.Future[None] = self._gate.loop.create_future()
        self._takers.append(taker)
        try:
            await taker
        except asyncio.CancelledError:
            if self._waiting and taker.done() and not taker.cancelled():
                self._wake_one()  # what it was woken for is for another
            raise

    def _wake_one(self) -> None:
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                return

    def leave_current(self) -> None:
        """The calling task closes the consumer: give back what nobody has taken, and what it has taken itself."""
        self._leave_waiting()
        task = asyncio.current_task()
        for cursor in list(self.batches.cursors):
            if cursor.owner is task:
                cursor.leave()

    def _leave_waiting(self) -> None:
        for batch in self._waiting:
            self.batches.done(batch)
        self._waiting.clear()

    def end(self) -> None:
        """The consumer is closed: what is in hand was responded to, or is delivered again."""
        self.is_over = True
        self._leave_waiting()
        for cursor in list(self.batches.cursors):
            cursor.leave()
        takers, self._takers = self._takers, deque()
        for taker in takers:
            if not taker.done():
                taker.set_result(None)


class _Iteration:
    """One ``async for``."""

    def __init__(self, messages: _Messages) -> None:
        self._messages = messages
        self._cursor = Cursor(messages.batches)

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        return await self._messages.next(self._cursor)

    def __del__(self) -> None:
        self._cursor.end()
