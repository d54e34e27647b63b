"""The messages of one connection that are in flight, and how many a server may have sent.

nsqd takes a message back ``msg_timeout`` after it was sent, unless a TOUCH has moved its deadline, and delivers it
again (nsqio/nsq: nsqd/channel.go, processInFlightQueue; youzan/nsq: nsqd/channel.go, processInFlightQueue). From then
on it is in flight no more, whether or not anybody here still means to answer it. ``expire`` finds these messages.

Order of arrival is order of deadlines, except for messages that were touched: these are looked at one by one.
"""

from __future__ import annotations

from math import inf

from nsq_fast._codec import HeldMessages, Message

from .events import ServerInfo

SLACK = 16
"""Answered messages that were touched may be kept, beside as many as are in flight."""


class InFlight(HeldMessages):
    """The ledger of one connection. Times are in seconds, on the clock of ``Session.receive``."""

    late: int

    def __init__(self) -> None:
        super().__init__()
        self._touched: list[Message] = []  # those whose first deadline is over, but not the one that TOUCH has set
        self._deadlines: dict[Message, float] = {}  # of all that were touched
        self.identified(ServerInfo())

    def identified(self, info: ServerInfo) -> None:
        """Take the timeouts that the server has granted."""
        self.msg_timeout: float = info.msg_timeout
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
        self.count: int = max(0, self.count - len(messages))
        self.late += len(messages)
        self.keep(others)
        first = others[0].received_at + self.msg_timeout if others else inf
        self.next_deadline: float = min([first, *(self._deadlines[message] for message in self._touched)])
        return messages

    def pending(self) -> list[Message]:
        """The messages in flight, except such as are marked as responded and whose answer has not been sent yet."""
        self._drop_touched()
        return self._touched + self.unanswered()

    def abandoned(self) -> list[Message]:
        """The messages in flight that nothing refers to but this ledger: nobody can answer them any more."""
        self._drop_touched()
        return self.unreachable(self._deadlines, self._touched)

    def _drop_touched(self) -> None:
        """Drop those touched that are answered."""
        if self._deadlines:
            self._touched = [message for message in self._touched if not message.has_responded()]
            self._deadlines = {
                message: deadline for message, deadline in self._deadlines.items() if not message.has_responded()
            }


# Does a server send more messages than RDY allows? Pure: counts and times in, a verdict out.
#
# A correct server has at most RDY messages of a connection in flight, by its own
# count. What we have received and not answered can be more, since a server takes
# messages back when their time is over, and then sends others:
#
# - a message that waits for us, in buffers, for longer than ``msg_timeout`` is sent
#   again. It cannot wait longer than ``mute_time``: by then the server has closed
#   the connection, since it has not heard from us;
# - each ``msg_timeout``, a server may take back everything that is in flight;
# - an administrator who empties or resets a channel frees all of RDY at once.
#   nsqio/nsq: nsqd/channel.go, Empty; youzan/nsq: nsqd/channel.go, initPQ.
#
# So what is in flight leaks from a bucket, RDY messages each ``msg_timeout``. From
# the first message of any period to the last, a correct server sends at most
# ``RDY * (3 + mute_time / msg_timeout)`` more than were answered and leaked: RDY that
# were on the way, as often as they can time out there, RDY for what it had room for,
# and RDY for a round of time-outs that begins at once.

# Beside these three: for administrators who empty the channel, so many times before anything is answered.
RESETS = 5
# For the few that a server still sends while a lower RDY is on the way. nsqio/nsq: nsqd/protocol_v2.go, messagePump
STRAGGLERS = 50


class DeliveryLimit:
    """How many messages of one connection may be in flight.

    Args:
        msg_timeout: seconds after which the server takes an unanswered message back.
        mute_time: seconds of our silence after which the server closes the connection.
        now: the time; 0.0 where nobody tells it. Then no server is ever found to send too much.

    Attributes:
        most: in flight, up to which ``is_exceeded`` need not be asked.
    """

    def __init__(self, msg_timeout: float, mute_time: float, now: float) -> None:
        self.most: float = float(STRAGGLERS)
        self._msg_timeout = msg_timeout
        self._rounds = 3 + RESETS + mute_time / msg_timeout
        self._rdy = 0
        self._leaked = 0.0
        self._leaked_at = now

    def rdy_sent(self, count: int) -> None:
        """Note that RDY ``count`` is being sent. Nothing tells when it is in force, so the highest one counts."""
        if count > self._rdy:
            self._rdy = count
            self._set_most()

    def is_exceeded(self, in_flight: int, now: float) -> bool:
        """Whether so many messages, received by ``now`` and not answered, prove a fault of the server."""
        if in_flight > self.most and now:
            leak = self._rdy * (now - self._leaked_at) / self._msg_timeout
            self._leaked = min(in_flight, self._leaked + leak)
            self._leaked_at = now
            self._set_most()
        return in_flight > self.most and now > 0.0

    def _set_most(self) -> None:
        self.most = STRAGGLERS + self._rounds * self._rdy + self._leaked
