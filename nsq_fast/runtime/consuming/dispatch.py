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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic

from gevent.lock import Semaphore
from greenlet import greenlet

from nsq_fast._codec import Message
from nsq_fast._time_slice import Caller, TimeSlice, take
from nsq_fast.runtime.fork import tell_forks
from nsq_fast.runtime.loop_turns import SLICE, loop_turns
from nsq_fast.runtime.net.connection import Connection

from .disposition import Disposition, Handler
from .handlers import refuse_deferred
from .load import Load
from .ordered import Turn
from .outside_handlers import OutsideHandlers, OutsideWorker
from .timing import Sample

FLUSH_SECONDS = 5e-6
"""What a send for one FIN takes, about."""

FLUSH_SHARE = 0.1
"""Share of the time that a slow handler took which may be spent on FINs that leave one by one after it.

Where one handler is slow the next may be, too, and what gathered before it would wait."""

RARE = 100
"""A slow handler after so many quick ones says nothing of the next: where other programs want the processor, too, the
system takes it from quick handlers as well. To send FINs one by one for that made up to five times as many sends
(nsq-fast bench consume --connections 100, beside busy programs)."""


class PromptFins:
    """How many FINs of a consumer still leave one by one, because one of its handlers kept the hub from running lately.

    All pools share it: the FINs of each connection wait while a handler of another keeps the hub from running.

    Attributes:
        left: how many; 0 as long as handlers are quick, so that only consumers with slow ones pay for it.
        quick: messages handled since the last slow handler.
    """

    __slots__ = ("left", "quick")

    def __init__(self) -> None:
        self.left = 0
        self.quick = 0

    def slow(self, seconds: float, count: int) -> None:
        """A handler, the last of so many or one before it, has kept the hub waiting for so long."""
        if self.quick + count < RARE:
            self.left = max(self.left, round(FLUSH_SHARE / FLUSH_SECONDS * seconds))
        self.quick = 0


class InboundQueue:
    """Messages of one connection that wait for a worker.

    Args:
        connection: who delivered the messages.
        expire: called with the time (monotonic) when a deadline may be over; drops what is not to be handled any more.

    Attributes:
        ledger: the messages of the connection that are in flight.
        turn: of an ordered partition, which one worker at a time may handle; None when any number may.
        slice: takes the messages whose handlers have returned.
        handed: what handlers elsewhere have got of it, and may not have begun with.
    """

    __slots__ = ("connection", "expire", "handed", "is_queued", "ledger", "slice", "turn", "waiting")

    def __init__(self, connection: Connection, expire: Callable[[float], None]) -> None:
        self.connection = connection
        self.ledger = connection.session.ledger
        self.expire = expire
        self.waiting: deque[Message] = deque()
        self.handed: list[deque[Message]] = []
        self.is_queued = False
        self.turn: Turn | None = None
        self.slice = TimeSlice(connection.finished, connection.schedule_flush, 0.0)

    def take_unstarted(self) -> list[Message]:
        """The messages that no handler has begun with; none waits any more."""
        unstarted: list[Message] = []
        for messages in (*self.handed, self.waiting):
            with suppress(IndexError):  # a thread may take from its own meanwhile
                while True:
                    unstarted.append(messages.popleft())
        return unstarted

    def drop_expired(self) -> int:
        """Drop the messages that nsqd has taken back, which are the oldest; say how many there were."""
        waiting, count = self.waiting, 0
        while waiting and waiting[0].has_expired():
            waiting.popleft()
            count += 1
        return count


