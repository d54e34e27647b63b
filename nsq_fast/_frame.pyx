"""The frame reader: bytes in any pieces to lists of messages, responses and errors, or to columns.

``FrameReader`` gives objects to handlers, ``ColumnReader`` Arrow buffers to batch users. Both hold one partial frame at
most, in a buffer sized from that frame's header once the header has passed the size limit; whole frames are decoded
where they lie in the caller's chunk. So the work is linear in the bytes, however they are split.

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


# The column face.
#
# Two passes over the whole frames of a chunk, both without the GIL: ``tally_frames`` checks them and adds up what they
# hold, ``fill_columns`` copies it into buffers of exactly that size. Nothing is made per message.


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
        frames: the Response, ErrorFrame and TruncatedMessage objects that came among the messages.
    """

    def __init__(self):
        raise TypeError("Columns are made by ColumnReader.feed and join_columns")

    def __len__(self):
        return self.count


cdef struct Tally:
    Py_ssize_t used         # bytes of whole, good frames
    Py_ssize_t messages
    Py_ssize_t others       # frames that become objects: responses, errors, oversized messages
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


cdef inline bint is_row(const unsigned char* frame, Py_ssize_t total, Py_ssize_t max_size) noexcept nogil:
    # whether a good frame becomes a row of the columns: a message that is not oversized
    return read_u32(frame + FRAME_TYPE_AT) == FRAME_MESSAGE and total <= FRAME_TYPE_AT + max_size


cdef void tally_frames(
    const unsigned char* data, Py_ssize_t size, const Layout* layout, Tally* tally
) noexcept nogil:
    cdef MessageView view
    cdef Py_ssize_t at = 0, total
    cdef Py_ssize_t max_size = layout.max_size
    cdef bint skip_oversized = layout.skip_oversized, ext = layout.ext, detail = layout.detail
    while at < size:
        total = frame_total(data + at, size - at, max_size, skip_oversized)
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
        if is_row(data + at, total, max_size):
            tally.messages += 1
            tally.body_size += view.body_size
            tally.ext_size += view.ext_size
        else:
            tally.others += 1
        at += total
    tally.used = at


@cython.boundscheck(False)
@cython.wraparound(False)
cdef void fill_columns(const unsigned char* data, Py_ssize_t size, const Layout* layout, Cursor* to) noexcept nogil:
    # `size` bytes of frames that tally_frames has found good
    cdef MessageView view
    cdef Py_ssize_t at = 0, total
    cdef Py_ssize_t max_size = layout.max_size
    cdef bint ext = layout.ext, detail = layout.detail
    while at < size:
        total = FRAME_TYPE_AT + <Py_ssize_t> read_u32(data + at)
        if is_row(data + at, total, max_size):
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


def join_columns(parts, *, bint bodies=True):
    """Columns that came one after another as one: what gathers many small reads into a batch worth handing on.

    Args:
        bodies: otherwise ``body`` is empty, for who has no need of one buffer; ``body_offsets`` are as with it.

    Raises ValueError when a detail or ext header is in some of them only (an empty one may lack both), and when all
    bodies together, or all ext headers, take 2 GiB.
    """
    cdef list given = _checked_parts(parts)
    cdef list items = [part for part in given if part.count]
    cdef Tally tally
    cdef Cursor to
    cdef Columns first, part, columns
    if len(given) == 1 and bodies:
        return given[0]
    memset(&tally, 0, sizeof(Tally))
    for part in items:
        first = items[0]
        if (part.offsets is None) != (first.offsets is None) or (part.ext is None) != (first.ext is None):
            raise ValueError("parts must have the same headers, all of them")
        tally.messages += part.count
        tally.body_size += PyBytes_GET_SIZE(part.body)
        tally.ext_size += 0 if part.ext is None else PyBytes_GET_SIZE(part.ext)
    if tally.body_size > MAX_COLUMN_SIZE or tally.ext_size > MAX_COLUMN_SIZE:
        raise ValueError("parts must hold less than 2 GiB in one column")
    if not bodies:
        tally.body_size = 0
    columns = Columns.__new__(Columns)
    has_ext = bool(items) and (<Columns> items[0]).ext is not None
    has_detail = bool(items) and (<Columns> items[0]).offsets is not None
    _allocate(columns, &tally, has_ext, has_detail, &to)
    for part in items:
        _append(part, &to, bodies)
    for part in given:
        columns.frames += part.frames
    return columns


