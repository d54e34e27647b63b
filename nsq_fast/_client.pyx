# cython: nonecheck=True
# What was not set, by mistake, is an AttributeError then, and does not end the process.

"""What the client does for each read and each send, compiled: bytes become messages of the owner, and FINs bytes.

``TransportPath`` and ``ConnectionPath`` are the bases of ``nsq_fast.client.transport`` and ``connection``, which say
what the rules are and have what is done less often. No loop: what needs one is called by the loop, or given to it.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport int64_t

from ._codec cimport Message
from ._frame cimport SessionPath
from ._dispatch cimport monotonic

from _socket import socket as system_socket
from os import strerror

from .errors import ConnectionLost

cdef extern from "<errno.h>" nogil:
    int EWOULDBLOCK

cdef extern from "<sched.h>" nogil:
    int sched_yield()

cdef extern from "<time.h>" nogil:
    ctypedef long time_t
    cdef struct timespec:
        time_t tv_sec
        long tv_nsec
    int CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec* now)

cdef extern from "<sys/socket.h>" nogil:
    ssize_t recv(int fd, void* buffer, size_t size, int flags)
    ssize_t send(int fd, const void* data, size_t size, int flags)

cdef extern from "Python.h":
    # by their pointers: what Cython declares counts references, and a bytes that is resized must have one
    PyObject* new_bytes "PyBytes_FromStringAndSize" (const char* data, Py_ssize_t size) except NULL
    char* start_of "PyBytes_AS_STRING" (PyObject* data)
    int resize "_PyBytes_Resize" (PyObject** data, Py_ssize_t size) except -1

cdef enum:
    # 64 KiB decodes fastest: smaller reads cost syscalls, larger ones fall out of the cache.
    READ = 64 * 1024
    # So few bytes are taken for all there was: to try at once for more costs a syscall, which a publisher pays for each
    # reply, and a consumer of few messages at a time for each batch. A larger read, of more than nsqd's output buffer
    # holds, is followed by a try.
    SHORT_READ = 20_000
    # A connection lets others have their turn after so many bytes: two full reads keep batches large, the loop alive.
    YIELD_BYTES = 128 * 1024
    # More than this is sent at once, without waiting for the end of the loop's turn.
    FLUSH_BYTES = 64 * 1024
    REPLY_SIZE = 2048
    MESSAGE_SIZE = 4096
    FRAME_HEAD = 8  # its size and its type
    BLOCKED = -2  # nothing can be received, or sent, without waiting

READ_SIZE = READ


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


cdef class TransportPath:
    """One connected socket, which does not block, with what bytes go through on their way.

    Attributes:
        sock: the socket.
        layers: what bytes go through, the one next to the socket first; empty for plain TCP. Who has any has
            ``_recv_decoded`` and ``encode``.
    """

    def use(self, sock):
        """This is the socket from now on."""
        self.sock = sock
        self._fileno = sock.fileno
        self._is_real = isinstance(sock, system_socket)

    def __cinit__(self):
        self.layers = []

    def recv_now(self, Py_ssize_t size=READ):
        """What has come, decoded; ``b""`` at the end of the stream, None when nothing has. Raises OSError and NsqError.
        """
        return self.recv(size)

    cdef bytes recv(self, Py_ssize_t size):
        return self._recv_decoded() if self.layers else self.raw(size)

    def recv_raw(self):
        """The same, but not decoded."""
        return self.raw(READ)

    cdef bytes raw(self, Py_ssize_t size):
        if self._is_real:
            # Asked each time: a closed socket has -1, and its number may be another's by now.
            return recv_now(self._fileno(), size)
        try:
            return self.sock.recv(size)
        except BlockingIOError:
            return None

    def send_now(self, bytes data not None):
        """Encode and send without blocking; the encoded bytes that did not go, None for none. Raises OSError."""
        return self.send(data)

    cdef object send(self, bytes data):
        cdef bytes encoded = self.encode(data) if self.layers else data
        cdef ssize_t sent
        if not self._is_real:
            return self.send_encoded(memoryview(encoded))
        sent = _transfer(self._fileno(), PyBytes_AS_STRING(encoded), PyBytes_GET_SIZE(encoded), True)
        if sent == PyBytes_GET_SIZE(encoded):
            return None
        return memoryview(encoded)[sent if sent > 0 else 0:]

    def send_encoded(self, unsent):
        """Send encoded bytes without blocking; a memoryview of those that did not go, None for none. Raises OSError."""
        while unsent:
            try:
                unsent = unsent[self.sock.send(unsent):]
            except BlockingIOError:
                return unsent
        return None


# Trying to read before the loop does the waiting

LONGEST_REPLY = 60  # microseconds; most replies of a server on the same machine take 15 to 40
LONGEST_MESSAGE = 150  # microseconds; the next message of an ordered partition comes after the FIN of the last

cdef enum:
    # What is read goes through the stack, so that a try in vain allocates nothing.
    MOST_SPUN = 4096
    # Replies in a row that are read so; the next one is left to the loop.
    HITS = 4
    # A miss weighs as much as so many hits; if misses outweigh hits by more than ENOUGH, it rests.
    MISS = 2
    ENOUGH = 8
    # So many answers are left to the loop then; each rest that follows another is twice as long.
    SHORTEST_REST = 15
    LONGEST_REST = 240
    # Where the core was lost a rest is four times as long as the one before, within these; the shortest again after
    # CALM successes.
    SHORTEST_CROWDED_REST = 240
    LONGEST_CROWDED_REST = 3840
    CALM = 500
    # Microseconds. Who gets the core back so late has offered it to a process that wants it too, and rests: to try uses
    # up the time that the system gives a process, which then has to wait when the answer is there.
    CROWDED = 500


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
    cdef char buffer[MOST_SPUN]
    cdef ssize_t count
    cdef int64_t end = 0
    if not 0 < size <= MOST_SPUN:
        raise ValueError(f"size={size}: must be from 1 to {MOST_SPUN}")
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


cdef class SpinReader:
    """Reads what comes soon from a socket that does not block: before the loop waits, where it is microseconds away.

    A server nearby answers sooner than a process falls asleep and wakes up again, and than the hub gets round to it. So
    a greenlet that waits for the only reply that is due tries to read it at once, and so does a worker that has just
    finished a message of an ordered partition. Publishing one at a time is half as fast again for it, for the same CPU
    time (nsq-fast bench publish --mode single). Between two tries the core is offered to other processes: where client
    and server share one, the server answers then, and where they have one each the offer costs a system call.

    It is bounded: by ``longest`` for one answer; and where less than two of three tries succeed it rests, the longer
    the more often that was so: a server far away costs next to nothing. It rests as well where other processes want the
    core. After some replies in a row one is left to the hub, so that others have their turn.

    Args:
        sock: the socket.
        recv: as ``recv_soon``.
        longest: microseconds for one answer.
        in_a_row: answers one after the other, after which the hub has a turn; 0: it has none.

    Attributes:
        is_turn_due: nothing is read before the hub has had a turn, and this was set to False.
    """

    def __init__(self, sock, recv=recv_soon, int longest=LONGEST_REPLY, Py_ssize_t in_a_row=HITS):
        self._fileno = sock.fileno
        self._recv = recv
        self._longest = longest
        self._in_a_row = in_a_row
        self._next_rest = SHORTEST_REST
        self._crowded_rest = SHORTEST_CROWDED_REST

    def recv(self, Py_ssize_t size):
        """What came, ``b""`` at the end of the stream; None when it is the hub that has to wait. Raises OSError."""
        return self.soon(size)

    cdef bytes soon(self, Py_ssize_t size):
        cdef double began
        cdef bytes data
        if self.is_turn_due:
            return None
        if self._rest:
            self._rest -= 1
            self._hits = 0
            return None
        began = monotonic()
        # Asked each time: a closed socket has -1, and its number may be another's by now.
        data = self._recv(self._fileno(), size, self._longest)
        if data is None:
            self._hits = 0
            self._missed(monotonic() - began)
            return None
        if self._debt:
            self._debt -= 1
        else:
            self._is_paid = True
        self._hits += 1
        self._calm += 1
        if self._hits == self._in_a_row:
            self._hits = 0
            self.is_turn_due = True
        return data

    cdef void _missed(self, double seconds) noexcept:
        """Nothing came in so many seconds."""
        if self._calm >= CALM:
            self._crowded_rest = SHORTEST_CROWDED_REST
        if seconds * 1_000_000 > CROWDED:
            self._rest = self._crowded_rest
            self._crowded_rest = min(4 * self._crowded_rest, <Py_ssize_t>LONGEST_CROWDED_REST)
            self._calm = 0
            return
        if self._is_paid:
            self._is_paid = False
            self._next_rest = SHORTEST_REST
        self._debt += MISS
        if self._debt > ENOUGH:
            self._debt = ENOUGH
            self._rest = self._next_rest
            self._next_rest = min(2 * self._next_rest, <Py_ssize_t>LONGEST_REST)


cdef class ConnectionPath:
    """What one read brings, and who gets it; what waits to be sent, gathered for one send.

    What is written in one turn of the loop leaves in one send, FINs as one buffer. What the system does not take waits
    until it does; what is written meanwhile gathers behind it. No writing method raises what the network does:
    ``_write_failed`` deals with it.

    Attributes:
        closed_error: why the connection ended or is ending; None while it is open.
        last_received_at, last_message_at: ``time.monotonic()`` of the last bytes and the last messages.
        finished: messages whose FIN has not been built yet. Always the same list: workers append to it, after
            ``schedule_flush`` when it was empty.
        write_error: what broke writing; None while it works.
        is_scheduled: something waits for the end of the turn.
        reads_all: the loop need not call again for what was left unread, see ``loop.Loop``.
        reads_later: it will read on by itself, after others had their turn.
        is_prompt: send at once what is appended, not at the end of the turn: for a peer that sends its next message
            only when it has our answer.
    """

    def __cinit__(self):
        self.finished = []
        self._parts = []

    # Reading

    def readable(self):
        """The loop calls this whenever there is something to read. Raises nothing but what interrupts the program."""
        cdef TransportPath transport = self._transport
        cdef Py_ssize_t left = YIELD_BYTES, size
        cdef bytes data
        if self.reads_later:
            return  # else each call would add one that reads on, and they would take ever more of a turn
        try:
            while True:
                data = transport.recv(READ)
                if data is None:
                    return
                size = len(data)
                self.take(data)
                left -= size
                if not (transport.layers or self.reads_all):
                    if size < SHORT_READ or left <= 0:
                        return  # the loop calls again if there is more
                elif left <= 0:
                    self._read_on_later()  # the layers may hold more of what the loop sees no more
                    return
        except Exception as error:
            self._read_failed(error)

    cdef bytes reply_soon(self):
        """The only reply that is due, for ``take_reply``, if it comes in a moment; None leaves it to the loop."""
        cdef SpinReader spin = self._spin
        if spin is None or self.closed_error is not None or self.is_scheduled or len(self.session.pending) != 1:
            return None
        if spin.is_turn_due:
            spin.is_turn_due = False
            return None
        try:
            return spin.soon(REPLY_SIZE)
        except Exception as error:
            self._read_failed(error)
            return None

    def read_soon(self):
        """Read what comes in a moment, and hand it on: the server sends the next message when it has a FIN."""
        cdef SpinReader spin = self._message_spin
        cdef bytes data
        if spin is None or self.closed_error is not None or self._unsent is not None:
            return
        if spin.is_turn_due:
            spin.is_turn_due = False
            return
        try:
            data = spin.soon(MESSAGE_SIZE)
            if data is not None:
                self.take(data)
        except Exception as error:
            self._read_failed(error)

    def take_reply(self, bytes data not None):
        """Deal with what another has read from the socket."""
        try:
            self.take(data)
        except Exception as error:
            self._read_failed(error)

    cdef int take(self, bytes data) except -1:
        cdef double now
        cdef list events
        cdef SessionPath session = self.session
        if not data:
            lost = self.write_error or ConnectionLost(f"{self.address}: closed by the server")
            lost.is_abrupt = True
            raise lost
        self.last_received_at = now = monotonic()
        if self._take_oks(session.take_oks(data)):
            return 0
        token = session.take_receipt(data)
        if token is not None:
            self._owner.on_reply(self, token, data[FRAME_HEAD:])
            return 0
        events = session.take(data, now)
        if session.message_count == len(events):
            if events and self.closed_error is None:  # else nobody could answer them any more
                self.last_message_at = now
                self._owner.on_messages(self, events)
        else:
            self._dispatch(events)
        if session.failure is not None:
            raise session.failure
        return 0

    cdef bint _take_oks(self, list tokens) except -1:
        """Whether there were any: they are all that was read, as where commands are pipelined."""
        if tokens is None:
            return False
        fault = None
        on_reply = self._owner.on_reply
        for token in tokens:
            try:
                on_reply(self, token, b"OK")
            except Exception as error:  # the others must still hear of theirs
                fault = error
        if fault is not None:
            raise fault
        return True

    # Commands that have a reply

    def request(self, bytes data not None, command, token):
        """Queue a command that has a reply: ``on_reply`` or ``on_failed`` gets ``token``, in the order of requests.

        Raises ConnectionLost when closed, LocalProtocolError when the server does not know ``command``; nothing
        is sent then, and the owner hears nothing of ``token``.
        A partition in ``data`` is not seen here: ask ``session.dialect.has_partitions`` before it is put in.
        """
        self.ask(data, command, token)

    cdef int ask(self, bytes data, command, token) except -1:
        cdef SessionPath session = self.session
        if self.closed_error is not None or not session.is_ready():
            self._check_takes_commands()
        session.put(command, token)
        return self.put(data)

    cdef bint ask_if_idle(self, bytes data, command, token) except -1:
        """As ``ask``, but at once: only if no reply is due and nothing waits to be sent; whether that was so."""
        if self.closed_error is not None or not self.session.is_idle() or not self.is_free():
            return False
        self.session.put(command, token)
        self._send_now(data)
        return True

    # Writing

    cdef int put(self, bytes data) except -1:
        self._parts.append(data)
        self._size += len(data)
        if not self.is_scheduled:
            return self.schedule_now()
        return self.flush_now() if self._size > FLUSH_BYTES else 0

    def put_bytes(self, bytes data not None):
        """Append bytes, whether or not the connection is open."""
        self.put(data)

    cdef bint is_free(self) noexcept:
        """Whether bytes could be sent now, and nothing waits to be sent."""
        return not self.is_scheduled and self._unsent is None and self.write_error is None and not self._is_stopped

    def put_first(self, bytes data not None):
        """Put bytes before all that waits to be sent."""
        self._parts.insert(0, data)
        self._size += len(data)
        if not self.is_scheduled:
            self.schedule_now()

    def put_finished(self, Message message not None):
        """Append a FIN; it leaves after the bytes of this turn."""
        self.finished.append(message)
        if not self.is_scheduled:
            self.schedule_now()

    def put_requeue(self, bytes req not None):
        """Append a REQ."""
        self._requeued += 1
        self.put(req)

    def schedule_flush(self):
        """Have what is queued sent before the loop waits for anything, also what is appended only now."""
        self._schedule_end()

    cdef int schedule_now(self) except -1:
        return self.flush_now() if self.is_prompt else self._schedule_end()

    cdef int _schedule_end(self) except -1:
        if not self.is_scheduled:
            if self._ended is None:
                self._ended = self._end_of_turn
            self.is_scheduled = True
            self._at_end(self._ended)
        return 0

    def _end_of_turn(self):
        self.is_scheduled = False
        if self.finished or self._parts:  # otherwise a worker has flushed already, as it mostly has
            try:
                self.flush_now()
            except Exception as fault:
                self.loop.report(f"sending to {self.address}", fault, "what is queued next is sent")

    def flush(self):
        """Send what is queued now, as far as the system takes it without blocking."""
        self.flush_now()

    cdef int flush_now(self) except -1:
        if self._unsent is not None:
            return 0  # what has gathered goes behind it
        try:
            data = self.take_waiting()
        except Exception as error:
            self._write_failed(error)
            return 0
        if data is not None and self._send_now(data):
            self.tell_owner()
        return 0

    cdef int _send_now(self, data) except -1:
        """Send bytes; whether the system has taken them all."""
        try:
            unsent = self._transport.send(data if type(data) is bytes else bytes(data))
        except Exception as error:
            self._write_failed(error)
            return False
        if unsent is not None:
            self._write_later(unsent)
        return unsent is None

    def gather(self):
        """Make one buffer of what waits, not encoded; None if nothing does, or if it can no longer be sent."""
        return self.take_waiting()

    cdef object take_waiting(self):
        cdef list parts = self._parts, finished = self.finished
        if self._is_stopped or self.write_error is not None:
            self._drop_unsent()
            return None
        self._sending, self._sending_requeued = None, self._requeued
        self._requeued = 0
        if finished:
            self._sending = finished[:]
            finished.clear()
            # Only now: a message is either in the list or off the session's in-flight count.
            fins = self.session.fin_many(self._sending)
            if not parts:
                return fins
            parts.append(fins)
        if not parts:
            return None
        self._parts = []
        self._size = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def tell_sent(self):
        """The system has the answers that were gathered, if there were any: the owner hears of it."""
        self.tell_owner()

    cdef int tell_owner(self) except -1:
        cdef Py_ssize_t requeued = self._sending_requeued
        finished, self._sending = self._sending, None
        self._sending_requeued = 0
        if finished is not None or requeued:
            self._answers_left([] if finished is None else finished, requeued, True)
        return 0
