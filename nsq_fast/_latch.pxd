"""What one thread waits for until another opens it; see the .pyx."""

cdef extern from "Python.h" nogil:
    ctypedef void* PyThread_type_lock


cdef class Latch:
    cdef PyThread_type_lock _lock  # taken while it is closed
    cdef readonly bint is_open
    cdef bint _is_one_of_many  # it was opened together with others

    cdef bint block(self, timeout) except -1
