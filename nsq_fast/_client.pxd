"""What the client does for each read and each send; see the .pyx."""

from ._frame cimport SessionPath


cdef class TransportPath:
    cdef readonly list layers
    cdef readonly object sock
    cdef object _fileno
    cdef bint _is_real              # a socket of the system's; a simulated one has no descriptor

    cdef bytes recv(self, Py_ssize_t size)          # recv_now
    cdef bytes raw(self, Py_ssize_t size)           # recv_raw
    cdef object send(self, bytes data)              # send_now


cdef class SpinReader:
    cdef public bint is_turn_due
    cdef Py_ssize_t _debt               # misses weighed against hits
    cdef bint _is_paid                  # an answer came when there was no debt
    cdef Py_ssize_t _rest               # answers that are left to the hub
    cdef Py_ssize_t _next_rest, _crowded_rest
    cdef Py_ssize_t _calm               # answers since the core was last lost
    cdef Py_ssize_t _hits               # answers in a row
    cdef Py_ssize_t _in_a_row
    cdef object _fileno
    cdef object _recv
    cdef int _longest

    cdef bytes soon(self, Py_ssize_t size)      # recv
    cdef void _missed(self, double seconds) noexcept


cdef class ConnectionPath:
    cdef public object address
    cdef public SessionPath session
    cdef public object closed_error
    cdef public double last_received_at
    cdef public double last_message_at
    cdef readonly list finished
    cdef public object write_error
    cdef public bint is_scheduled
    cdef public bint is_prompt
    cdef public bint reads_all
    cdef public bint reads_later
    cdef public TransportPath _transport
    cdef public SpinReader _spin              # of replies; None: nobody but the loop reads
    cdef public SpinReader _message_spin      # of the next message of an ordered partition; None as above
    cdef public object _owner
    cdef public object _at_end              # of the turn: calls a function then
    cdef public object _unsent              # encoded bytes that the system has not taken yet, or None
    cdef public list _parts
    cdef public Py_ssize_t _size            # of the parts, in bytes
    cdef public bint _is_stopped            # nothing is sent any more
    cdef public Py_ssize_t _requeued        # REQs among the parts
    cdef public list _sending               # messages whose FINs are being sent; None while there are none
    cdef public Py_ssize_t _sending_requeued
    cdef object _ended                      # _end_of_turn of this one, made once

    cdef int ask(self, bytes data, command, token) except -1     # request
    cdef bint ask_if_idle(self, bytes data, command, token) except -1
    cdef bytes reply_soon(self)
    cdef int take(self, bytes data) except -1
    cdef bint _take_oks(self, list tokens) except -1
    cdef int put(self, bytes data) except -1        # write
    cdef bint is_free(self) noexcept
    cdef int schedule_now(self) except -1
    cdef int _schedule_end(self) except -1
    cdef int flush_now(self) except -1
    cdef object take_waiting(self)
    cdef int _send_now(self, data) except -1
    cdef int tell_owner(self) except -1
