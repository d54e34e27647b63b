"""The frame reader: bytes in any pieces to lists of messages, responses and errors, or to columns.

``FrameReader`` gives objects to handlers, ``ColumnReader`` (in ``_columns.pxi``) Arrow buffers to batch users. Both
hold one partial frame at most, in a buffer sized from that frame's header once the header has passed the size limit;
whole frames are decoded where they lie in the caller's chunk. So the work is linear in the bytes, however they are
split.

A message above the size limit need not end the conversation: with ``skip_oversized`` its headers are kept, its body
is passed over as it comes, and what is left is a TruncatedMessage, which can be answered.

Garbage ends in one RemoteProtocolError, after the frames before it were returned; the reader then raises nothing but
that error. The commands that go the other way are in ``_codec``, and so is the layout of a message.
"""

from collections import deque

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from ._codec cimport (
    FRAME_DATA_AT,
    FRAME_ERROR,
    FRAME_MESSAGE,
    FRAME_RESPONSE,
    FRAME_SIZE_AT,
    FRAME_TYPE_AT,
    DETAIL_SIZE,
    EXT_LENGTH_SIZE,
    EXT_VERSION_SIZE,
    ID_SIZE,
    INTERNAL_ID_AT,
    LAYOUT_OK,
    MESSAGE_HEADER_SIZE,
    MessageView,
    SHORT_HEADER,
    TruncatedMessage,
    TRACE_ID_AT,
    bytes_like,
    bytes_view,
    checked_int,
    new_message,
    new_truncated,
    raise_layout_error,
    read_layout,
    read_u32,
    read_u64,
)

from .errors import LocalProtocolError, RemoteProtocolError, server_error

cdef extern from "Python.h":
    Py_ssize_t PY_SSIZE_T_MAX

cdef enum:
    # what frame_total found wrong
    BAD_SIZE = -1
    BAD_TYPE = -2
    SHORT_MESSAGE = -3

    TYPE_SIZE = 4                   # the part of a frame that its size counts beside the data
    # nsqio/nsq: nsqd/protocol_v2.go, Send writes it as an int32
    MAX_SIZE = 0x7fffffff
    MAX_COLUMN_SIZE = 0x7fffffff    # offsets into a column have 32 bits
    MAX_EXT_SIZE = EXT_VERSION_SIZE + EXT_LENGTH_SIZE + 0xffff

DEFAULT_MAX_FRAME_SIZE = 8 * 1024 * 1024
# A larger message would leave too little of a column for the rest of the chunk that it ends in.
MAX_COLUMN_FRAME_SIZE = MAX_COLUMN_SIZE - 16 * 1024 * 1024


cdef class Response:
    """A response frame. The three that servers repeat are always the same objects: OK, HEARTBEAT, CLOSE_WAIT."""

    def __init__(self, data):
        if self.data is not None:  # others may be reading it
            raise TypeError("a Response is made once: __init__ was called again")
        self.data = bytes(bytes_like(data, "data"))

    def __repr__(self):
        return f"Response({self.data!r})"


cdef class ErrorFrame:
    """An error frame."""

    def __init__(self, data):
        if self.data is not None:
            raise TypeError("an ErrorFrame is made once: __init__ was called again")
        self.data = bytes(bytes_like(data, "data"))

    @property
    def error(self):
        """It as a ServerError, of the class for its code."""
        return server_error(self.data)

    def __repr__(self):
        return f"ErrorFrame({self.data!r})"


OK = Response(b"OK")
HEARTBEAT = Response(b"_heartbeat_")
CLOSE_WAIT = Response(b"CLOSE_WAIT")


cdef Response _response(FrameBuffer reader, const unsigned char* data, Py_ssize_t size):
    cdef Response response
    # The same objects each time: a publisher gets an OK for each publish, and compares addresses.
    if size == 2 and memcmp(data, b"OK", 2) == 0:
        return reader._ok
    if size == 11 and memcmp(data, b"_heartbeat_", 11) == 0:
        return reader._heartbeat
    if size == 10 and memcmp(data, b"CLOSE_WAIT", 10) == 0:
        return reader._close_wait
    response = Response.__new__(Response)
    response.data = PyBytes_FromStringAndSize(<const char*> data, size)
    return response


cdef ErrorFrame _error_frame(const unsigned char* data, Py_ssize_t size):
    cdef ErrorFrame frame = ErrorFrame.__new__(ErrorFrame)
    frame.data = PyBytes_FromStringAndSize(<const char*> data, size)
    return frame


