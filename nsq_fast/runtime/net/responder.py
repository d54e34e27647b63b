"""The responses to messages on one connection: FIN, REQ and TOUCH, and who is notified of them.

This is the responder that messages delegate to. FINs of one turn of the hub
leave as one buffer. The owner and the signals of single messages hear of an
answer when a program queues it; the owner hears once more when the system has
it, or when it is lost. A FIN that follows from the return of a handler is not
given here: workers put the message into ``finished``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

from nsq_fast._codec import Message
from nsq_fast.errors import ConnectionClosed, ConnectionLost, NsqError
from nsq_fast.log_events import RESPONSE_LOST
from nsq_fast.names import Address
from nsq_fast.protocol.session import Session
from nsq_fast.runtime.message_signals import MessageSignals, SignalBook
from nsq_fast.runtime.owner_thread import QUEUED, OwnerThread, Queued, get_ident

from .outbox import Outbox

logger = logging.getLogger(__name__)


class Responder:
    """The side of a connection that messages see.

    Attributes:
        address: the nsqd.
        session: the protocol state.
        closed_error: why the connection ended or is ending; None while it is open.
        finished: messages to be finished with the next flush: see ``Outbox.finished``.
        schedule_flush: have what is queued sent before the hub waits for anything.
        flush: send what is queued now, as far as the system takes it without blocking.
        hold: called with the connection, a message and its delay in ms in place of a REQ that has a delay, where
            the server would ignore it; to call ``requeue(message, 0)`` later.
    """

    def __init__(self, address: Address, session: Session, outbox: Outbox, owner: object) -> None:
        self.address = address
        self.session = session
        self.closed_error: NsqError | None = ConnectionClosed(f"{address}: not connected yet")
        self.hold: Callable[[Any, Message, int], None] | None = None
        self._thread = OwnerThread()
        self.finished = outbox.finished
        self.schedule_flush = outbox.schedule  # not methods of its own: these are called for each batch
        self.flush = outbox.flush
        self._outbox = outbox
        self._signals = SignalBook()
        self._on_finish: Callable[..., Any] | None = getattr(owner, "on_finish", None)
        self._on_requeue: Callable[..., Any] | None = getattr(owner, "on_requeue", None)
        self._on_answers: Callable[..., Any] | None = getattr(owner, "on_answers", None)
        self._on_touch: Callable[..., Any] | None = getattr(owner, "on_touch", None)
        self._delay_of: Callable[..., int] | None = getattr(owner, "requeue_delay_ms", None)

    def finish(self, message: Message) -> Queued:
        """FIN, together with the others of this turn of the hub."""
        if get_ident() != self._thread.ident and self._is_handed_over(self.finish, message):
            return QUEUED
        if self.closed_error is not None:
            self._refuse(message)
        self._outbox.finish(message)
        if self._on_finish is not None:
            self._on_finish(self, message)
        if self._signals.entries:
            self._signals.finished((message,))
        return QUEUED

    def finish_returned(self, message: Message) -> None:
        """FIN a message that is marked as answered because its handler has returned. Raises nothing."""
        self._outbox.finish(message)

    def requeue(self, message: Message, time_ms: int | None = None, backoff: bool = True) -> Queued:
        """REQ. Without ``time_ms`` the owner's ``requeue_delay_ms`` decides. A delay may be left to ``hold``."""
        if get_ident() != self._thread.ident and self._is_handed_over(self.requeue, message, time_ms, backoff):
            return QUEUED
        if self.closed_error is not None:
            self._refuse(message)
        if time_ms is None:
            time_ms = 0 if self._delay_of is None else self._delay_of(self, message)
        if time_ms and self.hold is not None:
            self.hold(self, message, time_ms)
            return QUEUED
        self._outbox.requeue(self.session.req(message, time_ms))
        if self._on_requeue is not None:
            self._on_requeue(self, message, time_ms, backoff)
        if self._signals.entries:
            self._signals.requeued(message, time_ms, backoff)
        return QUEUED

    def touch(self, message: Message) -> Queued:
        """TOUCH: more time for a message."""
        if get_ident() != self._thread.ident and self._is_handed_over(self.touch, message):
            return QUEUED
        self._check_open()
        self._outbox.write(self.session.touch(message, monotonic()))
        if self._on_touch is not None:
            self._on_touch(self, message)
        if self._signals.entries:
            self._signals.touched(message)
        return QUEUED

    def _answers_left(self, finished: list[Message], requeued: int, is_sent: bool) -> None:
        """These answers were handed to the system, or were dropped with the connection."""
        if finished and self._signals.entries:
            self._signals.finished(finished)
        if self._on_answers is not None:
            self._on_answers(self, finished, requeued, is_sent)

    def answer_promptly(self) -> None:
        """Send answers at once from now on, not gathered at the end of the hub's turn."""
        self._outbox.is_prompt = True

    def signals_of(self, message: Message) -> MessageSignals:
        """``on_finish``, ``on_requeue`` and ``on_touch`` of one message, kept until it is answered."""
        return self._signals.of(message)

    def _refuse(self, message: Message) -> None:
        message.mark_expired()  # the program is done with it, and nsqd has taken it back
        self._check_open()

    def _is_handed_over(self, answer: Callable[..., object], message: Message, *arguments: Any) -> bool:
        """In another thread, where that is allowed: have the hub's thread send an answer. Else raises WrongThread.

        False where there is nobody to answer: the caller raises that.
        """
        if not self._thread.takes_calls:
            self._thread.check(f"Message.{answer.__name__}()")
            return False
        if self.closed_error is not None:
            return False
        self._thread.hand_over(self._answer_for_thread, answer, message, *arguments)
        return True

    def _answer_for_thread(self, answer: Callable[..., object], message: Message, *arguments: Any) -> None:
        try:
            answer(message, *arguments)
        except NsqError as error:  # whoever asked for it has gone on meanwhile
            logger.info(
                "%s: the answer of a handler's thread was not sent: %s", self.address, error, extra=RESPONSE_LOST
            )

    def _check_open(self) -> None:
        if self.closed_error is not None:
            raise lost_error(f"{self.address}: the connection is closed: {self.closed_error}", outcome_unknown=False)


def lost_error(text: str, outcome_unknown: bool) -> ConnectionLost:
    """A ConnectionLost of which it is known whether the command may have been carried out."""
    error = ConnectionLost(text)
    error.outcome_unknown = outcome_unknown
    return error
