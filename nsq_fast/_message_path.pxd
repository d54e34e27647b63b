"""What a connection does for each read and each send; see the .pyx."""

from ._plain_socket cimport PlainSocket


cdef class ReadPath:
    cdef public object address
    cdef public object session
    cdef public object closed_error
    cdef public double last_received_at
    cdef public double last_message_at
    cdef public PlainSocket _transport
    cdef public object _owner
    cdef public object _outbox

    cdef int take(self, bytes data) except -1
    cdef bint take_oks(self, list tokens) except -1
    cdef object _end_of_stream(self)


cdef class SendQueue:
    cdef readonly list finished
    cdef public object error
    cdef public bint is_scheduled
    cdef public bint is_prompt
    cdef public PlainSocket _transport
    cdef public object _at_end_of_turn
    cdef public object _build_fins
    cdef public object _writer              # sends what the system has not taken at once; None while there is nothing
    cdef public list _parts
    cdef public Py_ssize_t _size            # of the parts, in bytes
    cdef public bint _is_stopped
    cdef public Py_ssize_t _requeued        # REQs among the parts
    cdef public list _sending               # messages whose FINs are being sent; None while there are none
    cdef public Py_ssize_t _sending_requeued
    cdef public object _on_answers
    cdef object _ended                      # _end_of_turn of this one, made once

    cdef bint can_send(self) noexcept
    cdef int schedule_now(self) except -1
    cdef int flush_now(self) except -1
    cdef object take_waiting(self)          # gather
    cdef int send(self, data) except -1
    cdef int tell_owner(self) except -1     # tell_sent