cdef inline Py_ssize_t frame_total(
    const unsigned char* frame, Py_ssize_t available, Py_ssize_t max_size, bint skip_oversized
) noexcept nogil:
    """Length of the frame that starts here; 0 when too little of it is here to tell; negative when it is not one.

    Every part of the header is judged as soon as it is here, so that the verdict does not depend on the split.
    """
    cdef Py_ssize_t size
    cdef uint32_t kind
    if available < FRAME_TYPE_AT:
        return 0
    # As an unsigned number: a negative size, which a server never sends, is then above every limit.
    size = <Py_ssize_t> read_u32(frame + FRAME_SIZE_AT)
    if size > max_size:
        return oversized_total(frame, available, size, skip_oversized)
    if size < TYPE_SIZE:
        return BAD_SIZE
    if available >= FRAME_DATA_AT:
        kind = read_u32(frame + FRAME_TYPE_AT)
        if kind > FRAME_MESSAGE:
            return BAD_TYPE
        if kind == FRAME_MESSAGE and size < TYPE_SIZE + MESSAGE_HEADER_SIZE:
            return SHORT_MESSAGE
    return FRAME_TYPE_AT + size


cdef Py_ssize_t oversized_total(
    const unsigned char* frame, Py_ssize_t available, Py_ssize_t size, bint skip_oversized
) noexcept nogil:
    # the same for a frame above the limit: only a message may be one, and only where it is to be passed over
    if not skip_oversized or size > MAX_SIZE:
        return BAD_SIZE
    if available < FRAME_DATA_AT:
        return 0
    if read_u32(frame + FRAME_TYPE_AT) != FRAME_MESSAGE:
        return BAD_SIZE
    if size < TYPE_SIZE + MESSAGE_HEADER_SIZE:
        return SHORT_MESSAGE
    return FRAME_TYPE_AT + size


cdef int _raise_frame_error(Py_ssize_t code, const unsigned char* frame, Py_ssize_t max_size) except -1:
    size = read_u32(frame + FRAME_SIZE_AT)
    if code == SHORT_MESSAGE:
        raise_layout_error(SHORT_HEADER, size - TYPE_SIZE)
    if code == BAD_TYPE:
        raise RemoteProtocolError(f"unknown frame type {read_u32(frame + FRAME_TYPE_AT)}")
    # The usual mistakes of configuration begin with bytes that make an absurd size.
    start = frame[:FRAME_TYPE_AT]
    hint = ""
    if start == b"HTTP":
        hint = "; the peer speaks HTTP: is this the HTTP port (4151) of an nsqd, not its TCP port (4150)?"
    elif start[0] in b"\x15\x16" and start[1] == 3:  # a TLS record: alert or handshake, version 3.x
        hint = "; the peer speaks TLS"
    raise RemoteProtocolError(
        f"frame size {size} is not within {TYPE_SIZE} and max_frame_size={max_size}: {start!r}{hint}"
    )


