"""The incremental frame reader and its column face, for this package and for other extensions to cimport."""


cdef class Response:
    cdef readonly bytes data


cdef class ErrorFrame:
    cdef readonly bytes data


cdef class FrameBuffer:
    cdef public bint detail                     # messages carry DETAIL, from the next frame on
    cdef public bint ext                        # messages carry EXT, from the next frame on
    cdef readonly Py_ssize_t max_frame_size     # largest size field accepted
    cdef readonly bint skip_oversized           # read over messages above it, in place of an error
    cdef unsigned char _head[8]                 # the partial frame, until its header is whole
    cdef unsigned char* _frame                  # the partial frame from then on, of _kept bytes; NULL before
    cdef Py_ssize_t _have                       # bytes received of the partial frame
    cdef Py_ssize_t _total                      # length of the partial frame, 0 while unknown
    cdef Py_ssize_t _kept                       # how many of them are kept: all, or the headers of an oversized message
    cdef bint _busy                             # inside feed
    cdef object _error                          # what poisoned the reader; None while it works
    # OK, HEARTBEAT, CLOSE_WAIT: here and in no variable of C, which all interpreters of the process would share
    cdef Response _ok, _heartbeat, _close_wait

    cdef int _enter(self) except -1
    cdef int _poison(self, object error) except -1
    cdef int _raise_error(self) except -1
    # copy what `data` has of the partial frame; returns how many bytes that was
    cdef Py_ssize_t _top_up(self, const unsigned char* data, Py_ssize_t size) except -1
    cdef bint _is_whole(self) noexcept
    cdef Py_ssize_t _kept_of(self, Py_ssize_t total) noexcept
    cdef object _truncated(
        self, const unsigned char* frame, Py_ssize_t available, Py_ssize_t total, object responder, double now
    )
    cdef void _drop_frame(self) noexcept
    cdef bytes _take(self)


cdef class FrameReader(FrameBuffer):
    cdef public object responder                # given to every message
    cdef readonly Py_ssize_t message_count      # whole messages in the list that the last feed returned
    cdef object _backlog                        # deque of chunks kept back by max_frames; None when there are none
    cdef Py_ssize_t _backlog_at                 # where the first of them goes on

    cpdef list feed(self, data, double now=*, Py_ssize_t max_frames=*)
    cdef int _feed_backlog(self, object data, list out, double now, Py_ssize_t limit) except -1
    # append the frames that `data` completes; returns the bytes taken, fewer than `size` only at the limit
    cdef Py_ssize_t _decode(
        self, const unsigned char* data, Py_ssize_t size, list out, double now, Py_ssize_t limit
    ) except -1
    cdef object _decode_kept(self, double now)
    cdef object _decode_frame(self, const unsigned char* frame, Py_ssize_t total, double now)


cdef class Columns:
    cdef readonly Py_ssize_t count
    cdef readonly bytes timestamps, attempts, ids, internal_ids, trace_ids
    cdef readonly bytes offsets, sizes          # None without DETAIL
    cdef readonly bytes ext_versions, ext_offsets, ext  # None without EXT
    cdef readonly bytes body_offsets, body
    cdef readonly list frames                   # responses, errors and truncated messages among the messages


cdef struct Layout:
    # the settings of a reader, as they are at the beginning of a feed
    Py_ssize_t max_size
    bint skip_oversized
    bint ext
    bint detail


cdef class ColumnReader(FrameBuffer):
    cdef int _decode(self, const unsigned char* data, Py_ssize_t size, Columns columns) except -1
    cdef int _collect_others(
        self, const unsigned char* data, Py_ssize_t size, const Layout* layout, list frames
    ) except -1


cdef class SessionPath:
    cdef public object stage
    cdef public object dialect
    cdef public object pending          # a deque of pairs: name and token
    cdef public object failure
    cdef public object ledger
    cdef public Py_ssize_t message_count
    cdef public object _limit           # knows how many messages may be in flight, once the server is known
    cdef public FrameReader _reader
    cdef object _ready
    cdef object _publishes

    cdef int put(self, command, token) except -1    # expect
    cdef bint is_ready(self) noexcept
    cdef bint is_idle(self) except -1
    cdef list take(self, data, double now)          # receive
    cdef list take_oks(self, data)                  # receive_oks
    cdef object take_receipt(self, bytes data)
    cdef list _tokens(self, Py_ssize_t count)
