"""Messages, and every command as bytes.

    frame    u32 size | u32 type | data                          size = 4 + len(data)
    message  i64 timestamp | u16 attempts | 16 id | [EXT] | [DETAIL] | body
    EXT      u8 version, and unless that is 0: u16 length | bytes
    DETAIL   u64 offset | u32 size

All numbers are big endian. The one decoder of messages is ``read_layout`` in the .pxd; ``_frame`` finds the frames;
``_commands.pxi`` is what goes the other way. Nothing here does I/O or knows of connections: a
message has a responder.

Threads without a global interpreter lock may share all objects of this module and of ``_frame``. What one of them
changes is changed as one step: an object's own lock is held (``cython.critical_section``), also that of a caller's list
while its items are read; flags of messages are set atomically. With the lock of the interpreter both are nothing.
"""

from collections import namedtuple

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_Check, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.object cimport PyObject
from libc.math cimport INFINITY
from libc.stdint cimport int32_t
from libc.string cimport memcpy

from .errors import AlreadyResponded, RemoteProtocolError

cdef extern from "Python.h":
    int PyBUF_READ
    object PyMemoryView_GetContiguous(object obj, int buffertype, char order)
    Py_buffer* PyMemoryView_GET_BUFFER(object view)
    object PyNumber_Index(object value)
    Py_ssize_t Py_REFCNT(PyObject* value)
    PyObject** PySequence_Fast_ITEMS(object items)
    # of items that their owner keeps: no reference is counted
    int item_is_bytes "PyBytes_Check"(PyObject* item)
    int item_is_exactly_bytes "PyBytes_CheckExact"(PyObject* item)
    Py_ssize_t item_size "PyBytes_GET_SIZE"(PyObject* item)
    char* item_data "PyBytes_AS_STRING"(PyObject* item)
    int PyUnicode_IS_COMPACT_ASCII(object text)
    Py_ssize_t PyUnicode_GET_LENGTH(object text)
    void* PyUnicode_DATA(object text)

cdef extern from *:
    """
    #ifdef Py_GIL_DISABLED
      #define nsq_load_flags(flags) __atomic_load_n(flags, __ATOMIC_ACQUIRE)
      #define nsq_set_flags(flags, bits) ((void) __atomic_fetch_or(flags, (unsigned char) (bits), __ATOMIC_ACQ_REL))
      #define nsq_clear_flags(flags, bits) ((void) __atomic_fetch_and(flags, (unsigned char) ~(bits), __ATOMIC_ACQ_REL))
      static inline int nsq_claim_flags(unsigned char *flags, unsigned char bits, unsigned char unless) {
          unsigned char old = nsq_load_flags(flags);
          do {
              if (old & unless)
                  return 0;
          } while (!__atomic_compare_exchange_n(
              flags, &old, (unsigned char) (old | bits), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE));
          return 1;
      }
    #else
      #define nsq_load_flags(flags) (*(flags))
      #define nsq_set_flags(flags, bits) ((void) (*(flags) |= (unsigned char) (bits)))
      #define nsq_clear_flags(flags, bits) ((void) (*(flags) &= (unsigned char) ~(bits)))
      static inline int nsq_claim_flags(unsigned char *flags, unsigned char bits, unsigned char unless) {
          if (*flags & unless)
              return 0;
          *flags |= bits;
          return 1;
      }
    #endif
    """
    unsigned char load_flags "nsq_load_flags"(unsigned char* flags) noexcept nogil
    void set_flags "nsq_set_flags"(unsigned char* flags, unsigned char bits) noexcept nogil
    void clear_flags "nsq_clear_flags"(unsigned char* flags, unsigned char bits) noexcept nogil
    # set `bits` unless one of `unless` is set; whether they were set by this call
    bint claim_flags "nsq_claim_flags"(unsigned char* flags, unsigned char bits, unsigned char unless) noexcept nogil

