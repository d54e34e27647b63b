"""The hot loop of a worker, compiled: handlers are called, their FINs join the others, and the clock is looked at.

It stands apart from ``_codec``, which has no clock. The clock is looked at after every handler, however quick: what
that takes is less than what the loop in Python took for each message (nsq-fast bench consume).
"""

from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from ._codec cimport Message


cdef double _monotonic() noexcept nogil:
    """``time.monotonic()``, without a Python call."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + 1e-9 * now.tv_nsec


cdef class Caller:
    """Who calls handlers.

    Attributes:
        current: the message, or list of messages, whose handler runs now; None when none does.
    """


cdef class TimeSlice:
    """The time for which one worker handles messages of one connection before others have their turn.

    Args:
        finished: takes the messages that are to be finished.
        schedule: called before the first message joins an empty ``finished``; to have it sent soon.
        end: when the slice is over, by ``time.monotonic()``.

    Attributes:
        tell: called with each message that joins ``finished``; None when nobody wants to know. Must not raise.
    """

    def __init__(self, list finished not None, schedule, double end):
        self._finished = finished
        self._schedule = schedule
        self.end = end

    def handle(self, Caller caller not None, inbound, disposition, handler):
        """Call ``handler(consumer, message)`` for waiting messages, oldest first, until none waits or the slice is over.

        Args:
            caller: its ``current`` is each message in turn.
            inbound: its ``waiting``, a deque, holds the messages.
            disposition: says who the ``consumer`` is; ``give_up`` gets messages of more attempts than ``max_tries``,
                ``check_result`` whatever a handler returns but None, ``failed`` those whose handler or result raises.

        Returns whether the slice is over. What the disposition raises ends it, the message is ``caller.current``.
        """
        cdef Message message
        cdef int max_tries = disposition.max_tries
        cdef bint is_finished
        consumer, waiting = disposition.consumer, inbound.waiting
        popleft = waiting.popleft
        while waiting:
            message = popleft()
            caller.current = message
            if message.attempts > max_tries:
                disposition.give_up(inbound, message)
                is_finished = False
            else:
                try:
                    result = handler(consumer, message)
                    if result is not None:
                        disposition.check_result(result)
                    is_finished = True
                except BaseException as error:
                    disposition.failed(message, error)
                    is_finished = False
            if is_finished:
                self._finish(message)
            self._count += 1
            if _monotonic() > self.end:
                return True
        return False

    def returned(self, Message message not None):
        """Finish a message whose handler has returned, unless it is answered or to be answered later.

        Returns whether the slice is over.
        """
        self._finish(message)
        self._count += 1
        return _monotonic() > self.end

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
