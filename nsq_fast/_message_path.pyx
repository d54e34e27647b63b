"""What a connection does for each read and each send, compiled: bytes become messages of the owner, and FINs bytes.

``ReadPath`` takes what one read brought through the session to the owner, ``SendQueue`` gathers what is to be sent.
They are the bases of ``nsq_fast.runtime.net.incoming`` and ``outbox``, which say what the rules are and have what is
done less often.
"""

from ._codec cimport Message
from ._plain_socket cimport PlainSocket
from ._time_slice cimport monotonic

from .errors import ConnectionLost

cdef enum:
    # More than this is sent at once, without waiting for the end of the hub's turn.
    FLUSH_BYTES = 64 * 1024


cdef class ReadPath:
    """The read side of a connection: what one read brings, and who gets it.

    The owner is called in the reader greenlet, or in one that reads in its place.

    Attributes:
        closed_error: why the connection ended or is ending; None while it is open.
        last_received_at, last_message_at: ``time.monotonic()`` of the last bytes and the last messages.
    """

    def read_for_reader(self, bint is_soon=False):
        """Do one read of the reader's in the calling greenlet, so that what comes needs no switch to get there.

        False if that is not possible: the reader is busy, or the connection is ending. True does not say that
        anything came: see ``stop_reading_for_reader``. Whenever the caller does anything else, the reader reads.

        Args:
            is_soon: a FIN was just sent, so that the server sends the next message.
        """
        cdef PlainSocket transport = self._transport
        cdef bytes data
        if self.closed_error is not None or transport.receiver is None:
            return False
        try:
            data = transport.recv_soon() if is_soon else None
            if data is None:
                data = transport.read_in_place()
            if data is not None:
                self.take(data)
        except Exception as error:
            transport.cancel_recv(error)  # it is the reader that ends the connection
            return False
        return True

    def received(self, bytes data not None):
        """Take what was read to the owner. Raises what ends the connection."""
        self.take(data)

    cdef int take(self, bytes data) except -1:
        cdef double now
        cdef list events
        session = self.session
        if not data:
            raise self._end_of_stream()
        self.last_received_at = now = monotonic()
        if session.pending and self.take_oks(session.receive_oks(data)):
            return 0
        events = session.receive(data, now)
        if session.message_count == len(events):
            if events:
                self.last_message_at = now
                self._owner.on_messages(self, events)
        else:
            self._dispatch(events)
        if session.failure is not None:
            raise session.failure
        return 0

    cdef bint take_oks(self, list tokens) except -1:
        """Whether there were any: they are all that was read, as where commands are pipelined."""
        if tokens is None:
            return False
        on_reply = self._owner.on_reply
        for token in tokens:
            on_reply(self, token, b"OK")
        return True

    cdef object _end_of_stream(self):
        lost = self._outbox.error or ConnectionLost(f"{self.address}: closed by the server")
        lost.is_abrupt = True
        return lost


cdef class SendQueue:
    """Gathers bytes and FINs, which one send takes. An error is reported by ``_fail``, and no method raises it.

    Args:
        build_fins: makes one buffer of FINs for a list of messages.
        on_answers: called with the messages whose FINs, and the number of REQs, that were handed to the system
            (``is_sent``) or were dropped. It may be called in the hub and must not block.

    Attributes:
        finished: messages whose FIN has not been built yet. Always the same list: workers append to it, after
            ``schedule`` when it was empty.
        error: what broke writing; None while it works.
        is_scheduled: something waits for the end of the hub's turn.
        is_prompt: send at once what is appended, not at the end of the hub's turn: for a peer that sends its next
            message only when it has our answer.
    """

    def __init__(self, build_fins, on_answers):
        self.finished = []
        self._parts = []
        self._build_fins = build_fins
        self._on_answers = on_answers

    def write(self, data):
        """Append bytes."""
        self._parts.append(data)
        self._size += len(data)
        if not self.is_scheduled:
            self.schedule_now()
        elif self._size > FLUSH_BYTES:
            self.flush_now()

    def send_alone(self, data):
        """Send bytes at once, unless others wait to be sent, or nothing can be; whether it was done.

        A failure to send is reported, and the result is True.
        """
        if self.is_scheduled or not self.can_send():
            return False
        self.send(data)
        return True

    @property
    def is_quiet(self):
        """Whether bytes could be sent now, and nothing waits to be sent."""
        return not self.is_scheduled and self.can_send()

    cdef bint can_send(self) noexcept:
        return self._writer is None and self.error is None and not self._is_stopped

    def finish(self, Message message not None):
        """Append a FIN; it leaves after the bytes of this turn."""
        self.finished.append(message)
        if not self.is_scheduled:
            self.schedule_now()

    def requeue(self, req):
        """Append a REQ."""
        self._requeued += 1
        self.write(req)

    def schedule(self):
        """Have everything sent before the hub waits for anything."""
        self.schedule_now()

    cdef int schedule_now(self) except -1:
        if self.is_prompt:
            return self.flush_now()
        if not self.is_scheduled:
            if self._ended is None:
                self._ended = self._end_of_turn
            self.is_scheduled = True
            self._at_end_of_turn(self._ended)
        return 0

    def _end_of_turn(self):
        self.is_scheduled = False
        if self.finished or self._parts:  # otherwise a worker has flushed already, as it mostly has
            self._flush_at_end()

    def flush(self):
        """Send everything now, as far as the system takes it without blocking."""
        self.flush_now()

    cdef int flush_now(self) except -1:
        if self._writer is not None:
            return 0  # it takes what has gathered when it is rid of what it has
        try:
            data = self.take_waiting()
        except Exception as error:
            self._fail(error)
            return 0
        if data is not None and self.send(data):
            self.tell_owner()
        return 0

    cdef int send(self, data) except -1:
        """Send bytes; whether the system has taken them all."""
        try:
            unsent = self._transport.send(data if type(data) is bytes else bytes(data))
            if unsent is not None:
                self.leave_to_writer(unsent)
        except Exception as error:
            self._fail(error)
            return False
        return unsent is None

    def gather(self):
        """Make one buffer of what waits, not encoded; None if nothing does, or if it can no longer be sent."""
        return self.take_waiting()

    cdef object take_waiting(self):
        cdef list parts = self._parts, finished = self.finished
        if self._is_stopped or self.error is not None:
            self._drop()
            return None
        self._sending, self._sending_requeued = None, self._requeued
        self._requeued = 0
        if finished:
            self._sending = finished[:]
            finished.clear()
            # Only now: a message is either in the list or off the session's in-flight count.
            fins = self._build_fins(self._sending)
            if not parts:
                return fins
            parts.append(fins)
        if not parts:
            return None
        self._parts = []
        self._size = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def tell_sent(self):
        """The system has the answers that were gathered, if there were any: ``on_answers`` hears of it."""
        self.tell_owner()

    cdef int tell_owner(self) except -1:
        cdef Py_ssize_t requeued = self._sending_requeued
        finished, self._sending = self._sending, None
        self._sending_requeued = 0
        if finished is not None or requeued:
            self._on_answers([] if finished is None else finished, requeued, True)
        return 0