class HandlerLimit:
    """Keeps the number of handlers that run at once, over all pools of a consumer, within ``max_in_flight``.

    More messages than that may be here: those of lost connections, and those that nsqd has sent in place of others
    whose time was over. Ordered partitions do not count: each has one handler at a time.

    Args:
        limit: gives ``max_in_flight``.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._running = 0
        self._waiting: list[Pool] = []

    def take(self, pool: Pool) -> bool:
        """Let a worker of ``pool`` begin; if there are enough already, ``pool`` is woken when one ends."""
        if self._running == 0 or self._running < self._limit():  # one may always run, whatever the limit
            self._running += 1
            return True
        if pool not in self._waiting:
            self._waiting.append(pool)
        return False

    def give_back(self) -> None:
        """A worker is done."""
        self._running -= 1
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for pool in waiting:
                pool.wake()

    def changed(self) -> None:
        """The limit is another: have all those who wait look again."""
        waiting, self._waiting = self._waiting, []
        for pool in waiting:
            pool.wake_all()


class Pool:
    """A fixed number of workers that serve some inbound queues; 0 workers when a program takes the messages by itself.

    Attributes:
        idle: workers that wait.
        source: the one connection that these workers serve, which a worker reads itself in place of waiting for a
            message; None when there are several, or none.
        turns: of the loop of the hub that the workers run in.
        outside: where handlers run; None when they run in the worker greenlets.
        prompt: how many FINs are still sent one by one, because a handler of the consumer was slow lately.
        load: how busy the workers are.
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
        self.disposition = disposition
        self.outside = outside
        self.is_stopped = False
        self.source: Connection | None = None
        self.turns = loop_turns()
        self.prompt = prompt
        self._limit = limit
        self.load = Load()
        self.spare = spare
        self._ready: deque[InboundQueue] = deque()
        self.idle = 0
        self._wake = Semaphore(0)
        self.workers = [Worker(self) for _ in range(size + spare)]
        for number, worker in enumerate(self.workers):
            worker.start(f"{name}-{number}")
        tell_forks(self)

    def put(self, inbound: InboundQueue, count: int) -> None:
        """Note that ``count`` messages joined the inbound queue."""
        if not inbound.is_queued:
            inbound.is_queued = True
            self._ready.append(inbound)
        if self.idle:
            self._wake_up(min(self.idle, count))

    def _wake_up(self, count: int) -> None:
        self.idle -= count
        for _ in range(count):
            self._wake.release()

    def take(self) -> InboundQueue | None:
        """Wait for an inbound queue with messages; None when the pool is stopped. The queues take turns.

        Who takes a queue calls ``leave`` when done with it. The loop is not overdue then.
        """
        while not self.is_stopped:
            if self._ready:
                now = monotonic()
                if now > self.turns.due_at and self.turns.is_overdue(now):
                    self.turns.wait()
                    continue
                inbound = self._next()
                if inbound is not None:
                    return inbound
            if self._ready or self.source is None or not self.source.read_for_reader():
                self.idle += 1
                self._wake.acquire()
        return None

    def _next(self) -> InboundQueue | None:
        ready = self._ready
        for _ in range(len(ready)):
            inbound = ready[0]
            if not inbound.waiting:
                ready.popleft()
                inbound.is_queued = False
                continue
            ready.rotate(-1)
            if self._limit.take(self) if inbound.turn is None else inbound.turn.take(self):
                return inbound
        return None

    def leave(self, inbound: InboundQueue) -> None:
        """A worker is done with this queue for now. Its FINs leave now if the end of the turn may be far away."""
        if inbound.turn is not None:
            inbound.turn.give_back(self)
        else:
            self._limit.give_back()
        ready = self._ready
        if not inbound.waiting and ready and ready[-1] is inbound:  # where ``_next`` has put it: nobody need look there
            ready.pop()
            inbound.is_queued = False
        if not inbound.waiting and self.source is not None:  # all is answered: nothing more joins the FINs
            inbound.connection.flush()
        elif self.prompt.left:
            inbound.connection.flush()
            self.prompt.left -= 1
        elif self.turns.is_overdue(monotonic()):
            inbound.connection.flush()

    def handled(self, began: float, count: int) -> None:
        """A worker has handled ``count`` messages since ``began`` (monotonic): note how busy it was."""
        now = monotonic()
        load = self.load
        load.busy += now - began
        load.handled += count
        # A handler that waited with gevent let the loop have its turns: it was not slow for others.
        if now - began > SLICE and self.turns.is_overdue(now):
            self.prompt.slow(now - self.turns.due_at, count)
        else:
            self.prompt.quick += count

    def wake(self) -> None:
        """Have a worker look again: a turn is free."""
        if self.idle:
            self._wake_up(1)
        elif self.source is not None:
            self.source.stop_reading_for_reader()

    def wake_all(self) -> None:
        """Have all workers look again."""
        self._wake_up(self.idle)

    def stop(self) -> None:
        """Let each worker end after what it is handling now."""
        self.is_stopped = True
        if self.source is not None:
            self.source.stop_reading_for_reader()
        self._wake_up(self.idle)

    def forked(self) -> None:
        """In the child of a fork: nothing that was received is handled, or is even begun with."""
        self.is_stopped = True
        for inbound in self._ready:
            inbound.waiting.clear()
            inbound.connection.finished.clear()


class Worker(Caller):
    """One greenlet that handles messages, one at a time or in batches."""

    __slots__ = ("_disposition", "_outside", "_pool", "greenlet")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._disposition = pool.disposition
        self._outside = None if pool.outside is None else OutsideWorker(pool.outside)
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
        began = monotonic()
        if began >= inbound.ledger.next_deadline:
            inbound.expire(began)
        timing = self._disposition.timing
        sample = timing.sample(began) if timing is not None and began >= timing.due else None
        try:
            if inbound.turn is not None:
                self._handle_ordered(inbound, inbound.turn, sample)
            elif self._disposition.batch_handler is not None:
                self._handle_batch(inbound, sample)
            elif self._outside is not None:
                self._handle_outside(inbound, self._outside, sample)
            else:
                handler = self._disposition.present_handler()
                if sample is not None:  # the first message by itself: the others cost nothing more
                    self._handle_some(inbound, sample.timed(handler), 0.0)
                self._handle_some(inbound, handler, self._pool.turns.due_at)
        except Exception:
            # A fault of ours, not of a handler: those are dealt with below. The worker must go on.
            self._disposition.log_fault(self.current)
        if sample is not None:
            sample.count()
        if inbound.turn is None:  # an ordered partition has one message in flight, however long its handler takes
            self._pool.handled(began, inbound.slice.take_count())

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
        """Handle messages until the queue is empty or the time slice is over, at ``end``."""
        time_slice = self._disposition.slice_of(inbound)
        deadline = inbound.ledger.next_deadline
        time_slice.end = 0.0 if self._pool.prompt.left else end if end < deadline else deadline
        while time_slice.handle(self, inbound, self._disposition, handler) and not self._is_over(inbound, end):
            pass

    def _is_over(self, inbound: InboundQueue, end: float) -> bool:
        """Send the FINs if handlers were slow lately; say whether it is time for others."""
        pool, now = self._pool, monotonic()
        if now >= inbound.ledger.next_deadline:
            inbound.expire(now)
        prompt = pool.prompt
        if prompt.left:
            inbound.connection.flush()
            prompt.left -= 1
            if not prompt.left:
                inbound.slice.end = end
        return now > end

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
