"""A socket that does not block, compiled: what is done for each read, the wait for it, and for each send.

A try in vain makes no exception. It is the base of ``nsq_fast.runtime.net.receiver`` and ``transport``, which have what
is done less often.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.errno cimport EAGAIN, EINTR, errno

from os import strerror

from gevent import getcurrent

cdef extern from "<errno.h>" nogil:
    int EWOULDBLOCK

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int fd, void* buffer, size_t size, int flags)
    ssize_t send(int fd, const void* data, size_t size, int flags)

cdef extern from "Python.h":
    # by their pointers: what Cython declares counts references, and a bytes that is resized must have one
    PyObject* new_bytes "PyBytes_FromStringAndSize" (const char* data, Py_ssize_t size) except NULL
    char* start_of "PyBytes_AS_STRING" (PyObject* data)
    int resize "_PyBytes_Resize" (PyObject** data, Py_ssize_t size) except -1

READ_SIZE = 64 * 1024
"""64 KiB decodes fastest: smaller reads cost syscalls, larger ones fall out of the cache."""

SHORT_READ = 20_000
"""So few bytes are taken for all there was: to try at once for more costs a syscall, which a publisher pays for each
reply, and a consumer of few messages at a time for each batch. A larger read, of more than nsqd's output buffer holds,
is followed by a try."""

cdef enum:
    # Who reads lets others run after so many bytes: two full reads keep the batches large and the hub alive. A short
    # read needs no such limit: the hub runs before the next one.
    YIELD_BYTES = 128 * 1024


class Interrupted(Exception):
    """Ends a ``recv_for_reader``."""


cdef enum:
    BLOCKED = -2  # nothing can be received, or sent, without waiting


cdef ssize_t _once(int fd, char* start, size_t size, bint is_sent) noexcept nogil:
    # how many bytes, or the number of the error below zero: taking the GIL may change errno
    cdef ssize_t count = send(fd, start, size, 0) if is_sent else recv(fd, start, size, 0)
    return count if count >= 0 else -errno


cdef ssize_t _transfer(int fd, char* start, size_t size, bint is_sent) except -1:
    """How many bytes were received, or sent; or BLOCKED. Raises OSError."""
    cdef ssize_t count
    while True:
        with nogil:
            count = _once(fd, start, size, is_sent)
        if count >= 0:
            return count
        if count == -EAGAIN or count == -EWOULDBLOCK:
            return BLOCKED
        if count != -EINTR:
            raise OSError(-count, strerror(-count))
        PyErr_CheckSignals()


cdef bytes recv_now(int fd, Py_ssize_t size):
    """What is there, up to ``size`` bytes; ``b""`` at the end of the stream, None when nothing is. Raises OSError."""
    cdef PyObject* data = new_bytes(NULL, size)
    cdef ssize_t count
    try:
        count = _transfer(fd, start_of(data), size, False)
        if count == BLOCKED:
            return None
        resize(&data, count)
        return <bytes> <object> data
    finally:
        Py_XDECREF(data)


cdef Py_ssize_t send_now(int fd, bytes data) except -1:
    """How many bytes the system has taken, 0 for none. Raises OSError."""
    cdef ssize_t count = _transfer(fd, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), True)
    return 0 if count == BLOCKED else count


cdef class PlainSocket:
    """Reads one socket, which does not block and nothing else may read, and writes to it.

    The watcher that wakes the reader is left running between reads: to start and stop it, and what ``hub.wait`` makes
    for each wait, takes longer than to read a message.

    Args:
        sock: the socket.
        hub: what runs while nothing comes.
        watcher: of the hub's loop; starts to tell when there is something to read.

    Attributes:
        layers: what bytes go through on their way, the one below first; empty for plain TCP. Who has any has
            ``_recv_decoded``, which is ``recv`` through them, and ``encode``.
        receiver: the greenlet that waits for bytes; None while none does.
    """

    def __init__(self, sock, hub, watcher):
        self.layers = []
        self._fileno = sock.fileno
        self._switch_to_hub = hub.switch
        self._readable = watcher
        self._read_size = READ_SIZE
        self._short_read = SHORT_READ
        self._budget = YIELD_BYTES

    def recv(self):
        """Read and decode; blocks. ``b""`` at the end of the stream. Raises OSError, RemoteProtocolError."""
        return self.read()

    def recv_raw(self):
        """The same, but not decoded."""
        return self.read_raw()

    cdef bytes read(self):
        return self._recv_decoded() if self.layers else self.read_raw()

    cdef bytes read_raw(self):
        cdef bint has_waited = self._is_drained
        cdef bytes data
        if has_waited:
            self._wait_readable()
        while True:
            # Asked each time: a closed socket has -1, and its number may be another's by now.
            data = recv_now(self._fileno(), self._read_size)
            if data is not None:
                self._is_drained = PyBytes_GET_SIZE(data) < self._short_read or self.note_read(PyBytes_GET_SIZE(data))
                return data
            if has_waited and self._relieved is not None:
                raise Interrupted  # it was not for bytes that this greenlet was woken
            self._wait_readable()
            has_waited = True

    def is_due(self, Py_ssize_t size):
        """Note that so many bytes were read; whether it is time to let others run."""
        return self.note_read(size)

    cdef bint note_read(self, Py_ssize_t size) noexcept:
        self._budget -= size
        if self._budget > 0:
            return False
        self._budget = YIELD_BYTES
        return True

    cdef int _wait_readable(self) except -1:
        if not self._is_watching:
            self._is_watching = True
            self._readable.start(self.wake_receiver)
        self.receiver = getcurrent()
        try:
            self._switch_to_hub()
        finally:
            self.receiver = None
        return 0

    def wake_receiver(self):
        """There is something to read."""
        receiver = self.receiver
        if receiver is not None:
            receiver.switch()
            return
        if self._is_lent:
            return
        self._is_watching = False  # nobody wants what there is; the next wait watches again
        self._readable.stop()

    def recv_for_reader(self):
        """``recv``, in place of another greenlet that waits in it, and waits on. None when it was woken by something
        else than bytes, as ``interrupt`` does, and at once when a third one is reading so.

        Whenever the caller does anything but wait here, the other one is there to receive.
        """
        return self.read_in_place()

    cdef bytes read_in_place(self):
        if self._relieved is not None:
            return None
        self._relieved, self.receiver = self.receiver, None
        try:
            return self.read()
        except Interrupted:
            return None
        finally:
            self.receiver, self._relieved = self._relieved, None

    def send_now(self, bytes data not None):
        """Encode and send without blocking; returns the encoded bytes that did not go. Raises OSError."""
        return self.send(data)

    cdef object send(self, bytes data):
        cdef bytes encoded = self.encode(data) if self.layers else data
        cdef Py_ssize_t sent = send_now(self._fileno(), encoded)
        return None if sent == PyBytes_GET_SIZE(encoded) else memoryview(encoded)[sent:]
