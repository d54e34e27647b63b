"""What follows each handler that returns, compiled: the FIN joins the others, and the clock is looked at.

It stands apart from ``_codec``, which has no clock. To do all of it in one call costs less than the two calls that
marking a message and collecting it took, so that the clock can be looked at after every handler, however quick
(bench/bench_time_slice.py).
"""

cimport cython
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

from ._codec cimport Message


cdef double _monotonic() noexcept nogil:
    """``time.monotonic()``, without a Python call."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + 1e-9 * now.tv_nsec


cdef class TimeSlice:
    """The time for which one worker handles messages of one connection before others have their turn.

    Args:
        finished: takes the messages that are to be finished.
        schedule: called before the first message joins an empty ``finished``; to have it sent soon.
        end: when the slice is over, by ``time.monotonic()``.
    """

    def __init__(self, list finished not None, schedule, double end):
        self._finished = finished
        self._schedule = schedule
        self.end = end

    @cython.binding(False)
    def returned(self, Message message not None):
        """Finish a message whose handler has returned, unless it is answered or to be answered later.

        Returns whether the slice is over.
        """
        if message.mark_returned():
            if not self._finished:
                self._schedule()
            self._finished.append(message)
        self._count += 1
        return _monotonic() > self.end

    @cython.binding(False)
    def is_over(self):
        """Whether the slice is over, after a message that ``returned`` has not seen."""
        self._count += 1
        return _monotonic() > self.end

    def take_count(self):
        """How many messages were handled since the last call."""
        count, self._count = self._count, 0
        return count