cdef class FrameBuffer:
    """What both readers share: the layout in force, the partial frame, the error that poisoned them."""

    @cython.critical_section
    def __init__(self, *, detail=False, ext=False, max_frame_size=DEFAULT_MAX_FRAME_SIZE, skip_oversized=False):
        self.detail = detail
        self.ext = ext
        self.max_frame_size = checked_int(max_frame_size, "max_frame_size", TYPE_SIZE, MAX_SIZE)
        self.skip_oversized = skip_oversized
        self._ok = OK
        self._heartbeat = HEARTBEAT
        self._close_wait = CLOSE_WAIT

    def __dealloc__(self):
        PyMem_Free(self._frame)

    cdef int _enter(self) except -1:
        # An allocation may start the garbage collector, and a destructor call feed again.
        if self._busy:
            raise LocalProtocolError("feed was called while another feed of the same reader is running")
        if self._error is not None:
            self._raise_error()
        self._busy = True
        return 0

    cdef int _raise_error(self) except -1:
        # without the traceback of the last time, or it would grow with every call
        raise self._error.with_traceback(None)

    cdef int _poison(self, object error) except -1:
        self._error = error
        self._drop_frame()
        return 0

    cdef bint _is_whole(self) noexcept:
        return self._frame != NULL and self._have == self._total

    cdef void _drop_frame(self) noexcept:
        PyMem_Free(self._frame)
        self._frame = NULL
        self._have = 0
        self._total = 0
        self._kept = 0

    cdef Py_ssize_t _kept_of(self, Py_ssize_t total) noexcept:
        # bytes to keep of a message that is too large: all but its body
        cdef Py_ssize_t headers = FRAME_DATA_AT + MESSAGE_HEADER_SIZE
        if self.ext:
            headers += MAX_EXT_SIZE
        if self.detail:
            headers += DETAIL_SIZE
        return min(total, headers)

    cdef object _truncated(
        self, const unsigned char* frame, Py_ssize_t available, Py_ssize_t total, object responder, double now
    ):
        # a message that is too large, of which `frame` has `available` bytes: those that are kept, or all
        cdef MessageView view
        # Fewer were kept where the layout has changed since: then the message ends within its headers.
        cdef Py_ssize_t kept = min(available, self._kept_of(total))
        cdef int code = read_layout(frame + FRAME_DATA_AT, kept - FRAME_DATA_AT, self.ext, self.detail, &view)
        if code != LAYOUT_OK:
            raise_layout_error(code, total - FRAME_DATA_AT)
        view.body_size += total - kept
        return new_truncated(&view, self.detail, responder, now, self.max_frame_size)

    cdef Py_ssize_t _top_up(self, const unsigned char* data, Py_ssize_t size) except -1:
        cdef Py_ssize_t taken = 0, n
        # The header goes into _head, eight bytes: memory is taken only when its size has passed the limit.
        if self._frame == NULL:
            taken = min(FRAME_DATA_AT - self._have, size)
            memcpy(self._head + self._have, data, taken)
            self._have += taken
            self._total = frame_total(self._head, self._have, self.max_frame_size, self.skip_oversized)
            if self._total < 0:
                _raise_frame_error(self._total, self._head, self.max_frame_size)
            if self._have < FRAME_DATA_AT:
                return taken
            self._kept = self._total
            if is_oversized(self, self._total):
                self._kept = self._kept_of(self._total)
            self._frame = <unsigned char*> PyMem_Malloc(self._kept)
            if self._frame == NULL:
                raise MemoryError()
            memcpy(self._frame, self._head, FRAME_DATA_AT)
        n = min(self._total - self._have, size - taken)
        # Of an oversized message only the headers are kept; the rest is counted, and dropped.
        if self._have < self._kept:
            memcpy(self._frame + self._have, data + taken, min(self._kept - self._have, n))
        self._have += n
        return taken + n

    @property
    def error(self):
        """What poisoned the reader, also when frames before it were still returned; None while it works."""
        with cython.critical_section(self):
            return self._error

    @property
    def buffered(self):
        """Bytes that were fed and are not decoded yet."""
        return self._have

    @cython.critical_section
    def take_buffered(self):
        """Take those bytes out, for whoever reads the stream from here on.

        Raises LocalProtocolError when bytes of an oversized message have been passed over: nobody can go on there.
        """
        return self._take()

    cdef bytes _take(self):
        if self._busy:
            raise LocalProtocolError("take_buffered was called inside feed")
        if self._frame != NULL and self._have > self._kept:
            raise LocalProtocolError("take_buffered was called inside a message that is passed over")
        cdef const unsigned char* start = &self._head[0] if self._frame == NULL else self._frame
        taken = PyBytes_FromStringAndSize(<const char*> start, self._have)
        self._drop_frame()
        return taken


cdef inline bint is_oversized(FrameBuffer reader, Py_ssize_t total) noexcept:
    # no method: those are called through a table, here for each message
    return total > FRAME_TYPE_AT + reader.max_frame_size


