"""Messages, and every command as bytes.

    frame    u32 size | u32 type | data                          size = 4 + len(data)
    message  i64 timestamp | u16 attempts | 16 id | [EXT] | [DETAIL] | body
    EXT      u8 version, and unless that is 0: u16 length | bytes
    DETAIL   u64 offset | u32 size
    command  NAME [SP param]... LF, and for some: u32 length | body
    MPUB     u32 total | u32 count | count x (u32 length | [u64 trace id  or  u16 length | header] | body)

All numbers are big endian. The one decoder of messages is ``read_layout`` in the .pxd; ``_frame`` finds the frames.
Commands know the wire format only: what a name may be, and which server takes which command, is decided above.
Bodies are any bytes-like objects, held until they are copied into the one buffer that is returned.
"""

import json
from collections import namedtuple

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from libc.string cimport memcpy

from .errors import AlreadyResponded, RemoteProtocolError

cdef extern from "Python.h":
    int PyBUF_READ
    object PyMemoryView_GetContiguous(object obj, int buffertype, char order)
    Py_buffer* PyMemoryView_GET_BUFFER(object view)
    object PyNumber_Index(object value)

cdef enum:
    RESPONDED = 1
    ASYNC = 2
    DETAILED = 4

    # bytes between the line of a command and its records
    NO_PREFIX = 0
    COUNT_ONLY = 4
    TOTAL_AND_COUNT = 8

    FIN_SIZE = 4 + ID_SIZE + 1      # "FIN ", id, LF
    TRACED_REPLY_SIZE = 2 + 8 + 8 + 8 + 4
    MAX_BODY = 0x7fffffff           # servers read lengths as signed numbers
    MAX_HEADER = 65534              # servers want less than 65535
    MAX_PARTITION = 1023            # ten bits of the internal id

cdef object _MAX_U64 = 0xffffffffffffffff
cdef object _MAX_I64 = 0x7fffffffffffffff
cdef object _MIN_I64 = -0x8000000000000000

MAGIC_V2 = b"  V2"
NOP = b"NOP\n"
CLS = b"CLS\n"

TracedReply = namedtuple("TracedReply", ["internal_id", "trace_id", "offset", "size"])
TracedReply.__doc__ = "Answer to a traced publish: ids, and where its record lies in the partition's log."
TracedReply.__module__ = "nsq_fast._codec"


