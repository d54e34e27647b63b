# cython: language_level=3
"""Counts what a recorded stream of nsqd holds, at C speed: an extension that cimports nsq_fast's reader.

No handler, no Python attribute access and no copy of an id per message: the fields of a Message are C fields here.
"""

from libc.stdint cimport int64_t, uint64_t

from nsq_fast._codec cimport Message, read_u64
from nsq_fast._frame cimport ErrorFrame, FrameReader


cdef class Counter:
    """Feed it what was read from a socket or a file; ask it for sums at any time."""

    cdef FrameReader reader
    cdef readonly uint64_t messages, retried, bytes
    cdef readonly int64_t oldest            # timestamp, ns since the epoch; 0 before the first message
    cdef readonly uint64_t highest_id       # internal id, of redesigned servers
    cdef readonly list errors

    def __init__(self, *, detail=False, ext=False):
        self.reader = FrameReader(detail=detail, ext=ext)
        self.errors = []

    cpdef feed(self, bytes chunk):
        """Raises RemoteProtocolError for what is not the protocol."""
        cdef list frames = self.reader.feed(chunk)
        cdef object frame
        for frame in frames:
            if type(frame) is Message:
                self.count(<Message> frame)
            elif type(frame) is ErrorFrame:
                self.errors.append((<ErrorFrame> frame).data)

    cdef void count(self, Message message) noexcept:
        cdef uint64_t internal_id = read_u64(message._id)
        self.messages += 1
        self.retried += message.attempts > 1
        self.bytes += <uint64_t> len(message.body)
        if self.oldest == 0 or message.timestamp < self.oldest:
            self.oldest = message.timestamp
        if internal_id > self.highest_id:
            self.highest_id = internal_id
