# cython: nonecheck=True
# What was not set, by mistake, is an AttributeError then, and does not end the process.

"""What a worker does, compiled: which messages are next, handlers called, and when FINs leave and others go on.

A worker goes through ``Dispatcher`` once for each read of its socket, which brings some hundred messages, or one, and
through ``TimeSlice`` for each message. It stands below ``nsq_fast.client.workers``.

Whether the time is over is asked after every handler, however quick: the next one may be the one that takes long.
Reading the clock costs 4 % of the CPU of a consumer.
"""

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport INT64_MIN, int64_t
from posix.time cimport CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, timespec

from ._codec cimport Message

from collections import deque
from contextlib import suppress
from types import CoroutineType

cdef extern from "Python.h":
    object PyContext_CopyCurrent()
    int PyContext_Enter(object context) except -1
    int PyContext_Exit(object context) except -1
    int PYGEN_NEXT
    int PyIter_Send(object coroutine, object value, PyObject** result) except -1


cdef double _held = -1.0


def hold_clock(double now):
    """It is ``now`` for all that is compiled, until the next call: for tests in virtual time. Below 0: the system's."""
    global _held
    _held = now


cdef double monotonic() noexcept nogil:
    """``time.monotonic()``, without a Python call."""
    cdef timespec now
    if _held >= 0:
        return _held
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + 1e-9 * now.tv_nsec


cdef int64_t oldest_of(int64_t max_age) noexcept nogil:
    """The timestamp, in nanoseconds since 1970, below which messages are too old now; ``max_age`` 0: none is."""
    cdef timespec now
    if max_age == 0:
        return INT64_MIN
    clock_gettime(CLOCK_REALTIME, &now)
    return now.tv_sec * <int64_t> 1000000000 + now.tv_nsec - max_age


cdef class Caller:
    """Who calls handlers.

    Attributes:
        current: the message, or list of messages, whose handler runs now; None when none does.
        began: when it began to handle messages, by ``time.monotonic()``; it has not waited for any since.
    """


cdef class TimeSlice:
    """The time for which one worker handles messages of one connection before others have their turn.

    Args:
        finished: takes the messages that are to be finished.
        schedule: called before the first message joins an empty ``finished``; to have it sent soon.
        end: when the slice is over, by ``time.monotonic()``.

    Attributes:
        tell: called with each message that joins ``finished``; None when nobody wants to know. Must not raise.
        max_age: nanoseconds since its timestamp after which a message gets no handler; 0: none. What is too old is
            known once a slice: it is over soon after a handler that takes long.
    """

    def __init__(self, list finished not None, schedule, double end):
        self._finished = finished
        self._schedule = schedule
        self.end = end

    cdef bint handle(self, Caller caller, InboundQueue inbound, acknowledger, handler) except -1:
        """Call ``handler(consumer, message)`` for waiting messages, oldest first, until none waits or it is over.

        Args:
            caller: its ``current`` is each message in turn.
            inbound: its ``waiting``, a deque, holds the messages.
            acknowledger: says who the ``consumer`` is; ``give_up`` gets messages of more attempts than ``max_tries``,
                and those that are too old, ``check_result`` whatever a handler returns but None, ``failed`` those
                whose handler or result raises.

        Returns whether the slice is over. What the acknowledger raises ends it, the message is ``caller.current``.
        """
        cdef Message message
        cdef int max_tries = acknowledger.max_tries
        cdef int64_t oldest = oldest_of(self.max_age)
        cdef bint is_finished
        consumer, waiting = acknowledger.consumer, inbound.waiting
        popleft = waiting.popleft
        while waiting:
            message = popleft()
            caller.current = message
            if message.attempts > max_tries or message.timestamp < oldest:
                acknowledger.give_up(inbound, message)
                is_finished = False
            else:
                try:
                    result = handler(consumer, message)
                    if result is not None:
                        acknowledger.check_result(result)
                    is_finished = True
                except BaseException as error:
                    acknowledger.failed(message, error)
                    is_finished = False
            if is_finished:
                self._finish(message)
            self._count += 1
            if is_over(self):
                return True
        return False

    def begin(self, Caller caller not None, inbound, acknowledger, handler):
        """As ``handle``, for a handler that is a coroutine function: run each to its end, or to where it first waits.

        Each has a context of its own. What is no Exception goes through; ``caller.current`` is its message.

        Returns None when no message waits or the slice is over; a message that has too many attempts, or is too old;
        or, of a handler that waits, its context, its coroutine and what it waits for.
        """
        cdef Message message
        cdef PyObject* waited_for
        cdef int max_tries = acknowledger.max_tries
        cdef int64_t oldest = oldest_of(self.max_age)
        cdef bint is_finished
        consumer, waiting = acknowledger.consumer, inbound.waiting
        popleft = waiting.popleft
        while waiting:
            message = popleft()
            caller.current = message
            if message.attempts > max_tries or message.timestamp < oldest:
                return message
            context = PyContext_CopyCurrent()
            waited_for = NULL
            try:
                PyContext_Enter(context)
                try:
                    coroutine = handler(consumer, message)
                    if type(coroutine) is not CoroutineType:
                        coroutine = acknowledger.awaited(coroutine)
                    is_finished = PyIter_Send(coroutine, None, &waited_for) != PYGEN_NEXT
                finally:
                    PyContext_Exit(context)
            except Exception as error:
                acknowledger.failed(message, error)
            else:
                rest = <object> waited_for
                Py_DECREF(rest)  # it was handed over with a reference
                if not is_finished:
                    return context, coroutine, rest
                self._finish(message)
            self._count += 1
            if is_over(self):
                return None
        return None

    def returned(self, Message message not None):
        """Finish a message whose handler has returned, unless it is answered or to be answered later.

        Returns whether the slice is over.
        """
        self._finish(message)
        self._count += 1
        return is_over(self)

    def all_returned(self, list messages not None):
        """As ``returned``, for each message of a batch; the clock is not looked at."""
        cdef Message message
        for message in messages:
            self._finish(message)
        self._count += len(messages)

    cdef int _finish(self, Message message) except -1:
        if message.mark_returned():
            if not self._finished:
                self._schedule()
            self._finished.append(message)
            if self.tell is not None:
                self.tell(message)
        return 0

    def take_count(self):
        """How many messages were handled since the last call."""
        count, self._count = self._count, 0
        return count