@cython.auto_pickle(False)
cdef class Message:
    """A message as delivered: made by the frame reader, or by hand for tests.

    ``id`` goes back as it came. ``internal_id`` and ``trace_id`` are its two halves as numbers, which mean something
    on redesigned servers only. ``offset`` and ``raw_size`` are None unless the subscription carries them.
    Raises TypeError or ValueError, naming the argument, when built with what no server could send.
    """

    def __init__(
        self, timestamp, attempts, id, body, *, ext=None, ext_version=None,
        offset=None, raw_size=None, responder=None, received_at=0.0,
    ):
        if (offset is None) != (raw_size is None):
            raise ValueError("offset and raw_size go together")
        self.timestamp = checked_int(timestamp, "timestamp", _MIN_I64, _MAX_I64)
        self.attempts = checked_int(attempts, "attempts", 0, 0xffff)
        memcpy(self._id, _id_pointer(id, "id"), ID_SIZE)
        self.body = _copied(body, "body")
        self.ext = None if ext is None else _copied(ext, "ext")
        if ext_version is None:
            ext_version = EXT_NONE if ext is None else EXT_JSON
        self.ext_version = checked_int(ext_version, "ext_version", 0, 0xff)
        if offset is not None:
            self._offset = checked_int(offset, "offset", 0, _MAX_U64)
            self._raw_size = checked_int(raw_size, "raw_size", 0, 0xffffffff)
            self._flags = DETAILED
        self.responder = responder
        self.received_at = received_at

    @property
    def id(self):
        """The 16 bytes that FIN, REQ and TOUCH send back."""
        return PyBytes_FromStringAndSize(<char*> self._id, ID_SIZE)

    @property
    def internal_id(self):
        """First half of the id, unsigned."""
        return read_u64(self._id)

    @property
    def trace_id(self):
        """Second half of the id, unsigned; 0 for a message that is not traced (redesigned servers only)."""
        return read_u64(self._id + 8)

    @property
    def offset(self):
        """Offset of the record in the partition's log, in bytes; None without a detail header."""
        return self._offset if self._flags & DETAILED else None

    @property
    def raw_size(self):
        """Size of the record in the partition's log, in bytes; None without a detail header."""
        return self._raw_size if self._flags & DETAILED else None

    @property
    def headers(self):
        """The JSON ext header as a dict, decoded once; {} when there is none, or it is not an object.

        Raises RemoteProtocolError when it is not JSON at all; ``ext`` still has the bytes.
        """
        if self._headers is None:
            self._headers = _decode_headers(self.ext) if self.ext and self.ext_version == EXT_JSON else {}
        return self._headers

    @property
    def partition(self):
        """Partition of the connection that delivered it; None when that has none."""
        return getattr(self.responder, "partition", None)

    cpdef bint mark_responded(self) noexcept:
        """Mark it as answered; False when it already was."""
        if self._flags & RESPONDED:
            return False
        self._flags |= RESPONDED
        return True

    def has_responded(self):
        """Whether it has been finished or requeued."""
        return bool(self._flags & RESPONDED)

    def enable_async(self):
        """Leave the answer to the program: a handler that returns no longer finishes the message."""
        self._flags |= ASYNC

    def is_async(self):
        """Whether enable_async was called."""
        return bool(self._flags & ASYNC)

    def finish(self):
        """Send FIN. Raises AlreadyResponded the second time."""
        self._claim()
        if self.responder is None:
            return
        try:
            self.responder.finish(self)
        except BaseException:
            self._flags &= ~RESPONDED
            raise

    def requeue(self, time_ms=None, backoff=True):
        """Send REQ. Raises AlreadyResponded the second time.

        Args:
            time_ms: milliseconds until redelivery; None leaves it to the consumer.
            backoff: whether this counts as a failure for backoff.
        """
        self._claim()
        if self.responder is None:
            return
        try:
            self.responder.requeue(self, time_ms, backoff)
        except BaseException:
            self._flags &= ~RESPONDED
            raise

    def touch(self):
        """Send TOUCH: ask for more time. Raises AlreadyResponded after an answer."""
        if self._flags & RESPONDED:
            raise AlreadyResponded(f"message {_printable(self.id)} has been answered already")
        if self.responder is not None:
            self.responder.touch(self)

    cdef int _claim(self) except -1:
        if not self.mark_responded():
            raise AlreadyResponded(f"message {_printable(self.id)} has been answered already")
        return 0

    def __repr__(self):
        traits = f"attempts={self.attempts} timestamp={self.timestamp} body={len(self.body or b'')} bytes"
        if self._flags & DETAILED:
            traits += f" offset={self._offset}"
        if self._flags & RESPONDED:
            traits += " responded"
        return f"<{type(self).__name__} {_printable(self.id)} {traits}>"


cdef Message new_message(const MessageView* view, bint detail, object responder, double received_at):
    cdef Message message = Message.__new__(Message)
    message.timestamp = view.timestamp
    message.attempts = view.attempts
    memcpy(message._id, view.id, ID_SIZE)
    message.body = PyBytes_FromStringAndSize(<const char*> view.body, view.body_size)
    message.responder = responder
    message.received_at = received_at
    if view.ext != NULL:
        message.ext = PyBytes_FromStringAndSize(<const char*> view.ext, view.ext_size)
        message.ext_version = <unsigned char> view.ext_version
    if detail:
        message._offset = view.offset
        message._raw_size = view.raw_size
        message._flags = DETAILED
    return message


