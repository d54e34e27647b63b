"""Workers: from received messages to handlers, and from handlers to FINs.

An ``InboundQueue`` holds what one connection has received and nobody has begun
to handle. A ``WorkerPool`` is a fixed number of workers that serve inbound queues: one
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

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from math import inf
from time import monotonic, time
from types import CoroutineType, FrameType, GeneratorType
from typing import TYPE_CHECKING, Any

from nsq_fast._codec import Message
from nsq_fast._dispatch import Caller, Dispatcher, HandlerLimit, InboundQueue, PromptFins, Tally, take
from nsq_fast._record import SAMPLE_EVERY, Histogram
from nsq_fast.errors import ConfigError, HandlerDeferred

from .connection import Queued
from .loop import SLICE

if TYPE_CHECKING:
    from nsq_fast.protocol.session import InFlight

    from .acknowledger import Acknowledger
    from .consumer import AnyConsumer


# Handlers: what can be one, what it may return, and how long it takes.
#
# Calling an ``async def`` or a generator function runs nothing of its body. A message
# whose handler is one would be finished without having been handled, so it is
# refused when it is given, where that can be seen, and else when it returns.
#
# How long they take, and how old messages are then, is sampled where ``histograms`` asks for it: at most one message
# in ``SAMPLE_EVERY`` seconds, the first one that a worker begins with. That is decided before anything is known of it,
# so slow messages are as likely to be sampled as quick ones, and the others cost nothing.


Handler = Callable[[Any, Message], object]
BatchHandler = Callable[[Any, list[Message]], object]

REMEDY = "nsq_fast handlers are plain functions that run on gevent: use 'def', without 'yield'"
# What handlers return by the way, and is not worth a closer look.
_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, tuple, dict, set, Queued})


def check_handler(name: str, handler: Any, *keywords: str) -> None:
    """Raise ConfigError unless ``handler`` is None, or a callable that has run when it returns; see ``check_fits``."""
    if handler is None:
        return
    if not callable(handler):
        raise ConfigError(f"{name}={handler!r}: must be callable")
    kind = deferred_kind(handler)
    if kind is not None:
        raise ConfigError(f"{name}={handler!r} is {kind}: calling it would not run its body. {REMEDY}")
    check_fits(name, handler, *keywords)


def check_fits(name: str, handler: Any, *keywords: str) -> None:
    """Raise ConfigError if ``handler`` cannot be called with a consumer and a message, which would be given up.

    Args:
        keywords: the keyword by which it gets the message; by default it gets it by position.
    """
    try:
        signature = inspect.signature(handler, follow_wrapped=False)  # it is the wrapper that is called
    except (TypeError, ValueError):
        return  # what is written in C need not tell
    try:
        signature.bind(None, *(() if keywords else (None,)), **dict.fromkeys(keywords))
    except TypeError as error:
        wanted = f"the consumer, and {keywords[0]}=" if keywords else "two arguments, the consumer and what to handle"
        raise ConfigError(f"{name}={handler!r}: must take {wanted}: {error}") from None


def deferred_kind(handler: Any) -> str | None:
    """What kind of function ``handler`` is, if calling it does not run its body."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, getattr(type(handler), "__call__", None)):  # noqa: B004
        while isinstance(function, functools.partial | functools.partialmethod):
            function = function.func
        if inspect.iscoroutinefunction(function):
            return "an async function"
        if inspect.isgeneratorfunction(function):
            return "a generator function"
        if inspect.isasyncgenfunction(function):
            return "an async generator function"
    return None


def refuse_deferred(result: object) -> None:
    """Raise HandlerDeferred if what a handler has returned is work that has not been done."""
    if type(result) in _PLAIN:
        return
    if not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if isinstance(result, CoroutineType | GeneratorType):
        result.close()  # or Python would warn that it was never awaited
    raise HandlerDeferred(f"the handler returned {result!r}, which nobody runs, and has handled nothing. {REMEDY}")