cdef inline bint is_over(TimeSlice time) noexcept:
    return time.end < monotonic()


def take(waiting, Py_ssize_t count):
    """Take up to ``count`` messages from the front of a deque: a list of them, and the highest of their attempts."""
    cdef Message message
    cdef list messages
    cdef int attempts = 0
    if len(waiting) <= count:  # as mostly; a copy takes a third of the calls
        messages = list(waiting)
        waiting.clear()
    else:
        popleft = waiting.popleft
        messages = [popleft() for _ in range(count)]
    for message in messages:
        attempts = max(attempts, message.attempts)
    return messages, attempts


cdef class TurnTimes:
    """The turns of a loop of gevent's. All times are of ``time.monotonic()``.

    Attributes:
        due_at: when its next turn is due, as far as is known; a turn that nobody has noticed makes it later.
        began_at: when its last turn began, as far as is known.
    """

    def __init__(self, loop):
        self._loop = loop
        self._run_callback = loop.run_callback
        self._ended = self._end
        self._at_end = []

    @property
    def has_others(self):
        """Whether greenlets or other callbacks are ready to run; what is done at the end of the turn does not count."""
        return self.is_awaited()

    cdef bint is_awaited(self) except -1:
        return len(self._loop._callbacks) > bool(self._at_end)

    def at_end(self, function):
        """Have ``function`` called before the loop waits for anything; it must not block.

        One callback of the loop serves all that ask in one turn: many connections answer in each.
        """
        self.put_at_end(function)

    cdef int put_at_end(self, function) except -1:
        if not self._at_end:
            self._run_callback(self._ended)
        self._at_end.append(function)
        return 0

    def _end(self):
        cdef list functions = self._at_end
        cdef Py_ssize_t done = 0
        self._at_end = []
        try:
            for function in functions:
                done += 1
                function()
        finally:
            for function in functions[done:]:  # one was interrupted
                self.put_at_end(function)


cdef class Tally:
    """The work of some workers.

    Attributes:
        busy: seconds that handlers have run, summed up over the workers.
        handled: messages that they have handled in that time.
    """


FLUSH_SECONDS = 5e-6
"""What a send for one FIN takes, about."""

FLUSH_SHARE = 0.1
"""Share of the time that a slow handler took which may be spent on FINs that leave one by one after it.

Where one handler is slow the next may be, too, and what gathered before it would wait."""

RARE = 100
"""A slow handler after so many quick ones says nothing of the next: where other programs want the processor, too, the
system takes it from quick handlers as well. To send FINs one by one for that made up to five times as many sends
(nsq-fast bench consume --connections 100, beside busy programs)."""