cdef int raise_layout_error(int code, Py_ssize_t size) except -1:
    part = {SHORT_HEADER: "its fixed header", SHORT_EXT: "its ext header"}.get(code, "its detail header")
    raise RemoteProtocolError(f"message frame cut short: {size} bytes end within {part}")


cdef str _printable(bytes id):
    return id.decode() if id.isalnum() else id.hex()


cdef dict _decode_headers(bytes ext):
    try:
        headers = json.loads(ext)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"ext header is not JSON: {error}") from error
    return headers if isinstance(headers, dict) else {}


# arguments

cdef object checked_int(object value, str argument, object minimum, object maximum):
    try:
        number = PyNumber_Index(value)
    except TypeError:
        raise TypeError(f"{argument} must be int, not {type(value).__name__}") from None
    if not minimum <= number <= maximum:
        raise ValueError(f"{argument} must be within {minimum} and {maximum}, not {number}")
    return number


cdef bytes _number(object value, str argument, object maximum):
    return b"%d" % checked_int(value, argument, 0, maximum)


cdef bytes _word(object value, str argument):
    # a space or line feed in a name would make another command of it
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be str, not {type(value).__name__}")
    cdef bytes word = (<str> value).encode("utf-8", "surrogatepass")
    cdef Py_ssize_t i
    cdef const unsigned char* text = <const unsigned char*> PyBytes_AS_STRING(word)
    for i in range(PyBytes_GET_SIZE(word)):
        if not 0x21 <= text[i] <= 0x7e:
            raise ValueError(f"{argument} must be printable ASCII without spaces, not {value!r}")
    if not word:
        raise ValueError(f"{argument} must not be empty")
    return word


cdef object bytes_like(object value, str argument):
    if PyBytes_Check(value):
        return value
    try:
        return PyMemoryView_GetContiguous(value, PyBUF_READ, b"C")
    except (TypeError, BufferError):
        raise TypeError(f"{argument} must be bytes-like, not {type(value).__name__}") from None


cdef Py_ssize_t bytes_view(object piece, const unsigned char** data) noexcept:
    if PyBytes_Check(piece):
        data[0] = <const unsigned char*> PyBytes_AS_STRING(piece)
        return PyBytes_GET_SIZE(piece)
    cdef Py_buffer* buffer = PyMemoryView_GET_BUFFER(piece)
    data[0] = <const unsigned char*> buffer.buf
    return buffer.len


cdef bytes _copied(object value, str argument):
    return value if type(value) is bytes else bytes(bytes_like(value, argument))


cdef const unsigned char* _id_pointer(object value, str argument) except NULL:
    # valid as long as the caller keeps `value`
    if isinstance(value, Message):
        return (<Message> value)._id
    if not PyBytes_Check(value):
        raise TypeError(f"{argument} must be a Message or bytes, not {type(value).__name__}")
    if PyBytes_GET_SIZE(value) != ID_SIZE:
        raise ValueError(f"{argument} must be {ID_SIZE} bytes, not {PyBytes_GET_SIZE(value)}: {value!r}")
    return <const unsigned char*> PyBytes_AS_STRING(value)


# building commands

cdef bytes _line(list words):
    return b" ".join(words) + b"\n"


cdef list _target(bytes verb, object topic, object partition):
    words = [verb, _word(topic, "topic")]
    if partition is not None:
        words.append(_number(partition, "partition", MAX_PARTITION))
    return words


cdef unsigned char* _put(unsigned char* at, object piece) noexcept:
    cdef const unsigned char* data
    cdef Py_ssize_t size = bytes_view(piece, &data)
    if size:  # an empty view may have no address
        memcpy(at, data, size)
    return at + size


