"""A socket that does not block; see the .pyx."""


cdef class PlainSocket:
    cdef readonly list layers
    cdef public object receiver
    cdef public object _relieved            # who waited for bytes until another began to read in its place
    cdef public bint _is_watching
    cdef public bint _is_lent               # another watches the socket
    cdef public bint _is_drained            # nothing is left to read, as far as is known, or others have their turn
    cdef public Py_ssize_t _read_size
    cdef public Py_ssize_t _short_read
    cdef Py_ssize_t _budget
    cdef object _fileno
    cdef object _switch_to_hub
    cdef readonly object _readable

    cdef bytes read(self)                           # recv
    cdef bytes read_raw(self)                       # recv_raw
    cdef bytes read_in_place(self)                  # recv_for_reader
    cdef bint note_read(self, Py_ssize_t size) noexcept     # is_due
    cdef int _wait_readable(self) except -1
    cdef object send(self, bytes data)              # send_now
