"""Commands: every one as bytes, built in one buffer of exact size. Part of ``_codec``, which includes this file.

    command  NAME [SP param]... LF, and for some a record
    record   u32 length | [u64 trace id  or  u16 length | header] | body
    MPUB     u32 total | u32 count | count x record

nsqio/nsq: nsqd/protocol_v2.go, IOLoop reads a command, PUB and readMPUB the records; youzan/nsq:
nsqdserver/protocol_v2.go, internalPubExtAndTrace and internalMPUBEXTAndTrace those with a trace id or a header.

They know the wire format only: what a name may be, and which server takes which command, is decided above. Bodies are
any bytes-like objects, held until they have been copied.
"""

cdef enum:
    # bytes between the line of a command and its records
    NO_PREFIX = 0
    COUNT_ONLY = 4
    TOTAL_AND_COUNT = 8

    FIN_SIZE = 4 + ID_SIZE + 1      # "FIN ", id, LF
    # nsqd reads the header of a stored record as b[29 : 29+length] with a length of 16 bits, which overflows above
    # 65535 - 29: it takes such a message, and panics when it reads it again. youzan/nsq: nsqd/message.go, decodeMessage
    MAX_HEADER = 65506
    MAX_PARTITION = 1023            # ten bits of the internal id. youzan/nsq: nsqd/topic.go, MAX_TOPIC_PARTITION

MAGIC_V2 = b"  V2"
NOP = b"NOP\n"
CLS = b"CLS\n"
MAX_HEADER_SIZE = MAX_HEADER


cdef bytes _number(object value, str argument, object maximum):
    return b"%d" % checked_int(value, argument, 0, maximum)


cdef bytes _milliseconds(object delay_ms):
    return _number(delay_ms, "delay_ms", 0x7fffffffffffffff)


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


cdef int _partition_digits(object partition, unsigned char* digits) except -1:
    # " 7": what names a partition in a command, and its length; 0 where it is not a partition as it should be
    cdef long number
    if type(partition) is not int:
        return 0
    if not 0 <= partition <= MAX_PARTITION:
        return 0
    number = partition
    cdef int size = 2 if number < 10 else 3 if number < 100 else 4 if number < 1000 else 5
    cdef int at = size - 1
    digits[0] = c" "
    while at:
        digits[at] = <unsigned char> (c"0" + number % 10)
        number //= 10
        at -= 1
    return size


cdef bytes _plain(bytes verb, object topic, object partition, PyObject** bodies, Py_ssize_t count, int prefix):
    """A command with a target and bodies, built in one go where all is as it nearly always is.

    None where it is not, or something is wrong: a topic that is no plain ASCII text, a body that is not ``bytes``.
    The caller keeps the bodies. (nsq-fast bench publish)
    """
    cdef unsigned char digits[8]
    cdef Py_ssize_t i, size, total = 4 * count
    if type(topic) is not str or not PyUnicode_IS_COMPACT_ASCII(topic):
        return None
    cdef Py_ssize_t topic_size = PyUnicode_GET_LENGTH(topic)
    cdef const unsigned char* text = <const unsigned char*> PyUnicode_DATA(topic)
    for i in range(topic_size):
        if not 0x21 <= text[i] <= 0x7e:
            return None
    cdef int digits_size = 0 if partition is None else _partition_digits(partition, digits)
    if topic_size == 0 or (partition is not None and digits_size == 0):
        return None
    for i in range(count):
        if not item_is_bytes(bodies[i]):
            return None
        total += item_size(bodies[i])
    if total > MAX_BODY - 4:
        return None
    cdef Py_ssize_t verb_size = PyBytes_GET_SIZE(verb)
    cdef Py_ssize_t line_size = verb_size + 1 + topic_size + digits_size + 1
    cdef bytes out = PyBytes_FromStringAndSize(NULL, line_size + prefix + total)
    cdef unsigned char* at = <unsigned char*> PyBytes_AS_STRING(out)
    memcpy(at, PyBytes_AS_STRING(verb), verb_size)
    at += verb_size
    at[0] = c" "
    memcpy(at + 1, text, topic_size)
    at += 1 + topic_size
    memcpy(at, digits, digits_size)
    at += digits_size
    at[0] = c"\n"
    at += 1
    if prefix == TOTAL_AND_COUNT:
        write_u32(at, <uint32_t> (total + 4))
        write_u32(at + 4, <uint32_t> count)
        at += 8
    for i in range(count):
        size = item_size(bodies[i])
        write_u32(at, <uint32_t> size)
        memcpy(at + 4, item_data(bodies[i]), size)
        at += 4 + size
    return out


