"""Workers: from received messages to handlers, and from handlers to FINs.

An ``InboundQueue`` holds what one connection has received and nobody has begun
to handle. A ``Pool`` is a fixed number of workers that serve inbound queues: one
worker for each queue keeps the order of its connection, N workers for all queues
handle N messages at a time. Nothing is spawned, no timer armed and no signal
built per message.

A worker is a greenlet, whose handlers block it (``Worker``), or a task, whose
handlers are awaited (``nsq_fast.aio``), or a program that iterates (``Cursor``).

When a handler returns, its message joins ``Connection.finished``; the FINs leave
in one buffer at the end of the loop's turn, even if the next handler waits. A
handler that blocks the process keeps the loop from having that turn. So a worker
looks at the clock after each handler. On gevent, once the loop is overdue
(``LoopTurns``), the worker sends the FINs itself, and lets timers and sockets have
their turn before the next handler begins. A worker that has handled all that its
connection has sent does not wait for the end of the turn either.

What a worker does for each read of a socket is compiled (``_dispatch.pyx``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any

from nsq_fast._codec import Message
from nsq_fast._dispatch import Dispatcher, HandlerLimit, InboundQueue, PromptFins
from nsq_fast._time_slice import Caller, take

from .deadlines import Load
from .handlers import Handler, Sample, refuse_deferred

if TYPE_CHECKING:
    from .acknowledger import Acknowledger, Turn
    from .consumer import AnyConsumer

SLICE = 0.005
"""Seconds that one worker after the other may use before timers and sockets have their turn."""


class Pool(Dispatcher):
    """A fixed number of workers that serve some inbound queues; 0 workers when a program takes the messages by itself.

    Args:
        turns: of the loop, where handlers may keep it from having them unseen; None on asyncio, whose tasks give way.
        wait: has a worker wait until ``release`` was called for it.

    Attributes:
        workers: those there are, and who iterates.
    """

    load: Load

    def __init__(
        self,
        acknowledger: Acknowledger,
        limit: HandlerLimit,
        prompt: PromptFins,
        turns: Any,
        wait: Callable[[], Any],
        release: Callable[[], object],
    ) -> None:
        super().__init__(turns, SLICE, prompt, limit, Load(), wait, release)
        self.acknowledger = acknowledger
        self.wait_for_more = wait
        self.workers: list[Worker] = []


class Worker(Caller):
    """Handles messages, one at a time or in batches, by handlers that have run when they return.

    Attributes:
        current: the message, or list of messages, that is handled now.
        runs_in: the greenlet or task that it is; None before it has begun.
    """

    __slots__ = ("_acknowledger", "_pool", "runs_in")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._acknowledger = pool.acknowledger
        self.runs_in: Any = None

    def run(self) -> None:
        """Work until the pool is stopped; blocks."""
        while (inbound := self._pool.take()) is not None:
            try:
                self._handle(inbound)
            finally:
                self.current = None
                self._pool.leave(inbound)

    def _handle(self, inbound: InboundQueue) -> None:
        began = self.began = monotonic()
        if began >= inbound.ledger.next_deadline:
            inbound.expire(began)
        timing = self._acknowledger.timing
        sample = timing.sample(began) if timing is not None and began >= timing.due else None
        try:
            if inbound.turn is not None:
                self._handle_ordered(inbound, inbound.turn, sample)
            elif self._acknowledger.batch_handler is not None:
                self._handle_batch(inbound, sample)
            else:
                self._handle_single(inbound, sample)
        except Exception:
            # A fault of ours, not of a handler: those are dealt with below. The worker must go on.
            self._acknowledger.log_fault(self.current)
        if sample is not None:
            sample.count()
        if inbound.turn is None:  # an ordered partition has one message in flight, however long its handler takes
            self._pool.handled(self.began, inbound.slice.take_count())

    def calling(self, handler: Callable[[Any, Any], object], sample: Sample | None) -> Callable[[Any, Any], object]:
        """What calls a handler with one item, where it runs, and times it."""
        return handler if sample is None else sample.timed(handler)

    def _handle_ordered(self, inbound: InboundQueue, turn: Turn, sample: Sample | None) -> None:
        """Handle what an ordered partition sends, one message after the other; each FIN leaves at once."""
        pool, acknowledger, waiting = self._pool, self._acknowledger, inbound.waiting
        consumer, threshold = acknowledger.consumer, acknowledger.ordered.threshold
        while waiting:
            is_finished = False
            now = monotonic()
            if now >= inbound.ledger.next_deadline:
                inbound.expire(now)
                continue
            message = self.current = waiting.popleft()
            if message.attempts <= threshold or acknowledger.begins(inbound, message):
                handler = self.calling(acknowledger.single_handler(), sample)
                try:
                    result = handler(consumer, message)
                    if result is not None:
                        refuse_deferred(result)
                except BaseException as error:
                    acknowledger.failed(message, error, is_ordered=True)
                else:
                    if message.mark_returned():
                        inbound.connection.finish_returned(message)  # the server sends the next one only then
                        acknowledger.tell_finished(message)
                        is_finished = True
            self.current = None
            if sample is not None:  # now: the next message may come much later
                sample.count()
                sample = None
            if pool.turns.is_overdue(monotonic()):
                return
            if is_finished and not waiting and not pool.turns.has_others:
                inbound.connection.read_soon()

    def _handle_single(self, inbound: InboundQueue, sample: Sample | None) -> None:
        handler = self._acknowledger.present_handler()
        if sample is not None:  # the first message by itself: the others cost nothing more
            self._handle_some(inbound, sample.timed(handler), 0.0)
            sample.count()  # now: the worker may read on, and wait
        self._handle_some(inbound, handler, self._pool.turns.due_at)

    def _handle_some(self, inbound: InboundQueue, handler: Handler, end: float) -> None:
        """Handle messages until none waits, or until ``end``."""
        pool, acknowledger = self._pool, self._acknowledger
        time_slice = acknowledger.slice_of(inbound)
        deadline = inbound.ledger.next_deadline
        self.end = end
        time_slice.end = 0.0 if pool.prompt.left else end if end < deadline else deadline
        while time_slice.handle(self, inbound, acknowledger, handler):
            if self._is_over(inbound):
                return

    def _is_over(self, inbound: InboundQueue) -> bool:
        """Send the FINs if handlers were slow lately; say whether it is time for others."""
        pool, now = self._pool, monotonic()
        if now >= inbound.ledger.next_deadline:
            inbound.expire(now)
        prompt = pool.prompt
        if prompt.left:
            inbound.connection.flush()
            prompt.left -= 1
            if not prompt.left:
                inbound.slice.end = self.end
        return now > self.end

    def _handle_batch(self, inbound: InboundQueue, sample: Sample | None) -> None:
        acknowledger = self._acknowledger
        messages = self.take_batch(inbound)
        if not messages:
            return
        handler = self.calling(acknowledger.batch_handler, sample)
        try:
            # A list of its own: a handler may pop, clear or replace, and what it was given is answered all the same.
            result = handler(acknowledger.consumer, messages[:])
            if result is not None:
                refuse_deferred(result)
        except BaseException as error:
            acknowledger.batch_failed(messages, error)
            return
        acknowledger.slice_of(inbound).all_returned(messages)

    def take_batch(self, inbound: InboundQueue) -> list[Message]:
        """Take as many messages as a batch handler gets at once; those that have too many attempts are given up."""
        messages, attempts = take(inbound.waiting, self._acknowledger.batch_size)
        self.current = messages
        if attempts > self._acknowledger.max_tries:
            messages = self.current = self._acknowledger.without_given_up(inbound, messages)
        return messages


class Cursor(Worker):
    """A program that takes messages one by one: asking for the next finishes the one before.

    Whoever iterates asks ``next`` until that is None, then goes on with another inbound queue by ``begin``.

    Attributes:
        owner: who iterates.
        is_over: whether the time slice is over.
    """

    __slots__ = ("_inbound", "_sample", "is_over", "owner")

    def __init__(self, pool: Pool, owner: object) -> None:
        super().__init__(pool)
        self.runs_in = self.owner = owner  # who iterates is a worker for whoever looks at what is being handled
        self._inbound: InboundQueue | None = None
        self.is_over = False
        self._sample: Sample | None = None
        pool.workers.append(self)

    def begin(self, inbound: InboundQueue) -> None:
        """Go on with messages of this queue, until it is empty or the time slice is over."""
        pool, acknowledger = self._pool, self._acknowledger
        began = self.began = monotonic()
        self._inbound = inbound
        self.is_over = False
        acknowledger.slice_of(inbound)
        # With prompt FINs, the one of each message leaves when its round is over.
        turns = pool.turns
        inbound.slice.end = 0.0 if pool.prompt.left else began + SLICE if turns is None else turns.due_at
        timing = acknowledger.timing
        self._sample = timing.sample(began) if timing is not None and began >= timing.due else None

    def next(self) -> Message | None:
        """The program is done with the message before; take the next one. None: it is another queue's turn."""
        inbound = self._inbound
        if inbound is None:
            return None
        self._finish(inbound)
        waiting = inbound.waiting
        while waiting and not self.is_over and not self._pool.is_stopped:
            now = monotonic()
            if now >= inbound.ledger.next_deadline:
                inbound.expire(now)
                continue
            message: Message = waiting.popleft()
            self.current = message
            if self._is_given_up(inbound, message):
                self.current = None
                continue
            # Whatever happens from here on, ``current`` says which message is in the program's hands.
            if self._sample is not None:
                self._sample.begin(message)
            return message
        self._leave(inbound)
        return None

    def _is_given_up(self, inbound: InboundQueue, message: Message) -> bool:
        return self._acknowledger.is_given_up(inbound, message)

    def _finish(self, inbound: InboundQueue) -> None:
        message, self.current = self.current, None
        if not isinstance(message, Message):
            return
        if self._sample is not None:
            self._sample.end()
            self._sample.count()
            self._sample = None
        self.is_over = inbound.slice.returned(message)
        if inbound.turn is not None:  # the server sends the next one only then
            inbound.connection.flush()

    def _leave(self, inbound: InboundQueue) -> None:
        if inbound.turn is None:
            self._pool.handled(self.began, inbound.slice.take_count())
        self._inbound = None
        self._pool.leave(inbound)

    def leave(self) -> None:
        """The loop is left early: give the message of this round back, unless it is answered or asynchronous."""
        # Whether it was done nobody can know here.
        left, self.current = self.current, None
        if isinstance(left, Message) and not left.is_async():
            self._acknowledger.requeue(left, 0, False)
        if self._inbound is not None:
            self._leave(self._inbound)

    def close(self) -> None:
        """Nobody goes on with it. Idempotent."""
        self.leave()
        if self in self._pool.workers:
            self._pool.workers.remove(self)


