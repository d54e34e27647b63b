"""Worker greenlets: from received messages to handlers, and from handlers to FINs.

An ``InboundQueue`` holds what one connection has received and nobody has begun
to handle. A ``Pool`` is a fixed number of worker greenlets that serve inbound
queues: one worker for each queue keeps the order of its connection, N workers for
all queues handle N messages at a time. Nothing is spawned, no timer armed and no
signal built per message. A worker that serves one connection alone reads it by
itself when it has nothing to handle: what comes needs no switch to its handler.

When a handler returns, its message joins ``Connection.finished``; the FINs leave
in one buffer at the end of the hub's turn, even if the next handler waits. A
handler that blocks the process keeps the hub from having that turn. So a worker
looks at the clock after each handler. Once the loop is overdue (``LoopTurns``),
the worker sends the FINs itself, and lets timers and sockets have their turn
before the next handler begins. A worker that has handled all that its connection
has sent does not wait for the end of the turn either.

What a worker does for each read of a socket is compiled (``_dispatch.pyx``).
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from gevent.lock import Semaphore
from greenlet import greenlet

from nsq_fast._codec import Message
from nsq_fast._dispatch import Dispatcher, HandlerLimit, InboundQueue, PromptFins
from nsq_fast._time_slice import Caller, take
from nsq_fast.runtime.fork import tell_forks
from nsq_fast.runtime.loop_turns import SLICE, loop_turns

from .disposition import Disposition, Handler
from .handlers import refuse_deferred
from .load import Load
from .ordered import Turn
from .timing import Sample

if TYPE_CHECKING:
    from .outside_handlers import OutsideHandlers, OutsideWorker


class Pool(Dispatcher):
    """A fixed number of workers that serve some inbound queues; 0 workers when a program takes the messages by itself.

    Attributes:
        outside: where handlers run; None when they run in the worker greenlets.
        spare: how many of the workers can only wait for one of the others to be done.
    """

    def __init__(
        self,
        disposition: Disposition,
        size: int,
        name: str,
        limit: HandlerLimit,
        prompt: PromptFins,
        outside: OutsideHandlers | None = None,
        spare: int = 0,
    ) -> None:
        wake = Semaphore(0)
        super().__init__(loop_turns(), SLICE, prompt, limit, Load(), wake.acquire, wake.release)
        self.disposition = disposition
        self.outside = outside
        self.spare = spare
        self.workers = [Worker(self) for _ in range(size + spare)]
        for number, worker in enumerate(self.workers):
            worker.start(f"{name}-{number}")
        tell_forks(self)


class Worker(Caller):
    """One greenlet that handles messages, one at a time or in batches."""

    __slots__ = ("_disposition", "_outside", "_pool", "greenlet")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._disposition = pool.disposition
        self._outside: OutsideWorker | None = None if pool.outside is None else pool.outside.worker()
        self.greenlet: greenlet | None = None

    def start(self, name: str) -> None:
        """Begin to work."""
        runner = self._disposition.consumer.supervisor.loop(name, self._run)
        runner.runs_handlers = True
        self.greenlet = runner
        runner.start()

    def _run(self) -> None:
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
        timing = self._disposition.timing
        sample = timing.sample(began) if timing is not None and began >= timing.due else None
        try:
            if inbound.turn is not None:
                self._handle_ordered(inbound, inbound.turn, sample)
            elif self._disposition.batch_handler is not None:
                self._handle_batches(inbound, sample)
            elif self._outside is not None:
                self._handle_outside(inbound, self._outside, sample)
            else:
                handler = self._disposition.present_handler()
                if sample is not None:  # the first message by itself: the others cost nothing more
                    self._handle_some(inbound, sample.timed(handler), 0.0)
                    sample.count()  # now: the worker may read on, and wait
                self._handle_some(inbound, handler, self._pool.turns.due_at)
        except Exception:
            # A fault of ours, not of a handler: those are dealt with below. The worker must go on.
            self._disposition.log_fault(self.current)
        if sample is not None:
            sample.count()
        if inbound.turn is None:  # an ordered partition has one message in flight, however long its handler takes
            self._pool.handled(self.began, inbound.slice.take_count())

    def _handle_ordered(self, inbound: InboundQueue, turn: Turn, sample: Sample | None) -> None:
        """Handle what an ordered partition sends, one message after the other; each FIN leaves at once.

        Between two messages the turn is free for others, and the worker reads by itself, if it can.
        """
        pool, disposition, waiting = self._pool, self._disposition, inbound.waiting
        consumer, threshold = disposition.consumer, disposition.ordered.threshold
        while waiting:
            is_finished = False
            now = monotonic()
            if now >= inbound.ledger.next_deadline:
                inbound.expire(now)
                continue
            message = self.current = waiting.popleft()
            if message.attempts <= threshold or disposition.ordered.begins(inbound, message):
                handler = disposition.single_handler()
                if self._outside is not None:
                    handler = partial(self._outside.call, handler, sample)
                elif sample is not None:
                    handler = sample.timed(handler)
                try:
                    result = handler(consumer, message)
                    if result is not None:
                        refuse_deferred(result)
                except BaseException as error:
                    disposition.failed(message, error, is_ordered=True)
                else:
                    if message.mark_returned():
                        inbound.connection.finish_returned(message)  # the server sends the next one only then
                        disposition.tell_finished(message)
                        is_finished = True
            self.current = None
            if sample is not None:  # now: the next message may come much later
                sample.count()
                sample = None
            if pool.turns.is_overdue(monotonic()):
                return
            if not waiting:
                turn.give_back(pool)
                source = pool.source
                if source is None or not source.read_for_reader(is_finished) or not waiting or not turn.take(pool):
                    return

    def _handle_some(self, inbound: InboundQueue, handler: Handler, end: float) -> None:
        """Handle messages, and what is read when none is left, until nothing comes, or until ``end``.

        Where the worker has waited for what was read, ``end`` is that of another turn of the loop.
        """
        pool, disposition = self._pool, self._disposition
        time_slice = disposition.slice_of(inbound)
        deadline = inbound.ledger.next_deadline
        self.end = end
        time_slice.end = 0.0 if pool.prompt.left else end if end < deadline else deadline
        while True:
            if time_slice.handle(self, inbound, disposition, handler):
                if self._is_over(inbound):
                    return
            elif not pool.read_on(inbound, self) or disposition.is_asked(self.began):
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

    def _handle_batches(self, inbound: InboundQueue, sample: Sample | None) -> None:
        """Handle a batch, and each that is read when none is left, until nothing comes or the time slice is over."""
        timing = self._disposition.timing
        while True:
            self._handle_batch(inbound, sample)
            if inbound.waiting or sample is not None or not self._pool.read_on(inbound, self):
                return
            if timing is not None and self.began >= timing.due:
                return

    def _handle_batch(self, inbound: InboundQueue, sample: Sample | None) -> None:
        disposition = self._disposition
        messages, attempts = take(inbound.waiting, disposition.batch_size)
        self.current = messages
        if attempts > disposition.max_tries:
            messages = disposition.without_given_up(inbound, messages)
            if not messages:
                return
            self.current = messages
        handler = disposition.batch_handler
        if self._outside is not None:
            handler = partial(self._outside.call, handler, sample)
        elif sample is not None:
            handler = sample.timed(handler)
        try:
            result = handler(disposition.consumer, messages)
            if result is not None:
                refuse_deferred(result)
        except BaseException as error:
            disposition.batch_failed(messages, error)
            return
        disposition.slice_of(inbound).all_returned(messages)

    def _handle_outside(self, inbound: InboundQueue, outside: OutsideWorker, sample: Sample | None) -> None:
        """Have some messages handled elsewhere; do what follows the handlers. It is said there what is ``current``."""
        disposition, waiting, handed = self._disposition, inbound.waiting, deque[Message]()
        while waiting and len(handed) < outside.size:
            message = waiting.popleft()
            if not disposition.is_given_up(inbound, message):
                handed.append(message)
        if not handed:
            return
        returned = disposition.slice_of(inbound).returned

        def finish(message: Message, error: BaseException | None) -> None:
            if sample is not None:
                sample.count()
            if error is None:
                returned(message)
            else:
                disposition.failed(message, error)

        def take_back(messages: deque[Message]) -> None:
            while messages:
                with suppress(IndexError):  # the thread took it just now
                    waiting.appendleft(messages.pop())
            if waiting:
                self._pool.put(inbound, len(waiting))

        inbound.handed.append(handed)
        handler = partial(disposition.present_handler(), disposition.consumer)
        try:
            outside.handle(handler, self._begins, handed, finish, take_back, sample)
        finally:
            inbound.handed.remove(handed)
            take_back(handed)

    def _begins(self, message: Message) -> bool:
        if message.has_expired():  # while it waited elsewhere: nsqd has taken it back
            return False
        self.current = message
        return True


CALLS_HANDLERS = (Worker._handle_some.__code__, Worker._handle_ordered.__code__, Worker._handle_batch.__code__)
"""The code that calls handlers."""