cdef list _listed(object iterable, str argument):
    try:
        return list(iterable)
    except TypeError:
        if hasattr(type(iterable), "__iter__"):
            raise
        raise TypeError(f"{argument} must be an iterable, not {type(iterable).__name__}") from None


cdef tuple _unzipped(object pairs):
    firsts = []
    bodies = []
    for pair in _listed(pairs, "pairs"):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"pairs must hold pairs whose second is a body, not {type(pair).__name__}")
        firsts.append(pair[0])
        bodies.append(pair[1])
    return firsts, bodies


def identify(body):
    """IDENTIFY with its JSON body."""
    return _records(b"IDENTIFY\n", NO_PREFIX, [body], None, None)


def auth(secret):
    """AUTH."""
    return _records(b"AUTH\n", NO_PREFIX, [bytes_like(secret, "secret")], None, None)


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
    cdef PyObject* only = <PyObject*> body
    cdef bytes plain = _plain(b"PUB", topic, partition, &only, 1, NO_PREFIX)
    if plain is not None:
        return plain
    return _records(_line(_target(b"PUB", topic, partition)), NO_PREFIX, [body], None, None)


def mpub(topic, bodies, partition=None):
    """MPUB of any iterable of bodies."""
    cdef bytes plain = None
    if type(bodies) is list and PyList_GET_SIZE(bodies):
        with cython.critical_section(bodies):
            plain = _plain(
                b"MPUB", topic, partition, PySequence_Fast_ITEMS(bodies), PyList_GET_SIZE(bodies), TOTAL_AND_COUNT
            )
    if plain is not None:
        return plain
    return _records(_line(_target(b"MPUB", topic, partition)), TOTAL_AND_COUNT, _listed(bodies, "bodies"), None, None)


def mpub_body(bodies):
    """What MPUB's total counts: the count and the bodies. It is also the body of HTTP ``/mpub?binary=true``."""
    return _records(b"", COUNT_ONLY, _listed(bodies, "bodies"), None, None)


def mpub_size(list bodies not None, Py_ssize_t max_msg_size):
    """The size of ``mpub_body(bodies)`` where each is a ``bytes`` of 1 to ``max_msg_size``; -1 where one is not."""
    cdef Py_ssize_t i, size, total = COUNT_ONLY
    cdef PyObject** items
    with cython.critical_section(bodies):
        items = PySequence_Fast_ITEMS(bodies)
        for i in range(PyList_GET_SIZE(bodies)):
            if not item_is_exactly_bytes(items[i]):
                return -1
            size = item_size(items[i])
            if not 0 < size <= max_msg_size:
                return -1
            total += 4 + size
        return total


def dpub(topic, delay_ms, body):
    """DPUB: deliver not before ``delay_ms`` milliseconds have passed. Original servers only."""
    line = _line([b"DPUB", _word(topic, "topic"), _milliseconds(delay_ms)])
    return _records(line, NO_PREFIX, [body], None, None)


def pub_trace(topic, trace_id, body, partition=None):
    """PUB_TRACE. The answer is a traced_reply. Redesigned servers only."""
    line = _line(_target(b"PUB_TRACE", topic, partition))
    return _records(line, NO_PREFIX, [body], [_checked_u64(trace_id, "trace_id")], None)


