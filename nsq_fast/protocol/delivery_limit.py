"""Does a server send more messages than RDY allows? Pure: counts and times in, a verdict out.

A correct server has at most RDY messages of a connection in flight, by its own
count. What we have received and not answered can be more, since a server takes
messages back when their time is over, and then sends others:

- a message that waits for us, in buffers, for longer than ``msg_timeout`` is sent
  again. It cannot wait longer than ``mute_time``: by then the server has closed
  the connection, since it has not heard from us;
- each ``msg_timeout``, a server may take back everything that is in flight;
- an administrator who empties or resets a channel frees all of RDY at once.
  nsqio/nsq: nsqd/channel.go, Empty; youzan/nsq: nsqd/channel.go, initPQ.

So what is unanswered is counted in a leaky bucket, which loses RDY messages each
``msg_timeout``. From the first message of any period to the last, a correct server
sends at most ``RDY * (3 + mute_time / msg_timeout)`` more than were answered and
leaked: RDY that were on the way, as often as they can time out there, RDY for what
it had room for, and RDY for a round of time-outs that begins at once.
"""

from __future__ import annotations

# Beside these three: for administrators who empty the channel, so many times before anything is answered.
RESETS = 5
# For the few that a server still sends while a lower RDY is on the way. nsqio/nsq: nsqd/protocol_v2.go, messagePump
STRAGGLERS = 50


class DeliveryLimit:
    """How many messages of one connection may be unanswered.

    Args:
        msg_timeout: seconds after which the server takes an unanswered message back.
        mute_time: seconds of our silence after which the server closes the connection.
        now: the time; 0.0 where nobody tells it. Then no server is ever found to send too much.

    Attributes:
        level: messages received, and neither answered nor leaked, as of the last verdict.
        limit: above which ``level`` proves a fault of the server, by the highest RDY that was sent.
    """

    def __init__(self, msg_timeout: float, mute_time: float, now: float) -> None:
        self.level = 0.0
        self.limit = float(STRAGGLERS)
        self._msg_timeout = msg_timeout
        self._rounds = 3 + RESETS + mute_time / msg_timeout
        self._rdy = 0
        self._leaked_at = now

    def rdy_sent(self, count: int) -> None:
        """Note that RDY ``count`` is being sent. Nothing tells when it is in force, so the highest one counts."""
        if count > self._rdy:
            self._rdy = count
            self.limit = STRAGGLERS + self._rounds * count

    def answered(self, count: int) -> None:
        """Note that ``count`` messages are being finished or requeued."""
        self.level = max(0.0, self.level - count)

    def is_exceeded(self, count: int, now: float) -> bool:
        """Whether the server has sent too much with these ``count`` messages, which were received by ``now``."""
        self.level += count
        return self.level > self.limit and self._is_exceeded_after_leaking(now)

    def _is_exceeded_after_leaking(self, now: float) -> bool:
        if not now:
            return False
        self.level = max(0.0, self.level - self._rdy * (now - self._leaked_at) / self._msg_timeout)
        self._leaked_at = now
        return self.level > self.limit
