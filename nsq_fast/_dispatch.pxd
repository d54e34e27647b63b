"""What a worker does; see the .pyx."""

from libc.stdint cimport int64_t

from ._codec cimport Message


cdef class Caller:
    cdef public object current
    cdef public double began


cdef class InboundQueue


cdef class TimeSlice:
    cdef list _finished
    cdef object _schedule
    cdef Py_ssize_t _count
    cdef public double end          # when the slice is over, by time.monotonic()
    cdef public object tell         # called with each message that is finished, or None
    cdef public int64_t max_age     # nanoseconds after which a message gets no handler; 0: none

    cdef bint handle(self, Caller caller, InboundQueue inbound, acknowledger, handler) except -1
    cdef int _finish(self, Message message) except -1


cdef double monotonic() noexcept nogil


cdef class TurnTimes:
    cdef public double began_at
    cdef public double due_at
    cdef readonly object _loop
    cdef readonly object _run_callback
    cdef list _at_end
    cdef object _ended              # _end of this one, made once

    cdef bint is_awaited(self) except -1
    cdef int put_at_end(self, function) except -1   # at_end


cdef class Tally:
    cdef public double busy
    cdef public Py_ssize_t handled


cdef class PromptFins:
    cdef readonly Py_ssize_t quick
    cdef public Py_ssize_t left


cdef class InboundQueue:
    cdef readonly object connection
    cdef readonly object expire
    cdef readonly object ledger
    cdef readonly object waiting        # a deque
    cdef readonly list handed
    cdef readonly TimeSlice slice
    cdef public object lock
    cdef public bint is_queued


cdef class HandlerLimit:
    cdef object _limit          # gives how many handlers may run
    cdef Py_ssize_t _running
    cdef list _waiting          # dispatchers

    cdef bint take(self, Dispatcher dispatcher) except -1
    cdef int give_back(self) except -1


cdef class Dispatcher:
    cdef public bint is_stopped
    cdef readonly Py_ssize_t idle
    cdef readonly TurnTimes turns
    cdef readonly PromptFins prompt
    cdef readonly Tally load
    cdef object _ready          # a deque of InboundQueue
    cdef object _wait
    cdef object _release
    cdef double _slice
    cdef HandlerLimit _limit

    cdef int _put(self, InboundQueue inbound, Py_ssize_t count) except -1
    cdef int _wake_up(self, Py_ssize_t count) except -1
    cdef InboundQueue _next(self)
    cdef bint _is_overdue(self, double now) except -1
    cdef double _end_of_slice(self, InboundQueue inbound, double end) except -1