def mpub_trace(topic, pairs, partition=None):
    """MPUB_TRACE of (trace id, body) pairs. Redesigned servers only."""
    trace_ids, bodies = _unzipped(pairs)
    checked = [_checked_u64(trace_id, "trace_id") for trace_id in trace_ids]
    return _records(_line(_target(b"MPUB_TRACE", topic, partition)), TOTAL_AND_COUNT, bodies, checked, None)


def pub_ext(topic, header, body, partition=None):
    """PUB_EXT: ``header`` is JSON, at most 65506 bytes. Redesigned servers only."""
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


cpdef bytes fin_many(messages):
    """FIN of every Message or id in the iterable, as one buffer. Messages count as responded then."""
    cdef list items = messages if type(messages) is list else _listed(messages, "messages")
    with cython.critical_section(items):
        return _fin_each(items)


cdef bytes _fin_each(list items):
    cdef Py_ssize_t i, count = PyList_GET_SIZE(items)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, count * FIN_SIZE)
    cdef unsigned char* at = <unsigned char*> PyBytes_AS_STRING(out)
    for i in range(count):  # runs no Python code, so the caller's list stays as it is
        memcpy(at, b"FIN ", 4)
        memcpy(at + 4, _id_pointer(<object> PyList_GET_ITEM(items, i), "messages"), ID_SIZE)
        at[FIN_SIZE - 1] = c"\n"
        at += FIN_SIZE
    for i in range(count):
        if isinstance(<object> PyList_GET_ITEM(items, i), Message):
            set_flags(&(<Message> PyList_GET_ITEM(items, i))._flags, RESPONDED)
    return out


cdef bytes _for_each_id(object ids, bytes before, bytes after):
    """``before``, an id, ``after``, for each of the 16 byte ids that lie side by side in ``ids``."""
    cdef const unsigned char* id
    held = bytes_like(ids, "ids")
    cdef Py_ssize_t size = bytes_view(held, &id)
    cdef Py_ssize_t head = PyBytes_GET_SIZE(before), tail = PyBytes_GET_SIZE(after)
    cdef Py_ssize_t i, count = size // ID_SIZE
    if size % ID_SIZE:
        raise ValueError(f"ids must have a length that is a multiple of {ID_SIZE}, not {size}")
    cdef bytes out = PyBytes_FromStringAndSize(NULL, count * (head + ID_SIZE + tail))
    cdef unsigned char* at = <unsigned char*> PyBytes_AS_STRING(out)
    for i in range(count):
        memcpy(at, PyBytes_AS_STRING(before), head)
        memcpy(at + head, id + i * ID_SIZE, ID_SIZE)
        memcpy(at + head + ID_SIZE, PyBytes_AS_STRING(after), tail)
        at += head + ID_SIZE + tail
    return out


def fin_columns(ids):
    """FIN of every id in a column of them, as ``Columns.ids`` or a slice of it, in one buffer."""
    return _for_each_id(ids, b"FIN ", b"\n")


def req_columns(ids, delay_ms):
    """REQ of every id in a column of them, in one buffer."""
    return _for_each_id(ids, b"REQ ", b" %b\n" % _milliseconds(delay_ms))


def req(id, delay_ms):
    """REQ of a Message or id: deliver again after ``delay_ms`` milliseconds."""
    return b"REQ %b %b\n" % (_id_bytes(id), _milliseconds(delay_ms))


def touch(id):
    """TOUCH of a Message or id."""
    return b"TOUCH " + _id_bytes(id) + b"\n"


def cls():
    """CLS: ask for no more messages; the response is CLOSE_WAIT. nsqio/nsq: nsqd/protocol_v2.go, CLS"""
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


# Commands of many messages straight from columns in Arrow's layout.
#
# The messages of a command are chosen by their row numbers, so that the rows of one batch that go to different places
# need not be copied apart first. Offsets and row numbers are int32, trace ids uint64, in native byte order.


cdef struct VarColumn:
    # entry n is data[offsets[n]:offsets[n + 1]]; the arrays may lie at any address
    const unsigned char* offsets
    const unsigned char* data
    Py_ssize_t size


