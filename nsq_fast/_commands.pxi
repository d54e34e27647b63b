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
