"""The framing format of snappy; see the .pyx."""

from libc.stdint cimport uint8_t, uint32_t

cdef enum State:
    WHOLE
    PARTIAL
    BROKEN

cdef struct Chunk:
    uint8_t kind
    Py_ssize_t end        # where the next one begins
    const uint8_t* body   # behind the CRC, of what holds data
    Py_ssize_t body_size
    Py_ssize_t size       # of the data; 0 for what holds none
    uint32_t crc


cdef class SnappyChunks:
    cdef object _decompress_into
    cdef bytes _input
    cdef Py_ssize_t _at  # what is before it in _input was read

    cpdef feed(self, bytes data)
    cpdef bytes read(self)
    cdef bytes _before_broken(self, bytes piece)
    cdef Py_ssize_t _size_of_next(self) except -1
    cdef State _look(self, Chunk* chunk) noexcept
    cdef bint _decode(self, Chunk* chunk, char* target) except -1
