"""The hot loop of a worker; see the .pyx."""

from libc.stdint cimport int64_t

from ._codec cimport Message


cdef class Caller:
    cdef public object current
    cdef public double began
    cdef public double end


cdef class TimeSlice:
    cdef list _finished
    cdef object _schedule
    cdef Py_ssize_t _count
    cdef public double end          # when the slice is over, by time.monotonic()
    cdef public object tell         # called with each message that is finished, or None
    cdef public int64_t max_age     # nanoseconds after which a message gets no handler; 0: none

    cdef int _finish(self, Message message) except -1


cdef double monotonic() noexcept nogil
