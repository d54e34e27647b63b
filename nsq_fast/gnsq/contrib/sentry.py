"""Report to Sentry what handlers raise."""

from __future__ import annotations

import importlib
from typing import Any

from nsq_fast._codec import Message


class SentryExceptionHandler:
    """Connect it to ``on_exception``.

    Args:
        client: None, or the ``sentry_sdk`` module: reports with it (ImportError when it is not installed). A client
            of raven, which came before it, works as well: anything with ``captureException``.
    """

    def __init__(self, client: Any = None) -> None:
        self.client: Any = importlib.import_module("sentry_sdk") if client is None else client

    def message_extra(self, message: Message) -> dict[str, Any]:
        """What is reported of a message. Override it to keep the body to yourself."""
        return {
            "id": message.id.decode("ascii", "backslashreplace"),
            "timestamp": message.timestamp,
            "attempts": message.attempts,
            "body": message.body.decode("utf-8", "backslashreplace"),
        }

    def __call__(self, consumer: Any, message: Message | None, error: BaseException) -> None:
        extra = {} if message is None else {"message": self.message_extra(message)}
        if hasattr(self.client, "captureException"):
            exc_info = (type(error), error, error.__traceback__)
            self.client.captureException(exc_info=exc_info, extra=extra)
            return
        with self.client.new_scope() as scope:
            for name, value in extra.items():
                scope.set_context(name, value)
            scope.capture_exception(error)
