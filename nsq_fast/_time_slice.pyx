"""The hot loop of a worker, compiled: handlers are called, their FINs join the others, and the clock is looked at.

It stands apart from ``_codec``, which has no clock. Whether the time is over is asked after every handler, however
quick. The clock took a sixth of all that the client does with a message. So the processor's counter of ticks is asked
first, which takes half as long: while fewer ticks have gone by than the slowest counter makes until then, it is not.
"""

from libc.stdint cimport uint64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from ._codec cimport Message

cdef extern from *:
    """
    #if defined(__x86_64__) && defined(__GNUC__)
    #include <cpuid.h>
    #include <x86intrin.h>
    static inline uint64_t nsq_fast_ticks(void) { return __rdtsc(); }
    /* Whether the counter runs at one rate, asleep or awake. AMD64 Architecture Programmer's Manual 3, CPUID
       Fn8000_0007 EDX, TscInvariant; Intel 64 Software Developer's Manual 3, Invariant TSC. */
    static int nsq_fast_has_ticks = 0;
    __attribute__((constructor)) static void nsq_fast_look_for_ticks(void)
    {
        unsigned a, b, c, d;
        nsq_fast_has_ticks = __get_cpuid(0x80000007, &a, &b, &c, &d) && (d >> 8 & 1);
    }
    #else
    static inline uint64_t nsq_fast_ticks(void) { return 0; }
    static int nsq_fast_has_ticks = 0;
    #endif
    """
    uint64_t nsq_fast_ticks() noexcept nogil
    const bint nsq_fast_has_ticks

cdef enum:
    # It counts at the base frequency; the slowest processors with a counter of one rate have 0.8 GHz.
    FEWEST_TICKS = 500_000_000      # in a second
    LONGEST = 3600                  # seconds; more than any slice has, and no more than fits


cdef double monotonic() noexcept nogil:
    """``time.monotonic()``, without a Python call."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + 1e-9 * now.tv_nsec


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
    """

    def __init__(self, list finished not None, schedule, double end):
        self._finished = finished
        self._schedule = schedule
        self.end = end

    def handle(self, Caller caller not None, inbound, disposition, handler):
        """Call ``handler(consumer, message)`` for waiting messages, oldest first, until none waits or it is over.

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
            if is_over(self):
                return True
        return False

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
    # The counter of another processor may be behind: the difference is a huge number then, and the clock is asked.
    if nsq_fast_ticks() - time._looked_at < time._early and time.end == time._early_for:
        return False
    return is_over_by_the_clock(time)


cdef bint is_over_by_the_clock(TimeSlice time) noexcept:
    cdef double left
    time._looked_at = nsq_fast_ticks()
    left = time.end - monotonic()
    time._early_for = time.end
    time._early = <uint64_t> (min(left, <double> LONGEST) * FEWEST_TICKS) if nsq_fast_has_ticks and left > 0 else 0
    return left < 0


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