cdef enum:
    RESPONDED = 1
    ASYNC = 2
    DETAILED = 4
    EXPIRED = 8

    # "OK", internal id, trace id, offset, size. youzan/nsq: nsqdserver/protocol_v2.go, getTracedReponse
    TRACED_REPLY_SIZE = 2 + 8 + 8 + 8 + 4
    MAX_BODY = 0x7fffffff           # servers read lengths as signed numbers

MESSAGE_ID_SIZE = ID_SIZE

TracedReply = namedtuple("TracedReply", ["internal_id", "trace_id", "offset", "size"])
TracedReply.__doc__ = "Answer to a traced publish: ids, and where its record lies in the partition's log."
TracedReply.__module__ = "nsq_fast._codec"


# No copy in another process: it could answer nothing, since the connection stays here.
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
        if self.body is not None:  # others may be reading it
            raise TypeError("a message is made once: __init__ was called again")
        self.timestamp = _checked_i64(timestamp, "timestamp")
        self.attempts = checked_int(attempts, "attempts", 0, 0xffff)
        memcpy(self._id, _id_pointer(id, "id"), ID_SIZE)
        self.body = _copied(body, "body")
        self.ext = None if ext is None else _copied(ext, "ext")
        if ext_version is None:
            ext_version = EXT_NONE if ext is None else EXT_JSON
        self.ext_version = checked_int(ext_version, "ext_version", 0, 0xff)
        if offset is not None:
            self._offset = _checked_u64(offset, "offset")
            self._raw_size = checked_int(raw_size, "raw_size", 0, 0xffffffff)
            set_flags(&self._flags, DETAILED)
        self.responder = responder
        self.received_at = received_at

    @property
    def id(self):
        """The 16 bytes that FIN, REQ and TOUCH send back."""
        return PyBytes_FromStringAndSize(<char*> self._id, ID_SIZE)

    @property
    def internal_id(self):
        """First half of the id, unsigned."""
        # youzan/nsq: nsqd/message.go, GetFullMsgID
        return read_u64(self._id)

    @property
    def trace_id(self):
        """Second half of the id, unsigned; 0 for a message that is not traced (redesigned servers only)."""
        return read_u64(self._id + 8)

    @property
    def offset(self):
        """Offset of the record in the partition's log, in bytes; None without a detail header."""
        return self._offset if load_flags(&self._flags) & DETAILED else None

    @property
    def raw_size(self):
        """Size of the record in the partition's log, in bytes; None without a detail header."""
        return self._raw_size if load_flags(&self._flags) & DETAILED else None

    @property
    def headers(self):
        """The JSON ext header as a dict, decoded once; {} when there is none, or it is not an object.

        Raises RemoteProtocolError when it is not JSON at all; ``ext`` still has the bytes.
        """
        # Not decoded with the message: few handlers look at them, and JSON takes longer than the message.
        with cython.critical_section(self):
            if self._headers is None:
                self._headers = _decode_headers(self.ext) if self.ext and self.ext_version == EXT_JSON else {}
            return self._headers

    @property
    def is_truncated(self):
        """Whether the body was left out, since the frame is larger than ``max_frame_size``: a TruncatedMessage."""
        return False

    @property
    def partition(self):
        """Partition of the connection that delivered it; None when that has none."""
        return getattr(self._current_responder(), "partition", None)

    @property
    def topic(self):
        """Topic of the connection that delivered it; None when its responder names none."""
        return getattr(self.responder, "topic", None)

    @property
    def on_finish(self):
        """Signal on_finish() of this message, by its responder: a FIN was queued. Its sender is the message."""
        return self._signal("on_finish")

    @property
    def on_requeue(self):
        """Signal on_requeue(timeout, backoff) of this message, by its responder: a REQ was queued; timeout in ms."""
        return self._signal("on_requeue")

    @property
    def on_touch(self):
        """Signal on_touch() of this message, by its responder: a TOUCH was queued."""
        return self._signal("on_touch")

    cpdef bint mark_responded(self) noexcept:
        """Mark it as answered; False when it already was."""
        return claim_flags(&self._flags, RESPONDED, RESPONDED)

    cpdef bint mark_returned(self) noexcept:
        """Its handler has returned: mark it as answered, for whoever called to finish it.

        False when it was answered already, or is to be answered later (``enable_async``): there is nothing to do then.
        """
        return claim_flags(&self._flags, RESPONDED, RESPONDED | ASYNC)

    def has_responded(self):
        """Whether it has been finished or requeued."""
        return bool(load_flags(&self._flags) & RESPONDED)

    def mark_expired(self):
        """Note that nsqd has taken it back: it was not answered in time, or its connection is lost."""
        set_flags(&self._flags, EXPIRED)

    def has_expired(self):
        """Whether nsqd has taken it back before it was answered; nsqd delivers it again, here or elsewhere."""
        return bool(load_flags(&self._flags) & EXPIRED)

    def enable_async(self):
        """Leave the answer to the program: a handler that returns no longer finishes the message."""
        set_flags(&self._flags, ASYNC)

    def is_async(self):
        """Whether enable_async was called."""
        return bool(load_flags(&self._flags) & ASYNC)

    def finish(self):
        """Send FIN; return what the responder returns. Raises AlreadyResponded the second time."""
        self._claim()
        responder = self._current_responder()
        if responder is None:
            return None
        try:
            return responder.finish(self)
        except BaseException:  # nothing was queued: the program may try again, or requeue it
            clear_flags(&self._flags, RESPONDED)
            raise

    def requeue(self, time_ms=None, backoff=True):
        """Send REQ; return what the responder returns. Raises AlreadyResponded the second time.

        Args:
            time_ms: milliseconds until redelivery; None leaves it to the consumer.
            backoff: whether this counts as a failure for backoff.
        """
        self._claim()
        responder = self._current_responder()
        if responder is None:
            return None
        try:
            return responder.requeue(self, time_ms, backoff)
        except BaseException:
            clear_flags(&self._flags, RESPONDED)
            raise

    def touch(self):
        """Send TOUCH: ask for more time; return what the responder returns. Raises AlreadyResponded after an answer."""
        if load_flags(&self._flags) & RESPONDED:
            raise AlreadyResponded(f"message {_printable(self.id)} has been answered already")
        responder = self._current_responder()
        return None if responder is None else responder.touch(self)

    cdef object _current_responder(self):
        with cython.critical_section(self):
            return self.responder

    cdef int _claim(self) except -1:
        # Before the responder is called, which may switch to another greenlet: only one of them may answer.
        if not self.mark_responded():
            raise AlreadyResponded(f"message {_printable(self.id)} has been answered already")
        return 0

    cdef object _signal(self, str name):
        # Signals are the responder's: one that gathers FINs queues them without a call of finish().
        responder = self._current_responder()
        signals_of = getattr(responder, "signals_of", None)
        if signals_of is None:
            raise AttributeError(
                f"{name}: the responder of this message keeps no signals: {responder!r} has no signals_of(message)"
                ", see docs/embedding.md, Messages"
            )
        return getattr(signals_of(self), name)

    def __repr__(self):
        traits = f"attempts={self.attempts} timestamp={self.timestamp} body={len(self.body or b'')} bytes"
        if load_flags(&self._flags) & DETAILED:
            traits += f" offset={self._offset}"
        if load_flags(&self._flags) & RESPONDED:
            traits += " responded"
        return f"<{type(self).__name__} {_printable(self.id)} {traits}>"


