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

So what is in flight leaks from a bucket, RDY messages each ``msg_timeout``. From
the first message of any period to the last, a correct server sends at most
``RDY * (3 + mute_time / msg_timeout)`` more than were answered and leaked: RDY that
were on the way, as often as they can time out there, RDY for what it had room for,
and RDY for a round of time-outs that begins at once.
"""

from __future__ import annotations

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
        self.most = float(STRAGGLERS)
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
