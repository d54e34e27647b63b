"""Layout constants, the message decoder and Message, for this package and for other extensions to cimport."""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t


cdef enum:
    # a frame: size, type, then data; size counts the type and the data
    # nsqio/nsq: internal/protocol/protocol.go, SendFramedResponse
    FRAME_SIZE_AT = 0
    FRAME_TYPE_AT = FRAME_SIZE_AT + 4
    FRAME_DATA_AT = FRAME_TYPE_AT + 4

    FRAME_RESPONSE = 0
    FRAME_ERROR = 1
    FRAME_MESSAGE = 2

    # a message: fixed header, then EXT and DETAIL where the subscription has them, then the body
    # nsqio/nsq: nsqd/message.go, WriteTo; youzan/nsq: nsqd/message.go, internalWriteTo
    TIMESTAMP_AT = 0
    ATTEMPTS_AT = TIMESTAMP_AT + 8
    ID_AT = ATTEMPTS_AT + 2
    INTERNAL_ID_AT = ID_AT
    TRACE_ID_AT = INTERNAL_ID_AT + 8
    ID_SIZE = 16
    MESSAGE_HEADER_SIZE = ID_AT + ID_SIZE

    # EXT: version, and for a version other than 0 a length and that many bytes
    # youzan/nsq: nsqd/message.go, internalWriteTo; internal/ext/ext.go has the versions
    EXT_VERSION_SIZE = 1
    EXT_LENGTH_SIZE = 2
    EXT_NONE = 0
    EXT_TAG = 2
    EXT_JSON = 4

    # DETAIL: offset of the record in the partition's log, and its size
    # youzan/nsq: nsqd/message.go, internalWriteTo
    DETAIL_SIZE_AT = 8
    DETAIL_SIZE = DETAIL_SIZE_AT + 4

    # what read_layout found
    LAYOUT_OK = 0
    SHORT_HEADER = 1
    SHORT_EXT = 2
    SHORT_DETAIL = 3


cdef struct MessageView:
    int64_t timestamp           # nanoseconds since the epoch
    uint16_t attempts           # deliveries so far, this one included
    const unsigned char* id     # ID_SIZE bytes
    int ext_version             # EXT_NONE when the layout has no EXT
    const unsigned char* ext    # NULL without an ext header; it may also be empty
    Py_ssize_t ext_size
    uint64_t offset             # 0 when the layout has no DETAIL
    uint32_t raw_size
    const unsigned char* body
    Py_ssize_t body_size


cdef inline uint16_t read_u16(const unsigned char* p) noexcept nogil:
    return <uint16_t> ((<unsigned int> p[0] << 8) | p[1])


cdef inline uint32_t read_u32(const unsigned char* p) noexcept nogil:
    return (<uint32_t> p[0] << 24) | (<uint32_t> p[1] << 16) | (<uint32_t> p[2] << 8) | <uint32_t> p[3]


cdef inline uint64_t read_u64(const unsigned char* p) noexcept nogil:
    return (<uint64_t> read_u32(p) << 32) | <uint64_t> read_u32(p + 4)


cdef inline void write_u16(unsigned char* p, uint16_t value) noexcept nogil:
    p[0] = <unsigned char> (value >> 8)
    p[1] = <unsigned char> (value & 0xff)


cdef inline void write_u32(unsigned char* p, uint32_t value) noexcept nogil:
    p[0] = <unsigned char> (value >> 24)
    p[1] = <unsigned char> ((value >> 16) & 0xff)
    p[2] = <unsigned char> ((value >> 8) & 0xff)
    p[3] = <unsigned char> (value & 0xff)


cdef inline void write_u64(unsigned char* p, uint64_t value) noexcept nogil:
    write_u32(p, <uint32_t> (value >> 32))
    write_u32(p + 4, <uint32_t> value)  # its lower half


