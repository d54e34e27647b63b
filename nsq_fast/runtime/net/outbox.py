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
from nsq_fast._message_path import SendQueue
from nsq_fast.errors import ConnectionLost, NsqError
from nsq_fast.runtime.loop_turns import loop_turns
from nsq_fast.runtime.supervised import FAULTS, Job, Supervisor

from .transport import Transport

_supervisor = Supervisor(logging.getLogger(__name__))


def _tell_nobody(finished: list[Message], requeued: int, is_sent: bool) -> None:
    pass


class Outbox(SendQueue):
    """The write side of one connection.

    Args:
        write_timeout: seconds the peer may take no byte while some wait.
        on_error: called once with the error and whether the peer is gone (then the read side ends too).
            It may be called in the hub and must not block.

    The others, and the attributes, are those of SendQueue.
    """

    _transport: Transport
    _at_end_of_turn: Callable[[Callable[[], object]], None]
    _on_answers: Callable[[list[Message], int, bool], Any]
    _writer: Job | None
    _parts: list[bytes]
    _size: int
    _is_stopped: bool
    _requeued: int
    _sending: list[Message] | None
    _sending_requeued: int

    def __init__(
        self,
        build_fins: Callable[[list[Message]], bytes],
        write_timeout: float,
        on_error: Callable[[ConnectionLost, bool], Any],
        on_answers: Callable[[list[Message], int, bool], Any] = _tell_nobody,
    ) -> None:
        super().__init__(build_fins, on_answers)
        self._write_timeout = write_timeout
        self._on_error = on_error
        self._unsent: memoryview | None = None
        self._is_empty = Event()

    def start(self, transport: Transport) -> None:
        """Begin to send to ``transport``, in the hub of the calling greenlet."""
        self._transport = transport
        self._at_end_of_turn = loop_turns().at_end

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

    def _flush_at_end(self) -> None:
        try:
            self.flush()
        except FAULTS as fault:
            _supervisor.report(f"sending to {self._transport.address}", fault, "what is queued next is sent")

    def leave_to_writer(self, unsent: memoryview) -> None:
        """The system has not taken everything, as it hardly ever does: what is left goes before anything else."""
        self._unsent = unsent
        self._writer = _supervisor.job(f"nsq_fast-writer-{self._transport.address}", self._write_loop)
        self._writer.start()

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
                self.tell_sent()
                data = self.gather()
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
        lost = (self._sending or []) + self.finished
        requeued = self._sending_requeued + self._requeued
        self.finished.clear()
        self._sending, self._sending_requeued, self._requeued = None, 0, 0
        self._parts = []
        self._size = 0
        self._unsent = None
        self._is_empty.set()
        if lost or requeued:
            self._on_answers(lost, requeued, False)
