"""What waits to be written to one nsqd, gathered: one send per turn of the hub.

Whoever writes only appends. At the end of the hub's turn everything goes out
in one non-blocking send, the FINs of the turn as one buffer. What the system
does not take is left to a writer greenlet, which lives only until it is rid of
it. So nothing waits for more traffic, nothing has a syscall of its own, and
two greenlets never interleave. ``flush`` is for those who know that the hub's
turn will not end soon.

Answers (FIN and REQ) are told of once more when they are handed to the system,
or dropped: only then it is known that they were, or were not, sent.

An error is kept in ``error`` and reported once; from then on bytes are
dropped. No method raises it: the greenlet that writes is rarely the one to
deal with a lost connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gevent.event import Event

from nsq_fast._codec import Message
from nsq_fast.errors import ConnectionLost, NsqError
from nsq_fast.runtime.loop_turns import loop_turns
from nsq_fast.runtime.supervised import FAULTS, Job, Supervisor

from .transport import Transport

_supervisor = Supervisor(logging.getLogger(__name__))

# More than this is sent at once, without waiting for the end of the hub's turn.
FLUSH_BYTES = 64 * 1024


_NOTHING: tuple[list[Message], int] = [], 0


def _tell_nobody(finished: list[Message], requeued: int, is_sent: bool) -> None:
    pass


class Outbox:
    """The write side of one connection.

    Args:
        build_fins: makes one buffer of FINs for a list of messages.
        write_timeout: seconds the peer may take no byte while some wait.
        on_error: called once with the error and whether the peer is gone (then the read side ends too).
            It may be called in the hub and must not block.
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

    def __init__(
        self,
        build_fins: Callable[[list[Message]], bytes],
        write_timeout: float,
        on_error: Callable[[ConnectionLost, bool], Any],
        on_answers: Callable[[list[Message], int, bool], Any] = _tell_nobody,
    ) -> None:
        self.finished: list[Message] = []
        self.error: ConnectionLost | None = None
        self.is_prompt = False
        self._transport: Transport
        self._at_end_of_turn: Callable[[Callable[[], object]], None]
        self._build_fins = build_fins
        self._write_timeout = write_timeout
        self._on_error = on_error
        self._on_answers = on_answers
        self._requeued = 0  # REQs among the parts
        self._sending = _NOTHING  # the answers in what is being sent
        self._parts: list[bytes] = []
        self._size = 0
        self._unsent: memoryview | None = None
        self.is_scheduled = False
        self._is_stopped = False
        self._writer: Job | None = None
        self._is_empty = Event()

    def start(self, transport: Transport) -> None:
        """Begin to send to ``transport``, in the hub of the calling greenlet."""
        self._transport = transport
        self._at_end_of_turn = loop_turns().at_end

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._parts.append(data)
        self._size += len(data)
        if not self.is_scheduled:
            self.schedule()
        elif self._size > FLUSH_BYTES:
            self.flush()

    def send_alone(self, data: bytes) -> bool:
        """Send bytes at once, unless others wait to be sent, or nothing can be; whether it was done.

        A failure to send is reported by ``on_error``, and the result is True.
        """
        if self.is_scheduled or self._writer is not None or self._is_stopped or self.error is not None:
            return False
        try:
            unsent = self._transport.send_now(data)
            if unsent is not None:
                self.leave_to_writer(unsent)
        except Exception as error:
            self._fail(error)
        return True

    @property
    def is_quiet(self) -> bool:
        """Whether bytes could be sent now, and nothing waits to be sent."""
        return not self.is_scheduled and self._writer is None and self.error is None and not self._is_stopped

    def finish(self, message: Message) -> None:
        """Append a FIN; it leaves after the bytes of this turn."""
        self.finished.append(message)
        if not self.is_scheduled:
            self.schedule()

    def requeue(self, req: bytes) -> None:
        """Append a REQ."""
        self._requeued += 1
        self.write(req)

    def drain(self, timeout: float | None) -> bool:
        """Wait until everything was handed to the system; False if that did not happen in time."""
        self.flush()
        if self._unsent is not None or self._parts or self.finished:
            self._is_empty.clear()
            self._is_empty.wait(timeout)
        return self.error is None and self._unsent is None and not self._is_stopped

    def stop(self) -> None:
        """Drop what is left and send nothing more."""
        self._is_stopped = True
        self._drop()
        if self._writer is not None:
            self._writer.kill(block=False)

    def schedule(self) -> None:
        """Have everything sent before the hub waits for anything."""
        if self.is_prompt:
            self.flush()
        elif not self.is_scheduled:
            self.is_scheduled = True
            self._at_end_of_turn(self._end_of_turn)

    def _end_of_turn(self) -> None:
        self.is_scheduled = False
        if not self.finished and not self._parts:
            return  # a worker has flushed already, as it mostly has
        try:
            self.flush()
        except FAULTS as fault:
            _supervisor.report(f"sending to {self._transport.address}", fault, "what is queued next is sent")

    def flush(self) -> None:
        """Send everything now, as far as the system takes it without blocking."""
        if self._writer is not None:
            return  # it takes what has gathered when it is rid of what it has
        try:
            data = self._gather()
        except Exception as error:
            self._fail(error)
            return
        if data is not None:
            self._send_now(data)

    def _send_now(self, data: bytes) -> None:
        """Send what was gathered."""
        try:
            unsent = self._transport.send_now(data)
            if unsent is not None:
                self.leave_to_writer(unsent)
        except Exception as error:
            self._fail(error)
            return
        if unsent is None and self._sending is not _NOTHING:
            self._tell_sent()

    def leave_to_writer(self, unsent: memoryview) -> None:
        """The system has not taken everything, as it hardly ever does: what is left goes before anything else."""
        self._unsent = unsent
        self._writer = _supervisor.job(f"nsq_fast-writer-{self._transport.address}", self._write_loop)
        self._writer.start()

    def _gather(self) -> bytes | None:
        """Make one buffer of what waits, not encoded; None if nothing does, or if it can no longer be sent."""
        if self._is_stopped or self.error is not None:
            self._drop()
            return None
        parts = self._parts
        finished = self.finished[:]
        self.finished.clear()
        self._sending = (finished, self._requeued) if finished or self._requeued else _NOTHING
        self._requeued = 0
        if finished:
            # Only now: a message is either in the list or off the session's in-flight count.
            fins = self._build_fins(finished)
            if not parts:
                return fins
            parts.append(fins)
        if not parts:
            return None
        self._parts = []
        self._size = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _tell_sent(self) -> None:
        """The system has the answers that were gathered."""
        finished, requeued = self._sending
        self._sending = _NOTHING
        self._on_answers(finished, requeued, True)

    def _send(self) -> bool:
        """Send what is left without blocking; whether all of it went."""
        unsent = self._unsent
        while unsent:
            sent = self._transport.try_send(unsent)
            if not sent:
                self._unsent = unsent
                return False
            unsent = unsent[sent:]
        self._unsent = None
        if not self._parts and not self.finished:
            self._is_empty.set()
        return True

    def _write_loop(self) -> None:
        try:
            while True:
                while not self._send():
                    self._transport.wait_writable(self._write_timeout)
                if self._sending is not _NOTHING:
                    self._tell_sent()
                data = self._gather()
                if data is None:
                    return
                self._unsent = memoryview(self._transport.encode(data))
        except Exception as error:
            self._fail(error)
        finally:
            self._writer = None

    def _fail(self, cause: Exception) -> None:
        if self.error is not None or self._is_stopped:
            return
        if not isinstance(cause, (OSError, NsqError)):
            _supervisor.report(f"sending to {self._transport.address}", cause, "the connection ends")
        is_peer_gone = isinstance(cause, ConnectionError)
        self.error = ConnectionLost(f"{self._transport.address}: cannot write: {cause}")
        self.error.__cause__ = cause
        self._drop()
        self._on_error(self.error, is_peer_gone)

    def _drop(self) -> None:
        sending, requeued = self._sending
        lost, requeued = sending + self.finished, requeued + self._requeued
        self.finished.clear()
        self._sending, self._requeued = _NOTHING, 0
        self._parts = []
        self._size = 0
        self._unsent = None
        self._is_empty.set()
        if lost or requeued:
            self._on_answers(lost, requeued, False)
