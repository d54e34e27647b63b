"""The frame reader: bytes in any pieces to lists of messages, responses and errors, or to columns.

``FrameReader`` gives objects to handlers, ``ColumnReader`` gives Arrow buffers to batch users. Both hold one partial
frame at most, in a buffer sized from that frame's header once the header has passed the size limit; whole frames are
decoded where they lie in the caller's chunk. So the work is linear in the bytes, whatever way they are split.

Garbage ends in one RemoteProtocolError, after the frames before it were returned; the reader then raises nothing but
that error. The commands that go the other way are in ``_codec``, and so is the layout of a message.
"""

from collections import deque

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
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
    ID_SIZE,
    INTERNAL_ID_AT,
    LAYOUT_OK,
    MESSAGE_HEADER_SIZE,
    MessageView,
    SHORT_HEADER,
    TRACE_ID_AT,
    bytes_like,
    bytes_view,
    checked_int,
    new_message,
    raise_layout_error,
    read_layout,
    read_u32,
    read_u64,
)

from .errors import LocalProtocolError, RemoteProtocolError, server_error

cdef enum:
    # what frame_total found wrong
    BAD_SIZE = -1
    BAD_TYPE = -2
    SHORT_MESSAGE = -3

    TYPE_SIZE = 4                   # the part of a frame that its size counts beside the data
    MAX_COLUMN_SIZE = 0x7fffffff    # offsets into a column have 32 bits

DEFAULT_MAX_FRAME_SIZE = 8 * 1024 * 1024

cdef Py_ssize_t NO_LIMIT = <Py_ssize_t> ((<size_t> -1) >> 1)


cdef class Response:
    """A response frame. The three that servers repeat are always the same objects: OK, HEARTBEAT, CLOSE_WAIT."""

    def __init__(self, data):
        self.data = bytes(bytes_like(data, "data"))

    def __repr__(self):
        return f"Response({self.data!r})"


cdef class ErrorFrame:
    """An error frame."""

    def __init__(self, data):
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

cdef Response _OK = OK
cdef Response _HEARTBEAT = HEARTBEAT
cdef Response _CLOSE_WAIT = CLOSE_WAIT


cdef Response _response(const unsigned char* data, Py_ssize_t size):
    cdef Response response
    if size == 2 and memcmp(data, b"OK", 2) == 0:
        return _OK
    if size == 11 and memcmp(data, b"_heartbeat_", 11) == 0:
        return _HEARTBEAT
    if size == 10 and memcmp(data, b"CLOSE_WAIT", 10) == 0:
        return _CLOSE_WAIT
    response = Response.__new__(Response)
    response.data = PyBytes_FromStringAndSize(<const char*> data, size)
    return response


cdef ErrorFrame _error_frame(const unsigned char* data, Py_ssize_t size):
    cdef ErrorFrame frame = ErrorFrame.__new__(ErrorFrame)
    frame.data = PyBytes_FromStringAndSize(<const char*> data, size)
    return frame


cdef Py_ssize_t frame_total(const unsigned char* frame, Py_ssize_t available, Py_ssize_t max_size) noexcept nogil:
    """Length of the frame that starts here; 0 when too little of it is here to tell; negative when it is not one.

    Every part of the header is judged as soon as it is here, so that the verdict does not depend on the split.
    """
    cdef Py_ssize_t size
    cdef uint32_t kind
    if available < FRAME_TYPE_AT:
        return 0
    size = <Py_ssize_t> read_u32(frame + FRAME_SIZE_AT)
    if size < TYPE_SIZE or size > max_size:
        return BAD_SIZE
    if available >= FRAME_DATA_AT:
        kind = read_u32(frame + FRAME_TYPE_AT)
        if kind > FRAME_MESSAGE:
            return BAD_TYPE
        if kind == FRAME_MESSAGE and size < TYPE_SIZE + MESSAGE_HEADER_SIZE:
            return SHORT_MESSAGE
    return FRAME_TYPE_AT + size


