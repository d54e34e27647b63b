"""One command, and its reply, that another thread may send and read on a socket of the hub thread; see the .pyx."""


cdef class SendPermit:
    cdef readonly unsigned long long number
    cdef unsigned long long _granted  # so many were
    cdef int _descriptor  # -1 while nothing may be sent or read
    cdef object _token
    cdef bytes _data
    cdef Py_ssize_t _sent
    cdef bytes _received
