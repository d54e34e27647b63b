"""gnsq's rules for messages where they differ from nsq_fast's: requeue delays, and subclasses that handle messages."""

from __future__ import annotations

from typing import Any, Protocol

from nsq_fast._codec import Message
from nsq_fast.protocol.backoff import RequeueDelay
from nsq_fast.runtime import Acknowledger, Handler

_NO_DELAY = RequeueDelay(0, base=0.0, factor=1.0, cap=0.0, jitter=0.0, random=lambda: 0.0)


class _Kept(Exception):
    """Raised when a subclass keeps a message to respond to it later."""


class GnsqOptions(Protocol):
    """What these rules ask of gnsq's Consumer."""

    @property
    def requeue_delay(self) -> int | None:
        """ms until a message that failed is delivered again; None: computed from its attempts."""

    @property
    def overrides_handling(self) -> bool:
        """Whether a subclass has methods of its own to handle messages."""


class GnsqAcknowledger(Acknowledger):
    """What follows a handler, by gnsq's rules.

    ``message.requeue()`` has no delay; the consumer's ``requeue_delay`` is for failures.
    """

    def __init__(self, consumer: Any, *args: Any) -> None:
        super().__init__(consumer, *args)
        self._options: GnsqOptions = consumer
        self._failure_delay, self.requeue_delay = self.requeue_delay, _NO_DELAY

    def failed(self, message: Message, error: BaseException, is_ordered: bool = False) -> None:
        if not isinstance(error, _Kept):
            super().failed(message, error, is_ordered)

    def requeue(self, message: Message, delay_ms: int | None, backoff: bool) -> None:
        fixed = self._options.requeue_delay
        if delay_ms is None:
            delay_ms = fixed if fixed is not None else self._failure_delay(message.attempts)
        super().requeue(message, delay_ms, backoff)

    def present_handler(self) -> Handler:
        return _routed if self._options.overrides_handling else super().present_handler()


def _routed(consumer: Any, message: Message) -> None:
    """Hand a message to a subclass, which may respond to it after it has returned."""
    consumer.handle_message(message.responder, message)
    if not message.has_responded() and not message.is_async():
        raise _Kept
