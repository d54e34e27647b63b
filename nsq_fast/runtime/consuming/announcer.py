"""What a connection reports, passed on as signals of the consumer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nsq_fast._codec import Message
from nsq_fast.errors import NsqError, ServerError
from nsq_fast.log_events import HEARTBEAT_LATE, RESPONSE_FAILED, SERVER_ERROR
from nsq_fast.protocol.targets import Target
from nsq_fast.runtime.net.connection import Connection
from nsq_fast.runtime.signals import emit

from .stats import Counters

if TYPE_CHECKING:
    from .context import Context


class Announcer:
    """The part of a ConnectionOwner that only tells the receivers of signals, and the log.

    Args:
        consumer: whose signals and log.
        target: what the connection is subscribed to.
        counters: over all connections to the target.
        on_doubt: called when lookup may know something better than this connection.

    Attributes:
        overdue_since: when something was received last, at the time when a heartbeat was late; None before.
    """

    def __init__(self, consumer: Context, target: Target, counters: Counters, on_doubt: Callable[[], None]) -> None:
        self.target = target
        self.counters = counters
        self.overdue_since: float | None = None
        self._on_doubt = on_doubt
        self._consumer = consumer

    def on_finish(self, conn: Connection, message: Message) -> None:
        emit(self._consumer, "on_finish", message_id=message.id)

    def on_touch(self, conn: Connection, message: Message) -> None:
        self.counters.touched += 1

    def on_answer_failed(self, conn: Connection, error: ServerError, message_id: bytes | None) -> None:
        self.counters.answers_failed += 1
        self._consumer.logger.warning("%s: answered too late: %s", self.target, error, extra=RESPONSE_FAILED)
        emit(self._consumer, "on_error", error=error)

    def on_error(self, conn: Connection, error: ServerError) -> None:
        self._consumer.logger.error("%s: %s", self.target, error, extra=SERVER_ERROR)
        emit(self._consumer, "on_error", error=error)

    def on_reply(self, conn: Connection, token: Any, data: bytes) -> None:
        emit(self._consumer, "on_response", response=data)

    def on_failed(self, conn: Connection, token: Any, error: NsqError) -> None:
        emit(self._consumer, "on_error", error=error)

    def on_heartbeat_overdue(self, conn: Connection) -> None:
        """The nsqd is silent. It may hang, and another lead its partition by now."""
        self.overdue_since = conn.last_received_at
        self._consumer.logger.warning(
            "%s: its heartbeat is late; asking lookup who serves the topic", self.target, extra=HEARTBEAT_LATE
        )
        self._on_doubt()

    def on_heartbeat(self, conn: Connection) -> None:
        emit(self._consumer, "on_response", response=b"_heartbeat_")
