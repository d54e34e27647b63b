"""What follows each handler that returns; see the .pyx."""


cdef class TimeSlice:
    cdef list _finished
    cdef object _schedule
    cdef Py_ssize_t _count
    cdef public double end          # when the slice is over, by time.monotonic()
