"""One command, and its reply, that another thread may send and read on a socket of the hub thread, compiled.

Every method is one step for all threads: the interpreter's lock (GIL) is held
throughout, during the system call, too; without such a lock that of the object
is. The socket does not block, so a call takes a few microseconds.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, errno
from libc.string cimport memcmp

cdef extern from "<sys/socket.h>" nogil:
    ssize_t send(int fd, const void* buffer, size_t size, int flags)
    ssize_t recv(int fd, void* buffer, size_t size, int flags)

cdef enum:
    MOST = 4096
    OK_SIZE = 10


cdef class SendPermit:
    """Permits one command at a time. ``grant`` and ``revoke`` belong to the thread that owns the socket.

    | state   | what happened                        | next state                                                 |
    |---------|--------------------------------------|------------------------------------------------------------|
    | revoked | ``grant``                            | granted                                                    |
    | granted | ``send`` sent the bytes, or some     | used: no other command is sent                             |
    | granted | ``send`` could send no byte          | returned: nothing is sent or read                          |
    | used    | ``receive`` read an OK               | granted: the owner learns nothing of that command          |
    | both    | ``receive`` read anything else       | returned; the owner has to have a look at it, see ``news`` |
    | any     | ``revoke``                           | revoked; it returns what is left to do                     |

    Attributes:
        number: of the permit that is granted now, another one each time; 0 in all other states. Who looks at what
            belongs to the owner asks for it before, and sends with it: so what was seen is true when it is sent.
        is_used: a command was sent, and has no reply.
        has_news: ``receive`` has read what is for the owner.
    """

    def __cinit__(self):
        self._descriptor = -1

    @property
    def is_used(self):
        return self._data is not None

    @property
    def has_news(self):
        return self._received is not None

    @cython.critical_section
    def grant(self, int descriptor):
        """Permit one command on this socket, which does not block and must stay open until ``revoke``."""
        self._granted += 1
        self.number = self._granted
        self._descriptor = descriptor

    @cython.critical_section
    def revoke(self):
        """Permit nothing. Returns what is left to do, None where that is nothing: the token of a command without
        reply, or None; what the system did not take of its bytes, or None; what was read for the owner, or None.
        """
        self.number = 0
        self._descriptor = -1
        if self._data is None and self._received is None:
            return None
        token, data, sent, received = self._token, self._data, self._sent, self._received
        self._token = self._data = self._received = None
        return token, (data[sent:] if data is not None and sent < len(data) else None), received

    @cython.critical_section
    def send(self, unsigned long long number, token, bytes data):
        """Send a command, if this permit is still granted; how many bytes went. 0: none, and nothing was noted."""
        cdef Py_ssize_t sent
        if not number or number != self.number:
            return 0
        self.number = 0
        sent = send(self._descriptor, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), 0)
        if sent <= 0:
            self._descriptor = -1
            return 0  # the owner will find the same, and knows what to do
        self._token, self._data, self._sent = token, data, sent
        return sent

    @cython.critical_section
    def receive(self):
        """Read, unless the permit is revoked. Returns the token of the command that was sent if that is stored: the
        next one may be sent. None: nothing came, or it is for the owner.
        """
        cdef char buffer[MOST]
        cdef Py_ssize_t size
        if self._descriptor < 0:
            return None
        size = recv(self._descriptor, buffer, MOST, 0)
        if size < 0 and (errno == EAGAIN or errno == EINTR):
            return None
        # nsqio/nsq: internal/protocol/protocol.go, SendFramedResponse: size, type 0, data
        if size == OK_SIZE and self._data is not None and self._sent == len(self._data) and (
            memcmp(buffer, b"\0\0\0\6\0\0\0\0OK", OK_SIZE) == 0
        ):
            token = self._token
            self._token = self._data = None
            self._granted += 1
            self.number = self._granted
            return token
        self.number = 0
        self._descriptor = -1
        self._received = PyBytes_FromStringAndSize(buffer, max(0, size))  # an error is the end of the stream
        return None