@cython.auto_pickle(False)
cdef class TruncatedMessage(Message):
    """A message whose frame is larger than ``max_frame_size``: all of it but the body, which is empty.

    ``body_size`` says how many bytes the body has at the server, ``max_frame_size`` which limit its frame is above.
    It can be finished, requeued and touched as any message.
    """

    def __init__(self, timestamp, attempts, id, *, body_size, max_frame_size, **options):
        Message.__init__(self, timestamp, attempts, id, b"", **options)
        self.body_size = checked_int(body_size, "body_size", 0, MAX_BODY)
        self.max_frame_size = checked_int(max_frame_size, "max_frame_size", 4, MAX_BODY)

    @property
    def is_truncated(self):
        """Whether the body was left out: it was."""
        return True


cdef Message new_message(const MessageView* view, bint detail, object responder, double received_at):
    # By __new__: __init__ would check what read_layout has checked already.
    cdef Message message = Message.__new__(Message)
    message.body = PyBytes_FromStringAndSize(<const char*> view.body, view.body_size)
    _fill(message, view, detail, responder, received_at)
    return message


cdef TruncatedMessage new_truncated(
    const MessageView* view, bint detail, object responder, double received_at, Py_ssize_t max_frame_size
):
    cdef TruncatedMessage message = TruncatedMessage.__new__(TruncatedMessage)
    message.body = b""
    message.body_size = view.body_size
    message.max_frame_size = max_frame_size
    _fill(message, view, detail, responder, received_at)
    return message