cdef struct Chosen:
    # rows[start:stop], or the range itself where there are none
    const unsigned char* rows
    Py_ssize_t start
    Py_ssize_t stop


cdef inline int32_t _int32_at(const unsigned char* array, Py_ssize_t at) noexcept nogil:
    cdef int32_t value
    memcpy(&value, array + 4 * at, 4)
    return value


cdef inline uint64_t _uint64_at(const unsigned char* array, Py_ssize_t at) noexcept nogil:
    cdef uint64_t value
    memcpy(&value, array + 8 * at, 8)
    return value


cdef inline Py_ssize_t _entry(const VarColumn* column, Py_ssize_t row, const unsigned char** data) noexcept nogil:
    # its length; -1 when the offsets do not lie in the data
    cdef Py_ssize_t begin = _int32_at(column.offsets, row), end = _int32_at(column.offsets, row + 1)
    if not 0 <= begin <= end <= column.size:
        return -1
    data[0] = column.data + begin
    return end - begin


cdef inline Py_ssize_t _row_at(const Chosen* chosen, Py_ssize_t at) noexcept nogil:
    return at if chosen.rows == NULL else _int32_at(chosen.rows, at)


cdef bytes _frozen(object array, str argument):
    return array if type(array) is bytes else bytes(bytes_like(array, argument))


cdef Py_ssize_t _items(object piece, str argument, Py_ssize_t item_size, const unsigned char** data) except -1:
    cdef Py_ssize_t size = bytes_view(piece, data)
    if size % item_size:
        raise ValueError(f"{argument} must hold items of {item_size} bytes, not {size} bytes")
    return size // item_size