cdef list _checked_parts(object parts):
    items = list(parts)
    for part in items:
        if not isinstance(part, Columns):
            raise TypeError(f"parts must hold Columns, not {type(part).__name__}")
    return items


cdef void _append(Columns part, Cursor* to, bint bodies) noexcept:
    cdef Py_ssize_t n = part.count, row = to.row
    memcpy(to.timestamps + row, _column(part.timestamps), n * 8)
    memcpy(to.attempts + row, _column(part.attempts), n * 2)
    memcpy(to.ids + ID_SIZE * row, _column(part.ids), n * ID_SIZE)
    memcpy(to.internal_ids + row, _column(part.internal_ids), n * 8)
    memcpy(to.trace_ids + row, _column(part.trace_ids), n * 8)
    if part.offsets is not None:
        memcpy(to.offsets + row, _column(part.offsets), n * 8)
        memcpy(to.sizes + row, _column(part.sizes), n * 4)
    if part.ext is not None:
        memcpy(to.ext_versions + row, _column(part.ext_versions), n)
        to.ext_at = _append_offsets(<int32_t*> _column(part.ext_offsets), n, to.ext_offsets + row, to.ext_at)
        memcpy(to.ext + to.ext_offsets[row], _column(part.ext), to.ext_at - to.ext_offsets[row])
    to.body_at = _append_offsets(<int32_t*> _column(part.body_offsets), n, to.body_offsets + row, to.body_at)
    if bodies:
        memcpy(to.body + to.body_offsets[row], _column(part.body), to.body_at - to.body_offsets[row])
    to.row = row + n


@cython.boundscheck(False)
cdef int32_t _append_offsets(const int32_t* offsets, Py_ssize_t n, int32_t* to, int32_t base) noexcept nogil:
    # to[0] stands already: it is where the part before ended
    cdef Py_ssize_t i
    for i in range(1, n + 1):
        to[i] = base + offsets[i]
    return base + offsets[n]


