"""What a handler of FastStream gets for a message of NSQ."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from faststream._internal._compat import json_loads
from faststream.message import StreamMessage

from nsq_fast import Message
from nsq_fast.errors import AlreadyResponded, NsqError
from nsq_fast.log_events import RESPONSE_FAILED

logger = logging.getLogger(__name__)


class NSQMessage(StreamMessage[Message]):  # type: ignore[misc]  # FastStream is an extra: type checkers may not have it
    """A message; ``ack`` and ``reject`` are its FIN, ``nack`` its REQ."""

    async def ack(self) -> None:
        """FIN."""
        _respond(self.raw_message.finish)
        await super().ack()

    async def nack(self, delay: float | None = None) -> None:
        """REQ: it comes again after ``delay`` seconds; None: later with each attempt."""
        _respond(lambda: self.raw_message.requeue(None if delay is None else round(1000 * delay)))
        await super().nack()

    async def reject(self) -> None:
        """FIN: nobody wants it."""
        _respond(self.raw_message.finish)
        await super().reject()


async def parse(message: Message) -> NSQMessage:
    """The message as FastStream wants it. Bodies of original servers have no headers beside them."""
    headers = message.headers if message.ext is not None else {}
    return NSQMessage(
        raw_message=message,
        body=message.body,
        headers=headers,
        content_type=headers.get("content-type"),
        correlation_id=headers.get("correlation_id"),
        message_id=message.id.decode("ascii", "replace"),
    )


async def decode(message: StreamMessage[Any]) -> Any:
    """What the body holds: JSON, else text, else the bytes."""
    with suppress(ValueError):
        return json_loads(message.body)
    with suppress(UnicodeDecodeError):
        return message.body.decode()
    return message.body


def _respond(response: Callable[[], object]) -> None:
    try:
        response()
    except AlreadyResponded:
        pass
    except NsqError as error:  # its connection is lost
        logger.warning(
            "a message was handled, and comes again: it cannot be responded to: %s", error, extra=RESPONSE_FAILED
        )