cdef inline int _fill(
    Message message, const MessageView* view, bint detail, object responder, double received_at
) except -1:
    message.timestamp = view.timestamp
    message.attempts = view.attempts
    memcpy(message._id, view.id, ID_SIZE)
    message.responder = responder
    message.received_at = received_at
    if view.ext != NULL:
        message.ext = PyBytes_FromStringAndSize(<const char*> view.ext, view.ext_size)
        message.ext_version = <unsigned char> view.ext_version
    if detail:
        message._offset = view.offset
        message._raw_size = view.raw_size
        message._flags = DETAILED
    return 0


cdef int raise_layout_error(int code, Py_ssize_t size) except -1:
    part = {SHORT_HEADER: "its fixed header", SHORT_EXT: "its ext header"}.get(code, "its detail header")
    raise RemoteProtocolError(f"message frame cut short: {size} bytes end within {part}")


cdef str _printable(object id):
    # Ids of the original are text, 16 hex digits (nsqio/nsq: nsqd/guid.go, Hex); those of the redesigned are any bytes.
    if type(id) is not bytes:
        return repr(id)
    return id.decode() if id.isalnum() else id.hex()


_loads = None  # of json, from the first header on: most programs have none

cdef dict _decode_headers(bytes ext):
    global _loads
    if _loads is None:
        from json import loads as _loads
    try:
        headers = _loads(ext)
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        raise RemoteProtocolError(f"ext header is not JSON: {error}") from error
    return headers if isinstance(headers, dict) else {}


# arguments: shared with the commands

cdef object checked_int(object value, str argument, object minimum, object maximum):
    number = value
    if type(value) is not int:  # a subclass, a numpy number: __index__ makes it an int; a float has none
        try:
            number = PyNumber_Index(value)
        except TypeError:
            raise TypeError(f"{argument} must be int, not {type(value).__name__}") from None
    if not minimum <= number <= maximum:
        raise ValueError(f"{argument} must be within {minimum} and {maximum}, not {number}")
    return number


cdef object _checked_i64(object value, str argument):
    return checked_int(value, argument, -0x8000000000000000, 0x7fffffffffffffff)


cdef object _checked_u64(object value, str argument):
    return checked_int(value, argument, 0, 0xffffffffffffffff)


cdef object bytes_like(object value, str argument):
    if PyBytes_Check(value):
        return value
    # A contiguous copy of what is not, such as every other byte of a buffer: pointers below run over it.
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
    # A message outlives the caller's buffer, which may change; only bytes never do.
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


cdef bytes _id_bytes(object value):
    return PyBytes_FromStringAndSize(<const char*> _id_pointer(value, "id"), ID_SIZE)


include "_commands.pxi"


# The messages of a connection that were received and not answered.
#
# They are in one list, in order of arrival. Answers mostly come in the same order: these are found at the front, where
# nothing of a message is looked at but its address, and leave the list at once. Messages that were answered in another
# order are dropped many at a time.