class Pools:
    """The workers of a consumer: one pool that all connections share, or one for each connection.

    Attributes:
        shared: the pool that all connections share; None when each has its own.
    """

    def __init__(self, consumer: AnyConsumer) -> None:
        self.shared: Pool | None = None
        self._consumer = consumer
        self._pools = consumer.workload.pools
        self._limit = HandlerLimit(lambda: consumer.flow.limit)
        self._prompt = PromptFins()

    def start(self, is_iterated: bool) -> None:
        """Make what the options ask for; with ``is_iterated`` a pool without workers, served by who iterates."""
        config = self._consumer.config
        # Without any of these, each connection gets a worker of its own: messages stay in the order of arrival.
        size = config.concurrency or config.handler_threads
        if is_iterated or size:
            self.shared = self.new(0 if is_iterated or size is None else size, "worker")
            self._consumer.workload.shared = self.shared

    def new(self, size: int, name: str) -> Pool:
        consumer = self._consumer
        pool = consumer.new_pool(self._limit, self._prompt)
        for number in range(size):
            worker = consumer.new_worker(pool)
            pool.workers.append(worker)
            consumer.start_worker(worker, f"{consumer.name} {name}-{number}")
        self._pools.append(pool)
        return pool

    def drop(self, pool: Pool) -> None:
        if pool in self._pools and pool is not self.shared:
            self._pools.remove(pool)

    def limit_changed(self) -> None:
        """The number of handlers that may run at once is another now."""
        self._limit.changed()

    def workers(self) -> Iterator[Worker]:
        return (worker for pool in self._pools for worker in pool.workers)

    def stop(self) -> None:
        """Let each worker end after what it is handling now."""
        for pool in self._pools:
            pool.stop()