cdef class ColumnReader(FrameBuffer):
    """Turns received bytes into columns; options, errors and poisoning as FrameReader's.

    The frames are decoded with the GIL released; a feed from another thread meanwhile raises LocalProtocolError.
    """

    @cython.critical_section
    def feed(self, chunk):
        """Decode what ``chunk`` completes into Columns.

        ``chunk`` is any bytes-like object; bytes are read where they are, others are copied first, as they might
        change meanwhile. Raises ValueError, and takes nothing, when the chunk and what is here of an unfinished message
        do not fit into one column together (2 GiB).
        """
        cdef Columns columns = Columns.__new__(Columns)
        cdef const unsigned char* data
        given = bytes_like(chunk, "chunk")
        cdef Py_ssize_t size = bytes_view(given, &data)
        # No more body than this can come of it: whatever else is here of the frame is header.
        cdef Py_ssize_t held = max(self._have - FRAME_DATA_AT - MESSAGE_HEADER_SIZE, 0)
        if size > MAX_COLUMN_SIZE - held:
            raise ValueError(f"chunk must be at most {MAX_COLUMN_SIZE - held} bytes, not {size}")
        cdef bytes piece = given if type(given) is bytes else bytes(given)
        bytes_view(piece, &data)
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
        cdef Layout layout = Layout(self.max_frame_size, self.skip_oversized, self.ext, self.detail)
        cdef Py_ssize_t first = 0, at = 0
        cdef TruncatedMessage truncated = None
        cdef Tally tally
        cdef Cursor to
        memset(&tally, 0, sizeof(Tally))
        if self._have and size:
            at = self._top_up(data, size)
            first = self._total if self._is_whole() else 0
        if first and (self._kept < first or is_oversized(self, first)):
            truncated = self._truncated(self._frame, self._kept, first, None, 0.0)
            self._drop_frame()
            first = 0
        with nogil:
            tally_frames(self._frame, first, &layout, &tally)
            first = tally.used
            tally.used = 0
            if tally.layout_code == LAYOUT_OK:
                tally_frames(data + at, size - at, &layout, &tally)
        _allocate(columns, &tally, layout.ext, layout.detail, &to)
        with nogil:
            fill_columns(self._frame, first, &layout, &to)
            fill_columns(data + at, tally.used, &layout, &to)
        if truncated is not None:
            columns.frames.append(truncated)
        if tally.others:
            self._collect_others(self._frame, first, &layout, columns.frames)
            self._collect_others(data + at, tally.used, &layout, columns.frames)
        at += tally.used
        if tally.frame_code:
            _raise_frame_error(tally.frame_code, data + at, layout.max_size)
        if tally.layout_code != LAYOUT_OK:
            raise_layout_error(tally.layout_code, tally.layout_size)
        if self._is_whole():
            self._drop_frame()
        if at < size:
            self._top_up(data + at, size - at)
        return 0

    cdef int _collect_others(
        self, const unsigned char* data, Py_ssize_t size, const Layout* layout, list frames
    ) except -1:
        # `size` bytes of frames that tally_frames has found good
        cdef Py_ssize_t at = 0, total
        cdef uint32_t kind
        while at < size:
            total = FRAME_TYPE_AT + <Py_ssize_t> read_u32(data + at)
            kind = read_u32(data + at + FRAME_TYPE_AT)
            if kind == FRAME_RESPONSE:
                frames.append(_response(self, data + at + FRAME_DATA_AT, total - FRAME_DATA_AT))
            elif kind == FRAME_ERROR:
                frames.append(_error_frame(data + at + FRAME_DATA_AT, total - FRAME_DATA_AT))
            elif not is_row(data + at, total, layout.max_size):
                frames.append(self._truncated(data + at, total, total, None, 0.0))
            at += total
        return 0


# What a session does for each command and for each read: replies find their commands, bytes become messages.
# ``SessionPath`` is the base of ``nsq_fast.protocol.session``, which says what the rules are and has what is done less
# often. No I/O, and no clock.

cdef enum:
    OK_SIZE = 10
    RECEIPT_SIZE = 38  # a frame with the answer to a traced publish, see ``_codec.traced_reply``