cdef Py_ssize_t _measure(list pieces, str argument, Py_ssize_t limit) except -1:
    # Total length. What is not bytes is replaced by a view, which holds its buffer, and so its length, until copied.
    cdef const unsigned char* data
    cdef Py_ssize_t i, size, total = 0
    for i in range(PyList_GET_SIZE(pieces)):
        piece = pieces[i]
        if not PyBytes_Check(piece):
            piece = bytes_like(piece, argument)
            pieces[i] = piece
        size = bytes_view(piece, &data)
        if size > limit:
            raise ValueError(f"{argument} must be at most {limit} bytes, not {size}")
        total += size
    return total


cdef unsigned char* _put_record(unsigned char* at, object body, object trace_id, object header) except NULL:
    cdef unsigned char* start = at
    at += 4
    if trace_id is not None:
        write_u64(at, <uint64_t> trace_id)
        at += 8
    if header is not None:
        at = _put(at + 2, header)
        write_u16(start + 4, <uint16_t> (at - start - 6))
    at = _put(at, body)
    write_u32(start, <uint32_t> (at - start - 4))
    return at


cdef bytes _records(bytes line, int prefix, list bodies, list trace_ids, list headers):
    """``line``, then what ``prefix`` says, then a record for each body: one buffer of exact size.

    The lists belong to the caller's frame alone; ``trace_ids`` are checked already.
    """
    cdef bint many = prefix != NO_PREFIX
    cdef Py_ssize_t count = PyList_GET_SIZE(bodies)
    cdef Py_ssize_t total = 4 * count + _measure(bodies, "bodies" if many else "body", MAX_BODY)
    cdef Py_ssize_t i
    if many and count == 0:
        raise ValueError("bodies must not be empty: servers refuse a publish of nothing")
    if trace_ids is not None:
        total += 8 * count
    if headers is not None:
        total += 2 * count + _measure(headers, "header", MAX_HEADER)
    if total > MAX_BODY - 4:
        raise ValueError(f"the command's body must be less than 2 GiB, not {total} bytes")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, PyBytes_GET_SIZE(line) + prefix + total)
    cdef unsigned char* at = _put(<unsigned char*> PyBytes_AS_STRING(out), line)
    if prefix == TOTAL_AND_COUNT:
        write_u32(at, <uint32_t> (total + 4))
        at += 4
    if many:
        write_u32(at, <uint32_t> count)
        at += 4
    for i in range(count):
        at = _put_record(
            at,
            <object> PyList_GET_ITEM(bodies, i),
            None if trace_ids is None else <object> PyList_GET_ITEM(trace_ids, i),
            None if headers is None else <object> PyList_GET_ITEM(headers, i),
        )
    return out


cdef tuple _unzipped(object pairs):
    firsts = []
    bodies = []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"pairs must hold pairs whose second is a body, not {type(pair).__name__}")
        firsts.append(pair[0])
        bodies.append(pair[1])
    return firsts, bodies


# commands

def identify(body):
    """IDENTIFY with its JSON body."""
    return _records(b"IDENTIFY\n", NO_PREFIX, [body], None, None)


def auth(secret):
    """AUTH."""
    return _records(b"AUTH\n", NO_PREFIX, [secret], None, None)


def sub(topic, channel, partition=None):
    """SUB. Only redesigned servers take a partition, here as everywhere."""
    return _subscription(b"SUB", topic, channel, partition)


def sub_advanced(topic, channel, partition=None, offset=None):
    """SUB_ADVANCED: messages come with a detail header. Redesigned servers only.

    ``offset`` is ``type:value``, as in ``timestamp:1700000000``, and needs a partition, which the server then
    ignores: it uses its default one.
    """
    if offset is None:
        return _subscription(b"SUB_ADVANCED", topic, channel, partition)
    if partition is None:
        raise ValueError("offset needs a partition")
    line = _subscription(b"SUB_ADVANCED", topic, channel, partition)
    return line[:-1] + b" " + _word(offset, "offset") + b"\n"


def sub_ordered(topic, channel, partition=None):
    """SUB_ORDERED: messages in order, one at a time, with a detail header. Redesigned servers only."""
    return _subscription(b"SUB_ORDERED", topic, channel, partition)


