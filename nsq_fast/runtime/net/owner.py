"""The callbacks of a connection, which the consumer or producer that owns it implements."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from nsq_fast._codec import Message, TruncatedMessage
from nsq_fast.errors import MessageTooLarge, NsqError, ServerError

ConnectionT = TypeVar("ConnectionT", contravariant=True)


class ConnectionOwner(Protocol[ConnectionT]):
    """Callbacks of a connection, called in its reader greenlet or in one in its place. None of them may block.

    An owner may also have ``on_finish(conn, message)``, ``on_requeue(conn, message, delay_ms, backoff)`` and
    ``on_touch(conn, message)``, called when a program queues the command;
    ``on_answers(conn, finished, requeued, is_sent)``, called when the FINs of the messages ``finished`` and so many
    REQs were handed to the system, or were lost with the connection; ``requeue_delay_ms(conn, message) -> int``,
    asked when a message is requeued without a delay (0 when the owner does not have it); and
    ``on_heartbeat_overdue(conn)``, called when a heartbeat is late, well before the connection ends of that.
    """

    def on_messages(self, conn: ConnectionT, messages: list[Message]) -> None: ...

    def on_message_skipped(self, conn: ConnectionT, message: TruncatedMessage, error: MessageTooLarge) -> None: ...

    def on_reply(self, conn: ConnectionT, token: Any, data: bytes) -> None: ...

    def on_failed(self, conn: ConnectionT, token: Any, error: NsqError) -> None: ...

    def on_answer_failed(self, conn: ConnectionT, error: ServerError, message_id: bytes | None) -> None: ...

    def on_heartbeat(self, conn: ConnectionT) -> None: ...

    def on_error(self, conn: ConnectionT, error: ServerError) -> None: ...

    def on_close_wait(self, conn: ConnectionT) -> None: ...

    def on_disconnect(self, conn: ConnectionT, error: NsqError) -> None: ...
