"""The consumer's side of the trace log: each delivery when it arrives, and what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import TYPE_CHECKING

from nsq_fast._codec import Message
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.trace import TraceLog

if TYPE_CHECKING:
    from nsq_fast.runtime.trace_records import Outcome


class Tracer:
    """Records the deliveries of one consumer. Ask ``is_on`` once for many messages.

    Only redesigned servers have ids that mean something, so only their messages are recorded.

    Attributes:
        log: where to. While it is not active, ``is_on`` need not be asked.
    """

    def __init__(self, log: TraceLog, channel: str) -> None:
        self.log = log
        self._channel = channel

    def is_on(self, connection: Connection) -> bool:
        """Whether messages of ``connection`` are recorded now."""
        log = self.log
        return log.is_active and log.is_on(connection.topic or "") and connection.session.dialect.has_partitions

    def received(self, connection: Connection, messages: Iterable[Message]) -> None:
        """Record messages that have arrived just now."""
        for message in messages:
            self.log.received(
                connection.topic or "", self._channel, message, nsqd=connection.address, local=connection.local_address
            )

    def record(self, connection: Connection, messages: Iterable[Message], outcome: Outcome) -> None:
        """Record answers that were sent just now; those that came too late are timeouts, whatever they said."""
        now = monotonic()
        for message in messages:
            # nsqd takes no response for a message that it has sent to somebody else, and may not even say so.
            is_late = message.has_expired() or now > connection.session.ledger.deadline(message)
            self.log.consumed(
                connection.topic or "",
                self._channel,
                message,
                "TIMEOUT" if is_late else outcome,
                nsqd=connection.address,
                local=connection.local_address,
                handling_time=now - message.received_at,
            )