cdef class PromptFins:
    """How many FINs of a consumer still leave one by one, because one of its handlers kept the hub from running lately.

    All pools share it: the FINs of each connection wait while a handler of another keeps the hub from running.

    Attributes:
        left: how many; 0 as long as handlers are quick, so that only consumers with slow ones pay for it.
        quick: messages handled since the last slow handler.
    """

    def slow(self, double seconds, Py_ssize_t count):
        """A handler, the last of so many or one before it, has kept the hub waiting for so long."""
        if self.quick + count < RARE:
            self.left = max(self.left, round(FLUSH_SHARE / FLUSH_SECONDS * seconds))
        self.quick = 0


cdef class InboundQueue:
    """Messages of one connection that wait for a worker.

    Args:
        connection: who delivered the messages.
        expire: called with the time (monotonic) when a deadline may be over; drops what is not to be handled any more.

    Attributes:
        ledger: the messages of the connection that are in flight.
        waiting: a deque of those that wait, oldest first.
        lock: of an ordered partition, which one worker at a time may handle; None when any number may.
        slice: takes the messages whose handlers have returned.
        handed: what handlers elsewhere have got of it, and may not have begun with.
        is_queued: whether workers look here.
    """

    def __init__(self, connection, expire):
        self.connection = connection
        self.ledger = connection.session.ledger
        self.expire = expire
        self.waiting = deque()
        self.handed = []
        self.slice = TimeSlice(connection.finished, connection.schedule_flush, 0.0)

    def take_unstarted(self):
        """The messages that no handler has begun with; none waits any more."""
        unstarted = []
        for messages in (*self.handed, self.waiting):
            with suppress(IndexError):  # a thread may take from its own meanwhile
                while True:
                    unstarted.append(messages.popleft())
        return unstarted

    def drop_expired(self):
        """Drop the messages that nsqd has taken back, which are the oldest; say how many there were."""
        waiting, count = self.waiting, 0
        while waiting and waiting[0].has_expired():
            waiting.popleft()
            count += 1
        return count


cdef class HandlerLimit:
    """Keeps the number of handlers that run at once, over all pools of a consumer, within ``max_in_flight``.

    More messages than that may be here: those of lost connections, and those that nsqd has sent in place of others
    whose time was over. Ordered partitions do not count: each has one handler at a time.

    Args:
        limit: gives ``max_in_flight``.
    """

    def __init__(self, limit):
        self._limit = limit
        self._waiting = []

    cdef bint take(self, Dispatcher dispatcher) except -1:
        """Let a worker begin; if there are enough already, ``dispatcher`` is woken when one ends."""
        if self._running == 0 or self._running < self._limit():  # one may always run, whatever the limit
            self._running += 1
            return True
        if dispatcher not in self._waiting:
            self._waiting.append(dispatcher)
        return False

    cdef int give_back(self) except -1:
        """A worker is done."""
        self._running -= 1
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for dispatcher in waiting:
                dispatcher.wake()
        return 0

    def changed(self):
        """The limit is another: have all those who wait look again."""
        waiting, self._waiting = self._waiting, []
        for dispatcher in waiting:
            dispatcher.wake_all()


