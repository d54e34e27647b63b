"""The messages of one connection that are in flight: received, not answered, and still in time.

nsqd takes a message back ``msg_timeout`` after it was sent, unless a TOUCH has moved its deadline, and delivers it
again (nsqio/nsq: nsqd/channel.go, processInFlightQueue; youzan/nsq: nsqd/channel.go, processInFlightQueue). From then
on it is in flight no more, whether or not anybody here still means to answer it. ``expire`` finds these messages.

Order of arrival is order of deadlines, except for messages that were touched: these are looked at one by one.
"""

from __future__ import annotations

from math import inf

from nsq_fast._codec import HeldMessages, Message

from .identify import ServerInfo

SLACK = 16
"""Answered messages that were touched may be kept, beside as many as are in flight."""


class InFlight(HeldMessages):
    """The ledger of one connection. Times are in seconds, on the clock of ``Session.receive``."""

    def __init__(self) -> None:
        super().__init__()
        self._touched: list[Message] = []  # those whose first deadline is over, but not the one that TOUCH has set
        self._deadlines: dict[Message, float] = {}  # of all that were touched
        self.identified(ServerInfo())

    def identified(self, info: ServerInfo) -> None:
        """Take the timeouts that the server has granted."""
        self.msg_timeout = info.msg_timeout
        self._max_msg_timeout = info.max_msg_timeout

    def touched(self, message: Message, now: float) -> None:
        """TOUCH of a message is about to be sent."""
        if message.has_responded() or message.has_expired():
            return
        # nsqio/nsq and youzan/nsq: nsqd/channel.go, TouchMessage
        self._deadlines[message] = min(now + self.msg_timeout, message.received_at + self._max_msg_timeout)
        if len(self._deadlines) > 2 * self.count + SLACK:
            self._drop_touched()

    def deadline(self, message: Message) -> float:
        """When the server takes a message back, as far as is known now."""
        return self._deadlines.get(message, message.received_at + self.msg_timeout)

    def expire(self, now: float) -> list[Message]:
        """Take out and return the messages whose deadline is over, marked as expired; oldest first.

        Before ``next_deadline`` there is none.
        """
        if now < self.next_deadline:
            return []
        # In order of arrival, which is that of first deadlines: those that are over are at the front.
        messages = self.unanswered()
        due = 0
        while due < len(messages) and messages[due].received_at + self.msg_timeout <= now:
            due += 1
        self._drop_touched()
        waiting = self._touched + messages[:due]
        self._touched = [message for message in waiting if self.deadline(message) > now]
        expired = [message for message in waiting if self.deadline(message) <= now]
        return self._expired(expired, messages[due:])

    def expire_excess(self, rdy: int, now: float) -> list[Message]:
        """As ``expire``, after messages came that the server may only send if it has taken others back before.

        That is sure when more are in flight here than ``rdy``, the highest RDY that the server may act upon. The
        deadlines of the oldest are not over here, because they were read late. Messages that are younger than half of
        their timeout stay: a server that sends more than RDY allows has another reason then.
        """
        messages = self.unanswered()
        taken, excess = 0, self.count - rdy
        while taken < min(excess, len(messages)) and self._may_be_taken_back(messages[taken], now):
            taken += 1
        return self._expired(messages[:taken], messages[taken:])

    def _may_be_taken_back(self, message: Message, now: float) -> bool:
        return message.received_at + self.msg_timeout / 2 <= now and message not in self._deadlines

    def _expired(self, messages: list[Message], others: list[Message]) -> list[Message]:
        for message in messages:
            message.mark_expired()  # so that a late answer, which the ledger still hears of, is not counted again
            self._deadlines.pop(message, None)
        self.count = max(0, self.count - len(messages))
        self.late += len(messages)
        self.keep(others)
        first = others[0].received_at + self.msg_timeout if others else inf
        self.next_deadline = min([first, *(self._deadlines[message] for message in self._touched)])
        return messages

    def pending(self) -> list[Message]:
        """The messages in flight, except such as are marked as responded and whose answer has not been sent yet."""
        self._drop_touched()
        return self._touched + self.unanswered()

    def _drop_touched(self) -> None:
        """Drop those touched that are answered."""
        if self._deadlines:
            self._touched = [message for message in self._touched if not message.has_responded()]
            self._deadlines = {
                message: deadline for message, deadline in self._deadlines.items() if not message.has_responded()
            }
