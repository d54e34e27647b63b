"""The column face of the frame reader. Part of ``_frame``, which includes this file.

Two passes over the whole frames of a chunk, both without the GIL: ``tally_frames`` checks them and adds up what they
hold, ``fill_columns`` copies it into buffers of exactly that size. Nothing is made per message.
"""


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


def join_columns(parts):
    """Columns that came one after another as one: what gathers many small reads into a batch worth handing on.

    Raises ValueError when a detail or ext header is in some of them only (an empty one may lack both), and when all
    bodies together, or all ext headers, take 2 GiB.
    """
    cdef list given = _checked_parts(parts)
    cdef list items = [part for part in given if part.count]
    cdef Tally tally
    cdef Cursor to
    cdef Columns first, part, columns
    if len(given) == 1:
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
    columns = Columns.__new__(Columns)
    has_ext = bool(items) and (<Columns> items[0]).ext is not None
    has_detail = bool(items) and (<Columns> items[0]).offsets is not None
    _allocate(columns, &tally, has_ext, has_detail, &to)
    for part in items:
        _append(part, &to)
    for part in given:
        columns.frames += part.frames
    return columns


cdef list _checked_parts(object parts):
    items = list(parts)
    for part in items:
        if not isinstance(part, Columns):
            raise TypeError(f"parts must hold Columns, not {type(part).__name__}")
    return items


cdef void _append(Columns part, Cursor* to) noexcept:
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