cdef class Dispatcher:
    """Which inbound queue a worker serves next, and what is due when it is done with it.

    Args:
        turns: of the loop; has ``is_overdue`` and ``wait`` besides. None: it is never overdue.
        slice: seconds after which a loop is overdue.
        prompt: FINs that leave one by one.
        limit: of the handlers that run at once.
        load: counts the work.
        wait: blocks a worker until ``release`` was called for it.

    Attributes:
        idle: workers that wait.
        is_stopped: whether workers end after what they are handling now.
        turns, prompt, load: as given.
    """

    def __init__(
        self,
        TurnTimes turns,
        double slice,
        PromptFins prompt not None,
        HandlerLimit limit not None,
        Tally load not None,
        wait,
        release,
    ):
        self.turns = turns
        self.prompt = prompt
        self.load = load
        self._slice = slice
        self._limit = limit
        self._wait = wait
        self._release = release
        self._ready = deque()

    def deliver(self, InboundQueue inbound not None, list messages not None):
        """These messages wait in the inbound queue from now on."""
        inbound.waiting.extend(messages)
        if self.idle or not inbound.is_queued:
            self._put(inbound, len(messages))

    def put(self, InboundQueue inbound not None, Py_ssize_t count):
        """Note that ``count`` messages joined the inbound queue."""
        self._put(inbound, count)

    cdef int _put(self, InboundQueue inbound, Py_ssize_t count) except -1:
        if not inbound.is_queued:
            inbound.is_queued = True
            self._ready.append(inbound)
        if self.idle:
            self._wake_up(min(self.idle, count))
        return 0

    cdef int _wake_up(self, Py_ssize_t count) except -1:
        self.idle -= count
        for _ in range(count):
            self._release()
        return 0

    def take(self):
        """Wait for an inbound queue with messages; None when the workers are stopped. The queues take turns.

        Who takes a queue calls ``leave`` when done with it. The loop is not overdue then.
        """
        cdef InboundQueue inbound
        while not self.is_stopped:
            if self._ready:
                if self._is_overdue(monotonic()):
                    self.turns.wait()
                    continue
                inbound = self._next()
                if inbound is not None:
                    return inbound
            self.idle += 1
            self._wait()
        return None

    def take_now(self):
        """As ``take``; None also where there is nothing now: a worker that is not stopped then waits, and is idle."""
        cdef InboundQueue inbound = None
        if not self.is_stopped:
            inbound = self._next()
            if inbound is None:
                self.idle += 1
        return inbound

    cdef InboundQueue _next(self):
        cdef InboundQueue inbound
        ready = self._ready
        for _ in range(len(ready)):
            inbound = ready[0]
            if not inbound.waiting:
                ready.popleft()
                inbound.is_queued = False
                continue
            ready.rotate(-1)
            if self._limit.take(self) if inbound.lock is None else inbound.lock.take(self):
                return inbound
        return None

    cdef bint _is_overdue(self, double now) except -1:
        return self.turns is not None and now > self.turns.due_at and self.turns.is_overdue(now)

    def leave(self, InboundQueue inbound not None):
        """A worker is done with this queue for now. Its FINs leave now if the end of the turn may be far away."""
        if inbound.lock is not None:
            inbound.lock.give_back(self)
        else:
            self._limit.give_back()
        ready = self._ready
        if not inbound.waiting and ready and ready[-1] is inbound:  # where ``_next`` has put it: nobody need look there
            ready.pop()
            inbound.is_queued = False
        if self.prompt.left:
            inbound.connection.flush()
            self.prompt.left -= 1
        elif self._is_overdue(monotonic()):
            inbound.connection.flush()

    def handle(self, Caller caller not None, InboundQueue inbound not None, acknowledger, handler, double end):
        """Call ``handler`` for messages of the queue until none waits, or until ``end``; see ``TimeSlice.handle``.

        It stops in between where there is something else to do: after each message while FINs leave one by one, and
        when a message expires.
        """
        cdef TimeSlice time_slice = inbound.slice
        cdef double now
        time_slice.end = self._end_of_slice(inbound, end)
        while time_slice.handle(caller, inbound, acknowledger, handler):
            now = monotonic()
            if now >= inbound.ledger.next_deadline:
                inbound.expire(now)
            if self.prompt.left:
                inbound.connection.flush()
                self.prompt.left -= 1
            time_slice.end = self._end_of_slice(inbound, end)
            if now > end:
                return

    cdef double _end_of_slice(self, InboundQueue inbound, double end) except -1:
        return 0.0 if self.prompt.left else min(end, <double> inbound.ledger.next_deadline)

    def handled(self, double began, Py_ssize_t count):
        """A worker has handled ``count`` messages since ``began`` (monotonic): note how busy it was."""
        cdef double now = monotonic()
        self.load.busy += now - began
        self.load.handled += count
        # A handler that waited with gevent let the loop have its turns: it was not slow for others.
        if now - began > self._slice and self._is_overdue(now):
            self.prompt.slow(now - self.turns.due_at, count)
        else:
            self.prompt.quick += count

    def wake(self):
        """Have a worker look again: a partition, or the limit, is free."""
        if self.idle:
            self._wake_up(1)

    def wake_all(self):
        """Have all workers look again."""
        self._wake_up(self.idle)

    def stop(self):
        """Let each worker end after what it is handling now."""
        self.is_stopped = True
        self._wake_up(self.idle)

    def forked(self):
        """In the child of a fork: nothing that was received is handled, or is even begun with."""
        self.is_stopped = True
        for inbound in self._ready:
            inbound.waiting.clear()
            inbound.connection.finished.clear()