cdef class FrameReader(FrameBuffer):
    """Turns received bytes into frames.

    Args:
        detail: messages carry offset and raw size (SUB_ADVANCED and SUB_ORDERED).
        ext: messages carry an ext header (topic and client both with extend_support).
        max_frame_size: largest frame accepted, in bytes, 4 to 2**31 - 1.
        skip_oversized: a message frame above ``max_frame_size`` comes as a TruncatedMessage; otherwise it is an error,
            as it is for all other frames.
        responder: given to every message, to send its FIN, REQ and TOUCH.
    """

    def __init__(
        self, *, detail=False, ext=False, max_frame_size=DEFAULT_MAX_FRAME_SIZE, skip_oversized=False, responder=None
    ):
        FrameBuffer.__init__(
            self, detail=detail, ext=ext, max_frame_size=max_frame_size, skip_oversized=skip_oversized
        )
        self.responder = responder

    @cython.critical_section
    cpdef list feed(self, data, double now=0.0, Py_ssize_t max_frames=0):
        """Decode what ``data`` completes: a list of Message, TruncatedMessage, Response and ErrorFrame.

        Args:
            data: any bytes-like object, split anywhere.
            now: becomes ``received_at`` of the messages.
            max_frames: stop after so many and keep the rest for the next feed; 0 for no limit.

        Raises RemoteProtocolError when the bytes are not NSQ's and no frame came before them. Otherwise those frames
        are returned, and the next feed raises. There is no way on after it: every later feed raises the same.
        """
        cdef list out = []
        cdef const unsigned char* pointer
        cdef Py_ssize_t size
        cdef Py_ssize_t limit = max_frames if max_frames > 0 else PY_SSIZE_T_MAX
        piece = bytes_like(data, "data")
        self._enter()
        self.message_count = 0
        try:
            if max_frames > 0 or self._backlog is not None:
                self._feed_backlog(piece, out, now, limit)
            else:
                size = bytes_view(piece, &pointer)
                self._decode(pointer, size, out, now, limit)
        except RemoteProtocolError as error:
            self._poison(error)
            self._backlog = None
        except BaseException:  # MemoryError, say, in the middle of a chunk: it is not known how far that was decoded
            self._poison(LocalProtocolError("the reader lost its place when an earlier feed failed"))
            raise
        finally:
            self._busy = False
        if self._error is not None and not out:
            self._raise_error()
        return out

    cdef int _feed_backlog(self, object data, list out, double now, Py_ssize_t limit) except -1:
        cdef const unsigned char* pointer
        cdef Py_ssize_t size, used
        if self._backlog is None:
            self._backlog = deque()
            self._backlog_at = 0
        self._backlog.append(bytes(data))  # a copy of what is not bytes: the caller may use its buffer again
        while self._backlog:
            size = bytes_view(self._backlog[0], &pointer) - self._backlog_at
            used = self._decode(pointer + self._backlog_at, size, out, now, limit)
            if used < size:
                self._backlog_at += used
                return 0
            self._backlog.popleft()
            self._backlog_at = 0
        self._backlog = None
        return 0

    cdef Py_ssize_t _decode(
        self, const unsigned char* data, Py_ssize_t size, list out, double now, Py_ssize_t limit
    ) except -1:
        cdef Py_ssize_t at = 0, total
        if self._have and size:
            at = self._top_up(data, size)
            if not self._is_whole():
                return at
            out.append(self._decode_kept(now))
            self._drop_frame()
        while at < size and len(out) < limit:
            total = frame_total(data + at, size - at, self.max_frame_size, self.skip_oversized)
            if total < 0:
                _raise_frame_error(total, data + at, self.max_frame_size)
            # The last frame of a chunk is mostly cut: it is copied, once, and all others are decoded where they lie.
            if total == 0 or total > size - at:
                self._top_up(data + at, size - at)
                return size
            out.append(self._decode_frame(data + at, total, now))
            at += total
        return at

    cdef object _decode_kept(self, double now):
        # the frame that came in pieces; a message of which some was dropped is oversized, whatever the limit is by now
        if self._kept < self._total:
            return self._truncated(self._frame, self._kept, self._total, self.responder, now)
        return self._decode_frame(self._frame, self._total, now)

    cdef object _decode_frame(self, const unsigned char* frame, Py_ssize_t total, double now):
        cdef MessageView view
        cdef int code
        cdef bint detail = self.detail
        cdef uint32_t kind = read_u32(frame + FRAME_TYPE_AT)
        cdef const unsigned char* data = frame + FRAME_DATA_AT
        cdef Py_ssize_t size = total - FRAME_DATA_AT
        if kind == FRAME_MESSAGE:
            if is_oversized(self, total):
                return self._truncated(frame, total, total, self.responder, now)
            code = read_layout(data, size, self.ext, detail, &view)
            if code != LAYOUT_OK:
                raise_layout_error(code, size)
            self.message_count += 1
            return new_message(&view, detail, self.responder, now)
        if kind == FRAME_RESPONSE:
            return _response(self, data, size)
        return _error_frame(data, size)

    @property
    def buffered(self):
        """Bytes that were fed and are not decoded yet."""
        with cython.critical_section(self):
            if self._backlog is None:
                return self._have
            size = self._have - self._backlog_at
            for piece in self._backlog:
                size += len(piece)
            return size

    @cython.critical_section
    def take_buffered(self):
        """Take those bytes out, for whoever reads the stream from here on."""
        taken = self._take()
        if self._backlog is not None:
            taken += b"".join(self._backlog)[self._backlog_at:]
            self._backlog = None
        return taken


include "_columns.pxi"
include "_session.pxi"