cdef enum:
    SLACK = 16          # answered messages that may stay, beside as many as are in flight
    TRIM_AT = 1024      # places at the front of the list that are empty before the list is made shorter


cdef class HeldMessages:
    """Counts messages in flight, and knows which they are; what ``nsq_fast.protocol.session`` is built on.

    ``count`` messages are in flight; an answer that is given twice counts twice. ``late`` messages have expired and may
    still be answered; their answers do not count. ``next_deadline`` is when the first to come expires, or earlier, by
    ``msg_timeout``, in seconds; infinite before there is one.
    """

    cdef public Py_ssize_t count
    cdef public Py_ssize_t late
    cdef public double msg_timeout
    cdef public double next_deadline
    cdef list _messages
    cdef Py_ssize_t _at     # the places before this are None

    def __cinit__(self):
        self._messages = []
        self.next_deadline = INFINITY

    @cython.critical_section
    def __len__(self):
        """Messages that are held, answered ones among them."""
        return PyList_GET_SIZE(self._messages) - self._at

    @cython.critical_section
    def received(self, list messages not None):
        """These messages have arrived, all at the same time. Returns how many are in flight now."""
        _check_messages(messages)
        if self.next_deadline == INFINITY and PyList_GET_SIZE(messages):
            self.next_deadline = (<Message> messages[0]).received_at + self.msg_timeout
        self.count += PyList_GET_SIZE(messages)
        self._messages += messages
        if PyList_GET_SIZE(self._messages) - self._at > 2 * self.count + SLACK:
            self._drop_answered()
        return self.count

    @cython.critical_section
    def follow(self, Message message not None):
        """A message stands for another, which is counted already and marked as responded."""
        self._messages.append(message)

    def finish(self, messages):
        """FIN of these messages, as one buffer; they are marked as responded, and in flight no more."""
        cdef list items = messages if type(messages) is list else _listed(messages, "messages")
        cdef bytes data
        with cython.critical_section(self, items):
            data = _fin_each(items)
            self._answered(items)
        return data

    def answered(self, messages):
        """FIN or REQ of these messages is about to be sent; they are marked as responded."""
        cdef list items = messages if type(messages) is list else list(messages)
        with cython.critical_section(self, items):
            self._answered(items)

    cdef int _answered(self, list items) except -1:
        cdef list held = self._messages
        cdef Py_ssize_t count = PyList_GET_SIZE(items), size = PyList_GET_SIZE(held), at = self._at, i = 0, late
        if self.late:
            late = _expired(items)
            self.late = max(0, self.late - late)
            self.count = max(0, self.count - (count - late))
        else:
            # More than are in flight: an embedder may answer a message twice, and nsqd refuses the second answer.
            self.count = self.count - count if self.count > count else 0
        while i < count and at + i < size and PyList_GET_ITEM(held, at + i) == PyList_GET_ITEM(items, i):
            i += 1
        if at + i == size:
            held.clear()
            self._at = 0
            return 0
        self._at = at + i
        # The places stay, and let go of their messages: bodies must not live for as long as the list is not trimmed.
        for i in range(at, self._at):
            held[i] = None
        if self._at > TRIM_AT and 2 * self._at > size:
            del held[:self._at]
            self._at = 0
        return 0

    @cython.critical_section
    def unanswered(self):
        """Drop what is answered or expired; return the others, in order of arrival."""
        self._drop_answered()
        return self._messages[:]

    cdef int _drop_answered(self) except -1:
        self._messages = unanswered(self._messages[self._at:])
        self._at = 0
        return 0

    @cython.critical_section
    def keep(self, list messages not None):
        """Hold these, and nothing else; what is counted stays as it is."""
        _check_messages(messages)
        self._messages = messages[:]
        self._at = 0

    @cython.critical_section
    def unreachable(self, dict noted=None, list others=None):
        """Messages that only this list refers to: nobody can answer them any more.

        Being a key of ``noted`` is no reference of a program's either. ``others`` are looked at, too: messages that are
        held no longer.
        """
        cdef list found
        self._drop_answered()
        found = _unreachable(self._messages, noted)
        if others is not None:
            found = _unreachable(others, noted) + found
        return found


