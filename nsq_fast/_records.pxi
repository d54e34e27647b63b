"""Commands of many messages straight from columns in Arrow's layout. Part of ``_codec``, which includes this file.

The messages of a command are chosen by their row numbers, so that the rows of one batch that go to different places
need not be copied apart first. Offsets and row numbers are int32, trace ids uint64, in native byte order.
"""

from libc.stdint cimport int32_t


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
