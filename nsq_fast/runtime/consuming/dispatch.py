"""Worker greenlets: from received messages to handlers, and from handlers to FINs.

A ``InboundQueue`` holds what one connection has received and nobody has begun to
handle. A ``Pool`` is a fixed number of worker greenlets that serve inbound queues: one
for each inbound keeps the order of its connection, N for all inbound queues handle N at a
time. Nothing is spawned, no timer armed and no signal built per message. A
worker that serves one connection alone reads it by itself when it has nothing
to handle: what comes needs no switch to its handler.

A FIN joins its inbound's list when its handler returns, and the list leaves in
one buffer at the end of the hub's turn, even if the next handler blocks; a
worker that has handled all its connection has sent need not wait for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from gevent import get_hub, sleep
from gevent.lock import Semaphore
from greenlet import greenlet

from nsq_fast._codec import Message
from nsq_fast.runtime.fork import tell_forks

if TYPE_CHECKING:
    from nsq_fast.runtime.net.connection import Connection

    from .disposition import Disposition
    from .ordered import Turn

SLICE = 0.005
"""Seconds that a worker handles messages before it lets heartbeats, lookups and others run."""

QUICK = 0.001
MAX_STRIDE = 64


class InboundQueue:
    """Messages of one connection that wait for a worker, and FINs that wait to leave together.

    Args:
        connection: who delivered the messages.
        on_finished: called with the connection and the messages whose FINs are to leave now.

    Attributes:
        turn: of an ordered partition, which one worker at a time may handle; None when any number may.
        turns: a number that changes when the hub has run after a message was finished.
    """

    __slots__ = ("connection", "fins", "is_queued", "on_finished", "turn", "turns", "waiting")

    def __init__(self, connection: Connection, on_finished: Callable[[Connection, Sequence[Message]], None]) -> None:
        self.connection = connection
        self.on_finished = on_finished
        self.waiting: deque[Message] = deque()
        self.fins: list[Message] = []
        self.is_queued = False
        self.turn: Turn | None = None
        self.turns = 0

    def finish(self, message: Message) -> None:
        """FIN a message that is marked as responded, with the next flush."""
        if not self.fins:
            self.schedule_flush()
        self.fins.append(message)

    def leave(self, pool: Pool) -> None:
        """A worker of ``pool`` is done with this inbound for now."""
        if self.turn is not None:
            self.turn.give_back(pool)

    def schedule_flush(self) -> None:
        """Have ``flush`` run before the hub waits for anything."""
        get_hub().loop.run_callback(self._end_of_turn)

    def _end_of_turn(self) -> None:
        self.turns += 1
        self.flush()

    def flush(self) -> None:
        """Hand the FINs over now."""
        fins = self.fins
        if fins:
            batch = fins[:]
            fins.clear()  # workers hold on to this list
            self.on_finished(self.connection, batch)


class Pool:
    """A fixed number of workers that serve some inbound queues; 0 workers when a program takes the messages by itself.

    Attributes:
        idle: workers that wait.
        source: the one connection that these workers serve, which a worker reads itself in place of waiting for a
            message; None when there are several, or none.
    """

    def __init__(self, disposition: Disposition, size: int, name: str) -> None:
        self.disposition = disposition
        self.is_stopped = False
        self.source: Connection | None = None
        self._ready: deque[InboundQueue] = deque()
        self.idle = 0
        self._wake = Semaphore(0)
        self.workers = [Worker(self) for _ in range(size)]
        for number, worker in enumerate(self.workers):
            worker.start(f"{name}-{number}")
        tell_forks(self)

    def put(self, inbound: InboundQueue, count: int) -> None:
        """Note that ``count`` messages joined the inbound."""
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
        """Wait for a inbound with messages; None when the pool is stopped. Lanes take turns.

        Who takes a inbound calls its ``leave`` when done with it.
        """
        while not self.is_stopped:
            inbound = self._next()
            if inbound is not None:
                return inbound
            if self.source is None or not self.source.read_for_reader():
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
            if inbound.turn is None or inbound.turn.take(self):
                return inbound
        return None

    def wake(self) -> None:
        """Have a worker look again: a turn is free."""
        if self.idle:
            self._wake_up(1)
        elif self.source is not None:
            self.source.stop_reading_for_reader()

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
            inbound.fins.clear()


class Worker:
    """One greenlet that handles messages, one at a time or in batches.

    Attributes:
        current: the message, or list of messages, whose handler runs now; None when none does.
    """

    __slots__ = ("_disposition", "_pool", "_stride", "current", "greenlet")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._disposition = pool.disposition
        self._stride = 1
        self.current: Message | list[Message] | None = None
        self.greenlet: greenlet | None = None

    def start(self, name: str) -> None:
        """Begin to work."""
        runner = self._disposition.consumer.supervisor.loop(name, self._run)
        self.greenlet = runner
        runner.start()

    def _run(self) -> None:
        while (inbound := self._pool.take()) is not None:
            turns = inbound.turns
            try:
                if inbound.turn is not None:
                    self._handle_ordered(inbound, inbound.turn)
                elif self._disposition.batch_handler is None:
                    self._handle_some(inbound)
                else:
                    self._handle_batch(inbound)
            except Exception:
                # A fault of ours, not of a handler: those are dealt with below. The worker must go on.
                self._disposition.log_fault(self.current)
            finally:
                self.current = None
                inbound.leave(self._pool)
            if not inbound.waiting:
                if self._pool.source is not None:  # its messages are all answered: nothing more joins the FINs
                    inbound.flush()
            elif inbound.turns == turns:  # no handler has let others run
                sleep(0)

    def _handle_ordered(self, inbound: InboundQueue, turn: Turn) -> None:
        """Handle what an ordered partition sends, one message after the other; each FIN leaves at once.

        Between two messages the turn is free for others, and the worker reads by itself, if it can.
        """
        pool, disposition, waiting = self._pool, self._disposition, inbound.waiting
        consumer, threshold = disposition.consumer, disposition.ordered.threshold
        while waiting:
            is_finished = False
            message = self.current = waiting.popleft()
            if message.attempts <= threshold or disposition.ordered.begins(inbound, message):
                try:
                    disposition.single_handler()(consumer, message)
                except BaseException as error:
                    disposition.failed(message, error)
                else:
                    if not message.is_async() and message.mark_responded():
                        inbound.on_finished(inbound.connection, (message,))  # the server sends the next one only then
                        disposition.tell_finished(message)
                        is_finished = True
            self.current = None
            if not waiting:
                turn.give_back(pool)
                source = pool.source
                if source is None or not source.read_for_reader(is_finished) or not waiting or not turn.take(pool):
                    return

    def _handle_some(self, inbound: InboundQueue) -> None:
        """Handle messages until the inbound is empty or the time slice is used up: the hot loop."""
        disposition = self._disposition
        consumer, handler, max_tries = disposition.consumer, disposition.present_handler(), disposition.max_tries
        waiting, fins, finish = inbound.waiting, inbound.fins, disposition.finish_in(inbound)
        popleft = waiting.popleft
        stride = self._stride
        began = monotonic()
        end = began + SLICE
        while waiting:
            for _ in range(stride):
                if not waiting:
                    break
                message = popleft()
                if message.attempts > max_tries:
                    self.current = message
                    disposition.give_up(inbound, message)
                    continue
                self.current = message
                try:
                    handler(consumer, message)
                except BaseException as error:
                    disposition.failed(message, error)
                    continue
                if not message.is_async() and message.mark_responded():
                    if not fins:
                        inbound.schedule_flush()
                    finish(message)
            now = monotonic()
            # Look at the clock often when handlers are slow, seldom when they are quick.
            stride = min(stride * 2, MAX_STRIDE) if now - began < QUICK else 1
            if now > end:
                break
            began = now
        self._stride = stride

    def _handle_batch(self, inbound: InboundQueue) -> None:
        disposition = self._disposition
        waiting = inbound.waiting
        messages = [waiting.popleft() for _ in range(min(len(waiting), disposition.batch_size))]
        self.current = messages
        messages = disposition.without_given_up(inbound, messages)
        if not messages:
            return
        self.current = messages
        try:
            disposition.batch_handler(disposition.consumer, messages)
        except BaseException as error:
            disposition.batch_failed(messages, error)
            return
        fins, finish = inbound.fins, disposition.finish_in(inbound)
        for message in messages:
            if not message.is_async() and message.mark_responded():
                if not fins:
                    inbound.schedule_flush()
                finish(message)
