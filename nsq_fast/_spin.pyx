"""Tries to read from a socket that does not block, compiled: a try in vain makes no exception and no buffer.

It stands apart from ``_codec`` and ``_frame``, which do no I/O. A try costs two system calls and nothing else, so a
reply is seen as soon as it is there (nsq-fast bench publish).
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t

cdef extern from "<errno.h>" nogil:
    int EWOULDBLOCK

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int fd, void* buffer, size_t size, int flags)

cdef extern from "<time.h>" nogil:
    ctypedef long time_t
    cdef struct timespec:
        time_t tv_sec
        long tv_nsec
    int CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec* now)

# What is read goes through the stack, so that a try in vain allocates nothing.
cdef enum:
    MOST = 4096


cdef inline int64_t _microseconds() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return <int64_t>now.tv_sec * 1_000_000 + now.tv_nsec // 1000


cpdef bytes recv_soon(int fd, Py_ssize_t size, int microseconds):
    """Read up to ``size`` bytes, at most 4096: once, and again until ``microseconds`` have passed.

    Returns what came, ``b""`` at the end of the stream, or None: also where another process has had the core for so
    long, since it will want it again. Between two tries the core is offered to other processes: a server that has none
    of its own could not reply otherwise. The GIL is held throughout: a try takes about as long as to let it go.
    Raises OSError.
    """
    cdef char buffer[MOST]
    cdef ssize_t count
    cdef int64_t end = 0
    if not 0 < size <= MOST:
        raise ValueError(f"size={size}: must be from 1 to {MOST}")
    while True:
        count = recv(fd, buffer, size, 0)
        if count >= 0:
            return PyBytes_FromStringAndSize(buffer, count)
        if errno != EAGAIN and errno != EWOULDBLOCK and errno != EINTR:
            PyErr_SetFromErrno(OSError)
        if not end:
            end = _microseconds() + microseconds
        sched_yield()
        if _microseconds() >= end:
            return None
