"""Tries to read from a socket that does not block, compiled: a try in vain makes no exception and no buffer.

It stands apart from ``_codec`` and ``_frame``, which do no I/O. A try costs the system call and nothing else, so a
reply is seen as soon as it is there (nsq-fast bench publish).
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_SetFromErrno
from libc.errno cimport EAGAIN, EINTR, errno

cdef extern from "<errno.h>" nogil:
    int EWOULDBLOCK

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int fd, void* buffer, size_t size, int flags)

# What is read goes through the stack, so that a try in vain allocates nothing.
cdef enum:
    MOST = 4096


cpdef tuple recv_soon(int fd, Py_ssize_t size, int tries):
    """Read up to ``size`` bytes, at most 4096, in at most ``tries`` tries.

    Returns what came, ``b""`` at the end of the stream, or None; and how many tries were in vain. The GIL is held
    throughout: a try takes about as long as to let it go. Raises OSError.
    """
    cdef char buffer[MOST]
    cdef ssize_t count
    cdef int missed
    if not 0 < size <= MOST:
        raise ValueError(f"size={size}: must be from 1 to {MOST}")
    for missed in range(tries):
        count = recv(fd, buffer, size, 0)
        if count >= 0:
            return PyBytes_FromStringAndSize(buffer, count), missed
        if errno != EAGAIN and errno != EWOULDBLOCK and errno != EINTR:
            PyErr_SetFromErrno(OSError)
    return None, tries