cdef list _unreachable(list messages, dict noted):
    cdef list found = []
    cdef PyObject* message
    cdef Py_ssize_t i, references
    for i in range(PyList_GET_SIZE(messages)):
        message = PyList_GET_ITEM(messages, i)
        references = Py_REFCNT(message)  # before anything else refers to it
        if references > 2:
            continue
        if references - (1 if noted and <object> message in noted else 0) == 1:
            found.append(<object> message)
    return found


cdef int _check_messages(list messages) except -1:
    # Whatever is held is taken for a Message from then on; an embedder's list may hold anything.
    cdef Py_ssize_t i
    for i in range(PyList_GET_SIZE(messages)):
        if not isinstance(<object> PyList_GET_ITEM(messages, i), Message):
            raise TypeError(f"messages must hold Message, not {type(<object> PyList_GET_ITEM(messages, i)).__name__}")
    return 0


cdef Py_ssize_t _expired(list items) except -1:
    cdef Py_ssize_t count = 0
    for each in items:
        if isinstance(each, Message) and load_flags(&(<Message> each)._flags) & EXPIRED:
            count += 1
    return count


cdef list unanswered(list messages):
    cdef list left = []
    cdef Message message
    for message in messages:
        if not load_flags(&message._flags) & (RESPONDED | EXPIRED):
            left.append(message)
    return left


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
    cdef const unsigned char* pointer
    cdef int version = EXT_NONE if ext_version is None else checked_int(ext_version, "ext_version", 0, 0xff)
    header = bytes_like(ext, "ext")
    cdef Py_ssize_t header_size = bytes_view(header, &pointer)
    if header_size > 0xffff:
        raise ValueError(f"ext must be at most {0xffff} bytes, not {header_size}")
    piece = bytes_like(body, "body")
    cdef Py_ssize_t size = MESSAGE_HEADER_SIZE + bytes_view(piece, &pointer)
    if ext_version is not None:
        size += EXT_VERSION_SIZE + (EXT_LENGTH_SIZE + header_size if version != EXT_NONE else 0)
    if offset is not None:
        size += DETAIL_SIZE
    if size > MAX_BODY - FRAME_DATA_AT:
        raise ValueError(f"body must make a frame of less than 2 GiB, not {size} bytes")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, FRAME_DATA_AT + size)
    cdef unsigned char* at = <unsigned char*> PyBytes_AS_STRING(out)
    write_u32(at + FRAME_SIZE_AT, <uint32_t> (FRAME_DATA_AT - FRAME_TYPE_AT + size))
    write_u32(at + FRAME_TYPE_AT, FRAME_MESSAGE)
    at += FRAME_DATA_AT
    write_u64(at + TIMESTAMP_AT, <uint64_t> <int64_t> _checked_i64(timestamp, "timestamp"))
    write_u16(at + ATTEMPTS_AT, <uint16_t> checked_int(attempts, "attempts", 0, 0xffff))
    memcpy(at + ID_AT, _id_pointer(id, "id"), ID_SIZE)
    at += MESSAGE_HEADER_SIZE
    if ext_version is not None:
        at[0] = <unsigned char> version
        at += EXT_VERSION_SIZE
        if version != EXT_NONE:
            write_u16(at, <uint16_t> header_size)
            at = _put(at + EXT_LENGTH_SIZE, header)
    if offset is not None:
        write_u64(at, <uint64_t> _checked_u64(offset, "offset"))
        write_u32(at + DETAIL_SIZE_AT, <uint32_t> checked_int(raw_size, "raw_size", 0, 0xffffffff))
        at += DETAIL_SIZE
    _put(at, piece)
    return out
