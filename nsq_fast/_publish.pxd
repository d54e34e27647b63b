"""Publishes and their commands; see the .pyx."""

cdef enum:
    COUNT_SIZE = 4
    LENGTH_SIZE = 4


cdef class PublishFields:
    cdef public object body
    cdef public object form
    cdef public object attempt
    cdef public object error
    cdef public Py_ssize_t weight
    cdef public bint is_alone
    cdef public bint is_plain
    cdef public bint done

    cdef int fill(self, body, form, Py_ssize_t weight) except -1
    cdef Py_ssize_t record_size(self) except -1