cdef bytes _subscription(bytes verb, object topic, object channel, object partition):
    words = _target(verb, topic, partition)
    words.insert(2, _word(channel, "channel"))
    return _line(words)


def pub(topic, body, partition=None):
    """PUB."""
    return _records(_line(_target(b"PUB", topic, partition)), NO_PREFIX, [body], None, None)


def mpub(topic, bodies, partition=None):
    """MPUB of any iterable of bodies."""
    return _records(_line(_target(b"MPUB", topic, partition)), TOTAL_AND_COUNT, list(bodies), None, None)


def mpub_body(bodies):
    """What MPUB's total counts: the count and the bodies. It is also the body of HTTP ``/mpub?binary=true``."""
    return _records(b"", COUNT_ONLY, list(bodies), None, None)


def dpub(topic, delay_ms, body):
    """DPUB: deliver not before ``delay_ms`` milliseconds have passed. Original servers only."""
    line = _line([b"DPUB", _word(topic, "topic"), _number(delay_ms, "delay_ms", _MAX_I64)])
    return _records(line, NO_PREFIX, [body], None, None)


def pub_trace(topic, trace_id, body, partition=None):
    """PUB_TRACE. The answer is a traced_reply. Redesigned servers only."""
    line = _line(_target(b"PUB_TRACE", topic, partition))
    return _records(line, NO_PREFIX, [body], [checked_int(trace_id, "trace_id", 0, _MAX_U64)], None)


def mpub_trace(topic, pairs, partition=None):
    """MPUB_TRACE of (trace id, body) pairs. Redesigned servers only."""
    trace_ids, bodies = _unzipped(pairs)
    checked = [checked_int(trace_id, "trace_id", 0, _MAX_U64) for trace_id in trace_ids]
    return _records(_line(_target(b"MPUB_TRACE", topic, partition)), TOTAL_AND_COUNT, bodies, checked, None)


def pub_ext(topic, header, body, partition=None):
    """PUB_EXT: ``header`` is JSON, at most 65534 bytes. Redesigned servers only."""
    return _records(_line(_target(b"PUB_EXT", topic, partition)), NO_PREFIX, [body], None, [header])


def mpub_ext(topic, pairs, partition=None):
    """MPUB_EXT of (header, body) pairs. Redesigned servers only, which leave the stream broken when they refuse it."""
    headers, bodies = _unzipped(pairs)
    return _records(_line(_target(b"MPUB_EXT", topic, partition)), TOTAL_AND_COUNT, bodies, None, headers)


def rdy(n):
    """RDY."""
    return b"RDY %d\n" % checked_int(n, "n", 0, 0x7fffffff)


def fin(id):
    """FIN of a Message, or of its 16 bytes of id."""
    return b"FIN " + _id_bytes(id) + b"\n"


def fin_many(messages):
    """FIN of every Message or id in the iterable, as one buffer."""
    cdef list items = messages if type(messages) is list else list(messages)
    cdef Py_ssize_t i, count = PyList_GET_SIZE(items)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, count * FIN_SIZE)
    cdef unsigned char* at = <unsigned char*> PyBytes_AS_STRING(out)
    for i in range(count):  # runs no Python code, so the caller's list stays as it is
        memcpy(at, b"FIN ", 4)
        memcpy(at + 4, _id_pointer(<object> PyList_GET_ITEM(items, i), "messages"), ID_SIZE)
        at[FIN_SIZE - 1] = c"\n"
        at += FIN_SIZE
    return out


def req(id, delay_ms):
    """REQ of a Message or id: deliver again after ``delay_ms`` milliseconds."""
    return b"REQ %b %b\n" % (_id_bytes(id), _number(delay_ms, "delay_ms", _MAX_I64))


def touch(id):
    """TOUCH of a Message or id."""
    return b"TOUCH " + _id_bytes(id) + b"\n"