@cython.final
@cython.auto_pickle(False)
cdef class Records:
    """Messages to publish, as columns: commands of many are built with no object for each.

    Body n is ``body[body_offsets[n]:body_offsets[n + 1]]``, and so are the ext headers; ``trace_ids`` has one for
    each. Bodies and headers are held, not copied: they must stay as they are. Offsets, trace ids and rows are copied
    unless they are bytes: what was measured must be what is written, whatever other threads do to their arrays.

    The methods take ``rows``, the numbers of the messages meant, in order, or None for all; and of these the ones
    from ``start`` to before ``stop``. Raises ValueError for a number that is none, and for offsets beyond the data.
    """

    cdef readonly Py_ssize_t count
    cdef tuple _held
    cdef VarColumn _bodies
    cdef VarColumn _headers
    cdef const unsigned char* _trace_ids

    # Not __init__: it could be called again, and would leave pointers into buffers that it has let go.
    def __cinit__(self, body_offsets, body, *, trace_ids=None, header_offsets=None, headers=None):
        if (header_offsets is None) != (headers is None):
            raise ValueError("header_offsets and headers go together")
        held = [_frozen(body_offsets, "body_offsets"), bytes_like(body, "body")]
        self.count = _items(held[0], "body_offsets", 4, &self._bodies.offsets) - 1
        self._bodies.size = bytes_view(held[1], &self._bodies.data)
        if self.count < 0:
            raise ValueError("body_offsets must have one more than there are messages")
        if trace_ids is not None:
            held.append(_frozen(trace_ids, "trace_ids"))
            _check_count(_items(held[-1], "trace_ids", 8, &self._trace_ids), self.count, "trace_ids")
        if headers is not None:
            held.append(_frozen(header_offsets, "header_offsets"))
            _check_count(
                _items(held[-1], "header_offsets", 4, &self._headers.offsets), self.count + 1, "header_offsets"
            )
            held.append(bytes_like(headers, "headers"))
            self._headers.size = bytes_view(held[-1], &self._headers.data)
        self._held = tuple(held)

    @property
    def is_traced(self):
        """Whether there are trace ids."""
        return self._trace_ids != NULL

    @property
    def has_headers(self):
        """Whether there are ext headers."""
        return self._headers.offsets != NULL

    cdef Py_ssize_t _choose(self, object rows, object start, object stop, Chosen* chosen) except -1:
        # how many; `rows` is what _frozen returned, or None
        cdef Py_ssize_t available = self.count
        chosen.rows = NULL
        if rows is not None:
            available = _items(rows, "rows", 4, &chosen.rows)
        chosen.start = checked_int(start, "start", 0, available)
        chosen.stop = available if stop is None else checked_int(stop, "stop", chosen.start, available)
        return chosen.stop - chosen.start

    cdef Py_ssize_t _measure(self, Py_ssize_t row, bint traced, bint headed) except -1:
        # bytes of a record behind its length
        cdef const unsigned char* data
        cdef Py_ssize_t size, header
        if not 0 <= row < self.count:
            raise ValueError(f"rows must be within 0 and {self.count - 1}, not {row}")
        size = _entry(&self._bodies, row, &data)
        header = _entry(&self._headers, row, &data) if headed else 0
        if size < 0 or header < 0:
            raise ValueError(f"{'body_offsets' if size < 0 else 'header_offsets'} of message {row} lie beyond the data")
        if header > MAX_HEADER:
            raise ValueError(f"headers of message {row} must be at most {MAX_HEADER} bytes, not {header}")
        return size + (8 if traced else 0) + (2 + header if headed else 0)

    def find_misfit(self, max_size):
        """The first message that servers would refuse: without body, or with its extras above ``max_size``; or -1."""
        cdef Py_ssize_t row, limit = checked_int(max_size, "max_size", 0, MAX_BODY)
        cdef const unsigned char* data
        for row in range(self.count):
            if self._measure(row, self._trace_ids != NULL, self._headers.offsets != NULL) > limit:
                return row
            if _entry(&self._bodies, row, &data) == 0:
                return row
        return -1

    def size_of(self, row):
        """Bytes of one body."""
        return self._measure(checked_int(row, "row", 0, max(self.count - 1, 0)), False, False)

    def cut(self, max_count, max_bytes, rows=None, start=0, stop=None):
        """Where to cut so that no part has more messages, or a larger command body: the ends of the parts.

        A message that is too large has a part for itself.
        """
        cdef Chosen chosen
        cdef Py_ssize_t most = checked_int(max_count, "max_count", 1, 0x7fffffff)
        cdef Py_ssize_t limit = checked_int(max_bytes, "max_bytes", 1, MAX_BODY)
        cdef bint traced = self._trace_ids != NULL, headed = self._headers.offsets != NULL
        cdef Py_ssize_t at, size, total = 4, count = 0
        piece = None if rows is None else _frozen(rows, "rows")
        self._choose(piece, start, stop, &chosen)
        ends = []
        for at in range(chosen.start, chosen.stop):
            size = 4 + self._measure(_row_at(&chosen, at), traced, headed)
            if count and (count == most or total + size > limit):
                ends.append(at)
                total, count = 4, 0
            total += size
            count += 1
        if count:
            ends.append(chosen.stop)
        return ends

    def pairs(self, rows=None, start=0, stop=None):
        """(trace id, body size) of each: what ``split_receipt`` needs. Trace ids are 0 where there are none."""
        cdef Chosen chosen
        cdef Py_ssize_t at, row, size
        piece = None if rows is None else _frozen(rows, "rows")
        self._choose(piece, start, stop, &chosen)
        found = []
        for at in range(chosen.start, chosen.stop):
            row = _row_at(&chosen, at)
            size = self._measure(row, False, False)
            found.append((0 if self._trace_ids == NULL else _uint64_at(self._trace_ids, row), size))
        return found

    def mpub(self, topic, partition=None, rows=None, start=0, stop=None):
        """MPUB of the bodies."""
        return self._command(_line(_target(b"MPUB", topic, partition)), False, False, rows, start, stop)

    def mpub_trace(self, topic, partition=None, rows=None, start=0, stop=None):
        """MPUB_TRACE. Redesigned servers only."""
        if self._trace_ids == NULL:
            raise ValueError("there are no trace_ids")
        return self._command(_line(_target(b"MPUB_TRACE", topic, partition)), True, False, rows, start, stop)

    def mpub_ext(self, topic, partition=None, rows=None, start=0, stop=None):
        """MPUB_EXT. Redesigned servers only."""
        if self._headers.offsets == NULL:
            raise ValueError("there are no headers")
        return self._command(_line(_target(b"MPUB_EXT", topic, partition)), False, True, rows, start, stop)

    cdef bytes _command(self, bytes line, bint traced, bint headed, object rows, object start, object stop):
        cdef Chosen chosen
        cdef Py_ssize_t at, total = 4
        piece = None if rows is None else _frozen(rows, "rows")
        cdef Py_ssize_t count = self._choose(piece, start, stop, &chosen)
        if count == 0:
            raise ValueError("bodies must not be empty: servers refuse a publish of nothing")
        for at in range(chosen.start, chosen.stop):
            total += 4 + self._measure(_row_at(&chosen, at), traced, headed)
            if total > MAX_BODY:
                raise ValueError("the command's body must be less than 2 GiB")
        cdef bytes out = PyBytes_FromStringAndSize(NULL, PyBytes_GET_SIZE(line) + 4 + total)
        cdef unsigned char* to = _put(<unsigned char*> PyBytes_AS_STRING(out), line)
        write_u32(to, <uint32_t> total)
        write_u32(to + 4, <uint32_t> count)
        to += 8
        for at in range(chosen.start, chosen.stop):  # runs no Python code: what was measured is as it was
            to = self._put_row(to, _row_at(&chosen, at), traced, headed)
        return out

    cdef unsigned char* _put_row(self, unsigned char* to, Py_ssize_t row, bint traced, bint headed) noexcept:
        cdef const unsigned char* data = NULL
        cdef unsigned char* start = to
        cdef Py_ssize_t size
        to += 4
        if traced:
            write_u64(to, _uint64_at(self._trace_ids, row))
            to += 8
        if headed:
            size = _entry(&self._headers, row, &data)
            write_u16(to, <uint16_t> size)
            if size:  # without any, the data may have no address
                memcpy(to + 2, data, size)
            to += 2 + size
        size = _entry(&self._bodies, row, &data)
        if size:
            memcpy(to, data, size)
        to += size
        write_u32(start, <uint32_t> (to - start - 4))
        return to