cdef int _raise_frame_error(Py_ssize_t code, const unsigned char* frame, Py_ssize_t max_size) except -1:
    size = read_u32(frame + FRAME_SIZE_AT)
    if code == SHORT_MESSAGE:
        raise_layout_error(SHORT_HEADER, size - TYPE_SIZE)
    if code == BAD_TYPE:
        raise RemoteProtocolError(f"unknown frame type {read_u32(frame + FRAME_TYPE_AT)}")
    start = frame[:FRAME_TYPE_AT]
    hint = ""
    if start == b"HTTP":
        hint = "; the peer speaks HTTP: is this the HTTP port (4151) of an nsqd, not its TCP port (4150)?"
    elif start[0] in b"\x15\x16" and start[1] == 3:
        hint = "; the peer speaks TLS"
    raise RemoteProtocolError(f"frame size {size} is not within {TYPE_SIZE} and {max_size}: {start!r}{hint}")


cdef class FrameBuffer:
    """What both readers share: the layout in force, the partial frame, the error that poisoned them."""

    def __init__(self, *, detail=False, ext=False, max_frame_size=DEFAULT_MAX_FRAME_SIZE):
        self.detail = detail
        self.ext = ext
        self.max_frame_size = checked_int(max_frame_size, "max_frame_size", TYPE_SIZE, 0x7fffffff)

    def __dealloc__(self):
        PyMem_Free(self._frame)

    cdef int _enter(self) except -1:
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

    cdef Py_ssize_t _top_up(self, const unsigned char* data, Py_ssize_t size) except -1:
        cdef Py_ssize_t taken = 0, n
        if self._frame == NULL:
            taken = min(FRAME_DATA_AT - self._have, size)
            memcpy(self._head + self._have, data, taken)
            self._have += taken
            self._total = frame_total(self._head, self._have, self.max_frame_size)
            if self._total < 0:
                _raise_frame_error(self._total, self._head, self.max_frame_size)
            if self._have < FRAME_DATA_AT:
                return taken
            self._frame = <unsigned char*> PyMem_Malloc(self._total)
            if self._frame == NULL:
                raise MemoryError()
            memcpy(self._frame, self._head, FRAME_DATA_AT)
        n = min(self._total - self._have, size - taken)
        memcpy(self._frame + self._have, data + taken, n)
        self._have += n
        return taken + n

    @property
    def error(self):
        """What poisoned the reader, also when frames before it were still returned; None while it works."""
        return self._error

    @property
    def buffered(self):
        """Bytes that were fed and are not decoded yet."""
        return self._have

    def take_buffered(self):
        """Take those bytes out, for whoever reads the stream from here on."""
        if self._busy:
            raise LocalProtocolError("take_buffered was called inside feed")
        cdef const unsigned char* start = &self._head[0] if self._frame == NULL else self._frame
        taken = PyBytes_FromStringAndSize(<const char*> start, self._have)
        self._drop_frame()
        return taken


