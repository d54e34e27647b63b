"""What must hold of both readers for any bytes: the same frames from both, however the bytes are cut, or one error.

``check_readers`` is called by libFuzzer for each input (``driver.c``). The first three bytes of an input choose the
layout, the limit, which runs are compared and where the second is cut; the rest is what a server sends. A broken
promise ends the process, with a traceback.

It makes few objects and calls little Python: what counts is how many inputs are tried in a given time.
"""

import traceback

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport abort
from libc.string cimport memcmp

from nsq_fast._codec cimport ID_SIZE, Message, TruncatedMessage
from nsq_fast._frame cimport ColumnReader, Columns, ErrorFrame, FrameBuffer, FrameReader, Response

from nsq_fast.errors import LocalProtocolError, RemoteProtocolError

cdef extern from "Python.h":
    int PyBUF_READ
    object PyMemoryView_FromMemory(const char* data, Py_ssize_t size, int flags)

cdef enum:
    CHOICES = 3     # bytes of an input that are no part of the stream

    # bits of the first of them
    DETAIL = 1
    EXT = 2
    LIMIT = 12
    COLUMNS = 16    # compare with the column reader, not with the frame reader
    CUT = 32        # feed the second run in three pieces

# max_frame_size; small ones, since the sanitizers take long to make a large block of memory. The first is an error.
cdef Py_ssize_t[4] LIMITS = [4096, 4096, 64, 30]


cdef api int check_readers(const unsigned char* data, Py_ssize_t size) noexcept:
    try:
        if size > CHOICES:
            check(data, data + CHOICES, size - CHOICES)
    except BaseException:
        traceback.print_exc()
        abort()
    return 0


cdef int check(const unsigned char* choices, const unsigned char* data, Py_ssize_t size) except -1:
    cdef Py_ssize_t first = 0, second = 0
    cdef Run one = new_run(), two = new_run()
    cdef FrameReader objects = FrameReader.__new__(FrameReader)
    cdef ColumnReader columns
    set_up(objects, choices[0])
    one.read_objects(objects, data, size)
    one.end(objects)
    if choices[0] & CUT or not choices[0] & COLUMNS:
        first, second = min(choices[1] % size, choices[2] % size), max(choices[1] % size, choices[2] % size)
    if choices[0] & COLUMNS:
        columns = ColumnReader.__new__(ColumnReader)
        set_up(columns, choices[0])
        two.read_columns(columns, data, first)
        two.read_columns(columns, data + first, second - first)
        two.read_columns(columns, data + second, size - second)
        two.end(columns)
    else:
        objects = FrameReader.__new__(FrameReader)
        set_up(objects, choices[0])
        two.read_objects(objects, data, first)
        two.read_objects(objects, data + first, second - first)
        two.read_objects(objects, data + second, size - second)
        two.end(objects)
    one.compare(two)
    return 0


cdef int set_up(FrameBuffer reader, unsigned char choice) except -1:
    # as its constructor does, but in less time
    cdef int limit = (choice & LIMIT) >> 2
    reader.detail = choice & DETAIL
    reader.ext = choice & EXT
    reader.max_frame_size = LIMITS[limit]
    reader.skip_oversized = limit > 0
    return 0


