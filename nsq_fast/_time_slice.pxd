"""What follows each handler that returns; see the .pyx."""


cdef class TimeSlice:
    cdef list _finished
    cdef object _schedule
    cdef public double end          # when the slice is over, by time.monotonic()