@cython.nonecheck(True)  # what was not set, by mistake, is an AttributeError then, and does not end the process
cdef class SessionPath:
    """The side of a conversation that all connections need all the time.

    Args:
        stage: how far the conversation has come.
        ready: the stage in which commands are allowed, and messages come.
        publishes: the names of the commands to which OK says all there is to say.
        reader: makes frames of what is received until another takes its place.

    Attributes:
        stage: how far the conversation has come.
        dialect: the server's family; its ``commands`` are those that the server knows.
        pending: the commands that wait for their reply: name and token, in the order in which they were given.
        message_count: messages in the list that ``receive`` returned last. When it equals the length of the list, the
            list holds messages only.
        failure: the error that the next ``receive`` raises, if there is one.
        ledger: the messages in flight, and when the server takes them back.
    """

    def __init__(self, stage, ready, publishes, FrameReader reader not None):
        self.stage = stage
        self.pending = deque()
        self._ready = ready
        self._publishes = publishes
        self._reader = reader

    def expect(self, command, token=None):
        """Register a command whose bytes the caller has built; its reply will carry ``token``.

        The bytes must be written in the order of the ``expect`` calls. Raises LocalProtocolError
        when no command is allowed now, or when the server's dialect does not have it.
        """
        self.put(command, token)

    cdef int put(self, command, token) except -1:
        if self.stage is not self._ready or command not in self.dialect.commands:
            self._refuse(command)
        self.pending.append((command, token))
        return 0

    cdef bint is_ready(self) noexcept:
        """Whether commands are allowed, and nothing read so far ends the connection."""
        return self.stage is self._ready and self.failure is None

    cdef bint is_idle(self) except -1:
        """Whether commands are allowed, and no reply is due."""
        return self.is_ready() and not self.pending

    def receive(self, data, double now=0.0):
        """Take bytes from the server; return what they complete: messages and events, in order.

        Args:
            data: what was read; ``b""`` for the end of the stream.
            now: a monotonic time in seconds. It becomes ``received_at`` of the messages, and is needed to notice a
                server that ignores RDY.

        Raises:
            RemoteProtocolError: the server broke the protocol, or sends many more messages than RDY allows.
            LocalProtocolError: called before ``connect()``, or between UpgradeNeeded and ``upgraded()``.
        """
        return self.take(data, now)

    cdef list take(self, data, double now):
        cdef FrameReader reader = self._reader
        cdef list frames
        cdef Py_ssize_t in_flight
        if not data or not self.is_ready():
            return self._receive_otherwise(bytes_like(data, "data"), now)
        frames = reader.feed(data, now)
        self.message_count = reader.message_count
        self.failure = reader._error  # behind frames that were whole, which are returned first
        if self.message_count < len(frames):
            return self._mixed(frames, now)
        if frames:
            in_flight = self.ledger.received(frames)
            if in_flight > <double>self._limit.most:
                self.check_in_flight(in_flight, now)
        return frames

    def receive_oks(self, data):
        """Take the usual answers to publishes, and return their tokens: ``data`` is OKs, one or more, and nothing else.

        Otherwise returns None, and nothing happened: ``receive`` takes everything.
        """
        return self.take_oks(data)

    cdef list take_oks(self, data):
        cdef bytes taken
        cdef Py_ssize_t count
        # Bytes of a partial frame before them would make it something else; a failure has to be raised first.
        if not self.pending or not self.is_ready() or self._reader.buffered:
            return None
        taken = data if type(data) is bytes else bytes(data)
        count = count_oks(taken)
        if count == 1:  # as for a publisher that waits for each
            return [self.pending.popleft()[1]] if self.pending[0][0] in self._publishes else None
        return self._tokens(count) if 0 < count <= len(self.pending) else None

    cdef object take_receipt(self, bytes data):
        """As ``take_oks``, of what was stored of one traced publish: the token of that, or None."""
        if not self.pending or not self.is_ready() or self._reader.buffered:
            return None
        if self.pending[0][0] not in self._publishes or PyBytes_GET_SIZE(data) != RECEIPT_SIZE:
            return None
        if memcmp(PyBytes_AS_STRING(data), <const char*> b"\0\0\0\x22\0\0\0\0OK", OK_SIZE):
            return None
        return self.pending.popleft()[1]

    cdef list _tokens(self, Py_ssize_t count):
        """Take out the tokens of the next publishes; None if not all of the next commands are publishes."""
        cdef list tokens = []
        for command, token in self.pending:
            if command not in self._publishes:
                return None
            tokens.append(token)
            if len(tokens) == count:
                break
        for _ in tokens:
            self.pending.popleft()
        return tokens


cdef Py_ssize_t count_oks(bytes data) except -1:
    """How many frames that say OK these bytes are; 0 if they are anything else."""
    cdef const char* start = PyBytes_AS_STRING(data)
    cdef Py_ssize_t size = PyBytes_GET_SIZE(data), at
    if size % OK_SIZE:
        return 0
    for at in range(0, size, OK_SIZE):
        if memcmp(start + at, <const char*> b"\0\0\0\x06\0\0\0\0OK", OK_SIZE):  # size, type, data
            return 0
    return size // OK_SIZE
