# cython: nonecheck=True
# What was not set, by mistake, is an AttributeError then, and does not end the process.

"""The hot loop of a worker, compiled: handlers are called, their FINs join the others, and the clock is looked at.

It stands apart from ``_codec``, which has no clock. Whether the time is over is asked after every handler, however
quick: the next one may be the one that takes long. Reading the clock costs 4 % of the CPU of a consumer.
"""

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport INT64_MIN, int64_t
from posix.time cimport CLOCK_MONOTONIC, CLOCK_REALTIME, clock_gettime, timespec

from ._codec cimport Message

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
        end: when others have their turn.
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

    def handle(self, Caller caller not None, inbound, acknowledger, handler):
        """Call ``handler(consumer, message)`` for waiting messages, oldest first, until none waits or it is over.

        Args:
            caller: its ``current`` is each message in turn.
            inbound: its ``waiting``, a deque, holds the messages.
            acknowledger: says who the ``consumer`` is; ``give_up`` gets messages of more attempts than ``max_tries``, and
                those that are too old, ``check_result`` whatever a handler returns but None, ``failed`` those whose
                handler or result raises.

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
        cdef list returned = [message for message in messages if message.mark_returned()]
        self._count += len(messages)
        if returned and not self._finished:
            self._schedule()
        self._finished.extend(returned)
        if self.tell is not None:
            for message in returned:
                self.tell(message)

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