cdef class FrameReader(FrameBuffer):
    """Turns received bytes into frames.

    Args:
        detail: messages carry offset and raw size (SUB_ADVANCED and SUB_ORDERED).
        ext: messages carry an ext header (topic and client both with extend_support).
        max_frame_size: largest frame accepted, in bytes, 4 to 2**31 - 1.
        responder: given to every message, to send its FIN, REQ and TOUCH.
    """

    def __init__(self, *, detail=False, ext=False, max_frame_size=DEFAULT_MAX_FRAME_SIZE, responder=None):
        FrameBuffer.__init__(self, detail=detail, ext=ext, max_frame_size=max_frame_size)
        self.responder = responder

    cpdef list feed(self, data, double now=0.0, Py_ssize_t max_frames=0):
        """Decode what ``data`` completes: a list of Message, Response and ErrorFrame.

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
        cdef Py_ssize_t limit = max_frames if max_frames > 0 else NO_LIMIT
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
        except BaseException:
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
        self._backlog.append(bytes(data))
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
            out.append(self._decode_frame(self._frame, self._total, now))
            self._drop_frame()
        while at < size and len(out) < limit:
            total = frame_total(data + at, size - at, self.max_frame_size)
            if total < 0:
                _raise_frame_error(total, data + at, self.max_frame_size)
            if total == 0 or total > size - at:
                self._top_up(data + at, size - at)
                return size
            out.append(self._decode_frame(data + at, total, now))
            at += total
        return at

    cdef object _decode_frame(self, const unsigned char* frame, Py_ssize_t total, double now):
        cdef MessageView view
        cdef int code
        cdef bint detail = self.detail
        cdef uint32_t kind = read_u32(frame + FRAME_TYPE_AT)
        cdef const unsigned char* data = frame + FRAME_DATA_AT
        cdef Py_ssize_t size = total - FRAME_DATA_AT
        if kind == FRAME_MESSAGE:
            code = read_layout(data, size, self.ext, detail, &view)
            if code != LAYOUT_OK:
                raise_layout_error(code, size)
            self.message_count += 1
            return new_message(&view, detail, self.responder, now)
        if kind == FRAME_RESPONSE:
            return _response(data, size)
        return _error_frame(data, size)

    @property
    def buffered(self):
        """Bytes that were fed and are not decoded yet."""
        if self._backlog is None:
            return self._have
        return self._have + sum(map(len, self._backlog)) - self._backlog_at

    def take_buffered(self):
        """Take those bytes out, for whoever reads the stream from here on."""
        taken = FrameBuffer.take_buffered(self)
        if self._backlog is not None:
            taken += b"".join(self._backlog)[self._backlog_at:]
            self._backlog = None
        return taken


cdef class Columns:
    """Messages as columns: bytes objects in Arrow's layout, in the machine's byte order, without nulls.

    ``pyarrow.Array.from_buffers(type, count, [None, pyarrow.py_buffer(column)])`` wraps one without a copy; for
    ``body`` and ``ext`` the type is ``binary()`` and the buffers are ``[None, offsets, data]``.

    Attributes:
        count: number of messages.
        timestamps: int64, nanoseconds since the epoch.
        attempts: uint16.
        ids: fixed_size_binary(16).
        internal_ids, trace_ids: uint64.
        offsets, sizes: uint64 and uint32 of the detail header; None without it.
        ext_versions, ext_offsets, ext: uint8, and binary as below, of the ext header; None without it.
        body_offsets, body: int32 offsets, ``count`` + 1 of them, and all bodies in one buffer.
        frames: the Response and ErrorFrame objects that came among the messages.
    """

    def __init__(self):
        raise TypeError("Columns are made by ColumnReader.feed")

    def __len__(self):
        return self.count


cdef struct Tally:
    Py_ssize_t used         # bytes of whole, good frames
    Py_ssize_t messages
    Py_ssize_t others
    Py_ssize_t body_size    # of all messages together
    Py_ssize_t ext_size
    Py_ssize_t frame_code   # what frame_total said of the frame after them, when that is bad
    int layout_code         # or what read_layout said of its data
    Py_ssize_t layout_size  # which is that long


cdef struct Cursor:
    int64_t* timestamps
    uint16_t* attempts
    unsigned char* ids
    uint64_t* internal_ids
    uint64_t* trace_ids
    uint64_t* offsets
    uint32_t* sizes
    uint8_t* ext_versions
    int32_t* ext_offsets
    unsigned char* ext
    int32_t* body_offsets
    unsigned char* body
    Py_ssize_t row
    int32_t ext_at
    int32_t body_at


cdef void tally_frames(
    const unsigned char* data, Py_ssize_t size, Py_ssize_t max_size, bint ext, bint detail, Tally* tally
) noexcept nogil:
    cdef MessageView view
    cdef Py_ssize_t at = 0, total
    while at < size:
        total = frame_total(data + at, size - at, max_size)
        if total < 0:
            tally.frame_code = total
            break
        if total == 0 or total > size - at:
            break
        if read_u32(data + at + FRAME_TYPE_AT) == FRAME_MESSAGE:
            tally.layout_code = read_layout(data + at + FRAME_DATA_AT, total - FRAME_DATA_AT, ext, detail, &view)
            if tally.layout_code != LAYOUT_OK:
                tally.layout_size = total - FRAME_DATA_AT
                break
            tally.messages += 1
            tally.body_size += view.body_size
            tally.ext_size += view.ext_size
        else:
            tally.others += 1
        at += total
    tally.used = at


@cython.boundscheck(False)
@cython.wraparound(False)
cdef void fill_columns(
    const unsigned char* data, Py_ssize_t size, bint ext, bint detail, Cursor* to
) noexcept nogil:
    # `size` bytes of frames that tally_frames has found good
    cdef MessageView view
    cdef Py_ssize_t at = 0, total
    while at < size:
        total = FRAME_TYPE_AT + <Py_ssize_t> read_u32(data + at)
        if read_u32(data + at + FRAME_TYPE_AT) == FRAME_MESSAGE:
            read_layout(data + at + FRAME_DATA_AT, total - FRAME_DATA_AT, ext, detail, &view)
            fill_row(&view, ext, detail, to)
        at += total


cdef void fill_row(const MessageView* view, bint ext, bint detail, Cursor* to) noexcept nogil:
    cdef Py_ssize_t row = to.row
    to.timestamps[row] = view.timestamp
    to.attempts[row] = view.attempts
    memcpy(to.ids + ID_SIZE * row, view.id, ID_SIZE)
    to.internal_ids[row] = read_u64(view.id)
    to.trace_ids[row] = read_u64(view.id + TRACE_ID_AT - INTERNAL_ID_AT)
    if detail:
        to.offsets[row] = view.offset
        to.sizes[row] = view.raw_size
    if ext:
        to.ext_versions[row] = <uint8_t> view.ext_version
        if view.ext_size:
            memcpy(to.ext + to.ext_at, view.ext, view.ext_size)
        to.ext_at += <int32_t> view.ext_size
        to.ext_offsets[row + 1] = to.ext_at
    memcpy(to.body + to.body_at, view.body, view.body_size)
    to.body_at += <int32_t> view.body_size
    to.body_offsets[row + 1] = to.body_at
    to.row = row + 1


cdef void* _column(bytes buffer) noexcept:
    return PyBytes_AS_STRING(buffer)


cdef int _allocate(Columns columns, const Tally* tally, bint ext, bint detail, Cursor* to) except -1:
    cdef Py_ssize_t n = tally.messages
    columns.count = n
    columns.frames = []
    columns.timestamps = PyBytes_FromStringAndSize(NULL, n * 8)
    columns.attempts = PyBytes_FromStringAndSize(NULL, n * 2)
    columns.ids = PyBytes_FromStringAndSize(NULL, n * ID_SIZE)
    columns.internal_ids = PyBytes_FromStringAndSize(NULL, n * 8)
    columns.trace_ids = PyBytes_FromStringAndSize(NULL, n * 8)
    columns.body_offsets = PyBytes_FromStringAndSize(NULL, (n + 1) * 4)
    columns.body = PyBytes_FromStringAndSize(NULL, tally.body_size)
    to.timestamps = <int64_t*> _column(columns.timestamps)
    to.attempts = <uint16_t*> _column(columns.attempts)
    to.ids = <unsigned char*> _column(columns.ids)
    to.internal_ids = <uint64_t*> _column(columns.internal_ids)
    to.trace_ids = <uint64_t*> _column(columns.trace_ids)
    to.body_offsets = <int32_t*> _column(columns.body_offsets)
    to.body = <unsigned char*> _column(columns.body)
    to.body_offsets[0] = 0
    to.row = to.body_at = to.ext_at = 0
    if detail:
        columns.offsets = PyBytes_FromStringAndSize(NULL, n * 8)
        columns.sizes = PyBytes_FromStringAndSize(NULL, n * 4)
        to.offsets = <uint64_t*> _column(columns.offsets)
        to.sizes = <uint32_t*> _column(columns.sizes)
    if ext:
        columns.ext_versions = PyBytes_FromStringAndSize(NULL, n)
        columns.ext_offsets = PyBytes_FromStringAndSize(NULL, (n + 1) * 4)
        columns.ext = PyBytes_FromStringAndSize(NULL, tally.ext_size)
        to.ext_versions = <uint8_t*> _column(columns.ext_versions)
        to.ext_offsets = <int32_t*> _column(columns.ext_offsets)
        to.ext = <unsigned char*> _column(columns.ext)
        to.ext_offsets[0] = 0
    return 0


cdef int _collect_others(const unsigned char* data, Py_ssize_t size, list frames) except -1:
    cdef Py_ssize_t at = 0, total
    cdef uint32_t kind
    while at < size:
        total = FRAME_TYPE_AT + <Py_ssize_t> read_u32(data + at)
        kind = read_u32(data + at + FRAME_TYPE_AT)
        if kind == FRAME_RESPONSE:
            frames.append(_response(data + at + FRAME_DATA_AT, total - FRAME_DATA_AT))
        elif kind == FRAME_ERROR:
            frames.append(_error_frame(data + at + FRAME_DATA_AT, total - FRAME_DATA_AT))
        at += total
    return 0


cdef class ColumnReader(FrameBuffer):
    """Turns received bytes into columns; options, errors and poisoning as FrameReader's.

    The frames are decoded with the GIL released.
    """

    def feed(self, chunk):
        """Decode what ``chunk`` completes into Columns.

        ``chunk`` is any bytes-like object; bytes are read where they are, others are copied first, as they might
        change meanwhile. Chunk and largest frame together must be less than 2 GiB.
        """
        cdef Columns columns = Columns.__new__(Columns)
        cdef const unsigned char* data
        cdef bytes piece = chunk if type(chunk) is bytes else bytes(bytes_like(chunk, "chunk"))
        cdef Py_ssize_t size = bytes_view(piece, &data)
        if size > MAX_COLUMN_SIZE - self.max_frame_size:
            raise ValueError(f"chunk must be at most {MAX_COLUMN_SIZE - self.max_frame_size} bytes, not {size}")
        self._enter()
        try:
            self._decode(data, size, columns)
        except RemoteProtocolError as error:
            self._poison(error)
        except BaseException:
            self._poison(LocalProtocolError("the reader lost its place when an earlier feed failed"))
            raise
        finally:
            self._busy = False
        if self._error is not None and not columns.count and not columns.frames:
            self._raise_error()
        return columns

    cdef int _decode(self, const unsigned char* data, Py_ssize_t size, Columns columns) except -1:
        # first the partial frame, if `data` completes it, then the frames that lie in `data`
        cdef bint ext = self.ext, detail = self.detail
        cdef Py_ssize_t limit = self.max_frame_size, first = 0, at = 0
        cdef Tally tally
        cdef Cursor to
        memset(&tally, 0, sizeof(Tally))
        if self._have and size:
            at = self._top_up(data, size)
            first = self._total if self._is_whole() else 0
        with nogil:
            tally_frames(self._frame, first, limit, ext, detail, &tally)
            first = tally.used
            tally.used = 0
            if tally.layout_code == LAYOUT_OK:
                tally_frames(data + at, size - at, limit, ext, detail, &tally)
        _allocate(columns, &tally, ext, detail, &to)
        with nogil:
            fill_columns(self._frame, first, ext, detail, &to)
            fill_columns(data + at, tally.used, ext, detail, &to)
        if tally.others:
            _collect_others(self._frame, first, columns.frames)
            _collect_others(data + at, tally.used, columns.frames)
        at += tally.used
        if tally.frame_code:
            _raise_frame_error(tally.frame_code, data + at, limit)
        if tally.layout_code != LAYOUT_OK:
            raise_layout_error(tally.layout_code, tally.layout_size)
        if self._is_whole():
            self._drop_frame()
        if at < size:
            self._top_up(data + at, size - at)
        return 0