def cls():
    """CLS: ask for no more messages; the answer is CLOSE_WAIT."""
    return CLS


def nop():
    """NOP: the answer to a heartbeat."""
    return NOP


def internal_create_topic(topic, partition, ext=False):
    """INTERNAL_CREATE_TOPIC. Redesigned servers outside a cluster only."""
    words = [b"INTERNAL_CREATE_TOPIC", _word(topic, "topic"), _number(partition, "partition", MAX_PARTITION)]
    if ext:
        words.append(b"true")
    return _line(words)


cdef bytes _id_bytes(object value):
    return PyBytes_FromStringAndSize(<const char*> _id_pointer(value, "id"), ID_SIZE)


# what servers send

def split_id(id):
    """(internal id, trace id) of 16 bytes of id."""
    cdef const unsigned char* pointer = _id_pointer(id, "id")
    return read_u64(pointer), read_u64(pointer + 8)


def traced_reply(data):
    """Read the answer to PUB_TRACE, MPUB_TRACE or a PUB_EXT with a trace id.

    After MPUB_TRACE it holds the first message's id and offset, no trace id, and the size of all records.
    Raises RemoteProtocolError when it is anything else.
    """
    cdef const unsigned char* pointer
    piece = bytes_like(data, "data")
    if bytes_view(piece, &pointer) != TRACED_REPLY_SIZE or pointer[0] != c"O" or pointer[1] != c"K":
        raise RemoteProtocolError(f"not the answer to a traced publish: {bytes(piece)[:64]!r}")
    return TracedReply(read_u64(pointer + 2), read_u64(pointer + 10), read_u64(pointer + 18), read_u32(pointer + 26))


def encode_frame(type, data):
    """A frame as servers send it: type 0 response, 1 error, 2 message."""
    piece = bytes_like(data, "data")
    cdef const unsigned char* pointer
    cdef Py_ssize_t size = bytes_view(piece, &pointer)
    if size > MAX_BODY - 4:
        raise ValueError(f"data must be less than 2 GiB, not {size} bytes")
    kind = checked_int(type, "type", 0, 0x7fffffff)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, FRAME_DATA_AT + size)
    cdef unsigned char* at = <unsigned char*> PyBytes_AS_STRING(out)
    write_u32(at + FRAME_SIZE_AT, <uint32_t> (size + 4))
    write_u32(at + FRAME_TYPE_AT, <uint32_t> kind)
    _put(at + FRAME_DATA_AT, piece)
    return out


def encode_message(timestamp, attempts, id, body, *, ext_version=None, ext=b"", offset=None, raw_size=None):
    """A message frame as servers send it.

    ``ext_version`` None leaves EXT out, 0 is an EXT without header; ``offset`` None leaves DETAIL out.
    """
    if (offset is None) != (raw_size is None):
        raise ValueError("offset and raw_size go together")
    if ext and not ext_version:
        raise ValueError("ext needs an ext_version other than 0")
    cdef list pieces = [
        checked_int(timestamp, "timestamp", _MIN_I64, _MAX_I64).to_bytes(8, "big", signed=True),
        checked_int(attempts, "attempts", 0, 0xffff).to_bytes(2, "big"),
        _id_bytes(id),
    ]
    if ext_version is not None:
        pieces.append(checked_int(ext_version, "ext_version", 0, 0xff).to_bytes(1, "big"))
        if ext_version:
            header = _copied(ext, "ext")
            pieces += [checked_int(len(header), "size of ext", 0, 0xffff).to_bytes(2, "big"), header]
    if offset is not None:
        pieces.append(checked_int(offset, "offset", 0, _MAX_U64).to_bytes(8, "big"))
        pieces.append(checked_int(raw_size, "raw_size", 0, 0xffffffff).to_bytes(4, "big"))
    pieces.append(_copied(body, "body"))
    return encode_frame(FRAME_MESSAGE, b"".join(pieces))