class Sample:
    """One message, or batch of messages, whose handler is timed; that may run in any thread.

    Args:
        timing: counts it.

    Attributes:
        age: seconds from the time that the message has from nsqd to the start of its handler; of a batch, its first.
        seconds: what the handler took; None before it has ended.
    """

    __slots__ = ("_began", "_timing", "age", "seconds")

    def __init__(self, timing: HandlerTiming) -> None:
        self._timing: HandlerTiming | None = timing
        self._began: float | None = None
        self.age: float = 0.0
        self.seconds: float | None = None

    def begin(self, item: Message | list[Message]) -> None:
        """The handler begins with a message, or a list of them. The first call counts."""
        if self._began is None:
            message = item[0] if isinstance(item, list) else item
            self.age = time() - 1e-9 * message.timestamp
            self._began = monotonic()

    def end(self) -> None:
        """The handler has ended, whatever came of it. The first call counts."""
        if self._began is not None and self.seconds is None:
            self.seconds = monotonic() - self._began

    def count(self) -> None:
        """Count it, unless no handler has ended. In the thread of the consumer; the first call counts."""
        if self._timing is not None and self.seconds is not None:
            self._timing.handler_time.observe(self.seconds)
            self._timing.message_age.observe(self.age)
            self._timing = None

    def timed(self, handler: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
        """A handler whose first call is timed."""

        def handle(consumer: Any, item: Any) -> object:
            self.begin(item)
            try:
                return handler(consumer, item)
            finally:
                self.end()

        return handle


class HandlerTiming:
    """What was sampled.

    Attributes:
        handler_time: seconds from the call of a handler to its end; of a coroutine function, to the end of its task.
        message_age: seconds from the timestamp of a message to the start of its handler.
        due: when the next sample may be taken, monotonic.
    """

    def __init__(self) -> None:
        self.handler_time: Histogram = Histogram()
        self.message_age: Histogram = Histogram()
        self.due: float = 0.0

    def sample(self, now: float) -> Sample:
        """A new sample, which is due. Call its ``count`` when its handler has ended."""
        self.due = now + SAMPLE_EVERY
        return Sample(self)


UNLIMITED = 1 << 30

USABLE = 0.5
"""Share of the message timeout that messages may spend waiting, at the speed measured. The rest is for handlers that
take longer than others."""

TOLERANCE = 0.25
"""A capacity that changes by less stays as it is: each change costs RDY commands."""


def outward(frame: FrameType | None) -> list[FrameType]:
    """A frame behind those that called it."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found[::-1]


def thread_frames(ident: int) -> list[FrameType]:
    """What a native thread does now, the outermost frame first."""
    return outward(sys._current_frames().get(ident))


class Load(Tally):
    """The work of one pool.

    Attributes:
        stuck: messages whose handlers run so long that nsqd is about to take them back, or has done so; one a worker.
        kept: messages whose handlers would run as long, but have them touched; a list for each worker.
        pace: seconds that a handler took for a message when that was measured last; 0.0 before there was any.
    """

    __slots__ = ("_busy_before", "_handled_before", "_last", "kept", "pace", "stuck")

    def __init__(self) -> None:
        self.stuck: list[Message] = []
        self.kept: list[list[Message]] = []
        self.pace: float = 0.0
        self._busy_before = 0.0
        self._handled_before = 0
        self._last = UNLIMITED

    @property
    def is_long(self) -> bool:
        """Whether some handler ran as long as the message timeout when that was looked at last."""
        return bool(self.stuck or self.kept)

    def measure(self) -> bool:
        """Take in what was handled since the last call; say whether there was anything."""
        handled = self.handled - self._handled_before
        if handled == 0:
            return False
        self.pace = (self.busy - self._busy_before) / handled
        # Differences, not totals: the handlers of now count, not those of the first hour.
        self._busy_before, self._handled_before = self.busy, self.handled
        return True

    def count_stuck(self) -> int:
        """Workers whose handlers run too long right now."""
        self.stuck = [message for message in self.stuck if not (message.has_responded() or message.is_async())]
        return len(self.stuck)

    def capacity(self, workers: int, msg_timeout: float) -> int:
        """How many messages ``workers`` can take on at once and begin with in time; 0 when all of them are stuck.

        Not fewer than there are workers free: a handler that takes nearly the whole timeout is in time if it begins
        at once.
        """
        unanswered = [[message for message in each if not message.has_responded()] for each in self.kept]
        self.kept = [each for each in unanswered if each]
        held = sum(map(len, self.kept))  # in flight for nsqd, too: RDY is above them, or no other message comes
        free = max(workers, 1) - self.count_stuck() - len(self.kept)
        # With every worker stuck, any message asked for would wait behind them until nsqd takes it back.
        if free <= 0:
            return held
        if self.pace <= 0.0:
            return UNLIMITED
        fitting = int(min(UNLIMITED, free * USABLE * msg_timeout / self.pace))
        if abs(fitting - self._last) > TOLERANCE * self._last:
            self._last = fitting
        return held + max(free, self._last)


class WorkerPool(Dispatcher):
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

    began: float

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._acknowledger = pool.acknowledger
        self.runs_in: Any = None

    def in_hand(self) -> list[Message]:
        """The messages that its handler has now."""
        current: Any = self.current
        return [current] if isinstance(current, Message) else current or []

    def frames(self) -> list[FrameType]:
        """Where its handler is now, as far as that can be seen from outside; the outermost first."""
        # A greenlet that has not given way is what its thread runs.
        return outward(getattr(self.runs_in, "gr_frame", None)) or thread_frames(self._acknowledger.consumer.ident)

    def run(self) -> None:
        """Work until the pool is stopped; blocks."""
        while (inbound := self._pool.take()) is not None:
            try:
                self._handle(inbound)
            finally:
                self.current = None
                self._pool.leave(inbound)

    def _sampled(self) -> Sample | None:
        """It begins to handle messages now. A sample of them, where one is wanted."""
        began, timing = monotonic(), self._acknowledger.timing
        self.began = began
        return timing.sample(began) if timing is not None and began >= timing.due else None

    def _handle(self, inbound: InboundQueue) -> None:
        sample = self._sampled()
        if self.began >= inbound.ledger.next_deadline:
            inbound.expire(self.began)
        try:
            if inbound.lock is not None:
                self._handle_ordered(inbound, sample)
            elif self._acknowledger.batch_handler is not None:
                self._handle_batch(inbound, sample)
            else:
                self._handle_single(inbound, sample)
        except Exception:
            # A fault of ours, not of a handler: those are dealt with below. The worker must go on.
            self._acknowledger.log_fault(self.current)
        if sample is not None:
            sample.count()
        if inbound.lock is None:  # an ordered partition has one message in flight, however long its handler takes
            self._pool.handled(self.began, inbound.slice.take_count())

    def calling(self, handler: Callable[[Any, Any], object], sample: Sample | None) -> Callable[[Any, Any], object]:
        """What calls a handler with one item, where it runs, and times it."""
        return handler if sample is None else sample.timed(handler)

    def _handle_ordered(self, inbound: InboundQueue, sample: Sample | None) -> None:
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
            is_usual = message.attempts <= threshold and not acknowledger.max_age
            if is_usual or not acknowledger.is_given_up(inbound, message):
                handler = self.calling(acknowledger.single_handler(), sample)
                try:
                    result = handler(consumer, message)
                    if result is not None:
                        refuse_deferred(result)
                except BaseException as error:
                    acknowledger.failed(message, error, is_ordered=True)
                else:
                    if message.mark_returned():
                        inbound.connection.put_finished(message)  # the server sends the next one only then
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
        pool, acknowledger = self._pool, self._acknowledger
        handler = acknowledger.present_handler()
        acknowledger.slice_of(inbound)
        if sample is not None:  # the first message by itself: the others cost nothing more
            pool.handle(self, inbound, acknowledger, sample.timed(handler), 0.0)
            sample.count()  # now: the worker may read on, and wait
        pool.handle(self, inbound, acknowledger, handler, pool.turns.due_at)

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
        """As many messages as a batch handler gets at once; policies get those of too many attempts, or too old."""
        messages, attempts = take(inbound.waiting, self._acknowledger.batch_size)
        self.current = messages
        if attempts > self._acknowledger.max_tries or self._acknowledger.max_age:
            is_given_up = self._acknowledger.is_given_up
            messages = self.current = [message for message in messages if not is_given_up(inbound, message)]
        return messages


class Cursor(Worker):
    """A program that takes messages one by one: asking for the next finishes the one before.

    Whoever iterates asks ``next`` until that is None, then goes on with another inbound queue by ``begin``.

    Attributes:
        owner: who iterates.
        is_over: whether the time slice is over.
    """

    __slots__ = ("_inbound", "_sample", "is_over", "owner")

    began: float
    owner: object

    def __init__(self, pool: WorkerPool, owner: object) -> None:
        super().__init__(pool)
        self.runs_in = self.owner = owner  # who iterates is a worker for whoever looks at what is being handled
        self._inbound: InboundQueue | None = None
        self.is_over: bool = False
        self._sample: Sample | None = None
        pool.workers.append(self)

    def begin(self, inbound: InboundQueue) -> None:
        """Go on with messages of this queue, until it is empty or the time slice is over."""
        pool = self._pool
        self._sample = self._sampled()
        self._inbound = inbound
        self.is_over = False
        self._acknowledger.slice_of(inbound)
        # With prompt FINs, the one of each message leaves when its round is over.
        turns = pool.turns
        inbound.slice.end = 0.0 if pool.prompt.left else self.began + SLICE if turns is None else turns.due_at

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
            self.current: Message | None = message
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
        if inbound.lock is not None:  # the server sends the next one only then
            inbound.connection.flush()

    def _leave(self, inbound: InboundQueue) -> None:
        if inbound.lock is None:
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
    """The workers of a consumer, one pool that all connections share, or one for each connection; and what they hold.

    nsqd delivers the messages of lost connections again elsewhere, but here they still take memory and handlers: they
    count towards ``max_in_flight`` until they are answered, or until the time is over that they had.

    Attributes:
        shared: the pool that all connections share; None when each has its own.
        msg_timeout: shortest message timeout of all connections there were, in seconds.
        orphaned: messages of lost connections, when they were counted last; any thread may read it.
        is_iterated: whether the program takes the messages, and no handler is called.
    """

    def __init__(self, consumer: AnyConsumer) -> None:
        self.is_iterated: bool = False
        self.shared: WorkerPool | None = None
        self.msg_timeout = inf
        self.orphaned: int = 0
        self._ledgers: list[InFlight] = []
        self._consumer = consumer
        self._pools: list[WorkerPool] = []
        self._limit = HandlerLimit(lambda: consumer.flow.max_in_flight)
        self._prompt = PromptFins()

    def __iter__(self) -> Iterator[WorkerPool]:
        return iter(self._pools)

    def start(self, is_iterated: bool) -> None:
        """Make what the options ask for; with ``is_iterated`` a pool without workers, served by who iterates."""
        # Without any of these, each connection gets a worker of its own: messages stay in the order of arrival.
        size = self._consumer.config.handlers
        self.is_iterated = is_iterated
        if is_iterated or size:
            self.shared = self.new(0 if is_iterated else size, "worker")

    def new(self, size: int, name: str) -> WorkerPool:
        consumer = self._consumer
        pool = consumer.new_pool(self._limit, self._prompt)
        for number in range(size):
            worker = consumer.new_worker(pool)
            pool.workers.append(worker)
            consumer.start_worker(worker, f"{consumer.name} {name}-{number}")
        self._pools.append(pool)
        return pool

    def drop(self, pool: WorkerPool) -> None:
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

    # Messages of lost connections

    def adopt(self, ledger: InFlight) -> None:
        """A connection is lost. What nobody has begun to handle must be marked as responded before."""
        if ledger.pending():
            self._ledgers.append(ledger)
            self.count_orphans()

    def count_orphans(self) -> int:
        """How many messages of lost connections the program still holds."""
        # A ledger that is empty is done with: nothing is ever added to that of a lost connection.
        counts = [len(ledger.pending()) for ledger in self._ledgers]
        self._ledgers = [ledger for ledger, count in zip(self._ledgers, counts, strict=True) if count]
        self.orphaned = sum(counts)
        return self.orphaned

    def expire_orphans(self, now: float) -> list[Message]:
        """Take out and return those whose time is over at ``now`` (monotonic)."""
        expired = [message for ledger in self._ledgers for message in ledger.expire(now)]
        self.count_orphans()
        return expired

    @property
    def next_deadline(self) -> float:
        """Before this moment ``expire_orphans`` finds nothing."""
        return min((ledger.next_deadline for ledger in self._ledgers), default=inf)

    # What handlers can take on

    @property
    def overdue(self) -> int:
        """Messages that the program still holds although nsqd has taken them back, or is about to."""
        return self.count_orphans() + sum(pool.load.count_stuck() for pool in self._pools if pool.load.stuck)

    def capacity_of(self, pool: WorkerPool | None) -> int:
        """How many messages the workers of ``pool`` can begin with in time."""
        if pool is None or not self._consumer.config.drop_expired or not (pool.load.pace or pool.load.is_long):
            return UNLIMITED
        return pool.load.capacity(len(pool.workers), self.msg_timeout)

    @property
    def pace(self) -> float:
        """Seconds that the slowest pool takes for a message."""
        return max((pool.load.pace for pool in self._pools), default=0.0)