cdef int _check_count(Py_ssize_t count, Py_ssize_t wanted, str argument) except -1:
    if count != wanted:
        raise ValueError(f"{argument} must have {wanted} items, not {count}")
    return 0


def group_rows(targets, groups):
    """The numbers of the rows of each group, in order: ``targets`` (int32) says of each row which group it is of.

    Returns a list of ``groups`` buffers of int32, as ``Records`` takes them. Raises ValueError for a target that is
    not within 0 and ``groups`` - 1.
    """
    cdef const unsigned char* target
    cdef int32_t row, group
    cdef Py_ssize_t limit = checked_int(groups, "groups", 0, 0x7fffffff)
    cdef bytes piece = _frozen(targets, "targets")
    cdef Py_ssize_t count = _items(piece, "targets", 4, &target)
    if count > 0x7fffffff:
        raise ValueError("targets must be less than 2**31")
    # one counter for each group: first of its rows, then of those that are written
    cdef bytes held = bytes(limit * sizeof(Py_ssize_t))
    cdef Py_ssize_t* counters = <Py_ssize_t*> PyBytes_AS_STRING(held)
    for row in range(<int32_t> count):
        group = _int32_at(target, row)
        if not 0 <= group < limit:
            raise ValueError(f"targets must be within 0 and {limit - 1}, not {group}")
        counters[group] += 1
    cdef Py_ssize_t at
    cdef list found = []
    for at in range(limit):
        found.append(PyBytes_FromStringAndSize(NULL, 4 * counters[at]))
        counters[at] = 0
    for row in range(<int32_t> count):
        group = _int32_at(target, row)
        memcpy(PyBytes_AS_STRING(<bytes> PyList_GET_ITEM(found, group)) + 4 * counters[group], &row, 4)
        counters[group] += 1
    return found