cdef inline int read_layout(
    const unsigned char* data, Py_ssize_t size, bint ext, bint detail, MessageView* view
) noexcept nogil:
    """Find the fields of one message in the ``size`` bytes of a frame's data.

    The only decoder of messages: fixed header, EXT, DETAIL, body, in that order. Returns LAYOUT_OK, or what is too
    short; ``view`` then holds nothing of use. Pointers in ``view`` live as long as ``data``.
    """
    cdef Py_ssize_t at = MESSAGE_HEADER_SIZE
    if size < at:
        return SHORT_HEADER
    view.timestamp = <int64_t> read_u64(data + TIMESTAMP_AT)
    view.attempts = read_u16(data + ATTEMPTS_AT)
    view.id = data + ID_AT
    view.ext_version = EXT_NONE
    view.ext = NULL
    view.ext_size = 0
    view.offset = 0
    view.raw_size = 0
    if ext:
        if size - at < EXT_VERSION_SIZE:
            return SHORT_EXT
        view.ext_version = data[at]
        at += EXT_VERSION_SIZE
        if view.ext_version != EXT_NONE:
            if size - at < EXT_LENGTH_SIZE:
                return SHORT_EXT
            view.ext_size = read_u16(data + at)
            at += EXT_LENGTH_SIZE
            if size - at < view.ext_size:
                return SHORT_EXT
            view.ext = data + at
            at += view.ext_size
    if detail:
        if size - at < DETAIL_SIZE:
            return SHORT_DETAIL
        view.offset = read_u64(data + at)
        view.raw_size = read_u32(data + at + DETAIL_SIZE_AT)
        at += DETAIL_SIZE
    view.body = data + at
    view.body_size = size - at
    return LAYOUT_OK


cdef class Message:
    cdef readonly int64_t timestamp     # nanoseconds since the epoch
    cdef readonly double received_at    # `now` of the feed that completed it, 0.0 when none was given
    cdef unsigned char _id[ID_SIZE]     # internal id, trace id
    cdef uint64_t _offset               # of the record in the partition's log; 0 without detail
    cdef readonly bytes body
    cdef readonly bytes ext             # raw ext header, None when there is none
    cdef public object responder        # who sends FIN, REQ and TOUCH for it; None when nobody
    cdef dict _headers                  # the ext header decoded, None until asked for
    cdef uint32_t _raw_size             # of the record in the partition's log; 0 without detail
    cdef readonly uint16_t attempts
    cdef readonly unsigned char ext_version
    cdef unsigned char _flags           # RESPONDED, ASYNC, DETAILED, EXPIRED

    cpdef bint mark_responded(self) noexcept
    cpdef bint mark_returned(self) noexcept
    cdef int _claim(self) except -1
    cdef object _current_responder(self)
    cdef object _signal(self, str name)


cdef class TruncatedMessage(Message):
    cdef readonly Py_ssize_t body_size          # bytes of the body that was not kept
    cdef readonly Py_ssize_t max_frame_size     # the limit that its frame is above


# a message of what read_layout found; `detail` as given to read_layout
cdef Message new_message(const MessageView* view, bint detail, object responder, double received_at)
# the same for a frame above `max_frame_size`; of the body, only `view.body_size` is looked at
cdef TruncatedMessage new_truncated(
    const MessageView* view, bint detail, object responder, double received_at, Py_ssize_t max_frame_size
)
# raise the RemoteProtocolError of what read_layout returned
cdef int raise_layout_error(int code, Py_ssize_t size) except -1
# `value` as bytes, or as a contiguous memoryview that holds its buffer; TypeError naming `argument` otherwise
cdef object bytes_like(object value, str argument)
# address and length of what bytes_like returned
cdef Py_ssize_t bytes_view(object piece, const unsigned char** data) noexcept
# `value` as an int of minimum..maximum; TypeError or ValueError naming `argument` otherwise
cdef object checked_int(object value, str argument, object minimum, object maximum)
