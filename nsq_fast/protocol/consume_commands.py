"""The commands of a consumer, and what they say of the messages in flight.

nsqio/nsq: nsqd/protocol_v2.go, SUB, RDY, FIN, REQ, TOUCH, CLS; youzan/nsq: nsqdserver/protocol_v2.go, SUBADVANCED and
SUBORDERED. Only SUB and CLS have replies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nsq_fast import _codec
from nsq_fast._codec import Message
from nsq_fast.config import ConnectionConfig
from nsq_fast.errors import LocalProtocolError
from nsq_fast.names import check_channel, check_topic

from .conversation import Conversation
from .delivery_limit import DeliveryLimit
from .in_flight import InFlight


class ConsumeCommands(Conversation):
    """A conversation that consumes, with one subscription at most.

    The methods return bytes to write. They raise LocalProtocolError for what is not allowed now or what the server does
    not have, NameInvalid, TypeError or ValueError for arguments; nothing has changed then.

    Attributes:
        rdy: the RDY last sent.
        ledger: the messages in flight, and when the server takes them back.
        is_subscribed: SUB was sent.
        is_closing: CLS was sent.
    """

    def __init__(self, config: ConnectionConfig) -> None:
        super().__init__(config)
        self.rdy = 0
        self.ledger = InFlight()
        self.is_subscribed = False
        self.is_closing = False
        self._limit: DeliveryLimit

    def _server_known(self, now: float) -> None:
        """The handshake is over, ``info`` and ``dialect`` are those of the server: from now on messages may come."""
        self.ledger.identified(self.info)
        silence = self.dialect.mute_intervals * self.config.heartbeat_interval
        self._limit = DeliveryLimit(self.info.msg_timeout, silence, now)

    @property
    def in_flight(self) -> int:
        """Messages received, not finished or requeued, and not expired."""
        return self.ledger.count

    def expire(self, now: float) -> list[Message]:
        """The messages whose deadline is over at ``now``, the clock of ``receive``: they are in flight no more.

        The server delivers them again, to this connection or another. They are marked as expired; a FIN that is still
        sent for one may be in time, or be answered with AnswerFailed. ``ledger.next_deadline`` says when to ask again.
        """
        return self.ledger.expire(now)

    def sub(
        self,
        topic: str,
        channel: str,
        *,
        partition: int | None = None,
        ordered: bool = False,
        advanced: bool = False,
        token: Any = None,
    ) -> bytes:
        """Subscribe. Once per connection.

        Args:
            partition: of a redesigned server; None leaves the choice to it.
            ordered: redesigned: one message at a time, in order; messages carry ``offset`` and ``raw_size``.
            advanced: redesigned: messages carry ``offset`` and ``raw_size``.
        """
        command = "SUB_ORDERED" if ordered else "SUB_ADVANCED" if advanced else "SUB"
        build = _codec.sub_ordered if ordered else _codec.sub_advanced if advanced else _codec.sub
        self._check(command, partition)
        if self.is_subscribed:
            raise LocalProtocolError(f"{command}: this connection has a subscription already")
        if ordered and self.config.sample_rate:
            raise LocalProtocolError(f"{command}: set sample_rate=0, ordered messages cannot be sampled")
        data = build(check_topic(topic), check_channel(channel), partition)
        self.pending.append((command, token))
        self.is_subscribed = True
        self._reader.detail = ordered or advanced  # these messages have a DETAIL between header and body
        return data

    def set_rdy(self, count: int) -> bytes:
        """RDY: let the server push while fewer than ``count`` messages are in flight.

        Raises LocalProtocolError above the server's ``max_rdy_count``: it would close the connection.
        """
        self._check_subscribed("RDY")
        if not 0 <= count <= self.info.max_rdy_count:
            raise LocalProtocolError(f"RDY {count}: the server allows 0 to {self.info.max_rdy_count}")
        data = _codec.rdy(count)
        self.rdy = count
        self._limit.rdy_sent(count)
        return data

    def fin(self, message: Message) -> bytes:
        """Finish a message: it was processed."""
        return self.fin_many([message])

    def fin_many(self, messages: Sequence[Message]) -> bytes:
        """Finish several messages in one buffer."""
        if not self.is_subscribed:
            self._check_subscribed("FIN")
        return self.ledger.finish(messages)

    def req(self, message: Message, delay_ms: int) -> bytes:
        """Give a message back, to be delivered again after ``delay_ms``."""
        self._check_subscribed("REQ")
        data = _codec.req(message.id, delay_ms)
        message.mark_responded()
        self.ledger.answered([message])
        return data

    def touch(self, message: Message, now: float | None = None) -> bytes:
        """Ask for more time for a message.

        Args:
            now: the clock of ``receive``; moves the deadline after which ``expire`` finds the message.
        """
        self._check_subscribed("TOUCH")
        data = _codec.touch(message.id)
        if now is not None:
            self.ledger.touched(message, now)
        return data

    def cls(self, *, token: Any = None) -> bytes:
        """Ask the server to send no more messages; the Reply says ``CLOSE_WAIT``. Messages may come before it."""
        self._check_subscribed("CLS")
        if self.is_closing:
            raise LocalProtocolError("CLS: was sent already")
        self.expect("CLS", token)
        self.is_closing = True
        return _codec.cls()

    def _check_subscribed(self, command: str) -> None:
        if not self.is_subscribed:
            raise LocalProtocolError(f"{command}: not allowed without a subscription")