cdef class Run:
    # what a reader made of a stream
    cdef list messages  # Message, or (Columns, row)
    cdef list others    # in their order
    cdef object error   # None without
    cdef object rest    # bytes that are no whole frame, or how many there are when a message is being passed over

    cdef int read_objects(self, FrameReader reader, const unsigned char* data, Py_ssize_t size) except -1:
        if self.error is not None:
            return 0
        try:
            # in place: what lies behind the input is poisoned
            for frame in reader.feed(PyMemoryView_FromMemory(<const char*> data, size, PyBUF_READ)):
                (self.messages if type(frame) is Message else self.others).append(frame)
        except RemoteProtocolError as error:
            self.error = error
        return 0

    cdef int read_columns(self, ColumnReader reader, const unsigned char* data, Py_ssize_t size) except -1:
        cdef Columns columns
        cdef Py_ssize_t row
        if self.error is not None:
            return 0
        try:
            columns = reader.feed(PyBytes_FromStringAndSize(<const char*> data, size))
        except RemoteProtocolError as error:
            self.error = error
            return 0
        check_ends(columns)
        for row in range(columns.count):
            self.messages.append((columns, row))
        self.others += columns.frames
        return 0

    cdef int end(self, FrameBuffer reader) except -1:
        if self.error is None:
            self.error = reader.error
        if self.error is None:
            try:
                self.rest = reader.take_buffered()
            except LocalProtocolError:
                self.rest = reader.buffered
        return 0

    cdef int compare(self, Run other) except -1:
        cdef Py_ssize_t at
        if self.error is not None or other.error is not None:
            assert str(self.error) == str(other.error), (self.error, other.error)
        assert self.rest == other.rest, (self.rest, other.rest)
        assert len(self.messages) == len(other.messages), (self.messages, other.messages)
        assert len(self.others) == len(other.others), (self.others, other.others)
        for at in range(len(self.messages)):
            message = other.messages[at]
            if isinstance(message, Message):
                same = is_same(self.messages[at], message)
            else:
                same = is_row(self.messages[at], message[0], message[1])
            assert same, (self.messages[at], message)
        for at in range(len(self.others)):
            assert is_same_frame(self.others[at], other.others[at]), (self.others[at], other.others[at])
        return 0


cdef Run new_run():
    cdef Run run = Run.__new__(Run)
    run.messages = []
    run.others = []
    return run


cdef bint is_same(Message one, Message two) except -1:
    return (
        one.timestamp == two.timestamp and one.attempts == two.attempts and memcmp(one._id, two._id, ID_SIZE) == 0
        and one.ext_version == two.ext_version and one.ext == two.ext and one.body == two.body
        and one._offset == two._offset and one._raw_size == two._raw_size
    )


cdef bint is_same_frame(object one, object two) except -1:
    if type(one) is not type(two):
        return False
    if isinstance(one, TruncatedMessage):
        assert (<TruncatedMessage> one).body == b""
        return is_same(one, two) and (<TruncatedMessage> one).body_size == (<TruncatedMessage> two).body_size >= 0
    if isinstance(one, Response):
        return (<Response> one).data == (<Response> two).data
    return (<ErrorFrame> one).data == (<ErrorFrame> two).data


cdef int check_ends(Columns columns) except -1:
    cdef const int32_t* ends = <const int32_t*> PyBytes_AS_STRING(columns.body_offsets)
    assert ends[0] == 0 and ends[columns.count] == PyBytes_GET_SIZE(columns.body)
    if columns.ext is not None:
        ends = <const int32_t*> PyBytes_AS_STRING(columns.ext_offsets)
        assert ends[0] == 0 and ends[columns.count] == PyBytes_GET_SIZE(columns.ext)
    return 0


cdef bint is_row(Message message, Columns columns, Py_ssize_t row) except -1:
    version = 0 if columns.ext is None else columns.ext_versions[row]
    ext = None if not version else entry(columns.ext_offsets, columns.ext, row)
    return (
        message.timestamp == (<const int64_t*> PyBytes_AS_STRING(columns.timestamps))[row]
        and message.attempts == (<const uint16_t*> PyBytes_AS_STRING(columns.attempts))[row]
        and memcmp(message._id, PyBytes_AS_STRING(columns.ids) + ID_SIZE * row, ID_SIZE) == 0
        and message.ext_version == version and message.ext == ext
        and message.body == entry(columns.body_offsets, columns.body, row)
        and (columns.offsets is None or message._offset == (<const uint64_t*> PyBytes_AS_STRING(columns.offsets))[row])
        and (columns.sizes is None or message._raw_size == (<const uint32_t*> PyBytes_AS_STRING(columns.sizes))[row])
    )


cdef bytes entry(bytes offsets, bytes data, Py_ssize_t row):
    cdef const int32_t* ends = <const int32_t*> PyBytes_AS_STRING(offsets)
    return data[ends[row]:ends[row + 1]]
