"""What the handlers of the main job do with messages: it depends on a message's sequence number alone (see ``_PLAN``).

So a run can be repeated, and every seed of trouble is there in every run: handlers that fail once or always, that
requeue, touch, or answer from another greenlet.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

from gevent import sleep

from nsq_fast._codec import Message
from nsq_fast.errors import NsqError, RequeueMessage
from nsq_fast.runtime import Consumer

from .jobmessages import HEAD
from .ledger import Ledger

_LATER = 0.02


class DeliberateFailure(Exception):
    """What a handler raises to fail a message on purpose."""


Action = Callable[["JobHandlers", Message, int], None]


class JobHandlers:
    """The handlers of one run; they mark in ``ledger`` what they do.

    Attributes:
        openers: numbers of messages that are simply finished.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.openers: set[int] = set()
        self._later: list[tuple[Message, int]] = []
        self._is_running = True

    def stop(self) -> None:
        """``answer_later`` returns when everything is answered."""
        self._is_running = False

    def handle(self, _consumer: Consumer, message: Message) -> None:
        """Do with a message what its number says."""
        number, published_at = HEAD.unpack_from(message.body)
        ledger = self.ledger
        ledger.delivered += 1
        if published_at and message.attempts == 1:
            ledger.latencies.append(perf_counter_ns() - published_at)
        action = _PLAN[number % len(_PLAN)]
        if action is None or number in self.openers:
            ledger.mark_finished(number)
        else:
            action(self, message, number)

    def _fail_always(self, _message: Message, number: int) -> None:
        self.ledger.events["failed"] += 1
        raise DeliberateFailure(number)

    def _fail_once(self, message: Message, number: int) -> None:
        if message.attempts == 1:
            self.ledger.events["failed"] += 1
            raise DeliberateFailure(number)
        self.ledger.mark_finished(number)

    def _requeue_once(self, message: Message, number: int) -> None:
        if message.attempts == 1:
            self.ledger.events["requeued"] += 1
            raise RequeueMessage(0.01)
        self.ledger.mark_finished(number)

    def _touch(self, message: Message, number: int) -> None:
        message.touch()
        self.ledger.events["touched"] += 1
        self.ledger.mark_finished(number)

    def _finish_later(self, message: Message, number: int) -> None:
        message.enable_async()
        self._later.append((message, number))

    def answer_later(self) -> None:
        """Finish what handlers have left to it, until ``stop`` is called."""
        while self._is_running or self._later:
            sleep(_LATER)
            waiting, self._later = self._later, []
            for message, number in waiting:
                self._finish(message, number)

    def _finish(self, message: Message, number: int) -> None:
        try:
            message.finish()
        except NsqError:  # the connection is gone: nsqd delivers the message again
            return
        self.ledger.events["answered_later"] += 1
        self.ledger.mark_finished(number)

    def on_giving_up(self, _consumer: Any, message: Message) -> None:
        """A message came too often, and is finished unhandled."""
        self.ledger.mark_given_up(HEAD.unpack_from(message.body)[0])


def _plan() -> list[Action | None]:
    """What happens to the messages whose number has a given remainder; None: the handler just returns."""
    plan: list[Action | None] = [None] * 1000
    plan[500] = JobHandlers._fail_always
    for action, first in [
        (JobHandlers._fail_once, 101),
        (JobHandlers._requeue_once, 211),
        (JobHandlers._touch, 307),
        (JobHandlers._finish_later, 401),
        (JobHandlers._finish_later, 601),
    ]:
        plan[first : first + 50 : 10] = [action] * 5
    return plan


_PLAN = _plan()
